"""Environments: sandboxes, egress policy, the agent's tools, verifiers, the monitor. No torch here."""
