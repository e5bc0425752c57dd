from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoint_samples import Scheme, differing_keys, sample, save_sample

from megacomposer.checkpoint.directory import latest_checkpoint
from megacomposer.checkpoint.native import load_checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3 in a run directory's `checkpoints`."""
    for step in (1, 2, 3):
        save_sample(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


def test_a_run_without_checkpoints_starts_fresh_and_loading_from_it_says_so(tmp_path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(ValueError, match="no complete checkpoint under"):
        load_checkpoint(tmp_path, sample(Scheme(), 0, None), expect={})


def test_latest_decides_even_against_a_higher_step(root, caplog) -> None:
    (root / "latest").write_text("step_00000002\n")
    assert latest_checkpoint(root) == root / "step_00000002"
    assert "skipping step_00000003" in caplog.text


@pytest.mark.parametrize("content", [b"", b"step_00000009\n", b"../elsewhere\n", b"\xff\xfe"])
def test_an_unusable_latest_falls_back_to_the_newest_that_verifies(root, caplog, content) -> None:
    (root / "latest").write_bytes(content)
    os.truncate(root / "step_00000003" / "state.json", 10)
    (root / "step_00000002" / "manifest.json").unlink()
    assert latest_checkpoint(root) == root / "step_00000001"
    for reason in ("skipping step_00000003", "state.json is damaged", "skipping step_00000002"):
        assert reason in caplog.text


def test_an_unfinished_save_is_never_chosen_even_with_a_manifest(root, caplog) -> None:
    shutil.copytree(root / "step_00000003", root / "step_00000004.incomplete")
    (root / "latest").unlink()
    assert latest_checkpoint(root) == root / "step_00000003"
    assert "skipping step_00000004.incomplete" in caplog.text
    with pytest.raises(ValueError, match="belongs to step 3"):
        load_checkpoint(root / "step_00000004.incomplete", sample(Scheme(), 0, None), expect={})


def test_a_save_removes_what_dead_saves_left(root) -> None:
    shutil.copytree(root / "step_00000003", root / "step_00000004.incomplete")
    (root / "step_00000001.removed.incomplete").mkdir()
    save_sample(root, 5)
    assert not list(root.glob("*.incomplete"))


def test_only_the_newest_are_kept(root) -> None:
    save_sample(root, 4, keep_last=2)
    assert steps(root) == [3, 4]
    save_sample(root, 5, keep_last=1)
    assert steps(root) == [5]
    save_sample(root, 6, keep_last=0)
    assert steps(root) == [5, 6]


def test_going_back_to_an_older_step_replaces_the_abandoned_ones_one_by_one(root) -> None:
    (root / "latest").write_text("step_00000001\n")
    shutil.copytree(root / "step_00000001", root / "step_00000000x")  # not ours: stays
    save_sample(root, 2, keep_last=1)
    assert latest_checkpoint(root) == root / "step_00000002"
    assert (root / "step_00000003").is_dir()  # the abandoned future is not ours to remove
    assert not (root / "step_00000001").exists()
    tensors = sample(Scheme(), 0, None)
    load_checkpoint(root, tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, 2) == []
    assert (root / "step_00000000x").is_dir()


def test_the_checkpoint_that_latest_names_is_not_saved_over(root) -> None:
    before = (root / "step_00000003" / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="step 3 is already saved"):
        save_sample(root, 3)
    assert (root / "step_00000003" / "manifest.json").read_bytes() == before
    assert steps(root) == [1, 2, 3]


def test_a_checkpoint_is_found_by_its_own_its_directorys_and_its_runs_path(root) -> None:
    for place in (root, root.parent, root / "step_00000003"):
        assert load_checkpoint(place, sample(Scheme(), 0, None), expect={}).step == 3
    copy = shutil.copytree(root / "step_00000002", root.parent / "best")
    assert load_checkpoint(copy, sample(Scheme(), 0, None), expect={}).step == 2


def test_a_checkpoint_renamed_to_another_step_is_refused(root) -> None:
    (root / "step_00000002").rename(root / "step_00000007")
    with pytest.raises(ValueError, match="belongs to step 2, not step_00000007"):
        load_checkpoint(root / "step_00000007", sample(Scheme(), 0, None), expect={})


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_latest_moves(
    tmp_path, monkeypatch
) -> None:
    """The order of the real calls: a power cut between any two of them loses no old checkpoint."""
    root = tmp_path / "checkpoints"
    save_sample(root, 1)
    events: list[tuple[str, object]] = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        events.append(("fsync", os.fstat(descriptor).st_ino))

    def rename(source: object, target: object, **keywords: object) -> None:
        real_rename(source, target, **keywords)
        events.append(("rename", os.fspath(target)))

    def replace(source: object, target: object) -> None:
        real_replace(source, target)
        events.append(("replace", os.fspath(target)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    path = save_sample(root, 2)
    published = events.index(("rename", str(path)))
    moved = events.index(("replace", str(root / "latest")))
    for entry in [path, path / "rng", *(p for p in path.rglob("*") if p.is_file())]:
        assert ("fsync", entry.stat().st_ino) in events[:published], entry
    root_synced = ("fsync", root.stat().st_ino)
    assert root_synced in events[published:moved]
    assert root_synced in events[moved:]
    assert ("fsync", (root / "latest").stat().st_ino) in events[published:moved]
