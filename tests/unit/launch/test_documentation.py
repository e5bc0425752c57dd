"""docs/launch.md shows what the launchers print today."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_CHECKOUT = "/srv/megacomposer"  # where the page's transcripts were made
_TRANSCRIPTS = re.findall(
    r"^```console\n\$ (.*?)\n(.*?)^```", (ROOT / "docs/launch.md").read_text(), re.M | re.S
)


@pytest.mark.parametrize(("command", "shown"), _TRANSCRIPTS, ids=[c for c, _ in _TRANSCRIPTS])
def test_transcript_is_what_the_command_prints(command: str, shown: str) -> None:
    assert "--dry-run" in command
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert result.stdout.replace(str(ROOT), _CHECKOUT) == shown, result.stderr


def test_page_has_a_transcript_of_every_launcher() -> None:
    commands = " ".join(command for command, _ in _TRANSCRIPTS)
    for launcher in ("local.sh", "multinode.sh", "submit.py"):
        assert launcher in commands
