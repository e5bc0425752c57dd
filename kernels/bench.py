"""Benchmark harness: one way to time, compare and report a kernel.

On CUDA a timing is the median over >= 30 runs between events, each run after the L2 cache has been
overwritten, after a warm-up that also compiles and autotunes. On the CPU it is the median wall
time, and labelled so. Rates are compared with peaks measured in the same process, never with a data
sheet. Runs follow each other without a pause, so matrix products of a second in all run at the
clocks that the GPU's power allows in training; the peak is of a few products, at higher ones.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import triton

MIN_REPEATS = 30
# More than twice the 60 MB of an H200, and not so much that writing it dominates a run.
_FLUSH_BYTES = 256 * 2**20
# Calls between two rests: few enough for the clocks to stay up, and most of them with a busy queue.
_CALLS_A_REST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured callable."""

    median_ms: float
    """Milliseconds a call, median."""
    p20_ms: float
    """Milliseconds a call, 20th percentile."""
    p80_ms: float
    """Milliseconds a call, 80th percentile."""
    repeats: int
    """Timed calls."""
    clock: Literal["cuda_events", "cuda_graph", "cpu_wall"]
    """What measured it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a report."""

    op: str
    """Op and pass, such as `rms_norm fwd`."""
    implementation: str
    """`ours` or the peer's name."""
    shape: tuple[int, ...]
    """Shape of the main operand."""
    dtype: str
    """Its dtype, without `torch.`."""
    timing: Timing
    """The measurement."""
    bytes_moved: int | None = None
    """Least bytes that the op must read and write; set for a memory-bound op."""
    flops: int | None = None
    """Floating-point operations of the op; set for a compute-bound one."""
    error: float | None = None
    """`relative_error` against float64."""

    def __post_init__(self) -> None:
        if (self.bytes_moved is None) == (self.flops is None):
            raise ValueError("Row: set exactly one of bytes_moved and flops")


def benchmark(
    fn: Callable[[], object],
    *,
    device: torch.device,
    warmup: int = 10,
    repeats: int = MIN_REPEATS,
    cuda_graph: bool = False,
    rest_s: float = 0.0,
) -> Timing:
    """Time `fn()` on `device`; repeats >= 30.

    rest_s: on a GPU, sleep so long before every fifth call, for clocks as a short run sees them.
    cuda_graph: capture one call and time its replays, which leaves launch overhead out; `fn` must
    not synchronise. Raises ValueError for repeats < 30, or a CUDA graph on the CPU.
    """
    if repeats < MIN_REPEATS:
        raise ValueError(f"benchmark: repeats must be at least {MIN_REPEATS}, got {repeats}")
    if device.type != "cuda":
        if cuda_graph:
            raise ValueError("benchmark: cuda_graph needs a CUDA device")
        for _ in range(warmup):
            fn()
        return _timing([_wall_ms(fn) for _ in range(repeats)], "cpu_wall")
    for _ in range(warmup):
        fn()
    torch.cuda.synchronize(device)
    run = _captured(fn) if cuda_graph else fn
    times = _event_times_ms(run, device, repeats, rest_s)
    return _timing(times, "cuda_graph" if cuda_graph else "cuda_events")


@functools.cache
def measured_copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a device-local copy far larger than any cache."""
    count = 2**30 if device.type == "cuda" else 2**26
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    timing = benchmark(lambda: target.copy_(source), device=device, warmup=3)
    return 2 * count / (timing.median_ms * 1e-3)


@functools.cache
def measured_bf16_tflops(device: torch.device, *, sustained: bool = False) -> float:
    """TFLOP/s of a large square bf16 matrix product on random data: of a few after a rest, or after
    a second of them."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    warmup = 5
    if device.type == "cuda":
        if sustained:
            warmup = 600
        else:
            torch.cuda.synchronize(device)
            time.sleep(0.5)
    timing = benchmark(lambda: a @ b, device=device, warmup=warmup)
    return 2 * size**3 / (timing.median_ms * 1e-3) / 1e12


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64; expected is usually a float64 reference."""
    expected = expected.detach().double()
    difference = actual.detach().double() - expected
    return float(difference.norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def environment(device: torch.device) -> dict[str, str]:
    """The device and versions that a result belongs to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
    }


