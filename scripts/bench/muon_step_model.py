"""What muon_step.py runs: the parameters of a model that is not built, optimizers, timed passes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator

import torch

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
from megacomposer.optim.optimizer import build_optimizer

LR = 1e-3
_PASS_STEPS = 5
_WIRE_BYTES = 2
# Least bytes per element of storage that a pass reads and writes.
_BYTES = {
    "update_momentum": MOMENTUM_BYTES,
    "pack": PACK_BYTES + _WIRE_BYTES,
    "apply_update": APPLY_BYTES + _WIRE_BYTES,
}
_PASSES = (*_BYTES, "orthogonalize_stacks", "copy_rectangles")
_MOST_BATCH = 256


class Model:
    """Every parameter of a preset cut to some layers, whole on this device, with a gradient."""

    def __init__(
        self, preset: str, num_layers: int, device: torch.device, *, split_output_heads: bool
    ) -> None:
        self.preset, self.device = preset, device
        self.per_head = split_output_heads
        self.config = dataclasses.replace(getattr(presets, preset)(), num_layers=num_layers)
        self.layout = Layout(MeshConfig(), world_size=1, rank=0, device_type=device.type)
        torch.manual_seed(0)
        self.shards: list[ParameterShard] = []
        for placement, matrices in parameter_placements(
            self.config, split_output_heads=split_output_heads
        ):
            shape = placement.global_shape
            parameter = torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02))
            parameter.grad = torch.randn(shape, device=device)
            self.shards.append(
                ParameterShard(
                    layout=placement.on(self.layout),
                    parameter=parameter,
                    kind=placement.kind,
                    matrices=matrices,
                    weight_decay=len(shape) > 1,
                    placement=placement,
                )
            )

    def elements(self, *, muon: bool) -> int:
        """Of the parameters that Muon updates, or of the others."""
        return sum(s.local.numel() for s in self.shards if bool(s.matrices) is muon)

    def describe(self) -> dict[str, object]:
        """What muon_scale.py needs to plan the same step."""
        return {
            "preset": self.preset,
            "num_layers": self.config.num_layers,
            "muon_o_proj": "per_head" if self.per_head else "whole",
            "muon_parameters": self.elements(muon=True),
            "adamw_parameters": self.elements(muon=False),
            "matrices": sum(len(shard.matrices) for shard in self.shards),
        }

    def muon_config(self) -> OptimConfig:
        return OptimConfig(name="muon", muon_o_proj="per_head" if self.per_head else "whole")


Step = Callable[[], object]


def _ours(model: Model) -> Step:
    optimizer = build_optimizer(model.muon_config(), model.shards, model.layout)
    return lambda: optimizer.step(lr=LR)


def _adamw(model: Model) -> Step:
    optimizer = build_optimizer(OptimConfig(name="adamw"), model.shards, model.layout)
    return lambda: optimizer.step(lr=LR)


def _dion(model: Model, *, gram: bool = False) -> Step:
    import torch._dynamo
    from dion import Muon

    torch._dynamo.config.recompile_limit = 64  # it compiles its passes for each shape
    stacks = [_stacked(shard) for shard in model.shards if shard.matrices]
    rest = [shard.parameter for shard in model.shards if not shard.matrices]
    return Muon(
        [{"params": stacks}, {"params": rest, "algorithm": "adamw"}],
        lr=LR,
        mu=0.95,
        weight_decay=0.1,
        nesterov=True,
        adjust_lr="rms_norm",
        use_triton=model.device.type == "cuda",
        use_polar_express=False,
        use_gram_newton_schulz=gram,
    ).step


def _stacked(shard: ParameterShard) -> torch.nn.Parameter:
    """The parameter as the stack of equal matrices that dion takes: a view of the same storage, or
    a transposed copy where heads tile the columns, which costs it the same."""
    first, whole, gradient = shard.matrices[0], shard.local, shard.local_grad
    assert gradient is not None
    rows, columns = first.rows, first.columns
    if columns != whole.shape[-1]:
        whole, gradient, rows, columns = whole.mT, gradient.mT, columns, rows
    assert len(shard.matrices) * rows * columns == whole.numel(), shard.name
    parameter = torch.nn.Parameter(whole.reshape(-1, rows, columns))
    parameter.grad = gradient.reshape(-1, rows, columns)
    return parameter


OPTIMIZERS: dict[str, Callable[[Model], Step]] = {
    "ours": _ours,
    "adamw": _adamw,
    "dion": _dion,
    "dion_gram_quack": lambda model: _dion(model, gram=True),
}


def time_steps(name: str, model: Model) -> dict[str, float] | str:
    """Milliseconds a step and peak memory, or why the optimizer did not run."""
    needed = {"dion": ["dion"], "dion_gram_quack": ["dion", "gram_newton_schulz"]}.get(name, [])
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    _release(model.device)
    try:
        timing = benchmark(OPTIMIZERS[name](model), device=model.device, warmup=3)
    except Exception as error:
        if not needed:  # only a foreign package may fail
            raise
        return f"{type(error).__name__}: {str(error).strip()[:200]}"
    on_cuda = model.device.type == "cuda"
    peak_bytes = torch.cuda.max_memory_allocated(model.device) if on_cuda else 0
    return {
        "ms": timing.median_ms,
        "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms,
        "peak_gib": peak_bytes / 2**30,
    }


def pass_times(model: Model) -> dict[str, dict[str, float]]:
    """Milliseconds of each pass of our step, all its calls together, and the bytes it moves."""
    _release(model.device)
    optimizer = build_optimizer(model.muon_config(), model.shards, model.layout)
    assert isinstance(optimizer, muon.ShardedMuon)
    optimizer.step(lr=LR)
    clock = _Clock(model.device)
    with clock.around(muon, _PASSES), clock.around(AdamW, ("step",)):
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


class _Clock:
    """Times calls of named functions: between CUDA events on their stream, or on the wall."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, object, object]] = []

    @contextlib.contextmanager
    def around(self, owner: object, names: tuple[str, ...]) -> Iterator[None]:
        """Replaces functions of a module or class by timed ones while it is open."""
        originals = {name: getattr(owner, name) for name in names}
        for name, function in originals.items():
            setattr(owner, name, self._timed(name, function))
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(owner, name, function)

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

    def _timed(self, name: str, function: Callable) -> Callable:
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
    """Our Newton-Schulz of each shape of matrix of the model, as the optimizer calls it."""
    counts = collections.Counter(
        (matrix.rows, matrix.columns) for shard in model.shards for matrix in shard.matrices
    )
    dtype = torch.float16 if model.device.type == "cuda" else torch.float32
    rows = []
    for (m, n), count in sorted(counts.items()):
        x = torch.randn(min(count, _MOST_BATCH), m, n, device=model.device).to(dtype)
        timing = benchmark(lambda x=x: orthogonalize_grouped([x]), device=model.device, warmup=3)
        rows.append({"rows": m, "columns": n, "batch": len(x), "ms": timing.median_ms})
    return rows


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
