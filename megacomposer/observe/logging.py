"""Text logs: every rank to its own file, rank 0 to the console as well."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

_ROOT = "megacomposer"


def get_logger(name: str) -> logging.Logger:
    """The logger `name` below megacomposer's own; pass `__name__`."""
    return logging.getLogger(name if name.split(".")[0] == _ROOT else f"{_ROOT}.{name}")


def setup_logging(run_dir: Path, rank: int, world_size: int) -> None:
    """Sends megacomposer's log records of level INFO and above to `run_dir/logs/<rank>.log`.

    Rank 0 also prints them to stderr. The file is appended to, so a resumed run keeps its past.
    Calling it again replaces the handlers of the call before.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    logger = logging.getLogger(_ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else a root handler of another library prints each line again
    folder = Path(run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / f"{rank}.log", encoding="utf-8")
    file.setFormatter(
        logging.Formatter(
            f"%(asctime)s rank {rank}/{world_size} %(levelname)s %(name)s: %(message)s"
        )
    )
    logger.addHandler(file)
    if rank == 0:
        console = _Console()
        console.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(console)


class _Console(logging.Handler):
    """Prints to whatever stderr is now: a progress bar replaces it to keep lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)
