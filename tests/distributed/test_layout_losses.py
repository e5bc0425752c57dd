"""The same run on every layout: losses of 20 steps agree to rounding, from one initial state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from parallel_model import close_groups

from megacomposer.mesh.config import MeshConfig
from megacomposer.optim.config import OptimConfig
from megacomposer.train.config import RunConfig
from runner import run_distributed
from small_run import small_config, write_corpus

STEPS = 20
OPTIMIZERS = {
    "adamw": OptimConfig(lr=2e-3),
    "muon": OptimConfig(name="muon", lr=2e-3),
    "muon, fp32 wire": OptimConfig(name="muon", lr=2e-3, muon_wire_dtype="fp32"),
}
TOLERANCES = {"adamw": 1e-5, "muon": 1e-4, "muon, fp32 wire": 1e-5}
"""Relative. Seen: 3e-7 in float32. The rounding of gradients may turn a digit of fp16, in which the
matrices of Muon travel: 6e-6."""


class Case(NamedTuple):
    mesh: MeshConfig
    micro_batch_size: int
    optimizer: str = "adamw"
    router: str = "biased"
    restart_in: str = ""
    """A run directory: save there after half of the steps, and go on from the checkpoint."""


_SOFTMAX = {"router_score": "softmax", "router_bias": False, "router_bias_update_rate": 0.0}
ROUTERS: dict[str, dict[str, Any]] = {
    "biased": {},
    "softmax": _SOFTMAX,
    "softmax with losses": {
        **_SOFTMAX,
        "router_aux_loss_coeff": 0.1,
        "router_z_loss_coeff": 0.01,
    },
}


# Layout on 4 ranks and micro-batch size. World 4 without TP has 4 dense ranks, with TP=2 two.
CASES = {
    "dp4": Case(MeshConfig(), 1),
    "dp4, two micro-batches": Case(MeshConfig(), 2),
    "ep2, experts 2 wide, dense 4 wide": Case(MeshConfig(ep=2), 1),
    "ep2, experts replicated, dense 2 x 2": Case(
        MeshConfig(ep=2, dense_shard=2, expert_shard=1), 2
    ),
    "ep1, experts 4 wide, dense 2 x 2": Case(MeshConfig(dense_shard=2, expert_shard=4), 1),
    "ep4": Case(MeshConfig(ep=4), 1),
    "tp2": Case(MeshConfig(tp=2), 2),
    "tp2 ep2, experts replicated": Case(MeshConfig(tp=2, ep=2, expert_shard=1), 1),
    "tp2 ep4, dense replicated": Case(MeshConfig(tp=2, ep=4, dense_shard=1), 2),
    "cp2 ep4": Case(MeshConfig(cp=2, ep=4), 1),
    "cp2 tp2 ep2": Case(MeshConfig(cp=2, tp=2, ep=2), 4),
    "muon, ep2, experts replicated, dense 2 x 2": Case(
        MeshConfig(ep=2, dense_shard=2, expert_shard=1), 2, "muon"
    ),
    "muon, cp2 tp2 ep2": Case(MeshConfig(cp=2, tp=2, ep=2), 4, "muon"),
    "muon, tp2 ep4, dense replicated": Case(
        MeshConfig(tp=2, ep=4, dense_shard=1), 2, "muon, fp32 wire"
    ),
}
SOFTMAX_STEPS = 6
SOFTMAX_CASES = {
    "dp4, two micro-batches": Case(MeshConfig(), 1, router="softmax with losses"),
    "tp2 ep2, one micro-batch": Case(MeshConfig(tp=2, ep=2), 4, router="softmax with losses"),
    "cp2 ep4, two micro-batches": Case(MeshConfig(cp=2, ep=4), 2, router="softmax with losses"),
}


def losses_of(corpus: str, cases: list[Case], steps: int = STEPS) -> list[list[float]]:
    """Loss, MTP loss and gradient norm of each step, flat, for each case; one process start.

    With an auxiliary loss also its value.
    """
    from megacomposer.runtime.process import start_process

    results = []
    base = small_config(corpus)
    with start_process(base.runtime) as process:
        for case in cases:
            config = dataclasses.replace(
                base,
                run_dir=case.restart_in or base.run_dir,
                mesh=case.mesh,
                train=dataclasses.replace(base.train, micro_batch_size=case.micro_batch_size),
                optim=OPTIMIZERS[case.optimizer],
                model=dataclasses.replace(base.model, **ROUTERS[case.router]),
            )
            parts = [steps // 2, steps - steps // 2] if case.restart_in else [steps]
            results.append([value for part in parts for value in train(config, process, part)])
    return results


def train(config: RunConfig, process: Any, steps: int) -> list[float]:
    """Steps from the run directory's checkpoint, if there is one, and to one, if there is one."""
    from megacomposer.train.state import build_state
    from megacomposer.train.step import TrainStep

    state = build_state(config, process)
    state.restore()
    step = TrainStep(
        state.model,
        state.layout,
        state.shards,
        state.optimizer,
        clip_grad_norm=config.optim.clip_grad_norm,
        device=process.device,
    )
    values: list[float] = []
    with state.loader as loader:
        for _ in range(steps):
            result = step(loader.next_step(), lr=config.optim.lr)
            assert result.mtp_loss is not None
            values += [result.loss, result.mtp_loss, result.grad_norm]
            aux_loss = result.balance.get("train/aux_loss")
            values += [] if aux_loss is None else [aux_loss]
        state.step += steps
        if Path(config.run_dir).exists():
            state.save()
    close_groups()
    return values


