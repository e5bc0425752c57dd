from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_samples import SHAPES, Scheme, differing_keys, rng_sample, sample, save_sample

from megacomposer.checkpoint.native import load_checkpoint, read_state, save_checkpoint
from megacomposer.checkpoint.planner import Tensors
from megacomposer.checkpoint.rng import capture_rng, restore_rng
from megacomposer.mesh.sharding import whole_layout


def save(root: Path, tensors: Tensors, host_state: dict, step: int = 1, **keywords) -> Path:
    return save_checkpoint(root, step, tensors, host_state, rng_sample(), keep_last=0, **keywords)


def with_moments(tensors: Tensors) -> Tensors:
    moments = {f"optim/momentum/{key}": value for key, value in tensors.items()}
    return {**tensors, **moments}


def test_a_state_comes_back_bit_for_bit_with_its_host_state_and_random_state(tmp_path) -> None:
    host_state = {
        "loader": {"epoch": 2, "position": 10**15, "shards": [1, 2]},
        "loss": 0.1 + 0.2,
        "best": math.inf,
        "name": "\u00e9",
        "nothing": None,
        "flag": True,
    }
    random_state = capture_rng()
    wanted = torch.rand(3)
    save_checkpoint(tmp_path, 7, sample(Scheme(), 0, 7), host_state, random_state, keep_last=0)
    tensors = sample(Scheme(), 0, None)
    loaded = load_checkpoint(tmp_path, tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, 7) == []
    assert (loaded.step, loaded.host_state) == (7, host_state)
    assert loaded.versions["torch"] == torch.__version__
    assert read_state(loaded.path)["host_state"] == host_state
    restore_rng(loaded.rng_state)
    assert torch.equal(torch.rand(3), wanted)


def test_special_values_and_every_kind_of_number_keep_their_bits(tmp_path) -> None:
    values = {
        "float": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4e38]),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "half": torch.tensor([float("nan"), 1e-40, -0.0]).bfloat16(),
        "fp8": torch.tensor([1.5, -0.0]).to(torch.float8_e4m3fn),
        "long": torch.tensor([2**62 + 1, -1]),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }

    def tensors(fill: bool) -> Tensors:
        return {
            key: (
                whole_layout(key, tuple(value.shape), is_primary=True),
                value if fill else torch.zeros_like(value),
            )
            for key, value in values.items()
        }

    save(tmp_path, tensors(True), {})
    target = tensors(False)
    load_checkpoint(tmp_path, target, expect={})
    for key, value in values.items():
        loaded = target[key][1].contiguous().view(torch.uint8)
        assert torch.equal(loaded, value.contiguous().view(torch.uint8)), key


def test_missing_moments_are_an_error_and_leave_the_weights_alone(tmp_path) -> None:
    save(tmp_path, sample(Scheme(), 0, 1), {})
    tensors = with_moments(sample(Scheme(), 0, None))
    with pytest.raises(ValueError, match="missing in the checkpoint: optim/momentum/column, "):
        load_checkpoint(tmp_path, tensors, expect={})
    assert differing_keys({k: tensors[k] for k in SHAPES}, Scheme(), 0, None) == []


def test_dropping_the_saved_moments_must_be_asked_for(tmp_path) -> None:
    save(tmp_path, with_moments(sample(Scheme(), 0, 1)), {})
    tensors = sample(Scheme(), 0, None)
    with pytest.raises(ValueError, match="in the checkpoint only: optim/momentum/column, "):
        load_checkpoint(tmp_path, tensors, expect={})
    assert differing_keys(tensors, Scheme(), 0, None) == []
    load_checkpoint(tmp_path, tensors, expect={}, allow_unused=True)
    assert differing_keys(tensors, Scheme(), 0, 1) == []


def test_one_error_lists_every_difference_of_another_model(tmp_path) -> None:
    save(tmp_path, sample(Scheme(), 0, 1), {"model_fingerprint": "m1"})
    tensors = sample(Scheme(), 0, None)
    for key, other in [("column", torch.zeros(12, 6)), ("half", torch.zeros(12, 3))]:
        tensors[key] = (whole_layout(key, tuple(other.shape), is_primary=True), other)
    tensors["extra"] = tensors.pop("norm")
    with pytest.raises(ValueError, match="is a checkpoint of another model") as refused:
        load_checkpoint(tmp_path, tensors, expect={"model_fingerprint": "m2", "vocab": 3})
    for part in (
        "missing in the checkpoint: extra",
        "in the checkpoint only: norm",
        "column (float32 [12, 5], here float32 [12, 6])",
        "half (bfloat16 [12, 3], here float32 [12, 3])",
        "model_fingerprint is 'm1' in the checkpoint and 'm2' here",
        "vocab is None in the checkpoint and 3 here",
    ):
        assert part in str(refused.value)
    untouched = {key: tensors[key] for key in ("row", "gate_up", "counts")}
    assert differing_keys(untouched, Scheme(), 0, None) == []


def test_random_state_is_not_given_to_another_layout(tmp_path) -> None:
    save(tmp_path, sample(Scheme(), 0, 1), {}, layout={"tp": 1, "cp": 1})

    def load(layout: dict[str, int]) -> dict[str, torch.Tensor] | None:
        tensors = sample(Scheme(), 0, None)
        return load_checkpoint(tmp_path, tensors, expect={}, layout=layout).rng_state

    assert load({"tp": 1, "cp": 1}) is not None
    assert load({"tp": 1, "cp": 2}) is None


@pytest.mark.parametrize(
    ("host_state", "where"),
    [
        ({"a": (1, 2)}, "host_state.a is a tuple"),
        ({"a": {3: 1}}, "host_state.a has the key 3"),
        ({"a": [torch.ones(1)]}, r"host_state.a\[0\] is a Tensor"),
    ],
)
def test_host_state_that_json_would_change_is_refused(tmp_path, host_state, where) -> None:
    with pytest.raises(ValueError, match=where):
        save(tmp_path, sample(Scheme(), 0, 1), host_state)
    assert list(tmp_path.iterdir()) == []


def test_a_local_tensor_of_another_shape_than_its_layout_is_refused(tmp_path) -> None:
    tensors = sample(Scheme(), 0, 1)
    tensors["norm"] = (tensors["norm"][0], torch.zeros(4))
    with pytest.raises(ValueError, match=r"norm: the local tensor is \(4,\), its layout says"):
        save(tmp_path, tensors, {})


def test_saving_changes_no_tensor_and_leaves_no_path_in_the_files(tmp_path) -> None:
    tensors = sample(Scheme(), 0, 1)
    path = save(tmp_path, tensors, {})
    assert differing_keys(tensors, Scheme(), 0, 1) == []
    for file in path.rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes()


def test_a_parameter_that_requires_grad_is_saved_and_filled(tmp_path) -> None:
    layout = whole_layout("weight", (2, 2), is_primary=True)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    save(tmp_path, {"weight": (layout, parameter)}, {})
    other = torch.nn.Parameter(torch.zeros(2, 2))
    load_checkpoint(tmp_path, {"weight": (layout, other)}, expect={})
    assert torch.equal(other, parameter)
    assert other.requires_grad


def test_two_saves_of_one_state_are_equal_byte_for_byte(tmp_path) -> None:
    one, other = save_sample(tmp_path / "a", 1), save_sample(tmp_path / "b", 1)
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()
