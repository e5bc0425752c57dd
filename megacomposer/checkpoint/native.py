"""Save and load a training state: DCP for the sharded tensors, our own manifest around it.

A checkpoint directory holds
  `__<rank>_0.distcp`, `.metadata`  DCP's shards and its table of them
  `state.json`                      step, host state, versions, and the layout it was saved under
  `rng/<rank>.safetensors`          each rank's random number generators
  `manifest.json`                   length and SHA-256 of all of the above
and loads under any other layout. No file of it can run code when it is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .agreement import CheckpointError, Ranks
from .directory import (
    checkpoints_directory,
    incomplete_directory,
    is_checkpoint,
    latest_checkpoint,
    older_checkpoints,
    prepare,
    publish,
    remove_older,
    step_directory,
)
from .files import FileEntry, describe_file, write_durably
from .manifest import (
    MANIFEST_NAME,
    CorruptCheckpointError,
    Manifest,
    check_files,
    divide_files,
    read_manifest,
    write_manifest,
)
from .planner import (
    BlockLoadPlanner,
    BlockSavePlanner,
    ShardReader,
    ShardWriter,
    Tensors,
    read_metadata,
    saved_table,
)
from .state import (
    STATE_NAME,
    check_arguments,
    check_same_model,
    compose_state,
    describe_placement,
    read_state,
    shorten,
)

logger = logging.getLogger(__name__)

METADATA_NAME = ".metadata"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedState:
    """What a checkpoint holds besides the tensors, which were loaded in place."""

    path: Path
    step: int
    host_state: dict[str, Any]
    rng_state: dict[str, torch.Tensor] | None
    """This rank's, for `restore_rng`; None where the layout is not the one it was saved under."""
    versions: dict[str, str]
    """Of megacomposer, torch and Python at the save."""


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Tensors,
    host_state: dict[str, Any],
    rng_state: dict[str, torch.Tensor],
    *,
    keep_last: int,
    layout: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `root/step_<step>`, complete or not at all, and point `root/latest` at it. Collective.

    Returns once everything is on stable storage and `latest` has moved.

    Args:
        root: the `checkpoints` directory, on a file system that all ranks share.
        tensors: every key on every rank; only primary ranks' blocks are written.
        host_state: JSON values with string keys, equal on every rank and free of the layout (step
            counters, data position, fingerprints). Rank 0's is written.
        rng_state: this rank's `capture_rng()`.
        keep_last: how many checkpoints remain; older ones are removed last. 0 keeps all.
        layout: sizes of the mesh axes; random state is restored only under an equal one.
        group: the ranks that save; the world by default.

    Raises, on every rank:
        ValueError: the ranks' arguments disagree, the blocks do not tile the tensors, `root` is
            not shared, or `latest` already names an undamaged checkpoint of this step.
        CheckpointError: the file system failed (full, quota, permissions). The partial directory is
            removed and earlier checkpoints are as they were.
    """
    ranks, root = Ranks(group=group), Path(root)
    final, partial = step_directory(root, step), incomplete_directory(root, step)
    placement = describe_placement(ranks, tensors, layout)
    check_arguments(ranks, step, tensors, host_state, placement)
    state = compose_state(step, host_state, placement)
    try:
        ranks.first(lambda: prepare(root, step))
        _write_shards(ranks, partial, tensors)
        ranks.each(lambda: _write_own_files(ranks, partial, rng_state, state))
        entries = ranks.each(lambda: _describe_own_files(ranks, partial))
        manifest = Manifest(step=step, files={k: v for part in entries for k, v in part.items()})
        ranks.first(lambda: _finish(partial, final, manifest))
    except (CheckpointError, ValueError) as error:
        # All ranks are here: whatever failed has failed on every one. What cannot be removed now
        # is removed by the next save.
        free = ranks.first(lambda: _free_space(root))
        ranks.first(lambda: shutil.rmtree(partial, ignore_errors=True))
        if isinstance(error, ValueError):
            raise
        raise CheckpointError(
            f"could not save step {step} under {root} ({free} there): {error}. Free space or raise "
            "the quota, or lower checkpoint.keep_last; earlier checkpoints are untouched"
        ) from error
    ranks.first(lambda: remove_older(final, keep_last))
    return final


def load_checkpoint(
    path_or_root: Path,
    tensors: Tensors,
    *,
    expect: Mapping[str, Any],
    layout: Mapping[str, int] | None = None,
    allow_unused: bool = False,
    skip_corrupt: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadedState:
    """Fill the local storage tensors in place from a checkpoint of any layout. Collective.

    Every file is checked against the manifest first, the work divided over the ranks; until all of
    it is right and of this model, nothing is modified.

    Args:
        path_or_root: one checkpoint, or a run or `checkpoints` directory (its newest, by rank 0).
        tensors: what to fill; a float32 tensor only from a saved float32 one, and so on.
        expect: entries that `host_state` must have, such as the model fingerprint.
        layout: as in `save_checkpoint`.
        allow_unused: let the checkpoint hold more keys, for instance to load the model alone.
        skip_corrupt: when the newest one of a directory is damaged, go on to the next older one,
            with a warning.
        group: the ranks that load; the world by default.

    Raises, on every rank:
        CorruptCheckpointError (a ValueError): names every missing or damaged file.
        ValueError: another model or another format, or no checkpoint there; lists the differences.
        CheckpointError: a file could not be read after all; tensors may be partly filled then.
    """
    ranks = Ranks(group=group)
    newest = resolve_checkpoint(path_or_root, group=group)
    if newest is None:
        raise ValueError(f"no complete checkpoint under {path_or_root}")
    candidates = [newest]
    if skip_corrupt and newest != Path(path_or_root):
        candidates += ranks.first(lambda: older_checkpoints(newest))
    for path in candidates:
        try:
            manifest, state, metadata = _verify(ranks, path, tensors, expect, allow_unused)
            break
        except CorruptCheckpointError as error:
            if path == candidates[-1]:
                raise
            if ranks.rank == 0:
                logger.warning("skipping %s: %s", path.name, error)
    _read_shards(ranks, path, metadata, tensors)
    placement = describe_placement(ranks, tensors, layout)
    return LoadedState(
        path=path,
        step=manifest.step,
        host_state=state["host_state"],
        rng_state=_load_rng(ranks, path, manifest, state["placement"] == placement),
        versions=state["versions"],
    )


def resolve_checkpoint(
    path_or_root: Path, *, group: dist.ProcessGroup | None = None
) -> Path | None:
    """The checkpoint itself, or the newest one of a run or `checkpoints` directory. Collective.

    Rank 0 looks and the others take its word, so that no two ranks disagree about what exists.
    None when there is no complete checkpoint.
    """
    path = Path(path_or_root)
    return Ranks(group=group).first(
        lambda: path if is_checkpoint(path) else latest_checkpoint(checkpoints_directory(path))
    )


def _write_shards(ranks: Ranks, partial: Path, tensors: Tensors) -> None:
    """DCP's part of the save; its failure, on all ranks at once, as ours."""
    try:
        with warnings.catch_warnings():
            # A single process without torch.distributed is a use we support.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                dict(tensors),
                storage_writer=ShardWriter(partial),
                planner=BlockSavePlanner(tensors),
                process_group=ranks.group,
            )
    except CheckpointException as exception:  # a BaseException: nothing else would catch it
        raise _from_dcp(exception) from exception


