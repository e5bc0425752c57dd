"""How the agent starts commands, and that nothing of them is left, on a real agent."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from agent_process import ENV, agent, is_running, shell, with_agent
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.sandbox import SandboxClosedError, SandboxFileError, Status


def test_outputs_of_parallel_commands_are_not_mixed() -> None:
    async def test(link: AgentLink) -> None:
        count = 4000
        scripts = [f"yes {i} | head -{count}; echo {i} >&2" for i in range(20)]
        results = await asyncio.gather(*(shell(link, script) for script in scripts))
        for i, result in enumerate(results):
            assert result.ok
            assert result.stdout == f"{i}\n".encode() * count
            assert result.stderr == f"{i}\n".encode()

    with_agent(test)


def test_output_is_streamed_in_order_and_complete() -> None:
    async def test(link: AgentLink) -> None:
        seen: list[tuple[str, bytes]] = []
        result = await shell(
            link, "seq 50000; echo end >&2", on_output=lambda *chunk: seen.append(chunk)
        )
        assert b"".join(data for name, data in seen if name == "stdout") == result.stdout
        assert b"".join(data for name, data in seen if name == "stderr") == b"end\n"
        assert result.stdout.split() == [str(i).encode() for i in range(1, 50001)]

    with_agent(test)


def test_an_error_of_the_output_callback_ends_the_command_and_not_the_link() -> None:
    def fail(stream: str, data: bytes) -> None:
        raise KeyError(data)

    async def test(link: AgentLink) -> None:
        with pytest.raises(KeyError):
            await shell(link, "echo $$; exec sleep 1000", on_output=fail)
        assert (await shell(link, "echo on")).stdout == b"on\n"

    with_agent(test)


def test_standard_input_of_any_size_arrives_whole() -> None:
    data = random.Random(1).randbytes(3_000_001)

    async def test(link: AgentLink) -> None:
        assert (await shell(link, "cat", stdin=data)).stdout == data

    with_agent(test)


def test_a_command_that_does_not_read_its_input_does_not_block_others() -> None:
    async def test(link: AgentLink) -> None:
        slow = asyncio.create_task(shell(link, "sleep 1000", stdin=b"x" * 5_000_000))
        closed = await shell(link, "exec <&-; echo closed", stdin=b"x" * 5_000_000)
        assert closed.stdout == b"closed\n"
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    with_agent(test)


def test_a_command_without_input_sees_its_end_at_once() -> None:
    async def test(link: AgentLink) -> None:
        result = await shell(link, "read line; echo $?; test -t 0 || echo no terminal")
        assert result.stdout == b"1\nno terminal\n"

    with_agent(test)


def test_commands_inherit_no_descriptor_signal_mask_or_environment() -> None:
    async def test(link: AgentLink) -> None:
        script = (
            "env; ls -l /proc/self/fd | wc -l; grep -E 'Sig(Blk|Ign)' /proc/self/status; ulimit -c"
        )
        result = await shell(link, script)
        assert b"canary" not in result.stdout
        lines = result.stdout.decode().split("\n")
        # "total", 0, 1, 2, and the one that ls opens
        assert lines[-5:] == ["5", f"SigBlk:\t{0:016x}", f"SigIgn:\t{0:016x}", "0", ""]

    with_agent(test)


@pytest.mark.parametrize(
    ("argv", "cwd", "named", "code"),
    [
        (["no-such-program"], "/", "no-such-program", "ENOENT"),
        (["/etc/passwd"], "/", "/etc/passwd", "EACCES"),
        (["true"], "/no/such", "/no/such", "ENOENT"),
        (["true"], "/etc/passwd", "/etc/passwd", "ENOTDIR"),
        (["true", "x" * 1_000_000], "/", "true", "E2BIG"),
        (["true", "x" * 100_000_000], "/", "true", "E2BIG"),
    ],
)
def test_a_command_that_cannot_start_names_what_is_missing(
    argv: list[str], cwd: str, named: str, code: str
) -> None:
    async def test(link: AgentLink) -> None:
        with pytest.raises(SandboxFileError) as caught:
            await link.exec(argv, cwd=cwd, env=ENV, stdin=b"", timeout_s=10, output_bytes=1000)
        assert (caught.value.path, caught.value.code) == (named, code)

    with_agent(test)


def test_programs_are_looked_up_in_the_path_of_the_command(tmp_path: Path) -> None:
    program = tmp_path / "only-here"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)

    async def test(link: AgentLink) -> None:
        env = {"PATH": f"{tmp_path}:/bin"}
        result = await link.exec(
            ["only-here"], cwd="/", env=env, stdin=b"", timeout_s=10, output_bytes=1000
        )
        assert result.stdout == b"found\n"

    with_agent(test)


def test_exit_codes_and_signals_are_told_apart() -> None:
    async def test(link: AgentLink) -> None:
        exited = await shell(link, "exit 137")
        assert (exited.status, exited.exit_code) == (Status.EXITED, 137)
        signaled = await shell(link, "kill -SEGV $$")
        assert (signaled.status, signaled.exit_code) == (Status.SIGNALED, 128 + signal.SIGSEGV)

    with_agent(test)


# Ends --------------------------------------------------------------------------------------------

_ESCAPES = """
trap '' TERM HUP INT
echo partial
echo $$ >>{pids}
setsid sh -c 'echo $$ >>{pids}; trap "" TERM; sleep 1000 & echo $! >>{pids}; wait' &
(setsid sh -c 'setsid sh -c "echo \\$\\$ >>{pids}; exec sleep 1000" &' &)
sh -c 'sh -c "nohup sleep 1000 >/dev/null 2>&1 & echo \\$! >>{pids}"'
touch {pids}.ready
while :; do sleep 1; done
"""


def test_a_timeout_ends_daemons_sessions_and_double_forks_and_keeps_the_output(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pids"

    async def test(link: AgentLink) -> None:
        result = await shell(link, _ESCAPES.format(pids=pids), timeout_s=2.0)
        assert (result.status, result.exit_code) == (Status.TIMEOUT, 137)
        assert result.stdout == b"partial\n"

    with_agent(test)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 5
    assert [pid for pid in started if is_running(pid)] == []


def test_too_much_output_ends_the_command_and_keeps_the_first_bytes() -> None:
    async def test(link: AgentLink) -> None:
        result = await shell(link, "seq 100000000", output_bytes=100_000)
        assert (result.status, result.exit_code) == (Status.OUTPUT_LIMIT, 137)
        assert len(result.stdout) == 100_000
        assert result.stdout.startswith(b"1\n2\n3\n")

    with_agent(test)


def test_a_cancelled_command_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def test(link: AgentLink) -> None:
        task = asyncio.create_task(shell(link, _ESCAPES.format(pids=pids)))
        while not Path(f"{pids}.ready").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while any(is_running(int(line)) for line in pids.read_text().split()):
            await asyncio.sleep(0.02)
        assert (await shell(link, "echo on")).ok

    with_agent(test)


def test_background_processes_neither_hold_the_command_nor_lose_their_pipe(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    script = f"(sleep 0.6; echo late && echo yes >{alive}; sleep 1000) & echo $!"

    async def test(link: AgentLink) -> None:
        result = await shell(link, script)
        assert result.ok
        assert b"late" not in result.stdout
        while not alive.exists():
            await asyncio.sleep(0.02)
        assert alive.read_text() == "yes\n"
        assert is_running(int(result.stdout))
        await link.kill_all()
        assert not is_running(int(result.stdout))

    with_agent(test)


def test_a_timeout_spares_the_background_processes_of_other_commands() -> None:
    async def test(link: AgentLink) -> None:
        server = int((await shell(link, "setsid sleep 1000 >/dev/null 2>&1 & echo $!")).stdout)
        assert (await shell(link, "sleep 1000", timeout_s=0.3)).status is Status.TIMEOUT
        assert is_running(server)

    with_agent(test)


def test_a_command_that_kills_its_keeper_loses_everything_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sleep 1000 & echo $! >>{pids}; kill -9 $PPID; exec sleep 1000"

    async def test(link: AgentLink) -> None:
        result = await shell(link, script)
        assert (result.status, result.exit_code) == (Status.SIGNALED, 137)
        assert not is_running(int(pids.read_text()))

    with_agent(test)


def test_a_command_that_stops_its_keeper_still_times_out() -> None:
    async def test(link: AgentLink) -> None:
        result = await shell(link, "kill -STOP $PPID; exec sleep 1000", timeout_s=0.5)
        assert result.status is Status.TIMEOUT

    with_agent(test)


def test_orphans_are_reaped() -> None:
    async def test(link: AgentLink) -> None:
        await shell(link, "for i in $(seq 300); do (true &) ; done; setsid sleep 1000 &")
        while (await link.stats()).threads != 2:  # the sleep, and its keeper
            await asyncio.sleep(0.02)

    with_agent(test)


def test_the_end_of_the_stream_kills_all_and_ends_the_agent(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def run() -> None:
        async with agent() as (link, _):
            task = asyncio.create_task(shell(link, _ESCAPES.format(pids=pids)))
            while not Path(f"{pids}.ready").exists():
                await asyncio.sleep(0.02)
        with pytest.raises(SandboxClosedError):
            await task

    asyncio.run(run())
    assert not any(is_running(int(line)) for line in pids.read_text().split())


def test_commands_end_with_an_agent_that_was_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def run() -> None:
        async with agent() as (link, process):
            task = asyncio.create_task(shell(link, _ESCAPES.format(pids=pids)))
            while not Path(f"{pids}.ready").exists():
                await asyncio.sleep(0.02)
            process.kill()
            with pytest.raises(SandboxClosedError, match="gone"):
                await task
            with pytest.raises(SandboxClosedError):
                await link.stats()
            while any(is_running(int(line)) for line in pids.read_text().split()):
                await asyncio.sleep(0.02)

    asyncio.run(run())


def test_nothing_is_written_between_pause_and_resume(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    script = f"setsid sh -c 'while :; do echo x >>{counter}; done' & sleep 1000"

    async def test(link: AgentLink) -> None:
        task = asyncio.create_task(shell(link, script))
        while not counter.exists():
            await asyncio.sleep(0.02)
        await link.pause()
        size = counter.stat().st_size
        await asyncio.sleep(0.2)
        assert counter.stat().st_size == size
        await link.resume()
        while counter.stat().st_size == size:
            await asyncio.sleep(0.02)
        await link.kill_all()
        assert (await task).exit_code == 137

    with_agent(test)


def test_statistics_count_threads_and_memory() -> None:
    async def test(link: AgentLink) -> None:
        await shell(link, "sleep 1000 & sleep 1000 & true")
        seen = await link.stats()
        assert seen.threads == 3  # two, and the keeper
        assert seen.memory_bytes > 0

    with_agent(test)
