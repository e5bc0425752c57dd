"""Sandbox backends, and what they are made of."""
