"""Process start, devices, seeds and determinism."""
