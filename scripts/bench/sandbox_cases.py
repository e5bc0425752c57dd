"""What scripts/bench/sandbox.py measures: one function for each operation."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from megacomposer.env.sandbox import SandboxBackend, SandboxSpec, Snapshot

REPOSITORY_FILES = 5000
FILE_BYTES = 8 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    backend: str
    operation: str
    repeats: int
    median_ms: float
    p95_ms: float
    per_s: float | None = None
    """Of whole sandboxes, where many ran at once."""

    @classmethod
    def of(cls, backend: str, operation: str, times_s: list[float]) -> Row:
        ordered = sorted(times_s)
        return cls(
            backend=backend,
            operation=operation,
            repeats=len(ordered),
            median_ms=round(statistics.median(ordered) * 1e3, 2),
            p95_ms=round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] * 1e3, 2),
        )

    def __str__(self) -> str:
        rate = f"{self.per_s:8.1f}/s" if self.per_s else ""
        return (
            f"{self.backend:<16}{self.operation:<28}{self.repeats:>7}{self.median_ms:>12.2f}"
            f"{self.p95_ms:>12.2f}  {rate}"
        )


def make_repository(root: Path) -> Path:
    """5,000 files in 50 directories, 40 MB that do not compress."""
    for index in range(REPOSITORY_FILES):
        directory = root / f"package{index % 50}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"module{index}.py").write_bytes(os.urandom(FILE_BYTES))
    return root


def machine() -> dict[str, Any]:
    bwrap = shutil.which("bwrap")
    version = (
        subprocess.run([bwrap, "--version"], capture_output=True, text=True) if bwrap else None
    )
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "bubblewrap": version.stdout.split()[-1] if version else None,
        "user": "root" if os.geteuid() == 0 else "unprivileged",
        "repository": f"{REPOSITORY_FILES} files of {FILE_BYTES} bytes",
    }


async def timed(action: Awaitable[Any]) -> float:
    start_s = time.perf_counter()
    await action
    return time.perf_counter() - start_s


def spawn_rows(repeats: int) -> Row:
    """The floor: a plain process of the host."""
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        times_s.append(time.perf_counter() - start_s)
    return Row.of("no sandbox", "spawn /bin/true", times_s)


async def backend_rows(name: str, backend: SandboxBackend, source: Path, repeats: int) -> list[Row]:
    """All operations of one sandbox at a time."""
    base = await backend.import_tree(str(source))
    times_s: dict[str, list[float]] = {}
    await (await backend.start(SandboxSpec(base=base))).close()  # the unpacked layer is there now
    for _ in range(repeats):
        await _measure_once(backend, base, times_s)
    return [Row.of(name, operation, values) for operation, values in times_s.items()]


async def _measure_once(
    backend: SandboxBackend, base: Snapshot, times_s: dict[str, list[float]]
) -> None:
    def note(operation: str, seconds: float) -> None:
        times_s.setdefault(operation, []).append(seconds)

    start_s = time.perf_counter()
    sandbox = await backend.start(SandboxSpec(base=base))
    note("start", time.perf_counter() - start_s)
    note("exec /bin/true", await timed(sandbox.exec(["/bin/true"])))
    note("exec /bin/true (again)", await timed(sandbox.exec(["/bin/true"])))
    note("read 8 KiB", await timed(sandbox.read_file("package7/module7.py")))
    note("write 8 KiB", await timed(sandbox.write_file("package7/new.py", os.urandom(8192))))
    await sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo $i > package$i/x; done"])
    start_s = time.perf_counter()
    snapshot = await sandbox.snapshot()
    note("snapshot (10 files)", time.perf_counter() - start_s)
    # A new state each time: else its layer would be unpacked already.
    await sandbox.write_file("package7/new.py", os.urandom(8192))
    start_s = time.perf_counter()
    child = await sandbox.fork()
    await child.exec(["/bin/ls", "package7/module7.py"])
    await child.close()
    note("fork + command + close", time.perf_counter() - start_s)
    note("restore", await timed(sandbox.restore(snapshot)))
    note("close", await timed(sandbox.close()))


async def throughput_row(
    name: str, backend: SandboxBackend, source: Path, count: int, concurrency: int
) -> Row:
    """`count` sandboxes, each started, used once and closed, `concurrency` at a time."""
    base = await backend.import_tree(str(source))
    times_s: list[float] = []

    async def work() -> None:
        for _ in iter(lambda: next(numbers, None), None):
            start_s = time.perf_counter()
            async with await backend.start(SandboxSpec(base=base)) as sandbox:
                await sandbox.exec(["/bin/true"])
            times_s.append(time.perf_counter() - start_s)

    numbers = iter(range(count))
    start_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    rate = round(count / (time.perf_counter() - start_s), 1)
    row = Row.of(name, f"start+exec+close, {concurrency} at once", times_s)
    return dataclasses.replace(row, per_s=rate)
