"""The progress bar: drawn for a person at a terminal, silent everywhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megacomposer.observe.progress import progress_bar

_SCRIPT = """
import logging, sys
from pathlib import Path
from megacomposer.observe.logging import get_logger, setup_logging
from megacomposer.observe.progress import progress_bar

setup_logging(Path(sys.argv[1]), rank=0, world_size=1)
with progress_bar(5, enabled=sys.argv[2] == "on", completed=2) as bar:
    bar.advance(loss=2.34567, note="[red]x")
    get_logger("megacomposer.loop").info("a line of the log")
    bar.advance(loss=1.5)
    print("visible" if bar.visible else "hidden")
"""


def run_on_terminal(run_dir: Path, enabled: str) -> tuple[str, str]:
    """What a run prints on stdout (a pipe) and on stderr (a terminal of 100 columns)."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(run_dir), enabled],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        text=True,
        timeout=60,
    )
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:  # how Linux says that the last writer has closed a terminal
        pass
    os.close(ours)
    assert done.returncode == 0, drawn.decode()
    return done.stdout, drawn.decode()


def test_bar_that_is_not_drawn_or_miscounts_a_resumed_run(tmp_path: Path) -> None:
    printed, drawn = run_on_terminal(tmp_path, "on")
    assert printed == "visible\n"
    assert "4/5" in drawn
    assert "loss 1.5" in drawn


def test_log_line_that_the_bar_overwrites(tmp_path: Path) -> None:
    _, drawn = run_on_terminal(tmp_path, "on")
    (line,) = [line for line in drawn.split("\n") if "a line of the log" in line]
    assert line.rstrip().endswith("INFO a line of the log")
    assert "a line of the log" in (tmp_path / "logs" / "0.log").read_text()


def test_bar_that_is_drawn_on_other_ranks(tmp_path: Path) -> None:
    printed, drawn = run_on_terminal(tmp_path, "off")
    assert printed == "hidden\n"
    assert drawn.splitlines()[0].endswith("INFO a line of the log")
    assert len(drawn.splitlines()) == 1


def test_bar_that_fills_a_log_file_with_control_characters(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with progress_bar(3, enabled=True) as bar:
        bar.advance(loss=1.0)
        assert not bar.visible
    assert capfd.readouterr() == ("", "")
