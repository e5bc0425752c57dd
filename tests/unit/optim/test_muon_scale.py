"""Predictions for worlds that are not here: bytes against the tables that ranks run by, times in
closed form where there is one, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.model import presets
from megacomposer.model.parameter_shapes import parameter_placements
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.cost import MeasuredShape, newton_schulz_cost_s
from megacomposer.optim.muon_exchange import Exchange, Held
from megacomposer.optim.muon_plan import MuonPlan, make_plan
from megacomposer.optim.muon_scale import (
    candidate_meshes,
    meets,
    predict,
    preset,
    read_calibrations,
    read_near_bytes_per_s,
    search_fewest,
    unmeasured_shapes,
)
from megacomposer.optim.muon_timeline import Machine, Timeline
from megacomposer.optim.muon_traffic import BucketWork, Flow, LocalWork, bucket_work

ROOT = Path(__file__).resolve().parents[3]
MODEL = dataclasses.replace(presets.tiny(), num_layers=2)
DENSE = dataclasses.replace(MODEL, num_experts=0)
# Buckets of a few matrices, so that there are several.
OPTIM = OptimConfig(name="muon", muon_bucket_mib=1 / 64)
NODE = 2
MACHINE = Machine(gpus_per_node=NODE)
LAYOUTS = {
    "fully sharded": MeshConfig(),
    "uneven experts": MeshConfig(ep=4, dense_shard=4),
    "replicated": MeshConfig(ep=2, dense_shard=2, expert_shard=2),
    "tensor parallel": MeshConfig(tp=2, ep=4, dense_shard=2),
}
WORLDS = {name: 12 if name == "uneven experts" else 8 for name in LAYOUTS}
# One matrix takes long, whatever its size is.
SLOW = MeasuredShape(rows=96, columns=128, batch=1, ms=1.0)


def plan_of(mesh: MeshConfig, world: int) -> tuple[Layout, MuonPlan]:
    layout = Layout(mesh, world_size=world, rank=0, device_type="cpu")
    parameters = [entry for entry in parameter_placements(MODEL) if entry[1]]
    return layout, make_plan(parameters, layout, steps=5, bucket_bytes=2**14)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_differ_from_those_of_the_exchanges_that_ranks_run(name: str) -> None:
    mesh, world = LAYOUTS[name], WORLDS[name]
    layout, plan = plan_of(mesh, world)
    assert len(plan.buckets) > 3
    totals = np.zeros((2, 2, world))  # near and far, out and in
    held = [Held(plan, rank) for rank in range(world)]
    for bucket in plan.buckets:
        work = bucket_work(plan, bucket, lambda rows, columns: 1.0, NODE)
        for rank in range(world):
            members = range(world)
            if bucket.kind == "expert":
                members = range(rank % layout.ep, world, layout.ep)
            exchange = Exchange(plan, bucket, held[rank], members, rank, torch.device("cpu"))
            flows = [(work.scatter, exchange.scatter)]
            if bucket.gathers:
                flows.append((work.gather, exchange.gather))
            for flow, sizes in flows:
                expected = np.zeros((2, 2))
                for peer, out, into in zip(members, sizes.sends, sizes.receives, strict=True):
                    assert flow.meets[rank, peer] == (peer != rank and out + into > 0)
                    if peer != rank:
                        expected[int(peer // NODE != rank // NODE)] += out, into
                assert (flow.near[:, rank] == expected[0]).all()
                assert (flow.far[:, rank] == expected[1]).all()
                totals[:, :, rank] += expected
            pieces = exchange.update.table.pieces
            assert work.applied[rank] == sum(piece.rows * piece.columns for piece in pieces)
            assert work.packed[rank] == sum(p.rows * p.columns for p in exchange.pack.pieces)
            copied = [r for table in exchange.disassembly for r in table.rectangles]
            if bucket.gathers:
                copied += exchange.assembly.rectangles
            assert work.copied[rank] == sum(r.rows * r.columns for r in copied)
            batches = [batch for batch, _, _ in exchange.stacks.shapes]
            assert work.newton_schulz_s[rank] == sum(batches)
    prediction = predict(MODEL, mesh, world, MACHINE, OPTIM)
    assert prediction.near_bytes == 2 * totals[0].max()
    assert prediction.far_bytes == 2 * totals[1].max()
    assert prediction.far_bytes > 0


def stored(muon: bool) -> int:
    return sum(
        math.prod(placement.global_shape)
        for placement, matrices in parameter_placements(MODEL)
        if bool(matrices) is muon
    )


def one_gpu_step_s(machine: Machine) -> float:
    """Momentum 12 bytes an element, pack and update 8 and 2 on the wire each; AdamW 28."""
    newton_schulz_s = sum(
        newton_schulz_cost_s(matrix.rows, matrix.columns, steps=5, table=machine.measured)
        for _, matrices in parameter_placements(MODEL)
        for matrix in matrices
    )
    moved = (12 + 10 + 10) * stored(True) + 28 * stored(False)
    return newton_schulz_s + moved / machine.elementwise_bytes_per_s


def test_one_gpu_takes_other_than_its_passes_and_newton_schulz() -> None:
    prediction = predict(MODEL, MeshConfig(), 1, MACHINE, OPTIM)
    assert prediction.step_s == pytest.approx(one_gpu_step_s(MACHINE))
    assert prediction.near_bytes == prediction.far_bytes == prediction.exchange_s == 0
    assert prediction.imbalance == 1
    assert prediction.state_bytes == 12 * stored(True) + 16 * stored(False)


def test_step_without_compute_takes_as_long_as_its_links() -> None:
    instant = dataclasses.replace(SLOW, ms=1e-12)
    machine = dataclasses.replace(MACHINE, calibrated=(instant,), elementwise_bytes_per_s=1e30)
    prediction = predict(DENSE, MeshConfig(), 8, machine, OPTIM)
    assert prediction.step_s >= prediction.exchange_s
    assert prediction.exchange_s * machine.far_bytes_per_s >= prediction.far_bytes > 0
    half = dataclasses.replace(machine, near_bytes_per_s=180e9, far_bytes_per_s=22.5e9)
    assert predict(DENSE, MeshConfig(), 8, half, OPTIM).step_s == pytest.approx(
        2 * prediction.step_s, rel=1e-3
    )


def test_rank_waits_only_for_those_it_exchanges_with() -> None:
    meets = np.zeros((4, 4), dtype=bool)
    meets[0, 1] = meets[1, 0] = True
    flow = Flow(near=np.zeros((2, 4)), far=np.zeros((2, 4)), meets=meets)
    assert flow.latest(np.array([1.0, 2.0, 9.0, 3.0])).tolist() == [2.0, 2.0, 9.0, 3.0]


def step_of_equal_buckets(
    count: int, *, gather_s: float, compute_s: float, scatter_s: float, local_s: float, buffers: int
) -> float:
    """On two ranks, one element a second on every link; the second rank computes less."""
    machine = Machine(elementwise_bytes_per_s=1e30, near_bytes_per_s=1.0, far_bytes_per_s=1.0)
    nothing, both, meets = np.zeros(2), np.ones((2, 2)), np.ones((2, 2), dtype=bool)
    work = BucketWork(
        gathers=gather_s > 0,
        gather=Flow(near=gather_s * both, far=0 * both, meets=meets),
        scatter=Flow(near=0 * both, far=scatter_s * both, meets=meets),
        newton_schulz_s=np.array([compute_s, compute_s / 2]),
        packed=nothing,
        copied=nothing,
        applied=nothing,
    )
    local = LocalWork(newton_schulz_s=np.array([local_s, local_s]), elements=nothing)
    timeline = Timeline(machine, 1, nothing, nothing)
    step_s = timeline.run([work] * count, local, buffers)
    assert timeline.exchange_s == count * (gather_s + scatter_s)
    return step_s


def test_exchanges_beside_longer_compute_show_only_at_the_ends() -> None:
    sizes = {"compute_s": 10.0, "scatter_s": 1.0, "local_s": 0.0}
    assert step_of_equal_buckets(6, gather_s=2.0, buffers=3, **sizes) == 2 + 6 * 10 + 1
    assert step_of_equal_buckets(6, gather_s=0.0, buffers=3, **sizes) == 6 * 10 + 1
    # one after another
    assert step_of_equal_buckets(6, gather_s=2.0, buffers=1, **sizes) == 6 * (2 + 10 + 1)


def test_local_work_fills_the_waits_for_exchanges() -> None:
    sizes = {"gather_s": 5.0, "compute_s": 1.0, "scatter_s": 5.0, "buffers": 3}
    assert step_of_equal_buckets(3, local_s=40.0, **sizes) == 3 * 1 + 40
    assert step_of_equal_buckets(3, local_s=0.0, **sizes) == 3 * (5 + 5)


@pytest.mark.parametrize("ep", [1, 2])
def test_more_gpus_of_a_layout_family_are_never_slower(ep: int) -> None:
    # Nodes of one GPU: no family loses its fast link on the way up.
    machine = dataclasses.replace(MACHINE, gpus_per_node=1, calibrated=(SLOW,))
    model = dataclasses.replace(MODEL, num_experts=32)
    optim = OptimConfig(name="muon")
    steps = [
        predict(model, MeshConfig(ep=ep), world, machine, optim).step_s for world in (2, 4, 8, 16)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 5


def test_world_that_cannot_divide_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="a world of 12 GPUs is not whole nodes of 8"):
        candidate_meshes(MODEL, 12, Machine())
    odd = dataclasses.replace(MODEL, num_experts=9)
    with pytest.raises(ValueError, match="9 experts do not divide over nodes of 8 GPUs"):
        candidate_meshes(odd, 16, Machine())
    with pytest.raises(ValueError, match=r"cannot be split over mesh\.ep"):
        predict(odd, MeshConfig(ep=2), 2, MACHINE, OPTIM)
    with pytest.raises(ValueError, match="impossible layout: ep 3 in a world of 8"):
        predict(MODEL, MeshConfig(ep=3), 8, MACHINE, OPTIM)
    with pytest.raises(ValueError, match="no preset 'dataclasses'"):
        preset("dataclasses")


@pytest.mark.parametrize("config", [MODEL, DENSE])
@pytest.mark.parametrize("world", [2, 6, 8, 64])
def test_every_candidate_layout_can_be_built(config: object, world: int) -> None:
    assert isinstance(config, type(MODEL))
    meshes = candidate_meshes(config, world, MACHINE)
    assert meshes
    assert len(set(meshes)) == len(meshes)
    for mesh in meshes:
        Layout(mesh, world_size=world, rank=0, device_type="cpu")


def test_search_stops_at_the_first_world_that_meets_the_goal() -> None:
    machine = dataclasses.replace(MACHINE, calibrated=(SLOW,), near_bytes_per_s=1e12)
    goal = {"step_s": predict(MODEL, MeshConfig(), 1, machine, OPTIM).step_s / 4, "multiple": 2}
    found = list(search_fewest(MODEL, machine, OPTIM, **goal, most=32))
    assert [prediction.world_size for prediction in found] == sorted(
        {prediction.world_size for prediction in found}
    )
    assert [meets(p, goal["step_s"]) for p in found] == [False] * (len(found) - 1) + [True]
    crowded = dataclasses.replace(machine, state_bytes=1.0)
    assert not any(
        meets(p, goal["step_s"]) for p in search_fewest(MODEL, crowded, OPTIM, **goal, most=8)
    )


def test_shapes_without_a_measurement_are_told_with_their_part_of_the_time() -> None:
    shapes = {
        (matrix.rows, matrix.columns)
        for _, matrices in parameter_placements(MODEL)
        for matrix in matrices
    }
    rows = [MeasuredShape(rows=n, columns=m, batch=1, ms=1.0) for m, n in sorted(shapes)]
    machine = dataclasses.replace(MACHINE, calibrated=tuple(rows))
    assert unmeasured_shapes(MODEL, machine, OPTIM) == {}
    missing = unmeasured_shapes(MODEL, dataclasses.replace(machine, calibrated=(rows[0],)), OPTIM)
    assert 0 < sum(missing.values()) < 1


def calibration(path: Path, **changes: object) -> Path:
    """A file as scripts/bench/muon_step.py writes it, for a step that is exactly as predicted."""
    machine = Machine(elementwise_bytes_per_s=1e9, calibrated=(SLOW,))
    record = {
        "model": {
            "preset": "tiny",
            "num_layers": 2,
            "muon_o_proj": "per_head",
            "matrices": sum(len(matrices) for _, matrices in parameter_placements(MODEL)),
        },
        "elementwise_bytes_per_s": 1e9,
        "newton_schulz": [dataclasses.asdict(SLOW)],
        "step_ms": one_gpu_step_s(machine) * 1e3,
    }
    path.write_text(json.dumps(record | changes))
    return path


def run_script(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts/bench/muon_scale.py"), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_check_compares_the_prediction_with_the_measured_step(tmp_path: Path) -> None:
    path = calibration(tmp_path / "step.json")
    out = run_script("--calibration", str(path), "--check")
    assert "prediction of the one-GPU step" in out
    assert out.endswith("prediction / measured 1.000\n")


def test_calibration_that_lacks_something_or_is_of_another_model_is_refused(
    tmp_path: Path,
) -> None:
    path = calibration(tmp_path / "step.json", step_ms=None)
    with pytest.raises(ValueError, match=r"lacks \['step_ms'\]"):
        read_calibrations(path)
    (told,) = read_calibrations(calibration(path))
    assert told.model == MODEL
    model = json.loads(path.read_text())["model"] | {"matrices": 3}
    with pytest.raises(ValueError, match="was measured on 3 matrices; tiny with 2 layers has"):
        read_calibrations(calibration(path, model=model))


def test_measured_links_and_meshes_are_not_those_of_the_prediction(tmp_path: Path) -> None:
    path, links = tmp_path / "step.jsonl", tmp_path / "links.jsonl"
    rows = [
        {"op": op, "most_blocks": blocks, "bytes": size, "bus_bytes_per_s": rate}
        for op, blocks, size, rate in (
            ("exchange", 16, 2**10, 1e6),
            ("exchange", 16, 2**30, 1e9),
            ("exchange", 8, 2**30, 2e9),
            ("exchange", 0, 2**30, 4e9),
            ("all_to_all", 0, 2**30, 3e9),
        )
    ]
    links.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_near_bytes_per_s(links, OptimConfig(name="muon", muon_reserved_sms=16)) == 1e9
    assert read_near_bytes_per_s(links, OptimConfig(name="muon")) == 4e9
    with pytest.raises(ValueError, match="no exchange with most_blocks=4"):
        read_near_bytes_per_s(links, OptimConfig(name="muon", muon_reserved_sms=6))
    one = calibration(path).read_text()
    mesh = {"mesh": {"dense_shard": 1}, "world_size": 2, "muon_reserved_sms": 16}
    model = json.loads(one)["model"] | mesh
    two = calibration(path, model=model, step_ms=7.0).read_text()
    path.write_text(f"{one}\n{two}\n")
    machine = Machine(elementwise_bytes_per_s=1e9, calibrated=(SLOW,), near_bytes_per_s=1e9)
    told = OptimConfig(name="muon", muon_reserved_sms=16)
    step_s = predict(MODEL, MeshConfig(dense_shard=1), 2, machine, told).step_s
    out = run_script("--calibration", str(path), "--links", str(links), "--check").splitlines()
    assert out[0].endswith("prediction / measured 1.000")
    assert "2-GPU step (tp 1, cp 1, ep 1, dense_shard 1, expert_shard 0)" in out[1]
    assert f": {step_s * 1e3:.2f} ms; measured 7.00 ms" in out[1]


def test_every_line_of_figures_is_labelled_a_prediction() -> None:
    out = run_script("--preset", "tiny", "--worlds", "8", "16", "--multiple", "8")
    lines = out.splitlines()
    assert sum(line.startswith("prediction | ") for line in lines) >= 3
    figures = [line for line in lines if any(c.isdigit() for c in line) and "GPUs for" not in line]
    assert all(line.startswith("prediction") for line in figures)
