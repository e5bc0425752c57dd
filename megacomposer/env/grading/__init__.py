"""Evidence for the reward, from a fresh sandbox."""
