"""Optimizer steps of muon_step.py on all ranks, with and without their exchanges, and traced."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from muon_step_model import LR, PASSES, Function, Model, Step, SwitchedLink, release, wrapped
from muon_step_peers import adamw, dion, megatron_layer_wise

from megacomposer.kernels.bench import benchmark
from megacomposer.optim import muon

_WARMUP = 3
_KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "user_annotation")
"""Categories of a Chrome trace; the rest is what the host does between launches."""


def ours(model: Model) -> Step:
    """Sharded Muon as a run has it."""
    optimizer = muon.ShardedMuon(model.shards, model.muon_config(), model.layout)
    return lambda: optimizer.step(lr=LR)


OPTIMIZERS: dict[str, tuple[Callable[[Model], Step], tuple[str, ...]]] = {
    "ours": (ours, ()),
    "adamw": (adamw, ()),
    "megatron_layer_wise": (megatron_layer_wise, ("megatron.core", "emerging_optimizers")),
    "dion": (dion, ("dion",)),
    "dion_gram_quack": (
        lambda model: dion(model, gram=True),
        ("dion", "gram_newton_schulz"),
    ),
}
"""How each is made, and the modules that it needs."""


def slowest(times: Sequence[float], model: Model) -> tuple[float, ...]:
    """The times of the rank whose first is the largest; collective."""
    if model.layout.world_size == 1:
        return tuple(times)
    found: list[Any] = [None] * model.layout.world_size
    dist.all_gather_object(found, tuple(times))
    return max(found)


def time_steps(name: str, model: Model) -> dict[str, float] | str:
    """Milliseconds a step and peak memory on the slowest rank, or why it did not run."""
    make, needed = OPTIMIZERS[name]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    release(model.device)
    try:
        found = _timed(make(model), model)
    except Exception as error:
        if not needed:  # only a foreign package may fail
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def _timed(step: Step, model: Model) -> dict[str, float]:
    if model.layout.world_size > 1:
        dist.barrier()
    timing = benchmark(step, device=model.device, warmup=_WARMUP)
    on_cuda = model.device.type == "cuda"
    peak_bytes = torch.cuda.max_memory_allocated(model.device) if on_cuda else 0
    times = (timing.median_ms, timing.p20_ms, timing.p80_ms, peak_bytes / 2**30)
    return dict(zip(("ms", "p20_ms", "p80_ms", "peak_gib"), slowest(times, model), strict=True))


def exchange_times(model: Model, reserved_sms: int) -> dict[str, float]:
    """Of our step with so many multiprocessors left to its exchanges: milliseconds, those of the
    slower rank's compute alone, and the part of the step that the exchanges add to it."""
    release(model.device)
    link = SwitchedLink()
    config = model.muon_config(muon_reserved_sms=reserved_sms)
    optimizer = muon.ShardedMuon(model.shards, config, model.layout, link=link)
    step = _timed(lambda: optimizer.step(lr=LR), model)
    counts = (float(link.sent_bytes), float(link.collectives))
    sent_bytes, collectives = slowest(counts, model)
    link.is_open = False
    alone = _timed(lambda: optimizer.step(lr=LR), model)
    return step | {
        "reserved_sms": reserved_sms,
        "sent_bytes": sent_bytes,
        "collectives": collectives,
        "compute_ms": alone["ms"],
        "exposed": (step["ms"] - alone["ms"]) / step["ms"],
    }


def trace(model: Model, path: Path) -> dict[str, float]:
    """One of our steps as a Chrome trace of kernels, copies and passes, gzipped at `path`; how long
    NCCL's kernels ran, and how much of that beside others."""
    release(model.device)
    step = ours(model)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=0, warmup=_WARMUP, active=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".whole")

    def save(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(whole))

    with (
        wrapped(muon, PASSES, _range),
        torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=save
        ) as profiler,
    ):
        for _ in range(_WARMUP + 1):
            step()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            profiler.step()
    events = [event for event in json.loads(whole.read_text())["traceEvents"] if _is_kept(event)]
    whole.unlink()
    for event in events:
        event["name"] = str(event["name"])[:80]
        if event["ph"] == "X":
            event.pop("args", None)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": events}, stream)
    return _overlap(events)


def _is_kept(event: dict[str, Any]) -> bool:
    if event["ph"] == "M":
        return event["name"] in ("process_name", "thread_name")
    return event["ph"] == "X" and event.get("cat") in _KEPT


def _range(name: str, function: Function) -> Function:
    def call(*args: object, **kwargs: object) -> object:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    return call


def _overlap(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event.get("cat") == "kernel":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            spans["nccl" in event["name"].lower()].append(span)
    sent, others = ([*_union(spans[is_nccl])] for is_nccl in (True, False))
    shared = sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in sent
        for first, last in others
    )
    return {
        "nccl_ms": sum(end - start for start, end in sent) * 1e-3,
        "nccl_beside_kernels_ms": shared * 1e-3,
        "kernels_ms": sum(end - start for start, end in others) * 1e-3,
    }


def _union(spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Disjoint spans that cover the same."""
    current: list[float] = []
    for start, end in sorted(spans):
        if current and start <= current[1]:
            current[1] = max(current[1], end)
            continue
        if current:
            yield current[0], current[1]
        current = [start, end]
    with contextlib.suppress(IndexError):
        yield current[0], current[1]
