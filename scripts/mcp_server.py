#!/usr/bin/env python3
"""Serve the agent's tools over one sandbox as an MCP server, on stdio or streamable HTTP.

    python scripts/mcp_server.py --task task.json --backend bubblewrap
    python scripts/mcp_server.py --repo ../project --site /var/tmp/site --http_port 8765

`--repo` works on a copy: nothing is ever written to the directory itself. Stdout belongs to the
protocol; messages go to stderr. Exit code 1 and one line `error: ...` when nothing can be served.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import tyro

from megacomposer.env.sandbox import SandboxError
from megacomposer.env.tools.mcp_config import McpServerConfig


def main() -> int:
    """Parse, and serve until the client leaves."""
    config = tyro.cli(McpServerConfig, description=__doc__, use_underscores=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # after the command line is parsed, so that --help does not wait for the SDK
    try:
        from megacomposer.env.tools.mcp_server import serve
    except ModuleNotFoundError as error:
        print(f"error: {error}; pip install 'megacomposer[mcp]'", file=sys.stderr)
        return 1
    try:
        asyncio.run(serve(config))
    except (ValueError, OSError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
