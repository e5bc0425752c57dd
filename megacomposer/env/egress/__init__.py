"""The egress proxy: what may leave a sandbox, and what did."""
