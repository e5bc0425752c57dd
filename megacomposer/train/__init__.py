"""The training step and the one loop of every phase."""