@pytest.mark.timeout(600)
def test_losses_do_not_depend_on_the_layout(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    alone = [Case(MeshConfig(), 8, name) for name in OPTIMIZERS]
    (losses,) = run_distributed(
        losses_of, 1, corpus, alone, timeout_s=120, init_process_group=False
    )
    expected = dict(zip(OPTIMIZERS, losses, strict=True))
    for values in losses:
        assert values[0] > values[-3], "the loss must fall, or the comparison proves little"
    per_rank = run_distributed(
        losses_of, 4, corpus, list(CASES.values()), timeout_s=560, init_process_group=False
    )
    assert all(rank == per_rank[0] for rank in per_rank), "ranks report different losses"
    for (name, case), values in zip(CASES.items(), per_rank[0], strict=True):
        tolerance = TOLERANCES[case.optimizer]
        assert values == pytest.approx(expected[case.optimizer], rel=tolerance), name


@pytest.mark.timeout(300)
def test_router_losses_depend_on_micro_batches_or_layout(tmp_path) -> None:
    """megatron-core's auxiliary loss does: it takes the loads of each micro-batch by itself."""
    corpus = str(write_corpus(tmp_path))
    alone = [Case(MeshConfig(), 8, router=name) for name in ("softmax with losses", "softmax")]
    alone.append(alone[0]._replace(restart_in=str(tmp_path)))
    # the same run goes on without the losses, whose loads are then of no use, and with them again
    alone += [case._replace(restart_in=str(tmp_path)) for case in (alone[1], alone[0])]
    ((expected, without, restarted, *_),) = run_distributed(
        losses_of, 1, corpus, alone, SOFTMAX_STEPS, timeout_s=120, init_process_group=False
    )
    assert expected[0] > expected[-4]
    assert restarted == expected, "a checkpoint forgets the loads of the last step"
    assert expected[-2] != pytest.approx(without[-1], rel=1e-3), "the router's losses weigh nothing"
    cases = list(SOFTMAX_CASES.values())
    per_rank = run_distributed(
        losses_of, 4, corpus, cases, SOFTMAX_STEPS, timeout_s=280, init_process_group=False
    )
    assert all(rank == per_rank[0] for rank in per_rank), "ranks report different losses"
    for name, values in zip(SOFTMAX_CASES, per_rank[0], strict=True):
        assert values == pytest.approx(expected, rel=1e-5), name
