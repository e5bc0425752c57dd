from __future__ import annotations

import math

import pytest
import torch
from parameter_shards import column_matrices, row_matrices, set_gradient, shard_of

from megacomposer.kernels.newton_schulz import orthogonalize, orthogonalize_reference
from megacomposer.model.parameters import Matrix, ParameterShard
from megacomposer.optim import muon_reference
from megacomposer.optim.adamw import AdamW
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon_reference import MuonReference
from megacomposer.optim.optimizer import build_optimizer
from megacomposer.optim.scale import update_scale


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _whole(shape: tuple[int, int]) -> tuple[Matrix, ...]:
    return (Matrix(offset=(0, 0), shape=shape),)


def _step(optimizer: MuonReference, shards: list[ParameterShard], seed: int, lr: float) -> None:
    for i, shard in enumerate(shards):
        set_gradient(shard, _random(shard.layout.global_shape, 1000 * seed + i))
    optimizer.step(lr=lr)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "adjust_lr_fn"), [("rms_match", "match_rms_adamw"), ("spectral", "original")]
)
@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_update_disagrees_with_torch_muon(
    shape: tuple[int, int], scale: str, adjust_lr_fn: str, nesterov: bool
) -> None:
    start = _random(shape, 0)
    shard = shard_of("weight", start, matrices=_whole(shape))
    config = OptimConfig(
        name="muon_reference",
        weight_decay=0.1,
        muon_nesterov=nesterov,
        muon_ns_coefficients="kj",
        muon_scale=scale,
    )
    ours = MuonReference([shard], config)
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.Muon(
        [parameter],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=nesterov,
        adjust_lr_fn=adjust_lr_fn,
    )
    for seed in range(1, 6):
        before = parameter.detach().clone()
        shard.local.copy_(before)  # so that each step is compared on its own
        _step(ours, [shard], seed, 0.02)
        parameter.grad = shard.local_grad
        theirs.step()
        moved, expected = shard.local - before, parameter.detach() - before
        # torch's Newton-Schulz is in bfloat16 whatever the device; ours on CPU is float32
        assert (moved - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_as_a_sum_changes_the_update_beyond_rounding(nesterov: bool) -> None:
    shape, mu = (12, 40), 0.95
    shard = shard_of("weight", torch.zeros(shape), matrices=_whole(shape), weight_decay=False)
    config = OptimConfig(
        muon_nesterov=nesterov, muon_momentum=mu, muon_scale="none", muon_wire_dtype="fp32"
    )
    optimizer = MuonReference([shard], config)
    average = torch.zeros(shape, dtype=torch.float64)
    other_form = []
    for seed in range(1, 5):
        before = shard.local.clone()
        _step(optimizer, [shard], seed, 1.0)
        gradient = shard.local_grad.double()
        average.lerp_(gradient, 1 - mu)
        forms = [average.clone(), gradient.lerp(average, mu)]
        expected, other = (
            orthogonalize_reference(form, steps=5, coefficients="you")
            for form in (reversed(forms) if nesterov else forms)
        )
        moved = (before - shard.local).double()
        assert (moved - expected).norm() < 1e-4 * expected.norm()
        other_form.append((moved - other).norm().item())
    assert max(other_form) > 0.1  # the two forms differ, so the comparison above can fail


def test_heads_experts_or_halves_are_orthogonalised_together() -> None:
    shards = [
        shard_of("query", _random((24, 16), 0), matrices=row_matrices((24, 16), 8)),
        shard_of("out", _random((16, 24), 1), matrices=column_matrices((16, 24), 8)),
        shard_of("experts", _random((3, 20, 16), 2), matrices=row_matrices((3, 20, 16), 10)),
    ]
    config = OptimConfig(weight_decay=0.1, muon_wire_dtype="fp32")
    optimizer = MuonReference(shards, config)
    before = [shard.local.clone() for shard in shards]
    _step(optimizer, shards, 1, 0.02)
    for shard, old in zip(shards, before, strict=True):
        whole = orthogonalize(shard.local_grad, steps=5, coefficients="you")
        for matrix in shard.matrices:
            gradient = shard.local_grad[matrix.slices].reshape(matrix.rows, matrix.columns)
            update = orthogonalize(gradient, steps=5, coefficients="you")
            update = update * 0.2 * math.sqrt(max(matrix.rows, matrix.columns))
            expected = old[matrix.slices].reshape_as(update) * (1 - 0.02 * 0.1) - 0.02 * update
            actual = shard.local[matrix.slices].reshape_as(update)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            if len(shard.matrices) > 1 and len(matrix.shape) == 2:
                part = whole[matrix.slices]
                assert (part - update).norm() > 0.1 * part.norm()


def test_update_rms_is_not_that_of_adamw() -> None:
    for shape in [(16, 64), (64, 16)]:
        shard = shard_of("weight", torch.zeros(shape), matrices=_whole(shape))
        _step(MuonReference([shard], OptimConfig(weight_decay=0.0)), [shard], 1, 1.0)
        assert shard.local.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_scale_formula_is_off() -> None:
    assert update_scale("rms_match", 64, 16) == update_scale("rms_match", 16, 64) == 1.6
    assert update_scale("spectral", 64, 16) == 2.0
    assert update_scale("spectral", 16, 64) == 1.0
    assert update_scale("none", 64, 16) == 1.0
    with pytest.raises(ValueError, match="muon_scale"):
        update_scale("other", 1, 1)


def test_parameters_without_matrices_do_not_follow_adamw() -> None:
    config = OptimConfig(name="muon_reference", muon_adam_lr_multiplier=0.5)
    embedding, norm = _random((10, 6), 0), _random((6,), 1)

    def others() -> list[ParameterShard]:
        return [shard_of("embedding", embedding), shard_of("norm", norm, weight_decay=False)]

    mixed, plain = others(), others()
    weight = shard_of("weight", _random((6, 6), 2), matrices=_whole((6, 6)))
    muon, adamw = MuonReference([*mixed, weight], config), AdamW(plain)
    for seed in range(1, 4):
        _step(muon, [*mixed, weight], seed, 1e-2)
        for a, b in zip(mixed, plain, strict=True):
            b.parameter.grad = a.local_grad
        adamw.step(lr=0.5 * 1e-2)
    for a, b in zip(mixed, plain, strict=True):
        assert torch.equal(a.local, b.local)


def test_zero_gradient_gives_nan_or_moves_the_parameter() -> None:
    shard = shard_of("weight", _random((8, 6), 0), matrices=row_matrices((8, 6), 4))
    optimizer = MuonReference([shard], OptimConfig(weight_decay=0.5))
    set_gradient(shard, torch.zeros(8, 6))
    optimizer.step(lr=0.1)
    assert torch.equal(shard.local, _random((8, 6), 0) * (1 - 0.1 * 0.5))


def test_weight_decay_reaches_a_matrix_marked_without() -> None:
    shard = shard_of("weight", torch.ones(4, 6), matrices=_whole((4, 6)), weight_decay=False)
    set_gradient(shard, torch.zeros(4, 6))
    MuonReference([shard], OptimConfig(weight_decay=0.5)).step(lr=0.1)
    assert torch.equal(shard.local, torch.ones(4, 6))


@pytest.mark.parametrize("size", [1e-36, 1.0, 1e30])
@pytest.mark.parametrize(("wire", "epsilon"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_wire_dtype_costs_more_than_its_rounding(wire: str, epsilon: float, size: float) -> None:
    def moved(wire_dtype: str) -> torch.Tensor:
        shard = shard_of("weight", torch.zeros(12, 40), matrices=_whole((12, 40)))
        set_gradient(shard, _random((12, 40), 1) * size)
        config = OptimConfig(muon_wire_dtype=wire_dtype, weight_decay=0.0)
        MuonReference([shard], config).step(lr=1.0)
        return shard.local

    exact, rounded = moved("fp32"), moved(wire)
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 2 * epsilon * exact.norm()


@pytest.mark.parametrize("cautious", [True, False])
def test_decay_works_against_the_update_or_is_left_out(cautious: bool) -> None:
    start, lr, decay = _random((12, 40), 0), 0.02, 0.5
    ends = []
    for weight_decay in (0.0, decay):
        shard = shard_of("weight", start, matrices=_whole((12, 40)))
        set_gradient(shard, _random((12, 40), 1))
        config = OptimConfig(weight_decay=weight_decay, muon_cautious_decay=cautious)
        MuonReference([shard], config).step(lr=lr)
        ends.append(shard.local)
    update = start - ends[0]
    decays = (update * start > 0) | torch.tensor(not cautious)
    assert 0 < int((update * start > 0).sum()) < start.numel()
    expected = torch.where(decays, start * (1 - lr * decay), start) - update
    torch.testing.assert_close(ends[1], expected, rtol=0, atol=1e-6)


def test_sharded_muon_without_a_layout_fails_later() -> None:
    shard = shard_of("weight", _random((4, 6), 0), matrices=_whole((4, 6)))
    with pytest.raises(ValueError, match="layout"):
        build_optimizer(OptimConfig(name="muon"), [shard])


def test_chunks_of_a_stack_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        shape = (7, 10, 6)
        shard = shard_of("experts", _random(shape, 0), matrices=row_matrices(shape, 5))
        _step(MuonReference([shard], OptimConfig()), [shard], 1, 0.1)
        return shard.local

    expected = run()
    for elements in (1, 30 * 4, 30 * 14):
        monkeypatch.setattr(muon_reference, "_CHUNK_ELEMENTS", elements)
        assert torch.equal(run(), expected)


def test_parameter_without_gradient_is_skipped_silently() -> None:
    weight = shard_of("weight", _random((4, 6), 0), matrices=_whole((4, 6)))
    norm = shard_of("norm", _random((6,), 1))
    optimizer = MuonReference([weight, norm], OptimConfig())
    set_gradient(weight, _random((4, 6), 2))
    with pytest.raises(ValueError, match="no gradient: norm;"):
        optimizer.step(lr=1e-3)
    assert torch.equal(weight.local, _random((4, 6), 0))
    optimizer.zero_grad()
    assert weight.parameter.grad is None
    with pytest.raises(ValueError, match="no gradient: weight, norm;"):
        optimizer.step(lr=1e-3)


def test_state_is_missing_before_the_first_step() -> None:
    weight = shard_of("weight", _random((8, 6), 0), (2, 3), matrices=_whole((8, 6)))
    norm = shard_of("norm", _random((6,), 1))
    optimizer = build_optimizer(OptimConfig(name="muon_reference"), [norm, weight])
    assert isinstance(optimizer, MuonReference)
    state = optimizer.state_tensors()
    assert set(state) == {
        "optim/weight/momentum",
        "optim/norm/exp_avg",
        "optim/norm/exp_avg_sq",
    }
    layout, momentum = state["optim/weight/momentum"]
    assert layout.name == "optim/weight/momentum"
    assert layout.blocks == weight.layout.blocks
    assert momentum.shape == (3, 6)
    assert momentum.dtype == torch.float32
    assert optimizer.state_scalars() == {"step": 0}


def test_resumed_run_differs_from_an_uninterrupted_one() -> None:
    def new(weight: torch.Tensor, norm: torch.Tensor) -> list[ParameterShard]:
        return [shard_of("weight", weight, matrices=_whole((8, 6))), shard_of("norm", norm)]

    config = OptimConfig(name="muon_reference")
    straight = new(_random((8, 6), 0), _random((6,), 1))
    optimizer = MuonReference(straight, config)
    for seed in range(1, 6):
        _step(optimizer, straight, seed, 1e-2)
    first = new(_random((8, 6), 0), _random((6,), 1))
    before = MuonReference(first, config)
    for seed in range(1, 4):
        _step(before, first, seed, 1e-2)
    second = new(first[0].local, first[1].local)
    after = MuonReference(second, config)
    for key, (_, tensor) in after.state_tensors().items():
        tensor.copy_(before.state_tensors()[key][1])
    after.load_state_scalars(before.state_scalars())
    for seed in range(4, 6):
        _step(after, second, seed, 1e-2)
    for a, b in zip(straight, second, strict=True):
        assert torch.equal(a.local, b.local)


def test_matrices_that_leave_part_of_a_parameter_out_are_accepted() -> None:
    shard = shard_of("weight", _random((8, 6), 0), matrices=row_matrices((8, 6), 4)[:1])
    with pytest.raises(AssertionError, match="weight"):
        MuonReference([shard], OptimConfig())


def test_model_without_parameters_is_accepted() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(OptimConfig(), [])
    adamw = build_optimizer(OptimConfig(), [shard_of("norm", torch.ones(3))])
    assert isinstance(adamw, AdamW)
