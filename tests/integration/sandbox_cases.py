"""Sandboxes of every backend, as root and as an ordinary user, for tests that attack them.

A `Host` is a process that holds a backend; `Box` is one of its sandboxes. The process imports all
that it needs, then becomes the user: an ordinary user may not be able to read the checkout. What
comes out of a box is searched for canaries that the host process has in its files, environment and
arguments: they must never be seen inside.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import ctypes
import functools
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backends import _load
from megacomposer.env.egress.policy import EgressPolicy
from megacomposer.env.egress.proxy import EgressProxy
from megacomposer.env.egress.tls import CertificateAuthority
from megacomposer.env.sandbox import ExecResult, SandboxError, SandboxSpec, Snapshot

USER_ID = 65534
COMBINATIONS = [f"{name}-{user}" for name in ("bubblewrap", "gvisor") for user in ("root", "user")]
CANARY = f"canary{uuid.uuid4().hex}"
"""In the host's files and environment; the end of it is what is searched for."""
PROBE = "/tmp/probe"
"""Where `Box.probe` has put escape_probe.cpp, compiled."""
_PROBE_SOURCE = Path(__file__).with_name("escape_probe.cpp")
_SANDBOX, _NOTHING = "sandbox", "nothing"
_ANSWER_TIMEOUT_S = 100.0
"""Longer than any command of a test: a backend that hangs fails, and does not hang the tests."""


class Box:
    """One sandbox; its methods are those of `Sandbox`, without `await`."""

    def __init__(self, host: Host, number: int, name: str) -> None:
        self.host, self.number, self.id = host, number, name

    def exec(self, argv: list[str], **options: Any) -> ExecResult:
        result: ExecResult = self.start_exec(argv, **options).result(_ANSWER_TIMEOUT_S)
        return self.host.searched(result)

    def sh(self, script: str, **options: Any) -> ExecResult:
        return self.exec(["sh", "-c", script], **options)

    def start_exec(self, argv: list[str], **options: Any) -> concurrent.futures.Future[Any]:
        return self.host.submit("call", self.number, "exec", (argv,), options)

    def probe(self, *words: str, **options: Any) -> list[list[str]]:
        """The lines, in words, of the probe; it must end by itself."""
        if not self.exec(["test", "-x", PROBE]).ok:
            self.call("write_file", PROBE, compiled_probe(), mode=0o755)
        result = self.exec([PROBE, *words], **options)
        assert result.ok, result
        return [line.split() for line in result.stdout.decode().splitlines()]

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """`read_file`, `fork` and so on."""
        result = self.host.submit("call", self.number, method, arguments, options).result(
            _ANSWER_TIMEOUT_S
        )
        if isinstance(result, bytes):
            assert CANARY[6:].encode() not in result
        return result

    def close(self) -> None:
        self.call("close")


