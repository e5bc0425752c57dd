"""Logs: who writes what, and where."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacomposer.observe.logging import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_logger() -> Iterator[None]:
    logger = logging.getLogger("megacomposer")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_rank_other_than_zero_that_prints_to_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path, rank=3, world_size=4)
    get_logger("megacomposer.train.loop").info("step 1")
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""
    text = (tmp_path / "logs" / "3.log").read_text()
    assert text.endswith("rank 3/4 INFO megacomposer.train.loop: step 1\n")


def test_rank_zero_line_that_is_lost_or_doubled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path / "first", rank=0, world_size=1)
    setup_logging(tmp_path / "second", rank=0, world_size=1)
    get_logger("script").warning("disk is full")
    assert capsys.readouterr().err.count("WARNING disk is full\n") == 1
    assert (tmp_path / "second" / "logs" / "0.log").read_text().count("\n") == 1
    assert (tmp_path / "first" / "logs" / "0.log").read_text() == ""


def test_resumed_run_that_erases_its_log(tmp_path: Path) -> None:
    for message in ("before", "after"):
        setup_logging(tmp_path, rank=0, world_size=1)
        get_logger("megacomposer.x").info(message)
    lines = (tmp_path / "logs" / "0.log").read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["before", "after"]


def test_logger_name_that_no_handler_listens_to() -> None:
    assert get_logger("__main__").name == "megacomposer.__main__"
    assert get_logger("megacomposer.data.loader").name == "megacomposer.data.loader"
    assert get_logger("megacomposer_plugin").name == "megacomposer.megacomposer_plugin"
