"""Router balance on one rank; tests/distributed/test_model_parallel.py has it on the real model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megacomposer.train.balance import RouterBalance

RATE = 0.01


@pytest.fixture(autouse=True)
def _job_of_one() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@dataclasses.dataclass
class Layers:
    """The part of a model that the balance reads: counts and biases of each MoE layer."""

    counts: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    rate: float = RATE

    def __post_init__(self) -> None:
        self.model_config = SimpleNamespace(router_bias_update_rate=self.rate)

    def moe_layers(self) -> dict[str, SimpleNamespace]:
        return {
            str(layer): SimpleNamespace(
                tokens_per_expert=counts, router=SimpleNamespace(expert_bias=bias)
            )
            for layer, (counts, bias) in enumerate(zip(self.counts, self.biases, strict=True))
        }


def test_bias_moves_by_other_than_the_rate_towards_the_mean() -> None:
    layers = Layers(
        counts=[torch.tensor([4.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 8.0, 0.0])],
        biases=[torch.zeros(4), torch.full((4,), 0.5)],
    )
    metrics = RouterBalance(layers).finish_step(apply=True)  # type: ignore[arg-type]
    first, second = layers.biases
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first, torch.tensor([-RATE, RATE, RATE, 0.0]))
    torch.testing.assert_close(second, 0.5 + torch.tensor([RATE, RATE, -RATE, RATE]))
    assert {name: float(value) for name, value in metrics.items()} == {
        "train/expert_load_max_over_mean": 4.0,
        "train/expert_load_min_over_mean": 0.0,
        "train/expert_bias_max": pytest.approx(0.51),
    }
    assert not any(bool(counts.any()) for counts in layers.counts)


def test_skipped_step_moves_a_bias_or_counts_into_the_next_one() -> None:
    layers = Layers(counts=[torch.tensor([3.0, 1.0])], biases=[torch.zeros(2)])
    RouterBalance(layers).finish_step(apply=False)  # type: ignore[arg-type]
    assert torch.equal(torch.stack([*layers.counts, layers.biases[0]]), torch.zeros(2, 2))


def test_fewer_tokens_than_experts_move_every_bias_up() -> None:
    """Two tokens on four experts: the mean is a half, and two experts are above it."""
    layers = Layers(counts=[torch.tensor([1.0, 1.0, 0.0, 0.0])], biases=[torch.zeros(4)])
    metrics = RouterBalance(layers).finish_step(apply=True)  # type: ignore[arg-type]
    assert layers.biases[0] is not None
    torch.testing.assert_close(layers.biases[0], torch.tensor([-RATE, -RATE, RATE, RATE]))
    assert float(metrics["train/expert_load_max_over_mean"]) == 2.0


def test_step_without_tokens_gives_nan_or_moves_a_bias() -> None:
    layers = Layers(counts=[torch.zeros(4)], biases=[torch.zeros(4)])
    metrics = RouterBalance(layers).finish_step(apply=True)  # type: ignore[arg-type]
    assert layers.biases[0] is not None
    assert not bool(layers.biases[0].any())
    assert all(float(value) == 0.0 for value in metrics.values())


def test_router_without_a_bias_reports_its_load() -> None:
    layers = Layers(counts=[torch.tensor([3.0, 1.0])], biases=[None], rate=0.0)
    metrics = RouterBalance(layers).finish_step(apply=True)  # type: ignore[arg-type]
    assert float(metrics["train/expert_load_max_over_mean"]) == 1.5
    assert not bool(layers.counts[0].any())


def test_dense_model_has_load_metrics() -> None:
    assert RouterBalance(Layers(counts=[], biases=[])).finish_step(apply=True) == {}  # type: ignore[arg-type]


def test_repeated_steps_leave_the_load_as_uneven_as_it_was() -> None:
    """A router that prefers experts by a fixed offset gets even loads after enough steps."""
    generator = torch.Generator().manual_seed(0)
    preference = torch.linspace(0.0, 0.6, 8)
    layers = Layers(counts=[torch.zeros(8)], biases=[torch.zeros(8)])
    balance = RouterBalance(layers)  # type: ignore[arg-type]
    loads = []
    for _ in range(100):
        scores = torch.rand(512, 8, generator=generator) + preference
        assert layers.biases[0] is not None
        chosen = (scores + layers.biases[0]).topk(2, dim=1).indices
        layers.counts[0] += chosen.flatten().bincount(minlength=8)
        metrics = balance.finish_step(apply=True)
        loads.append(float(metrics["train/expert_load_max_over_mean"]))
    assert loads[0] > 1.8
    assert max(loads[-10:]) < 1.3
