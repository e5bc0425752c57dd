"""The `checkpoints` directory of a run: which entries count, and how they come and go.

    checkpoints/
      latest                    names the newest complete checkpoint; replaced last, atomically
      step_00001000/            complete: it got this name after its manifest was on disk
      step_00001500.incomplete/ a save that did not finish, or one being removed; never read

A directory is renamed to `*.incomplete` before it is removed, so a crash in the middle of a
removal leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from .files import replace_durably, sync_directory
from .manifest import MANIFEST_NAME, CorruptCheckpointError, verify_checkpoint

logger = logging.getLogger(__name__)

LATEST_NAME = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_INCOMPLETE = ".incomplete"


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives once it is complete."""
    return root / f"step_{step:08d}"


def incomplete_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return root / f"step_{step:08d}{_INCOMPLETE}"


def is_checkpoint(path: Path) -> bool:
    """True for one checkpoint's directory, False for the run or `checkpoints` directory."""
    return _STEP.fullmatch(path.name) is not None or (path / MANIFEST_NAME).exists()


def checkpoints_directory(path: Path) -> Path:
    """`path` itself, or its `checkpoints` when `path` is a run directory."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def list_steps(root: Path) -> list[Path]:
    """Every `step_*` directory, oldest first; complete by name, not verified."""
    if not root.is_dir():
        return []
    found = [entry for entry in root.iterdir() if _STEP.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=_step_of)


def read_latest(root: Path) -> Path | None:
    """What `latest` names if that is there and has a manifest, else None with the reason logged."""
    pointer = root / LATEST_NAME
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        name = ""
    if not _STEP.fullmatch(name):
        logger.warning("%s does not name a checkpoint; ignoring it", pointer)
        return None
    if not (root / name / MANIFEST_NAME).is_file():
        logger.warning("%s names %s, which is not there or has no manifest", pointer, name)
        return None
    return root / name


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under `root` (a run or a `checkpoints` directory), or None.

    `latest` decides. Where it is absent or names nothing usable, the highest step whose manifest
    and file lengths verify is taken. A warning gives the reason for each newer entry passed over.
    The checkpoint that `latest` names is returned even if its files are damaged: loading then
    refuses it by name, rather than going back in time unasked. Not collective: with several ranks
    use `resolve_checkpoint`, so that all of them get one answer.
    """
    root = checkpoints_directory(root)
    named = read_latest(root)
    _report_unfinished(root, named)
    if named is not None:
        return named
    for path in reversed(list_steps(root)):
        try:
            verify_checkpoint(path, deep=False)
        except ValueError as error:
            logger.warning("skipping %s: %s", path.name, error)
            continue
        logger.warning("%s has no usable `latest`; the newest complete one is %s", root, path.name)
        return path
    return None


def older_checkpoints(path: Path) -> list[Path]:
    """The `step_*` directories beside `path` with a lower step, newest first."""
    return [
        other for other in reversed(list_steps(path.parent)) if _step_of(other) < _step_of(path)
    ]


def prepare(root: Path, step: int) -> Path:
    """Make an empty directory for the save of `step`, after removing what dead saves left.

    Raises ValueError when `latest` names an undamaged checkpoint of the same step: replacing that
    one could not be made atomic.
    """
    if not root.is_dir():
        root.mkdir(parents=True)
        sync_directory(root.parent)
    for entry in root.glob(f"step_*{_INCOMPLETE}"):
        logger.warning("removing %s, which a save that died left behind", entry)
        shutil.rmtree(entry)
    final = step_directory(root, step)
    if read_latest(root) == final and _is_undamaged(final):
        raise ValueError(
            f"step {step} is already saved: `latest` names {final}. Save another step, or remove "
            "that directory first"
        )
    partial = incomplete_directory(root, step)
    (partial / "rng").mkdir(parents=True)
    return partial


def publish(partial: Path, final: Path) -> None:
    """Turn the finished `partial` into `final` and point `latest` at it, each step durable.

    A `final` that is there already was never published, or is damaged (`prepare` saw to that).
    """
    for directory in (partial / "rng", partial):
        sync_directory(directory)
    if final.exists():
        logger.warning("replacing %s, which is damaged or was never published", final)
        remove_checkpoint(final)
    os.rename(partial, final)
    sync_directory(final.parent)
    replace_durably(final.parent / LATEST_NAME, f"{final.name}\n".encode())


def remove_older(final: Path, keep_last: int) -> None:
    """Keep `final` and the `keep_last - 1` next older ones; 0 keeps all. Newer ones stay."""
    if keep_last == 0:
        return
    for path in older_checkpoints(final)[keep_last - 1 :]:
        try:
            remove_checkpoint(path)
        except OSError as error:
            # The new checkpoint is safe; training must not die for want of tidiness.
            logger.warning("could not remove the old checkpoint %s: %s", path, error)


def remove_checkpoint(path: Path) -> None:
    """Remove one checkpoint so that no crash leaves half of it under its name."""
    doomed = path.with_name(f"{path.name}.removed{_INCOMPLETE}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def _is_undamaged(path: Path) -> bool:
    try:
        verify_checkpoint(path, deep=True)
    except CorruptCheckpointError:
        return False
    return True


def _report_unfinished(root: Path, named: Path | None) -> None:
    for entry in sorted(root.glob(f"step_*{_INCOMPLETE}")):
        logger.warning("skipping %s: its save or removal did not finish", entry.name)
    for path in list_steps(root):
        if named is not None and _step_of(path) > _step_of(named):
            logger.warning(
                "skipping %s: `latest` names %s, so the newer one was never published or the run "
                "was taken back to an older step",
                path.name,
                named.name,
            )
