"""Predicts Muon's step on a world of GPUs that is not here, from the plan that it would run.

The plan, what each rank computes and every byte on every link are exact; `muon_timeline` says what
is assumed of their times.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.model import presets
from megacomposer.model.config import ModelConfig
from megacomposer.model.parameter_shapes import parameter_placements
from megacomposer.model.parameters import Matrix
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.cost import newton_schulz_cost_s, table_from_rows
from megacomposer.optim.muon_pieces import layouts_of_world
from megacomposer.optim.muon_plan import MuonPlan, make_plan
from megacomposer.optim.muon_timeline import Machine, Timeline
from megacomposer.optim.muon_traffic import CostOf, PerRank, bucket_work, local_work
from megacomposer.optim.orthogonal import WIRE_DTYPES

Parameters = list[tuple[Placement, tuple[Matrix, ...]]]

HEADINGS = (
    "GPUs | ep | experts shard x replicate | dense shard x replicate | state GB | Newton-Schulz ms"
    " | imbalance | elementwise ms | NVLink GB | InfiniBand GB | exchange ms | step ms"
)

# Float32 parameter, gradient and moments.
_MUON_STATE_BYTES = 12
_ADAMW_STATE_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step of one layout. Bytes are exact for the plan, seconds are predicted."""

    mesh: MeshConfig
    world_size: int
    step_s: float
    newton_schulz_s: float
    """Of the busiest rank."""
    imbalance: float
    """That over the mean."""
    elementwise_s: float
    """Of the busiest rank: momentum, pack, copies, update and AdamW."""
    near_bytes: float
    """Over NVLink, out of or into the busiest rank."""
    far_bytes: float
    """The same over InfiniBand."""
    exchange_s: float
    """In which the links of the busiest rank are in use."""
    state_bytes: float
    """Parameters, gradients and moments of the rank with most of them."""
    fits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What scripts/bench/muon_step.py measured of one model on one mesh."""

    machine: Machine
    step_s: float
    model: ModelConfig
    optim: OptimConfig
    mesh: MeshConfig
    world_size: int


def read_calibrations(path: Path, *, links: Path | None = None) -> list[Calibration]:
    """Every record of the file, in its order.

    links: what NVLink was measured to carry, for `read_near_bytes_per_s`.

    Raises:
        ValueError: a record lacks something, or is of a model with other parameters.
    """
    return [_calibration(path, record, links) for record in _read_records(path)]


def read_near_bytes_per_s(path: Path, optim: OptimConfig) -> float:
    """What one GPU sends over NVLink in a second, from the file of scripts/bench/links.py: the
    largest exchange on a communicator of the thread blocks that `optim` leaves to exchanges.

    Raises:
        ValueError: the file has none.
    """
    reserved = optim.muon_reserved_sms
    most_blocks = 2 ** (reserved.bit_length() - 1) if reserved else 0
    rows = [
        row
        for row in _read_records(path)
        if (row.get("op"), row.get("most_blocks")) == ("exchange", most_blocks)
    ]
    if not rows:
        raise ValueError(
            f"{path} has no exchange with most_blocks={most_blocks}; write it with"
            f" scripts/bench/links.py --most-blocks {most_blocks} --json"
        )
    return float(max(rows, key=lambda row: row["bytes"])["bus_bytes_per_s"])


def _read_records(path: Path) -> list[dict[str, Any]]:
    """JSON objects one after the other, whatever lies between them."""
    text, decoder, records = path.read_text(encoding="utf-8").strip(), json.JSONDecoder(), []
    while text:
        record, end = decoder.raw_decode(text)
        records.append(record)
        text = text[end:].lstrip()
    return records


def _calibration(path: Path, record: dict[str, Any], links: Path | None) -> Calibration:
    needed = ("elementwise_bytes_per_s", "newton_schulz", "step_ms", "model")
    missing = [name for name in needed if record.get(name) is None]
    if missing:
        raise ValueError(f"{path} lacks {missing}; write it with scripts/bench/muon_step.py --json")
    told = record["model"]
    changes = {"num_layers": told["num_layers"]} | told.get("changes", {})
    model = dataclasses.replace(preset(told["preset"]), **changes)
    optim = OptimConfig(
        name="muon",
        muon_o_proj=told["muon_o_proj"],
        muon_reserved_sms=told.get("muon_reserved_sms", OptimConfig.muon_reserved_sms),
    )
    near_bytes_per_s = Machine.near_bytes_per_s
    if links is not None:
        near_bytes_per_s = read_near_bytes_per_s(links, optim)
    matrices = sum(len(found) for _, found in _parameters(model, optim))
    if matrices != told["matrices"]:
        raise ValueError(
            f"{path} was measured on {told['matrices']} matrices; {told['preset']} with"
            f" {told['num_layers']} layers has {matrices} now: measure it again"
        )
    return Calibration(
        machine=Machine(
            elementwise_bytes_per_s=record["elementwise_bytes_per_s"],
            calibrated=table_from_rows(record["newton_schulz"]),
            near_bytes_per_s=near_bytes_per_s,
        ),
        step_s=record["step_ms"] * 1e-3,
        model=model,
        optim=optim,
        mesh=MeshConfig(**told.get("mesh", {})),
        world_size=told.get("world_size", 1),
    )


def check(told: Calibration) -> str:
    """The prediction of a measured step beside it, as a line."""
    found = predict(told.model, told.mesh, told.world_size, told.machine, told.optim)
    sizes = [f"{name} {size}" for name, size in dataclasses.asdict(told.mesh).items()]
    step = f"{told.world_size}-GPU step ({', '.join(sizes)})"
    return (
        f"prediction of the {'one-GPU step' if told.world_size == 1 else step}:"
        f" {found.step_s * 1e3:.2f} ms; measured {told.step_s * 1e3:.2f} ms;"
        f" prediction / measured {found.step_s / told.step_s:.3f}"
    )


def preset(name: str) -> ModelConfig:
    """Of model/presets.py; ValueError for a name that it does not have."""
    found = getattr(presets, name, None)
    if found is None or getattr(found, "__module__", "") != presets.__name__:
        raise ValueError(f"model/presets.py has no preset {name!r}")
    config = found()
    assert isinstance(config, ModelConfig)
    return config


def _parameters(config: ModelConfig, optim: OptimConfig) -> Parameters:
    return parameter_placements(config, split_output_heads=optim.muon_o_proj == "per_head")


def predict(
    config: ModelConfig,
    mesh: MeshConfig,
    world_size: int,
    machine: Machine,
    optim: OptimConfig,
) -> Prediction:
    """One optimizer step of `config` on `mesh`.

    Raises:
        ValueError: the world or the model does not divide over the layout.
    """
    layout = Layout(mesh, world_size=world_size, rank=0, device_type="cpu")
    parameters = _parameters(config, optim)
    wire_bytes = WIRE_DTYPES[optim.muon_wire_dtype].itemsize
    plan = make_plan(
        [entry for entry in parameters if entry[1]],
        layout,
        steps=optim.muon_ns_steps,
        bucket_bytes=optim.muon_bucket_mib * 2**20,
        wire_bytes=wire_bytes,
        rates=machine,
    )
    cost_s = _cost_function(machine, optim)
    buckets = [bucket_work(plan, bucket, cost_s, machine.gpus_per_node) for bucket in plan.buckets]
    local = local_work(plan, cost_s)
    muon, adamw = _stored_elements(parameters, layout)
    timeline = Timeline(machine, wire_bytes, muon, adamw)
    step_s = timeline.run(buckets, local, optim.muon_buffers)
    load_s = local.newton_schulz_s + sum(work.newton_schulz_s for work in buckets)
    flows = [flow for work in buckets for flow in (work.gather, work.scatter)]
    state = float((_MUON_STATE_BYTES * muon + _ADAMW_STATE_BYTES * adamw).max())
    return Prediction(
        mesh=mesh,
        world_size=world_size,
        step_s=step_s,
        newton_schulz_s=float(load_s.max()),
        imbalance=float(load_s.max() / load_s.mean()),
        elementwise_s=float(timeline.elementwise_s.max()),
        near_bytes=wire_bytes * _busiest(plan, [flow.near for flow in flows]),
        far_bytes=wire_bytes * _busiest(plan, [flow.far for flow in flows]),
        exchange_s=timeline.exchange_s,
        state_bytes=state,
        fits=state <= machine.state_bytes,
    )


def _cost_function(machine: Machine, optim: OptimConfig) -> CostOf:
    return functools.cache(
        lambda rows, columns: newton_schulz_cost_s(
            rows, columns, steps=optim.muon_ns_steps, table=machine.measured
        )
    )


def _busiest(plan: MuonPlan, both_ways: Iterable[np.ndarray]) -> float:
    return float(sum(both_ways, np.zeros((2, plan.world_size))).max())


def _stored_elements(parameters: Parameters, layout: Layout) -> tuple[PerRank, PerRank]:
    """Elements on each rank of the parameters that Muon updates, and of the others."""
    layouts = layouts_of_world(layout)
    sums = np.zeros((2, layout.world_size))
    known: dict[Placement, list[int]] = {}
    for placement, matrices in parameters:
        key = dataclasses.replace(placement, name="")
        if key not in known:
            known[key] = [int(np.prod(placement.on(rank).local_shape)) for rank in layouts]
        sums[0 if matrices else 1] += known[key]
    return sums[0], sums[1]


def candidate_meshes(config: ModelConfig, world_size: int, machine: Machine) -> list[MeshConfig]:
    """Layouts worth a look: experts over one node or four, sharded as far as the world goes or only
    as far as each rank gets equally many; dense weights over eight nodes or the world.

    Raises:
        ValueError: the world is not whole nodes, or they do not divide the experts.
    """
    node, experts = machine.gpus_per_node, config.num_experts
    if world_size % node:
        raise ValueError(f"a world of {world_size} GPUs is not whole nodes of {node}")
    sizes = [ep for ep in (node, 4 * node) if world_size % ep == 0 and experts % ep == 0]
    if experts and not sizes:
        raise ValueError(f"{experts} experts do not divide over nodes of {node} GPUs")
    found = []
    for ep in sizes if experts else [1]:
        expert_ranks = world_size // ep
        shards = {expert_ranks}
        if experts:
            shards.add(math.gcd(expert_ranks, experts // ep))
        for expert_shard in sorted(shards):
            for dense_shard in sorted({math.gcd(world_size, 8 * node), world_size}):
                found.append(MeshConfig(ep=ep, expert_shard=expert_shard, dense_shard=dense_shard))
    return found


def best_prediction(
    config: ModelConfig, world_size: int, machine: Machine, optim: OptimConfig
) -> Prediction:
    """The shortest step of `candidate_meshes` among those whose state fits, or, if none does, of
    all; ValueError as there."""
    found = [
        predict(config, mesh, world_size, machine, optim)
        for mesh in candidate_meshes(config, world_size, machine)
    ]
    return min(found, key=lambda prediction: (not prediction.fits, prediction.step_s))


def search_fewest(
    config: ModelConfig,
    machine: Machine,
    optim: OptimConfig,
    *,
    step_s: float,
    multiple: int,
    most: int,
) -> Iterator[Prediction]:
    """Worlds in multiples of `multiple` up to `most`, from the first that could do its share of
    Newton-Schulz in `step_s` to the first that does all of a step in it (`meets`)."""
    costs = _shape_costs(config, machine, optim)
    total_s = sum(count * cost for count, cost in costs.values())
    least = -(-math.ceil(total_s / step_s) // multiple) * multiple
    for world_size in range(max(least, multiple), most + 1, multiple):
        prediction = best_prediction(config, world_size, machine, optim)
        yield prediction
        if meets(prediction, step_s):
            return


def meets(prediction: Prediction, step_s: float) -> bool:
    """Whether a layout takes no longer than `step_s` and its state fits."""
    return prediction.fits and prediction.step_s <= step_s


def unmeasured_shapes(
    config: ModelConfig, machine: Machine, optim: OptimConfig
) -> dict[tuple[int, int], float]:
    """Matrix shapes that the table lacks, with their part of all Newton-Schulz time."""
    table = machine.measured
    known = {(row.rows, row.columns) for row in table} | {(r.columns, r.rows) for r in table}
    costs = _shape_costs(config, machine, optim)
    total_s = sum(count * cost for count, cost in costs.values())
    return {
        shape: count * cost / total_s
        for shape, (count, cost) in costs.items()
        if shape not in known
    }


def _shape_costs(
    config: ModelConfig, machine: Machine, optim: OptimConfig
) -> dict[tuple[int, int], tuple[int, float]]:
    """Number and seconds of one, of every shape of matrix."""
    counts = collections.Counter(
        (matrix.rows, matrix.columns)
        for _, matrices in _parameters(config, optim)
        for matrix in matrices
    )
    cost_s = _cost_function(machine, optim)
    return {shape: (count, cost_s(*shape)) for shape, count in counts.items()}


def row(found: Prediction) -> str:
    """One line; GB over a link are those of the busiest rank's busier direction."""
    mesh, world = found.mesh, found.world_size
    expert = f"{mesh.expert_shard} x {world // mesh.ep // mesh.expert_shard}"
    state = f"{found.state_bytes / 1e9:.0f}" + ("" if found.fits else " (does not fit)")
    return (
        f"prediction | {world} | {mesh.ep} | {expert}"
        f" | {mesh.dense_shard} x {world // mesh.dense_shard} | {state}"
        f" | {found.newton_schulz_s * 1e3:.1f} | {found.imbalance:.2f}"
        f" | {found.elementwise_s * 1e3:.1f} | {found.near_bytes / 1e9:.2f}"
        f" | {found.far_bytes / 1e9:.2f} | {found.exchange_s * 1e3:.1f} | {found.step_s * 1e3:.1f}"
    )
