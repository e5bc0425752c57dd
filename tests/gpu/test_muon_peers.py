"""ShardedMuon on a GPU against megatron-core's TensorParallelMuon and torch.optim.Muon at equal
settings: one update, and a curve of 200 steps. `pytest -s` prints the agreement.

Both peers iterate in bfloat16 and average their momentum, (1 - mu) times ours; the rounding of the
former is what may remain of the difference.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from teacher_student import Make, Step, losses, one_rank, relative_difference, updates, whole_shards

from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon import ShardedMuon

DEVICE = "cuda"
LR, WEIGHT_DECAY, MOMENTUM, STEPS = 0.01, 0.1, 0.95, 5
UPDATE_BOUND, LOSS_BOUND = 0.04, 3e-3


def ours(coefficients: str, **changes: Any) -> Make:
    settings: dict[str, Any] = {
        "weight_decay": WEIGHT_DECAY,
        "muon_momentum": MOMENTUM,
        "muon_ns_steps": STEPS,
        "muon_ns_coefficients": coefficients,
        "muon_scale": "rms_match",
    }
    config = OptimConfig(name="muon", lr=LR, **(settings | changes))

    def make(weights: Sequence[torch.nn.Parameter]) -> Step:
        optimizer = ShardedMuon(whole_shards(weights), config, one_rank(DEVICE))
        return lambda: optimizer.step(lr=LR)

    return make


def torch_muon(weights: Sequence[torch.nn.Parameter]) -> Step:
    return torch.optim.Muon(
        weights,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        nesterov=True,
        ns_steps=STEPS,
        adjust_lr_fn="match_rms_adamw",
    ).step


def megatron_muon(coefficient_type: str) -> Make:
    """TensorParallelMuon without tensor parallelism; skips where emerging-optimizers is missing."""
    if importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("TensorParallelMuon needs the package emerging-optimizers (Python 3.12)")
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    def make(weights: Sequence[torch.nn.Parameter]) -> Step:
        return TensorParallelMuon(
            list(weights),
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            momentum=MOMENTUM,
            nesterov=True,
            num_ns_steps=STEPS,
            coefficient_type=coefficient_type,
            # sqrt(max(m, n)), so that 0.2 times it is our rms_match
            scale_mode="spectral",
            extra_scale_factor=0.2,
        ).step

    return make


# Each peer with the name of its polynomial in our terms.
PEERS: dict[str, tuple[Callable[[], Make], str]] = {
    "torch.optim.Muon": (lambda: torch_muon, "kj"),
    "TensorParallelMuon simple": (lambda: megatron_muon("simple"), "kj"),
    "TensorParallelMuon quintic": (lambda: megatron_muon("quintic"), "you"),
}


@pytest.mark.parametrize("peer", PEERS)
def test_third_update_agrees_with_a_peer(peer: str) -> None:
    theirs, coefficients = PEERS[peer]
    their_update, _ = updates(theirs(), 3, DEVICE)
    our_update, _ = updates(ours(coefficients), 3, DEVICE)
    difference = relative_difference(our_update, their_update)
    print(f"\n{peer}: third update differs by {difference:.2e} of its norm")
    assert difference < UPDATE_BOUND
    plain_update, _ = updates(ours(coefficients, muon_nesterov=False), 3, DEVICE)
    assert relative_difference(plain_update, their_update) > 3 * UPDATE_BOUND


@pytest.mark.parametrize("peer", PEERS)
def test_curve_of_200_steps_agrees_with_a_peer(peer: str) -> None:
    theirs, coefficients = PEERS[peer]
    their_curve = losses(theirs(), 200, DEVICE)
    our_curve = losses(ours(coefficients), 200, DEVICE)
    plain_curve = losses(ours(coefficients, muon_nesterov=False), 200, DEVICE)
    difference = _largest_difference(our_curve, their_curve)
    print(
        f"\n{peer}: loss {our_curve[0]:.4f} -> {our_curve[-1]:.4f} (ours) and "
        f"{their_curve[-1]:.4f}; largest difference at a step {difference:.2e}; "
        f"without Nesterov {_largest_difference(plain_curve, their_curve):.2e}"
    )
    assert our_curve[-1] < 0.15 * our_curve[0]
    assert difference < LOSS_BOUND
    assert _largest_difference(plain_curve, their_curve) > 3 * LOSS_BOUND


def _largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) / y for x, y in zip(a, b, strict=True))
