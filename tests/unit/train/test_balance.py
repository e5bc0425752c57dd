"""Router balance on one rank; tests/distributed/test_model_parallel.py has it on the real model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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
    update: str = "sign"
    own_routers: list[SimpleNamespace] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.model_config = SimpleNamespace(
            router_bias_update_rate=self.rate, router_bias_update=self.update
        )

    def routers(self) -> list[SimpleNamespace]:
        return self.own_routers

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


def test_bias_by_error_moves_all_biases_up_or_at_balance() -> None:
    layers = Layers(
        counts=[torch.tensor([4.0, 1.0, 1.0, 2.0]), torch.full((4,), 3.0), torch.zeros(4)],
        biases=[torch.zeros(4), torch.zeros(4), torch.zeros(4)],
        update="error",
    )
    RouterBalance(layers).finish_step(apply=True)  # type: ignore[arg-type]
    first, *balanced = layers.biases
    assert first is not None
    torch.testing.assert_close(first, RATE * torch.tensor([-1.0, 0.5, 0.5, 0.0]))
    for bias in balanced:
        assert bias is not None
        assert not bool(bias.any())


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


def router(load: torch.Tensor, statistics: list[float], *, replayed: bool = False) -> Any:
    """What the balance reads of a router with both losses and two experts a token."""
    return SimpleNamespace(
        expert_load=load,
        statistics=torch.tensor(statistics),
        aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
        step_tokens=4,
        replayed=replayed,
        rule=SimpleNamespace(num_chosen=2),
    )


def test_loads_are_not_the_shares_of_the_step_or_change_without_one() -> None:
    before = torch.full((4,), 0.25)
    counts = torch.tensor([6.0, 2.0, 0.0, 0.0])
    for apply, tokens, expected in (
        (True, counts, counts / 8),
        (False, counts, before),
        (True, 0 * counts, before),
    ):
        own = router(before.clone(), [0.0] * 8)
        layers = Layers(counts=[tokens.clone()], biases=[None], own_routers=[own])
        RouterBalance(layers).finish_step(apply=apply)  # type: ignore[arg-type]
        assert torch.equal(own.expert_load, expected)
        assert own.step_tokens == 0, "a forward after the step would count as one of its own"


def test_router_losses_or_replay_shares_are_not_means_over_tokens() -> None:
    # Four tokens: probabilities of each expert, squares, tokens, replayed, substituted.
    statistics = [2.0, 1.0, 0.5, 0.5, 12.0, 4.0, 5.0, 1.0]
    layers = Layers(
        counts=[torch.tensor([5.0, 1.0, 1.0, 1.0]), torch.tensor([2.0, 2.0, 2.0, 2.0])],
        biases=[None, None],
        own_routers=[
            router(torch.zeros(4), statistics, replayed=True),
            router(torch.zeros(4), [1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 0.0, 0.0]),
        ],
    )
    metrics = RouterBalance(layers).finish_step(apply=True)  # type: ignore[arg-type]
    # E sum f P: 4 (5 * 2 + 1 + 0.5 + 0.5) / (8 * 4) = 1.5; even probabilities and loads give 1.
    assert float(metrics["train/aux_loss"]) == pytest.approx((1.5 + 1.0) / 2)
    assert float(metrics["train/router_z_loss"]) == pytest.approx((3.0 + 1.0) / 2)
    assert float(metrics["train/router_replayed_frac"]) == pytest.approx(5 / 16)
    assert float(metrics["train/router_substituted_frac"]) == pytest.approx(1 / 6)
