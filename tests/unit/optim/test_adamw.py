from __future__ import annotations

import dataclasses

import pytest
import torch
from parameter_shards import set_gradient, shard_of

from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.adamw import AdamW

SHAPES = {"weight": (13, 17), "stack": (3, 5, 4), "norm": (37,), "scalar_like": (1,)}
RATES = [1e-3, 7e-4, 3e-3, 0.0, 2e-4]


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _has_decay(name: str) -> bool:
    return name in ("weight", "stack")


def _train(optimizer: AdamW, shards: list[ParameterShard], steps: range) -> None:
    for step in steps:
        gradients = _tensors(100 + step)
        for shard in shards:
            set_gradient(shard, gradients[shard.name.split("/")[0]])
        optimizer.step(lr=RATES[step])
        optimizer.zero_grad()


def test_update_differs_from_torch_adamw_in_any_bit() -> None:
    shards = [shard_of(n, t, weight_decay=_has_decay(n)) for n, t in _tensors(0).items()]
    ours = AdamW(shards, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    theirs = {name: torch.nn.Parameter(t) for name, t in _tensors(0).items()}
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in theirs.items() if _has_decay(n)], "weight_decay": 0.1},
            {"params": [p for n, p in theirs.items() if not _has_decay(n)], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step, lr in enumerate(RATES):
        for name, gradient in _tensors(100 + step).items():
            theirs[name].grad = gradient
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        _train(ours, shards, range(step, step + 1))
        state = ours.state_tensors()
        for shard in shards:
            expected = theirs[shard.name]
            assert torch.equal(shard.local, expected)
            for moment in ("exp_avg", "exp_avg_sq"):
                actual = state[f"optim/{shard.name}/{moment}"][1]
                assert torch.equal(actual, reference.state[expected][moment])


def test_sharding_changes_the_update() -> None:
    whole = [shard_of(n, t) for n, t in _tensors(0).items()]
    _train(AdamW(whole), whole, range(5))
    for shard in whole:
        full = _tensors(0)[shard.name]
        for count in (1, 2, 3, 5):
            starts = range(0, full.shape[0], count)
            pieces = [
                shard_of(f"{shard.name}/{s}", full, (s, min(count, full.shape[0] - s)))
                for s in starts
            ]
            _train(AdamW(pieces), pieces, range(5))
            assert torch.equal(torch.cat([piece.local for piece in pieces]), shard.local)


def test_empty_shard_breaks_the_step() -> None:
    full = _tensors(0)["weight"]
    shards = [shard_of("weight/empty", full, (13, 0)), shard_of("weight/rest", full, (0, 13))]
    optimizer = AdamW(shards)
    _train(optimizer, shards, range(2))
    assert shards[0].local.shape == (0, 17)
    assert optimizer.state_tensors()["optim/weight/empty/exp_avg"][1].shape == (0, 17)
    only_empty = [shard_of("weight/empty", full, (13, 0))]
    _train(AdamW(only_empty), only_empty, range(2))


def test_weight_decay_reaches_a_parameter_marked_without() -> None:
    full = torch.ones(4, 4)
    shards = [shard_of("decayed", full), shard_of("kept", full, weight_decay=False)]
    optimizer = AdamW(shards, weight_decay=0.5)
    for shard in shards:
        set_gradient(shard, torch.zeros(4, 4))
    optimizer.step(lr=0.1)
    assert torch.equal(shards[0].local, full * (1 - 0.1 * 0.5))
    assert torch.equal(shards[1].local, full)


def test_router_takes_other_steps_than_its_multiple_of_the_rate() -> None:
    full = torch.ones(4, 4)
    plain, router = shard_of("plain", full), shard_of("router", full)
    router = dataclasses.replace(router, is_router=True)
    optimizer = AdamW([plain, router], router_lr_multiplier=0.25)
    for shard in (plain, router):
        set_gradient(shard, _tensors(1)["weight"][:4, :4])
    optimizer.step(lr=0.1)
    torch.testing.assert_close(router.local - full, 0.25 * (plain.local - full))


def test_parameter_without_gradient_is_skipped_silently() -> None:
    shards = [shard_of(n, t) for n, t in _tensors(0).items()]
    optimizer = AdamW(shards)
    for shard in shards:
        set_gradient(shard, _tensors(1)[shard.name])
    shards[1].parameter.grad = None
    with pytest.raises(ValueError, match="1 of 4 parameters have no gradient: stack;"):
        optimizer.step(lr=1e-3)
    for shard in shards:
        assert torch.equal(shard.local, _tensors(0)[shard.name])
    assert optimizer.state_scalars() == {"step": 0}


def test_moments_are_missing_before_the_first_step_or_laid_out_otherwise() -> None:
    shard = shard_of("weight", _tensors(0)["weight"], (2, 3))
    state = AdamW([shard]).state_tensors()
    assert list(state) == ["optim/weight/exp_avg", "optim/weight/exp_avg_sq"]
    for key, (layout, tensor) in state.items():
        assert layout.name == key
        assert layout.blocks == shard.layout.blocks
        assert layout.global_shape == (13, 17)
        assert tensor.dtype == torch.float32
        assert tensor.shape == (3, 17)


def test_resumed_run_differs_from_an_uninterrupted_one() -> None:
    straight = [shard_of(n, t) for n, t in _tensors(0).items()]
    _train(AdamW(straight), straight, range(5))

    first = [shard_of(n, t) for n, t in _tensors(0).items()]
    before = AdamW(first)
    _train(before, first, range(3))
    second = [shard_of(s.name, s.local) for s in first]
    after = AdamW(second)
    for key, (_, tensor) in after.state_tensors().items():
        tensor.copy_(before.state_tensors()[key][1])
    after.load_state_scalars(before.state_scalars())
    _train(after, second, range(3, 5))
    for a, b in zip(straight, second, strict=True):
        assert torch.equal(a.local, b.local)


def test_scalars_of_another_optimizer_are_accepted() -> None:
    optimizer = AdamW([shard_of("weight", _tensors(0)["weight"])])
    for scalars in ({}, {"step": 3, "extra": 1}, {"steps": 3}):
        with pytest.raises(ValueError, match="scalars"):
            optimizer.load_state_scalars(scalars)