def _read_shards(ranks: Ranks, path: Path, metadata: Metadata, tensors: Tensors) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(
                dict(tensors),
                storage_reader=ShardReader(path, metadata),
                planner=BlockLoadPlanner(tensors),
                process_group=ranks.group,
            )
    except CheckpointException as exception:
        error = _from_dcp(exception)
        raise CheckpointError(f"could not read {path}, which verified: {error}") from exception


def _from_dcp(exception: CheckpointException) -> CheckpointError | ValueError:
    causes: dict[int, BaseException] = {r: pair[0] for r, pair in exception.failures.items()}
    text = "; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in sorted(causes.items()))
    if all(isinstance(cause, ValueError) for cause in causes.values()):
        return ValueError(text)
    return CheckpointError(text)


def _write_own_files(
    ranks: Ranks, partial: Path, rng_state: dict[str, torch.Tensor], state: dict[str, Any]
) -> None:
    # Rank 0 made the directory; where that is not seen here, `_finish` says so better than ENOENT.
    (partial / "rng").mkdir(exist_ok=True)
    write_durably(partial / _rng_name(ranks.rank), safetensors.torch.save(rng_state))
    if ranks.rank == 0:
        write_durably(partial / STATE_NAME, (json.dumps(state, indent=1) + "\n").encode())


