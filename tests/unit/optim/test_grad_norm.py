from __future__ import annotations

import math

import pytest
import torch
from parameter_shards import set_gradient, shard_of

from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.grad_norm import clip_by_global_norm, global_grad_norm


def _shards(scale: float = 1.0) -> list[ParameterShard]:
    generator = torch.Generator().manual_seed(0)
    shards = []
    for name, shape, rows in [
        ("a", (5, 3), (0, 5)),
        ("b", (7,), (2, 5)),
        ("empty", (4, 2), (4, 0)),
    ]:
        shard = shard_of(name, torch.zeros(shape), rows)
        set_gradient(shard, torch.randn(shape, generator=generator) * scale)
        shards.append(shard)
    return shards


def _squares(shards: list[ParameterShard]) -> float:
    return sum(shard.local_grad.double().square().sum().item() for shard in shards)


def test_norm_is_off_without_a_process_group() -> None:
    norm = global_grad_norm(_shards())
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(_squares(_shards())), rel=1e-6)


def test_norm_of_large_or_small_gradients_overflows_or_vanishes() -> None:
    for scale in (1e30, 1e-30):
        expected = math.sqrt(_squares(_shards(scale)))
        assert global_grad_norm(_shards(scale)).item() == pytest.approx(expected, rel=1e-5)


def test_rank_that_counts_nothing_fails() -> None:
    shard = shard_of("replica", torch.zeros(3), is_primary=False)
    set_gradient(shard, torch.ones(3))
    assert global_grad_norm([shard]).item() == 0.0


def test_clipping_misses_its_norm_or_touches_small_gradients() -> None:
    shards = _shards()
    before = [shard.local_grad.clone() for shard in shards]
    norm = global_grad_norm(shards)
    clip_by_global_norm(shards, 100.0, norm)
    for shard, gradient in zip(shards, before, strict=True):
        assert torch.equal(shard.local_grad, gradient)
    clip_by_global_norm(shards, 0.5, norm)
    assert math.sqrt(_squares(shards)) == pytest.approx(0.5, rel=1e-5)
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in before]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    for shard, parameter in zip(shards, parameters, strict=True):
        torch.testing.assert_close(shard.local_grad, parameter.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_gradient_gives_a_finite_norm(bad: float) -> None:
    shards = _shards()
    shards[0].local_grad[1, 1] = bad
    assert not torch.isfinite(global_grad_norm(shards))


def test_missing_gradient_or_no_limit_is_accepted() -> None:
    shards = _shards()
    norm = global_grad_norm(shards)
    for max_norm in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            clip_by_global_norm(shards, max_norm, norm)
    shards[1].parameter.grad = None
    with pytest.raises(ValueError, match="no gradient: b;"):
        global_grad_norm(shards)
    with pytest.raises(ValueError, match="no gradient: b;"):
        clip_by_global_norm(shards, 1.0, norm)
    with pytest.raises(ValueError, match="no parameters"):
        global_grad_norm([])
