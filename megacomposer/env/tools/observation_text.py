"""Making what a tool found into text of a bounded size, with what was left out said in it."""

from __future__ import annotations

from megacomposer.env.sandbox import ExecResult, Limits, Status

OBSERVATION_BYTES = 24_000
"""The default of what one answer may hold."""
_NOTE_BYTES = 120


def clip_middle(text: str, max_bytes: int) -> str:
    """The head and the tail, on whole lines where there are any, and a count of what is gone."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    room = max(0, max_bytes - _NOTE_BYTES)
    head = data[: room * 2 // 5]
    tail = data[len(data) - (room - len(head)) :]
    # A cut at a line's end, unless that would cost most of the part.
    end = head.rfind(b"\n") + 1
    head = head[:end] if end > len(head) // 2 else head
    start = tail.find(b"\n") + 1
    tail = tail[start:] if 0 < start < len(tail) // 2 else tail
    gone = data[len(head) : len(data) - len(tail)]
    lines = gone.count(b"\n")
    note = f"[... {len(gone)} bytes, {lines} lines left out ...]"
    before = head.decode("utf-8", "ignore")
    separator = "" if before.endswith("\n") or not before else "\n"
    return f"{before}{separator}{note}\n{tail.decode('utf-8', 'ignore')}"


def clip_end(text: str, max_bytes: int) -> str:
    """The head, and a count of what is gone."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    kept = data[: max(0, max_bytes - _NOTE_BYTES)].decode("utf-8", "ignore")
    return f"{kept}\n[... {len(data) - len(kept.encode())} more bytes left out]"


def clip_start(text: str, max_bytes: int) -> str:
    """The tail, and a count of what is gone."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    kept = data[len(data) - max(0, max_bytes - _NOTE_BYTES) :].decode("utf-8", "ignore")
    return f"[... {len(data) - len(kept.encode())} bytes left out]\n{kept}"


def ending(result: ExecResult, timeout_s: float, limits: Limits) -> str:
    """How a command ended, as a sentence; "" where it exited by itself."""
    if result.status is Status.TIMEOUT:
        return f"Killed after {timeout_s:g} s with everything that it started."
    if result.status is Status.MEMORY_LIMIT:
        return f"Killed: more memory than the sandbox's {limits.memory_bytes >> 20} MiB."
    if result.status is Status.OUTPUT_LIMIT:
        return f"Killed: it wrote more than {limits.output_bytes} bytes."
    if result.status is Status.SIGNALED:
        return f"Ended by signal {result.exit_code - 128}."
    return ""
