"""Damage of every kind is refused by the name of the file, and touches no tensor."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_samples import Scheme, differing_keys, sample, save_sample

from megacomposer.checkpoint.files import describe_file
from megacomposer.checkpoint.manifest import (
    CorruptCheckpointError,
    Manifest,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)
from megacomposer.checkpoint.native import load_checkpoint
from runner import run_distributed

NEWEST, OLDER = "step_00000002", "step_00000001"


def save_two_steps(root: str) -> None:
    for step in (1, 2):
        save_sample(Path(root), step, scheme=Scheme(shards=2))


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by two ranks: two shards each, of equal lengths in both steps."""
    root = tmp_path_factory.mktemp("undamaged")
    run_distributed(save_two_steps, 2, str(root))
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (root / NEWEST / name).stat().st_size == (root / OLDER / name).stat().st_size
    return root


@pytest.fixture
def root(undamaged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undamaged, tmp_path / "checkpoints"))


def flip_bit(file: Path, position: int, bit: int = 4) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def flip_bit_of_a_weight(path: Path) -> str:
    file = path / "__1_0.distcp"
    weight = sample(Scheme(shards=2), 1, 2)["column"][1].contiguous().numpy().tobytes()
    flip_bit(file, file.read_bytes().index(weight) + 5)
    return file.name


def zero_a_page(path: Path) -> str:
    with (path / "__0_0.distcp").open("r+b") as file:
        file.write(bytes(4096))
    return "__0_0.distcp"


def truncate(path: Path) -> str:
    os.truncate(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size - 1)
    return "__0_0.distcp"


def append(path: Path) -> str:
    with (path / "__1_0.distcp").open("ab") as file:
        file.write(b"\0")
    return "__1_0.distcp"


def remove_a_shard(path: Path) -> str:
    (path / "__1_0.distcp").unlink()
    return "__1_0.distcp"


def swap_two_shards(path: Path) -> str:
    one, other, aside = path / "__0_0.distcp", path / "__1_0.distcp", path / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return "__0_0.distcp"


def keep_a_stale_shard(path: Path) -> str:
    shutil.copy(path.parent / OLDER / "__1_0.distcp", path)
    return "__1_0.distcp"


def keep_a_stale_state(path: Path) -> str:
    shutil.copy(path.parent / OLDER / "state.json", path)
    return "state.json"


def take_another_steps_manifest(path: Path) -> str:
    shutil.copy(path.parent / OLDER / "manifest.json", path)
    return "manifest.json"


def flip_bit_of_metadata(path: Path) -> str:
    flip_bit(path / ".metadata", 200)
    return ".metadata"


def flip_bit_of_random_state(path: Path) -> str:
    flip_bit(path / "rng" / "00001.safetensors", -1)
    return "rng/00001.safetensors"


def flip_bit_of_manifest(path: Path) -> str:
    flip_bit(path / "manifest.json", 100)
    return "manifest.json"


def remove_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "manifest.json"


def empty_manifest(path: Path) -> str:
    (path / "manifest.json").write_bytes(b"")
    return "manifest.json"


