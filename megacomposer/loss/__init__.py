"""Pure tensor functions that turn per-token losses into the training objective."""
