"""What the MCP server serves, and where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megacomposer.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class McpServerConfig(Config):
    """One sandbox and its tools."""

    task: str = ""
    """A task.json whose layers are in the store."""
    repo: str = ""
    """A directory, instead of a task: its files are copied into the sandbox."""
    site: str = ""
    """With repo: a `pip install --target` directory that commands can import from."""
    backend: str = "auto"
    """auto, bubblewrap, gvisor, docker or e2b."""
    store: str = "~/.cache/megacomposer/layers"
    """Where the layers of snapshots are."""
    tools: tuple[str, ...] = ()
    """Names of the tools; none is what the task says."""
    http_port: int = 0
    """Serve http://127.0.0.1:PORT/mcp; 0 serves stdio."""
    audit: str = ""
    """Append audit events to this file."""

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.repo):
            raise ValueError("give either task or repo")
        if self.repo and not Path(self.repo).is_dir():
            raise ValueError(f"repo {self.repo!r} is no directory")
        if self.site and not self.repo:
            raise ValueError("site goes with repo: a task names its own mounts")
        if not 0 <= self.http_port < 65536:
            raise ValueError(f"http_port must be 0 to 65535, not {self.http_port}")
