"""The same run on every layout: losses of 20 steps agree to rounding, from one initial state."""

from __future__ import annotations

import dataclasses

import pytest
from parallel_model import close_groups

from megacomposer.mesh.config import MeshConfig
from runner import run_distributed
from small_run import small_config, write_corpus

STEPS = 20
TOLERANCE = 1e-5
"""Relative, float32: the issue's bound; what is seen is about 3e-7."""

# Layout on 4 ranks and micro-batch size. World 4 without TP has 4 dense ranks, with TP=2 two.
CASES = {
    "dp4": (MeshConfig(), 1),
    "dp4, two micro-batches": (MeshConfig(), 2),
    "ep2, experts 2 wide, dense 4 wide": (MeshConfig(ep=2), 1),
    "ep2, experts replicated, dense 2 x 2": (MeshConfig(ep=2, dense_shard=2, expert_shard=1), 2),
    "ep1, experts 4 wide, dense 2 x 2": (MeshConfig(dense_shard=2, expert_shard=4), 1),
    "ep4": (MeshConfig(ep=4), 1),
    "tp2": (MeshConfig(tp=2), 2),
    "tp2 ep2, experts replicated": (MeshConfig(tp=2, ep=2, expert_shard=1), 1),
    "tp2 ep4, dense replicated": (MeshConfig(tp=2, ep=4, dense_shard=1), 2),
    "cp2 ep4": (MeshConfig(cp=2, ep=4), 1),
    "cp2 tp2 ep2": (MeshConfig(cp=2, tp=2, ep=2), 4),
}


def losses_of(corpus: str, cases: list[tuple[MeshConfig, int]]) -> list[list[float]]:
    """Loss, MTP loss and gradient norm of each step, flat, for each case; one process start."""
    from megacomposer.runtime.process import start_process
    from megacomposer.train.state import build_state
    from megacomposer.train.step import TrainStep

    results = []
    base = small_config(corpus)
    with start_process(base.runtime) as process:
        for mesh, micro_batch_size in cases:
            loop = dataclasses.replace(base.train, micro_batch_size=micro_batch_size)
            config = dataclasses.replace(base, mesh=mesh, train=loop)
            state = build_state(config, process)
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
                for _ in range(STEPS):
                    result = step(loader.next_step(), lr=config.optim.lr)
                    assert result.mtp_loss is not None
                    values += [result.loss, result.mtp_loss, result.grad_norm]
            results.append(values)
            close_groups()
    return results


@pytest.mark.timeout(600)
def test_losses_do_not_depend_on_the_layout(tmp_path) -> None:
    corpus = str(write_corpus(tmp_path))
    (expected,) = run_distributed(
        losses_of, 1, corpus, [(MeshConfig(), 8)], timeout_s=120, init_process_group=False
    )[0]
    assert expected[0] > expected[-3], "the loss must fall, or the comparison proves little"
    per_rank = run_distributed(
        losses_of, 4, corpus, list(CASES.values()), timeout_s=560, init_process_group=False
    )
    assert all(rank == per_rank[0] for rank in per_rank), "ranks report different losses"
    for name, values in zip(CASES, per_rank[0], strict=True):
        assert values == pytest.approx(expected, rel=TOLERANCE), name