DAMAGES: list[Callable[[Path], str]] = [
    flip_bit_of_a_weight,
    zero_a_page,
    truncate,
    append,
    remove_a_shard,
    swap_two_shards,
    keep_a_stale_shard,
    keep_a_stale_state,
    take_another_steps_manifest,
    flip_bit_of_metadata,
    flip_bit_of_random_state,
    flip_bit_of_manifest,
    remove_manifest,
    empty_manifest,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_refused_by_name_and_nothing_is_loaded(root, damage) -> None:
    path = root / NEWEST
    name = damage(path)
    tensors = sample(Scheme(), 0, None)
    with pytest.raises(CorruptCheckpointError, match=name):
        load_checkpoint(path, tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, None) == []
    with pytest.raises(CorruptCheckpointError, match=name):
        verify_checkpoint(path, deep=True)


@pytest.mark.parametrize("seed", range(40))
def test_no_single_flipped_bit_anywhere_loads(root, seed) -> None:
    generator = random.Random(seed)
    files = sorted(path for path in (root / NEWEST).rglob("*") if path.is_file())
    file = generator.choice(files)
    flip_bit(file, generator.randrange(file.stat().st_size), generator.randrange(8))
    tensors = sample(Scheme(), 0, None)
    with pytest.raises(CorruptCheckpointError, match=file.name):
        load_checkpoint(root, tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, None) == []


def test_damage_to_the_newest_falls_back_only_when_asked(root, caplog) -> None:
    flip_bit_of_a_weight(root / NEWEST)
    tensors = sample(Scheme(), 0, None)
    with pytest.raises(CorruptCheckpointError, match=NEWEST):
        load_checkpoint(root, tensors, expect={})
    with pytest.raises(CorruptCheckpointError, match=NEWEST):  # this very one was asked for
        load_checkpoint(root / NEWEST, tensors, expect={}, skip_corrupt=True)
    caplog.clear()
    loaded = load_checkpoint(root, tensors, expect={}, skip_corrupt=True)
    assert loaded.step == 1
    assert differing_keys(tensors, Scheme(), 0, 1) == []
    assert f"skipping {NEWEST}" in caplog.text
    assert "__1_0.distcp is damaged" in caplog.text


def test_with_every_checkpoint_damaged_even_falling_back_refuses(root) -> None:
    for name in (NEWEST, OLDER):
        truncate(root / name)
    with pytest.raises(CorruptCheckpointError, match=OLDER):
        load_checkpoint(root, sample(Scheme(), 0, None), expect={}, skip_corrupt=True)


def test_a_damaged_checkpoint_that_latest_names_can_be_saved_again(root) -> None:
    flip_bit_of_a_weight(root / NEWEST)
    save_sample(root, 2)
    tensors = sample(Scheme(), 0, None)
    assert load_checkpoint(root, tensors, expect={}).step == 2
    assert differing_keys(tensors, Scheme(), 0, 2) == []


class Payload:
    """Pickled, it creates a file when somebody unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.file),))


def test_a_crafted_metadata_file_with_a_true_manifest_runs_no_code(root, tmp_path) -> None:
    path, mark = root / NEWEST, tmp_path / "it_ran"
    (path / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    manifest = read_manifest(path)
    files = {**manifest.files, ".metadata": describe_file(path / ".metadata")}
    write_manifest(path, Manifest(step=2, files=files))
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata refers to posix\.mkdir"):
        load_checkpoint(root, sample(Scheme(), 0, None), expect={})
    assert not mark.exists()


def load_damaged_on_two_ranks(root: str) -> tuple[str, str, list[str]]:
    """The error that this rank raises; only one of the two reads the damaged file."""
    rank = torch.distributed.get_rank()
    tensors = sample(Scheme(tp=2), rank, None)
    try:
        load_checkpoint(Path(root), tensors, expect={})
    except ValueError as error:
        touched = differing_keys(tensors, Scheme(tp=2), rank, None)
        return (type(error).__name__, str(error), touched)
    raise AssertionError("a damaged checkpoint loaded")


def test_damage_that_one_rank_finds_is_refused_by_all_with_the_same_words(root) -> None:
    name = flip_bit_of_a_weight(root / NEWEST)
    one, other = run_distributed(load_damaged_on_two_ranks, 2, str(root))
    assert one == other
    assert one[0] == "CorruptCheckpointError"
    assert f"{NEWEST}/{name} is damaged" in one[1]
    assert one[2] == []


def test_the_manifest_lists_every_file_but_itself(undamaged) -> None:
    path = undamaged / NEWEST
    listed = json.loads((path / "manifest.json").read_text())["files"]
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert present == listed.keys() | {"manifest.json"}
