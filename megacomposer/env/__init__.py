"""Environments: sandboxes, egress, the agent's tools, verifiers, the monitor. No torch."""
