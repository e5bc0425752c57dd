"""The agent's tools, over one RPC."""
