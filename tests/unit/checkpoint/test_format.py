from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_samples import Scheme, differing_keys, sample, save_sample

from megacomposer.checkpoint import manifest
from megacomposer.checkpoint.files import describe_file
from megacomposer.checkpoint.native import load_checkpoint

FORMAT_1 = Path(__file__).parent / "format_1" / "step_00000003"
"""Saved by two ranks (`save_sample(..., 3, scheme=Scheme(tp=2))`) with megacomposer 0.1, torch 2.13
and Python 3.11. Never to be written again: it stands for the checkpoints that people have."""


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(shards=3), Scheme(tp=2, shards=2)])
def test_a_checkpoint_of_the_first_release_still_loads_bit_for_bit(scheme) -> None:
    for rank in range(scheme.size):
        tensors = sample(scheme, rank, None)
        loaded = load_checkpoint(FORMAT_1, tensors, expect={"model_fingerprint": "m1"})
        assert differing_keys(tensors, scheme, rank, 3) == []
        assert loaded.host_state == {"model_fingerprint": "m1", "tokens": 30}
        assert loaded.rng_state is None  # two ranks saved it


def test_a_format_of_the_future_is_refused_by_its_version(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as future:
        future.setattr(manifest, "FORMAT_VERSION", 2)
        path = save_sample(tmp_path, 1)
    tensors = sample(Scheme(), 0, None)
    with pytest.raises(ValueError, match=r"checkpoint format 2; this version .* reads format 1"):
        load_checkpoint(path, tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, None) == []


@pytest.mark.parametrize("found", [0, 2, None, "1"])
def test_a_state_of_another_format_is_refused_even_under_our_manifest(tmp_path, found) -> None:
    path = Path(shutil.copytree(FORMAT_1, tmp_path / FORMAT_1.name))
    state = json.loads((path / "state.json").read_text())
    state["format"] = found
    (path / "state.json").write_text(json.dumps(state))
    listed = manifest.read_manifest(path)
    files = {**listed.files, "state.json": describe_file(path / "state.json")}
    manifest.write_manifest(path, manifest.Manifest(step=3, files=files))
    with pytest.raises(ValueError, match=f"state.json has checkpoint format {found!r}"):
        load_checkpoint(path, sample(Scheme(), 0, None), expect={})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_torch_checkpoint_is_refused_as_not_ours(tmp_path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "step_00000001")
    with pytest.raises(ValueError, match=r"manifest\.json is missing: not a complete checkpoint"):
        load_checkpoint(tmp_path / "step_00000001", sample(Scheme(), 0, None), expect={})