class Host:
    """A process with one backend, as one user."""

    def __init__(self, combination: str) -> None:
        self.combination = combination
        self.backend, _, self.user = combination.partition("-")
        self.directory = Path(tempfile.mkdtemp(prefix="cases-", dir="/tmp"))
        owner = USER_ID if self.user == "user" and os.geteuid() == 0 else os.geteuid()
        os.chown(self.directory, owner, owner)
        (self.directory / "secret").write_text(CANARY)
        (self.directory / "secret").chmod(0o644)
        self._lock = threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._process = subprocess.Popen(
            # The canary is an argument too.
            [sys.executable, __file__, self.backend, str(owner), str(self.directory), CANARY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HOST_SECRET": CANARY, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.pid = self._process.pid
        self.why_not: str = self.submit("open").result(_ANSWER_TIMEOUT_S)
        """Why this combination cannot run here; "" where it can."""

    def submit(self, *request: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            number = len(self._waiting)
            self._waiting[number] = future
            assert self._process.stdin is not None
            _write(self._process.stdin, (number, *request))
        return future

    def start(self, **fields: Any) -> Box:
        box: Box = self.submit("start", SandboxSpec(**fields)).result(_ANSWER_TIMEOUT_S)
        return box

    @contextlib.contextmanager
    def box(self, **fields: Any) -> Iterator[Box]:
        """A sandbox of its own for one test, and the check that nothing of it is left."""
        before = self.descendants()
        box = self.start(**fields)
        try:
            yield box
        finally:
            box.close()
        left = self.descendants() - before
        assert not left, f"processes are left: {left}"

    def events(self, kind: str, box: Box | None = None) -> list[dict[str, Any]]:
        """What the audit log has of a kind."""
        found = self.submit("events").result(_ANSWER_TIMEOUT_S)
        return [e for e in found if e["kind"] == kind and (box is None or e["sandbox"] == box.id)]

    def import_tree(self, workspace: Path) -> Snapshot:
        snapshot: Snapshot = self.submit("backend_call", "import_tree", (str(workspace),)).result(
            _ANSWER_TIMEOUT_S
        )
        return snapshot

    def descendants(self) -> set[int]:
        """Processes below the host process; it adopts those whose parent died."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit():
                    fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    if fields[0] not in "ZX":
                        parents[int(name)] = int(fields[1])
        found: set[int] = set()
        while more := {p for p, up in parents.items() if up in found | {self.pid}} - found:
            found |= more
        return found

    def searched(self, result: ExecResult) -> ExecResult:
        for stream in (result.stdout, result.stderr):
            assert CANARY[6:].encode() not in stream, "the canary was seen inside"
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self.directory)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (answer := _read(self._process.stdout)) is not None:
            number, kind, value = answer
            future = self._waiting[number]
            if kind == "error":
                future.set_exception(_rebuilt(*value))
            else:
                future.set_result(Box(self, *value) if kind == _SANDBOX else value)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RuntimeError("the host process died"))


@functools.cache
def compiled_probe() -> bytes:
    """The program escape_probe.cpp."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "probe"
        command = ["g++", "-O1", "-std=c++17", "-static", "-pthread", "-o", str(target)]
        subprocess.run([*command, str(_PROBE_SOURCE)], check=True)
        return target.read_bytes()


# The host process --------------------------------------------------------------------------------


def _write(file: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def _read(file: BinaryIO) -> Any:
    header = file.read(8)
    return pickle.loads(file.read(struct.unpack("<Q", header)[0])) if len(header) == 8 else None


def _rebuilt(kind: type[BaseException], arguments: Any, fields: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class _Server:
    """Answers requests with a backend's methods; each is a task of its own."""

    def __init__(self, backend: str, directory: Path) -> None:
        self._name, self._directory = backend, directory
        self._log = AuditLog()
        self._sandboxes: list[Any] = []
        self._proxies: list[EgressProxy] = []
        self._backend: Any = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = set()
        while (request := await loop.run_in_executor(None, _read, sys.stdin.buffer)) is not None:
            task = asyncio.create_task(self._answer(*request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if self._backend:
            await self._backend.close()
        for proxy in self._proxies:
            await proxy.close()

    async def _answer(self, number: int, name: str, *arguments: Any) -> None:
        try:
            kind, value = await getattr(self, f"_{name}")(*arguments)
        except (ValueError, AssertionError, OSError, SandboxError) as error:
            kind, value = "error", (type(error), error.args, vars(error))
        _write(sys.stdout.buffer, (number, kind, value))

    async def _open(self) -> tuple[str, Any]:
        module, kind = _load(self._name)
        reason = await module.probe()
        if not reason:
            self._backend = kind(LayerStore(self._directory / "store"), record=self._log.record)
        return _NOTHING, reason

    async def _start(self, spec: SandboxSpec) -> tuple[str, Any]:
        return self._known(await self._backend.start(spec))

    async def _start_of_file(self, file: str) -> tuple[str, Any]:
        digest = await self._backend.import_layer(file)
        return await self._start(SandboxSpec(base=Snapshot(layers=(digest,))))

    async def _call(
        self, number: int, method: str, arguments: Any, options: Any
    ) -> tuple[str, Any]:
        result = await getattr(self._sandboxes[number], method)(*arguments, **options)
        return self._known(result) if method == "fork" else (_NOTHING, result)

    async def _backend_call(self, method: str, arguments: Any) -> tuple[str, Any]:
        return _NOTHING, await getattr(self._backend, method)(*arguments)

    async def _events(self) -> tuple[str, Any]:
        return _NOTHING, self._log.events

    async def _proxy(self, rules: Any) -> tuple[str, Any]:
        """Starts an egress proxy; its socket."""
        socket = self._directory / f"egress{len(self._proxies)}.sock"
        proxy = EgressProxy(EgressPolicy(rules), socket, record=self._log.record)
        await proxy.start()
        self._proxies.append(proxy)
        return _NOTHING, str(socket)

    def _known(self, sandbox: Any) -> tuple[str, Any]:
        self._sandboxes.append(sandbox)
        return _SANDBOX, (len(self._sandboxes) - 1, sandbox.id)


def _copy_programs(directory: Path) -> None:
    """To where the user can reach them, as they would be in an installed package."""
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("megacomposer.env"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, Path) and value.parent.name == "env" and value.is_file():
                shutil.copy(value, directory / value.name)
                setattr(module, name, directory / value.name)


def _serve(backend: str, user: int, directory: Path) -> None:
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # a child subreaper
    _load(backend)
    # What these import when they are used may be out of the user's reach.
    CertificateAuthority()
    programs = directory / "programs"
    programs.mkdir()
    _copy_programs(programs)
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(directory)
    tempfile.tempdir = str(directory)
    asyncio.run(_Server(backend, directory).run())


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