def report(
    rows: list[Row], *, device: torch.device, ours: str = "ours", json_path: Path | None = None
) -> None:
    """Print `rows` as a table, and append each to `json_path` as one JSON object a line.

    `x best peer` is the best peer's time over this row's, among rows of one op, shape and dtype:
    above 1 is faster than every peer. Peers are all rows not named `ours`.
    """
    versions = environment(device)
    print(" ".join(f"{key}={value}" for key, value in versions.items()))
    bandwidth, tflops = measured_copy_bandwidth(device), measured_bf16_tflops(device)
    sustained = measured_bf16_tflops(device, sustained=True)
    print(
        f"measured peaks: copy {bandwidth / 1e9:.0f} GB/s, bf16 matmul {tflops:.1f} TFLOP/s"
        f" ({sustained:.1f} after a second of it)"
    )
    print("op | implementation | shape | dtype | ms | rate | % of peak | x best peer | error")
    for row in rows:
        record = _record(row, rows, ours, bandwidth, tflops)
        record["dense_tflops"], record["dense_sustained_tflops"] = tflops, sustained
        print(_line(record))
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            with json_path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record | versions) + "\n")


def _record(
    row: Row, rows: list[Row], ours: str, bandwidth: float, tflops: float
) -> dict[str, object]:
    seconds = row.timing.median_ms * 1e-3
    if row.bytes_moved is not None:
        rate, unit, peak = row.bytes_moved / seconds / 1e9, "GB/s", bandwidth / 1e9
    else:
        assert row.flops is not None
        rate, unit, peak = row.flops / seconds / 1e12, "TFLOP/s", tflops
    key = (row.op, row.shape, row.dtype)
    peers = [
        other.timing.median_ms
        for other in rows
        if (other.op, other.shape, other.dtype) == key
        and other.implementation not in (ours, row.implementation)
    ]
    return {
        "op": row.op,
        "implementation": row.implementation,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "ms": row.timing.median_ms,
        "p20_ms": row.timing.p20_ms,
        "p80_ms": row.timing.p80_ms,
        "repeats": row.timing.repeats,
        "clock": row.timing.clock,
        "rate": rate,
        "rate_unit": unit,
        "peak_frac": rate / peak,
        "x_best_peer": min(peers) / row.timing.median_ms if peers else None,
        "error": row.error,
    }


def _line(record: dict[str, object]) -> str:
    def number(name: str, form: str) -> str:
        value = record[name]
        return "-" if value is None else format(value, form)

    shape = record["shape"]
    assert isinstance(shape, list)
    clock = "" if record["clock"] == "cuda_events" else f" ({record['clock']})"
    return " | ".join(
        [
            str(record["op"]),
            str(record["implementation"]),
            "x".join(map(str, shape)),
            str(record["dtype"]),
            number("ms", ".4f") + clock,
            f"{number('rate', '.1f')} {record['rate_unit']}",
            number("peak_frac", ".1%"),
            number("x_best_peer", ".2f"),
            number("error", ".2e"),
        ]
    )


def _event_times_ms(
    run: Callable[[], object], device: torch.device, repeats: int, rest_s: float
) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for call, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if rest_s > 0 and call % _CALLS_A_REST == 0:
            torch.cuda.synchronize(device)
            time.sleep(rest_s)
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def _captured(fn: Callable[[], object]) -> Callable[[], object]:
    # Capture wants its warm-up on the side stream it will use.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def _wall_ms(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3


def _timing(
    times_ms: list[float], clock: Literal["cuda_events", "cuda_graph", "cpu_wall"]
) -> Timing:
    quintiles = statistics.quantiles(times_ms, n=5)
    return Timing(
        median_ms=statistics.median(times_ms),
        p20_ms=quintiles[0],
        p80_ms=quintiles[3],
        repeats=len(times_ms),
        clock=clock,
    )
