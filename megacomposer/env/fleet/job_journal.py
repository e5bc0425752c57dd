"""The journal of an executor: results that are safe on disk, one JSON object a line."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import msgspec

from megacomposer.env.fleet.job import Job, JobResult, Outcome

_FINAL = (Outcome.DONE, Outcome.FAILED, Outcome.TIMEOUT)
"""What a restarted executor does not run again."""


class JobJournal:
    """Results of earlier and present runs. One executor at a time has it open.

    Raises ValueError where the file is damaged, or in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, JobResult] = {}
        """Final results by job."""
        self._fingerprints: dict[str, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._load()
        except ValueError:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"journal {self.path} is in use by another executor") from None

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # the process died in the middle of a line: that job runs again
            os.ftruncate(self._fd, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                fingerprint = entry.pop("job")
                result = msgspec.convert(entry, JobResult)
            except (ValueError, KeyError, AttributeError, msgspec.ValidationError) as error:
                raise ValueError(f"journal {self.path}, line {number}: {error}") from error
            if result.outcome in _FINAL:
                self.results.setdefault(result.id, result)
                self._fingerprints.setdefault(result.id, fingerprint)

    def has(self, job: Job) -> bool:
        """Is there a final result? ValueError where it is of another job with the same id."""
        known = self._fingerprints.get(job.id)
        if known is not None and known != job.fingerprint():
            raise ValueError(
                f"journal {self.path} has a result of job {job.id!r} with another function or "
                "other arguments; give the job another id, or start with a new journal"
            )
        return known is not None

    def append(self, job: Job, result: JobResult) -> None:
        """Returns when the result is on the disk. Raises OSError."""
        entry = {"job": job.fingerprint(), **msgspec.to_builtins(result)}
        line = json.dumps(entry).encode() + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"journal {self.path}: only {written} of {len(line)} bytes were written")
        os.fsync(self._fd)
        if result.outcome in _FINAL:
            self.results[job.id] = result
            self._fingerprints[job.id] = entry["job"]

    def close(self) -> None:
        os.close(self._fd)