def _describe_own_files(ranks: Ranks, partial: Path) -> dict[str, FileEntry]:
    """Hash what this rank wrote; DCP names a shard file after the rank that wrote it."""
    names = [path.name for path in partial.glob(f"__{ranks.rank}_*.distcp")]
    names.append(_rng_name(ranks.rank))
    if ranks.rank == 0:
        names += [METADATA_NAME, STATE_NAME]
    return {name: describe_file(partial / name) for name in names}


def _finish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Rank 0's last steps: check that it sees every rank's files, list them, and publish."""
    present = {str(path.relative_to(partial)) for path in partial.rglob("*") if not path.is_dir()}
    if present != manifest.files.keys():
        raise ValueError(
            f"{partial} does not hold exactly what the ranks wrote "
            f"({shorten(present ^ manifest.files.keys())}); it must be on a file system that all "
            "ranks share"
        )
    check_files(partial, manifest, manifest.files, deep=False)
    write_manifest(partial, manifest)
    publish(partial, final)


def _verify(
    ranks: Ranks, path: Path, tensors: Tensors, expect: Mapping[str, Any], allow_unused: bool
) -> tuple[Manifest, dict[str, Any], Metadata]:
    """Check the small files, then what they say, then all the rest: the cheapest refusal first."""
    manifest = ranks.first(lambda: read_manifest(path))
    if missing := {STATE_NAME, METADATA_NAME} - manifest.files.keys():
        raise CorruptCheckpointError(f"{path / MANIFEST_NAME} does not list {shorten(missing)}")

    read: list[tuple[dict[str, Any], Metadata]] = []

    def read_and_compare() -> None:
        check_files(path, manifest, (STATE_NAME, METADATA_NAME), deep=True)
        state, metadata = read_state(path), read_metadata(path)
        check_same_model(path, state, saved_table(metadata), tensors, expect, allow_unused)
        read.append((state, metadata))  # not returned: `each` would send it to every rank

    ranks.each(read_and_compare)
    own = divide_files(manifest, ranks.size)[ranks.rank]
    ranks.each(lambda: check_files(path, manifest, own, deep=True))
    return manifest, *read[0]


def _load_rng(
    ranks: Ranks, path: Path, manifest: Manifest, same_placement: bool
) -> dict[str, torch.Tensor] | None:
    if not same_placement:
        if ranks.rank == 0:
            logger.warning("%s: saved under another layout, random state not restored", path.name)
        return None
    name = _rng_name(ranks.rank)
    assert name in manifest.files, name  # one for each rank of an equal world
    return safetensors.torch.load((path / name).read_bytes())


def _free_space(root: Path) -> str:
    try:
        space = os.statvfs(root)
    except OSError as error:
        return f"free space unknown, {error.strerror}"
    return f"{space.f_bavail * space.f_frsize / 2**20:.1f} MiB free"


def _rng_name(rank: int) -> str:
    return f"rng/{rank:05d}.safetensors"
