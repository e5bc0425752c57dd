"""What muon_step.py runs: the parameters of a model that is not built, and timed passes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from megacomposer.kernels.bench import benchmark
from megacomposer.kernels.newton_schulz import orthogonalize_grouped
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.model import presets
from megacomposer.model.parameter_shapes import parameter_placements
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim import muon
from megacomposer.optim.adamw import AdamW
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.cost import ADAMW_BYTES, APPLY_BYTES, MOMENTUM_BYTES, PACK_BYTES
from megacomposer.optim.muon_exchange import Link, Pending, Sizes

LR = 1e-3
Step = Callable[[], object]
Function = Callable[..., object]
Wrap = Callable[[str, Function], Function]
_PASS_STEPS = 5
_WIRE_BYTES = 2
# Least bytes per element of storage that a pass reads and writes.
_BYTES = {
    "update_momentum": MOMENTUM_BYTES,
    "pack": PACK_BYTES + _WIRE_BYTES,
    "apply_update": APPLY_BYTES + _WIRE_BYTES,
}
PASSES = (*_BYTES, "orthogonalize_stacks", "copy_rectangles")
_MOST_BATCH = 256


class Model:
    """Every parameter of a preset cut to some layers: this rank's part of it, with a gradient."""

    def __init__(
        self,
        preset: str,
        num_layers: int,
        device: torch.device,
        *,
        split_output_heads: bool = True,
        changes: dict[str, int] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`changes`: other fields of the preset. `layout`: started; None for one rank."""
        self.preset, self.device, self.changes = preset, device, changes or {}
        self.per_head = split_output_heads
        config = dataclasses.replace(getattr(presets, preset)(), num_layers=num_layers)
        self.config = dataclasses.replace(config, **self.changes)
        if layout is None:
            layout = Layout(MeshConfig(), world_size=1, rank=0, device_type=device.type)
        self.layout = layout
        torch.manual_seed(layout.rank)
        self.shards: list[ParameterShard] = []
        for placement, matrices in parameter_placements(
            self.config, split_output_heads=split_output_heads
        ):
            stored = placement.on(layout)
            parameter = torch.nn.Parameter(
                torch.randn(stored.local_shape, device=device).mul_(0.02)
            )
            parameter.grad = torch.randn(stored.local_shape, device=device)
            self.shards.append(
                ParameterShard(
                    layout=stored,
                    parameter=parameter,
                    kind=placement.kind,
                    matrices=matrices,
                    weight_decay=len(placement.global_shape) > 1,
                    placement=placement,
                )
            )

    def elements(self, *, muon: bool) -> int:
        """Stored here, of the parameters that Muon updates, or of the others."""
        return sum(s.local.numel() for s in self.shards if bool(s.matrices) is muon)

    def describe(self) -> dict[str, object]:
        """What muon_scale.py needs to plan the same step."""
        sizes = self.layout.describe()
        return {
            "preset": self.preset,
            "num_layers": self.config.num_layers,
            "changes": self.changes,
            "muon_o_proj": "per_head" if self.per_head else "whole",
            "muon_reserved_sms": self.muon_config().muon_reserved_sms,
            "muon_parameters": self.elements(muon=True),
            "adamw_parameters": self.elements(muon=False),
            "matrices": sum(len(shard.matrices) for shard in self.shards),
            "world_size": sizes.pop("world_size"),
            "mesh": sizes,
        }

    def muon_config(self, **settings: int) -> OptimConfig:
        o_proj = "per_head" if self.per_head else "whole"
        return OptimConfig(name="muon", muon_o_proj=o_proj, **settings)


class SwitchedLink(Link):
    """A link that can be told not to send: what is left of a step is the compute of each rank."""

    is_open = True

    def exchange(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        sizes: Sizes,
        group: dist.ProcessGroup,
    ) -> Pending:
        """Closed, the buffers keep what the last exchange left in them."""
        if self.is_open:
            return super().exchange(source, target, sizes, group)
        self._keep(source, target, sizes, group.rank())
        return _Packed(source.device)

    def reduce_max(self, values: torch.Tensor) -> None:
        if self.is_open:
            super().reduce_max(values)


class _Packed:
    """What this rank's stream was asked to do before an exchange, and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.current_stream().record_event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def pass_times(model: Model) -> dict[str, dict[str, float]]:
    """Milliseconds of each pass of our step, all its calls together, and the bytes it moves; with
    several ranks, while nothing is sent."""
    release(model.device)
    link = SwitchedLink()
    optimizer = muon.ShardedMuon(model.shards, model.muon_config(), model.layout, link=link)
    optimizer.step(lr=LR)
    link.is_open = False
    clock = Clock(model.device)
    with wrapped(muon, PASSES, clock.timed), wrapped(AdamW, ("step",), clock.timed):
        steps = [clock.sums_ms(lambda: optimizer.step(lr=LR)) for _ in range(_PASS_STEPS)]
    found = {}
    for name in steps[0]:
        is_adamw = name == "step"
        per_element = ADAMW_BYTES if is_adamw else _BYTES.get(name, 0)
        found["adamw of the others" if is_adamw else name] = {
            "ms": statistics.median(step[name] for step in steps),
            "bytes": per_element * model.elements(muon=not is_adamw),
        }
    return found


@contextlib.contextmanager
def wrapped(owner: object, names: Sequence[str], wrap: Wrap) -> Iterator[None]:
    """Functions of a module or class are `wrap(name, function)` while it is open."""
    originals = {name: getattr(owner, name) for name in names}
    for name, function in originals.items():
        setattr(owner, name, wrap(name, function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(owner, name, function)


class Clock:
    """Times calls of functions: between CUDA events on their stream, or on the wall."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, object, object]] = []

    def sums_ms(self, step: Step) -> dict[str, float]:
        """Runs one step; the time in each function, those that were called."""
        self._spans.clear()
        step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums: dict[str, float] = collections.defaultdict(float)
        for name, start, end in self._spans:
            if isinstance(start, torch.cuda.Event):
                sums[name] += start.elapsed_time(end)
            else:
                sums[name] += (end - start) * 1e3
        return dict(sums)

    def timed(self, name: str, function: Function) -> Function:
        """The function, with its calls timed."""

        def call(*args: object, **kwargs: object) -> object:
            start = self._now()
            result = function(*args, **kwargs)
            self._spans.append((name, start, self._now()))
            return result

        return call

    def _now(self) -> object:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def newton_schulz_rows(model: Model) -> list[dict[str, float]]:
    """Our Newton-Schulz of each shape of matrix of the model, as the optimizer calls it: with
    multiprocessors left to exchanges where there are several ranks."""
    several = model.layout.world_size > 1
    reserved_sms = model.muon_config().muon_reserved_sms if several else 0
    run = functools.partial(orthogonalize_grouped, reserved_sms=reserved_sms)
    counts = collections.Counter(
        (matrix.rows, matrix.columns) for shard in model.shards for matrix in shard.matrices
    )
    dtype = torch.float16 if model.device.type == "cuda" else torch.float32
    rows = []
    for (m, n), count in sorted(counts.items()):
        x = torch.randn(min(count, _MOST_BATCH), m, n, device=model.device).to(dtype)
        timing = benchmark(lambda x=x: run([x]), device=model.device, warmup=3)
        rows.append({"rows": m, "columns": n, "batch": len(x), "ms": timing.median_ms})
    return rows


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
