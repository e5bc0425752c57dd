"""The runs of two_gpu_training.py, and how far their losses may lie apart. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacomposer.checkpoint.config import CheckpointConfig
from megacomposer.data.config import DataConfig, DataSource
from megacomposer.mesh.config import MeshConfig
from megacomposer.optim.config import OptimConfig, ScheduleConfig
from megacomposer.recipes.pretrain import tiny
from megacomposer.runtime.config import RuntimeConfig
from megacomposer.train.config import RunConfig

ALONE = "alone"
SEQUENCES = 8
MIXES = (("fp32", "muon"), ("fp32", "adamw"), ("bf16", "muon"), ("bf16", "adamw"))
"""Compute dtype and optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, and what else a run on it has."""

    mesh: MeshConfig = MeshConfig()
    micro_batch_size: int = SEQUENCES // 2
    model: dict[str, Any] = dataclasses.field(default_factory=dict)


LAYOUTS = {
    ALONE: Layout(micro_batch_size=SEQUENCES),
    "ep2": Layout(mesh=MeshConfig(ep=2)),
    "fsdp2": Layout(),
    "dense_replicated": Layout(mesh=MeshConfig(dense_shard=1, expert_shard=2)),
    "experts_replicated": Layout(mesh=MeshConfig(dense_shard=2, expert_shard=1)),
    "tp2": Layout(mesh=MeshConfig(tp=2), micro_batch_size=SEQUENCES),
    "cp2": Layout(mesh=MeshConfig(cp=2), micro_batch_size=SEQUENCES),
    "ep2_two_micro_batches": Layout(mesh=MeshConfig(ep=2), micro_batch_size=SEQUENCES // 4),
    "ep2_two_parts": Layout(mesh=MeshConfig(ep=2), model={"moe_exchange_parts": 2}),
    "ep2_dense_replicated": Layout(mesh=MeshConfig(ep=2, dense_shard=1)),
    "tp2_ep2": Layout(mesh=MeshConfig(tp=2, ep=2), micro_batch_size=SEQUENCES),
    "cp2_ep2": Layout(mesh=MeshConfig(cp=2, ep=2), micro_batch_size=SEQUENCES),
}
"""`dense_replicated` and `experts_replicated` are HSDP: replicas x shards are 2 x 1 for one kind of
weights and 1 x 2 for the other."""
IN_EVERY_MIX = [*LAYOUTS][1:7]
"""Layouts. The others run in the first mix that is asked for."""
SAVED = ("ep2", "fsdp2")
THOROUGH_MIXES = (("fp32", "muon"), ("bf16", "adamw"))
"""In which runs are repeated and resumed."""
WITH_REFERENCE = ("ep2", "tp2")
BOUNDS = {
    ("fp32", "adamw"): (1e-5, 1e-4),
    ("fp32", "muon"): (5e-3, 0.1),
    ("bf16", "adamw"): (2e-2, 0.3),
    ("bf16", "muon"): (2e-2, 0.3),
}
"""Largest relative difference of losses and of the gradient norm. Muon makes directions of a
gradient that are rounding alone as long as all others, so its runs part sooner; that it does the
same on two ranks as on one is what `reference` tells, to the last bit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, or the second half of one."""

    layout: str
    dtype: str
    optimizer: str
    kind: str = "whole"
    """`whole`, `again` (the same once more), `peer` (experts' tokens from peer memory, not over
    NCCL), `reference` (unsharded Muon), or `resumed`."""
    source: str = ""
    """`resumed`: the layout of the whole run whose checkpoint at half of the steps it loads."""

    @property
    def name(self) -> str:
        parts = (self.dtype, self.optimizer, self.kind, self.source, self.layout)
        return "-".join(part for part in parts if part)

    def with_(self, **changes: str) -> Run:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def saves(self) -> bool:
        return self.kind == "whole" and self.layout in (ALONE, *SAVED)

    @property
    def expected(self) -> Run:
        """The run whose losses it must have."""
        layout = self.source if self.kind == "resumed" else self.layout
        layout = ALONE if self.kind == "whole" else layout
        return self.with_(kind="whole", source="", layout=layout)

    @property
    def is_exact(self) -> bool:
        """Whether every bit must be that of `expected`."""
        return self.kind != "whole" and self.layout == self.expected.layout

    def config(self, folder: Path, data: str, device: Any, steps: int, length: int) -> RunConfig:
        """Of the whole run, in a directory of its own in `folder`."""
        base, layout = tiny(), LAYOUTS[self.layout]
        source = folder / self.expected.name / "checkpoints" if self.kind == "resumed" else None
        train = dataclasses.replace(
            base.train,
            num_steps=steps,
            global_batch_size=SEQUENCES,
            micro_batch_size=layout.micro_batch_size,
            eval_interval_steps=0,
            completion_prompt="",
        )
        model = {"dtype": self.dtype, "router_bias_update_rate": 1e-3} | layout.model
        if self.kind == "peer":
            model["moe_exchange"] = "peer"
        muon = self.optimizer == "muon"
        optim = OptimConfig(
            name="muon_reference" if self.kind == "reference" else self.optimizer,  # type: ignore[arg-type]
            lr=1e-3,
            muon_bucket_mib=0.05,  # several exchanges
            qk_clip_threshold=1.0 if muon else 0.0,
        )
        return dataclasses.replace(
            base,
            run_dir=str(folder / self.name),
            model=dataclasses.replace(base.model, **model),
            data=DataConfig(sources=(DataSource(prefix=data),), seq_length=length),
            train=train,
            optim=optim,
            schedule=ScheduleConfig(kind="constant"),
            mesh=layout.mesh,
            runtime=RuntimeConfig(device=device, collective_timeout_s=60.0),
            checkpoint=CheckpointConfig(load_from=source),
        )


def stages(layouts: Sequence[str], mixes: Sequence[tuple[str, str]]) -> list[list[Run]]:
    """What one GPU runs first, then two, then one again. A stage needs those before it; what
    matters least comes last in it."""
    first: list[Run] = []
    pair: list[Run] = []
    last: list[Run] = []
    for dtype, optimizer in mixes:
        alone = Run(layout=ALONE, dtype=dtype, optimizer=optimizer)
        first.append(alone)
        whole = [alone.with_(layout=layout) for layout in layouts if layout in IN_EVERY_MIX]
        pair += whole
        for run in whole:
            if (dtype, optimizer) in THOROUGH_MIXES and run.layout == "ep2":
                pair += [run.with_(kind="again"), run.with_(kind="peer")]
            if optimizer == "muon" and run.layout in WITH_REFERENCE:
                pair.append(run.with_(kind="reference"))
            if (dtype, optimizer) in THOROUGH_MIXES and run.saves:
                sources = (run.layout, ALONE)
                pair += [run.with_(kind="resumed", source=source) for source in sources]
                last.append(alone.with_(kind="resumed", source=run.layout))
    others = [layout for layout in layouts if layout not in IN_EVERY_MIX]
    pair += [run.with_(layout=layout) for run in first[:1] for layout in others]
    return [first, pair, last]


def run_named(name: str) -> Run:
    """The inverse of `Run.name`."""
    dtype, optimizer, kind, *source, layout = name.split("-")
    source_layout = source[0] if source else ""
    return Run(layout=layout, dtype=dtype, optimizer=optimizer, kind=kind, source=source_layout)


def difference(found: dict[str, Any], expected: dict[str, Any], values: str) -> float:
    """The largest relative difference over the steps of `found`; infinite where a value is not
    finite, or `expected` lacks the step."""
    there = dict(zip(expected["steps"], expected[values], strict=True))
    largest = 0.0
    for step, value in zip(found["steps"], found[values], strict=True):
        distance = abs(value - there.get(step, math.inf)) / abs(there.get(step, 1.0))
        largest = max(largest, distance if math.isfinite(distance) else math.inf)
    return largest


def judge(run: Run, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Differences of a run from the one that it must equal, their bounds, and a verdict."""
    row: dict[str, Any] = {"run": run.name, "expected": run.expected.name, "verdict": "not run"}
    ours, expected = found.get(run.name, {}), found.get(run.expected.name, {})
    if "loss" not in ours or "loss" not in expected:
        return row
    bounds = (0.0, 0.0) if run.is_exact else BOUNDS[run.dtype, run.optimizer]
    loss = max(difference(ours, expected, name) for name in ("loss", "mtp_loss"))
    norm = difference(ours, expected, "grad_norm")
    row |= {"loss_difference": loss, "norm_difference": norm, "bounds": bounds}
    agrees = loss <= bounds[0] and norm <= bounds[1]
    if run.is_exact:
        agrees = agrees and ours["digest"] == expected["digest"]
    # A run that learns nothing would agree with another for the wrong reason.
    learns = expected["loss"][-1] < expected["loss"][0]
    return row | {"verdict": ("ok" if agrees else "differs") if learns else "does not learn"}


def table(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Lines to print; an exact run has no bounds, and its weights and moments are equal too."""
    lines = ["run | compared with | loss | gradient norm | bounds | verdict"]
    for row in verdicts:
        cells = [row["run"], row["expected"], "-", "-", "-", row["verdict"]]
        if "bounds" in row:
            loss, norm = row["bounds"]
            cells[2:4] = f"{row['loss_difference']:.1e}", f"{row['norm_difference']:.1e}"
            cells[4] = f"{loss:g}, {norm:g}" if loss else "every bit"
        lines.append(" | ".join(cells))
    return lines
