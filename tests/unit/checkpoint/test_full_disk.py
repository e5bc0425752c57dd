from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_samples import Scheme, differing_keys, rng_sample, sample, save_sample

from megacomposer.checkpoint.agreement import CheckpointError
from megacomposer.checkpoint.directory import latest_checkpoint
from megacomposer.checkpoint.native import load_checkpoint, save_checkpoint
from megacomposer.mesh.sharding import whole_layout

DISK_BYTES = 256 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one or two small checkpoints."""
    mount = shutil.which("mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# It fills up in the shard, in the table of shards, or in one of the small files.
@pytest.mark.parametrize("free_bytes", [0, 4096, 20_480, *range(32_768, 61_440, 4096)])
def test_a_full_disk_stops_the_save_cleanly_wherever_it_strikes(small_disk, free_bytes) -> None:
    root = small_disk / "run" / "checkpoints"
    save_sample(root, 1)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - free_bytes))
    layout = whole_layout("weight", (8000,), is_primary=True)
    big = {**sample(Scheme(), 0, 2), "weight": (layout, torch.zeros(8000))}
    with pytest.raises(CheckpointError, match="No space left on device") as failed:
        save_checkpoint(root, 2, big, {}, rng_sample(), keep_last=0)
    assert f"could not save step 2 under {root}" in str(failed.value)
    assert "Free space or raise the quota" in str(failed.value)
    assert latest_checkpoint(root) == root / "step_00000001"
    assert not list(root.glob("*.incomplete"))
    tensors = sample(Scheme(), 0, None)
    load_checkpoint(root / "step_00000001", tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, 1) == []
    ballast.unlink()
    save_sample(root, 3)
    assert load_checkpoint(root, sample(Scheme(), 0, None), expect={}).step == 3
