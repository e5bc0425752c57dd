"""SIGKILL at any moment of a save leaves a checkpoint that loads, and it is whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from checkpoint_samples import (
    Scheme,
    differing_keys,
    quick_processes,
    sample,
    save_and_die_before,
    save_sample,
    save_until_killed,
)

from megacomposer.checkpoint.directory import latest_checkpoint
from megacomposer.checkpoint.manifest import verify_checkpoint
from megacomposer.checkpoint.native import load_checkpoint


def load_and_check(root: Path) -> int:
    """Load the newest checkpoint, check every byte that it promised, and return its step."""
    tensors = sample(Scheme(), 0, None)
    loaded = load_checkpoint(root, tensors, expect={"model_fingerprint": "m1"})
    assert loaded.path == latest_checkpoint(root)
    assert loaded.host_state["tokens"] == 10 * loaded.step
    assert differing_keys(tensors, Scheme(), 0, loaded.step) == []
    return loaded.step


def run_to_its_end(target, *arguments) -> int | None:
    process = quick_processes().Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def test_a_kill_before_any_single_file_operation_keeps_the_old_or_the_new_checkpoint(
    tmp_path, caplog
) -> None:
    original, count_file = tmp_path / "original", tmp_path / "count"
    save_sample(original, 1)
    complete = tmp_path / "complete"
    shutil.copytree(original, complete)
    assert run_to_its_end(save_and_die_before, complete, 2, None, count_file) == 0
    operations = int(count_file.read_text())
    found = []
    for operation in range(operations):
        root = tmp_path / f"killed_{operation}"
        shutil.copytree(original, root)
        code = run_to_its_end(save_and_die_before, root, 2, operation, count_file)
        assert code == -signal.SIGKILL, operation
        caplog.clear()
        found.append(load_and_check(root))
        for path in root.glob("step_????????"):
            verify_checkpoint(path, deep=True)  # nothing half written or half removed
        leftovers = sorted(path.name for path in root.glob("step_*.incomplete"))
        for name in leftovers:
            assert f"skipping {name}" in caplog.text
        save_sample(root, 3, keep_last=1)
        assert load_and_check(root) == 3
        names = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
        assert names == ["latest", "step_00000003"]
    # The old one until `latest` moves, the new one from then on, and never anything else.
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert found.count(1) > 10


def test_a_kill_during_the_first_save_of_a_run_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path, caplog
) -> None:
    count_file = tmp_path / "count"
    assert run_to_its_end(save_and_die_before, tmp_path / "whole", 1, None, count_file) == 0
    operations = int(count_file.read_text())
    found = set()
    for operation in range(operations):
        root = tmp_path / f"killed_{operation}"
        run_to_its_end(save_and_die_before, root, 1, operation, count_file)
        if latest_checkpoint(root) is None:
            assert not list(root.glob("step_????????"))
            found.add(None)
        else:  # complete and renamed, with or without `latest`
            found.add(load_and_check(root))
    assert found == {None, 1}
    assert "has no usable `latest`" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_a_random_time_loses_no_save_that_had_returned(tmp_path, seed) -> None:
    kill_at_random_time(tmp_path / "checkpoints", seed, world_size=1)


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_rank_of_two_loses_no_save_that_had_returned(tmp_path, seed) -> None:
    kill_at_random_time(tmp_path / "checkpoints", seed, world_size=2)


def kill_at_random_time(root: Path, seed: int, world_size: int) -> None:
    generator = random.Random(seed)
    context = quick_processes()
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=save_until_killed, args=(root, rank, world_size, sender))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    sender.close()
    returned = [receiver.recv()]  # from here on there is always a checkpoint
    time.sleep(generator.uniform(0.0, 0.15))
    victim = generator.randrange(world_size)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    assert codes[victim] == -signal.SIGKILL
    # The survivor does not wait for ever for the dead.
    assert all(code not in (None, 0) for code in codes), codes
    while receiver.poll():
        try:
            returned.append(receiver.recv())
        except EOFError:
            break
    assert load_and_check(root) in (returned[-1], returned[-1] + 1)
