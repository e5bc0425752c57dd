"""The cheating monitor."""
