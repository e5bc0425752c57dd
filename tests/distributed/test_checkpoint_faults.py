"""What goes wrong on one rank ends the save or load on all of them, with one clear message."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import (
    SHAPES,
    Scheme,
    differing_keys,
    rng_sample,
    sample,
    save_sample,
)

from megacomposer.checkpoint.agreement import CheckpointError
from megacomposer.checkpoint.lock import RunLock
from megacomposer.checkpoint.native import (
    load_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
)
from runner import run_distributed

SCHEME = Scheme(shards=2)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond this in the block: the write fails as on a full disk."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_where_rank_1_has_no_room(root: Path, rank: int) -> None:
    with file_size_limit(1000 if rank == 1 else 10_000_000):
        save_sample(root, 2, scheme=SCHEME)


def save_where_rank_0_has_no_room(root: Path, rank: int) -> None:
    with file_size_limit(1000 if rank == 0 else 10_000_000):
        save_sample(root, 2, scheme=SCHEME)


def save(root: Path, rank: int, tensors: Any, host_state: dict[str, Any] | None = None) -> None:
    save_checkpoint(root, 2, tensors, host_state or {}, rng_sample(rank), keep_last=0)


def save_without_a_key_on_rank_1(root: Path, rank: int) -> None:
    keys = [key for key in SHAPES if not (rank == 1 and key == "norm")]
    save(root, rank, sample(SCHEME, rank, 2, keys))


def save_with_two_primary_ranks(root: Path, rank: int) -> None:
    tensors = sample(Scheme(replicas=2), rank, 2)
    layout, local = tensors["column"]
    tensors["column"] = (dataclasses.replace(layout, is_primary=True), local)
    save(root, rank, tensors)


def save_with_no_primary_rank(root: Path, rank: int) -> None:
    tensors = sample(SCHEME, rank, 2)
    layout, local = tensors["gate_up"]
    tensors["gate_up"] = (dataclasses.replace(layout, is_primary=False), local)
    save(root, rank, tensors)


def save_with_a_hole(root: Path, rank: int) -> None:
    tensors = sample(SCHEME, rank, 2)
    layout, local = tensors["gate_up"]
    tensors["gate_up"] = (dataclasses.replace(layout, is_primary=rank == 0), local)
    save(root, rank, tensors)


def save_with_another_host_state(root: Path, rank: int) -> None:
    save(root, rank, sample(SCHEME, rank, 2), {"tokens": rank})


def save_on_file_systems_of_their_own(root: Path, rank: int) -> None:
    save_sample(root if rank == 0 else root / "elsewhere", 2, scheme=SCHEME)


def take_a_lock_that_is_held(root: Path, rank: int) -> None:
    if rank == 0:
        held = RunLock(root.parent)
        held._acquire()
    with RunLock(root.parent):
        raise AssertionError("two trainers hold the lock")


SCENARIOS: list[Callable[[Path, int], None]] = [
    save_where_rank_1_has_no_room,
    save_where_rank_0_has_no_room,
    save_without_a_key_on_rank_1,
    save_with_two_primary_ranks,
    save_with_no_primary_rank,
    save_with_a_hole,
    save_with_another_host_state,
    save_on_file_systems_of_their_own,
    take_a_lock_that_is_held,
]


def run_scenarios(folder: str) -> dict[str, tuple[str, str]]:
    """Each scenario after a good save of step 1: the error that it raised on this rank."""
    rank = torch.distributed.get_rank()
    errors = {}
    for scenario in SCENARIOS:
        root = Path(folder) / scenario.__name__ / "checkpoints"
        save_sample(root, 1, scheme=SCHEME)
        try:
            scenario(root, rank)
        except (ValueError, CheckpointError) as error:
            errors[scenario.__name__] = (type(error).__name__, str(error))
        tensors = sample(SCHEME, rank, None)
        # Rank 1 looks in the wrong place: what rank 0 finds is what both load.
        place = root if rank == 0 else root / "nowhere"
        assert resolve_checkpoint(place) == root / "step_00000001"
        assert load_checkpoint(place, tensors, expect={}).step == 1
        assert differing_keys(tensors, SCHEME, rank, 1) == []
    return errors


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("faults")
    one, other = run_distributed(run_scenarios, 2, str(folder))
    assert one == other  # no rank was left waiting, and each can say why
    return folder, one


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("save_where_rank_1_has_no_room", "CheckpointError", ["rank 1", "File too large"]),
        ("save_where_rank_0_has_no_room", "CheckpointError", ["rank 0", "File too large"]),
        ("save_without_a_key_on_rank_1", "ValueError", ["ranks 0 and 1", "norm"]),
        ("save_with_two_primary_ranks", "ValueError", ["column", "two primary ranks"]),
        ("save_with_no_primary_rank", "ValueError", ["gate_up", "no rank is primary"]),
        ("save_with_a_hole", "ValueError", ["gate_up", "36 of 72 elements"]),
        ("save_with_another_host_state", "ValueError", ["ranks 0 and 1", "host_state"]),
        ("save_on_file_systems_of_their_own", "ValueError", ["that all ranks share"]),
        ("take_a_lock_that_is_held", "ValueError", ["in use by another trainer"]),
    ],
)
def test_a_fault_of_one_rank_is_an_error_of_both(faults, scenario, kind, words) -> None:
    folder, errors = faults
    found_kind, message = errors[scenario]
    assert found_kind == kind, message
    for word in words:
        assert word in message
    root = folder / scenario / "checkpoints"
    names = {path.name for path in root.iterdir()}
    assert names - {"elsewhere", ".lock"} == {"latest", "step_00000001"}


def test_a_full_disk_is_reported_with_the_path_and_what_to_do(faults) -> None:
    folder, errors = faults
    _, message = errors["save_where_rank_1_has_no_room"]
    assert str(folder / "save_where_rank_1_has_no_room" / "checkpoints") in message
    assert "Free space or raise the quota" in message
    assert "earlier checkpoints are untouched" in message
