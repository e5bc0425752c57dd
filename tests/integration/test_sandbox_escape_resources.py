"""Quotas hold, the host and the neighbours go on, nothing is left: E6-E8, E10, E11, E13."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacomposer.env.sandbox import Limits, SandboxClosedError, Status
from sandbox_cases import PROBE, Box, Host, compiled_probe

MIB = 1 << 20


def limit_fields(box: Box) -> list[str]:
    return [event["field"] for event in box.host.events("limit", box)]


def used_bytes(directory: Path) -> int:
    """Of files that the host can see."""
    files = [Path(top) / name for top, _, names in os.walk(directory) for name in names]
    return sum(file.lstat().st_blocks * 512 for file in files if file.exists())


def install_probe(box: Box) -> None:
    box.call("write_file", PROBE, compiled_probe(), mode=0o755)


def test_a_fork_bomb_stops_at_the_quota_and_goes_with_the_sandbox(host: Host, box: Box) -> None:
    # `Host.box` sees that no process is left.
    with host.box(limits=Limits(processes=64)) as bombed:
        bomb = bombed.start_exec(["bash", "-c", ":(){ :|:& };:; sleep 60"], timeout_s=1.5)
        assert box.sh("echo neighbour").stdout == b"neighbour\n"
        assert len(host.descendants()) < 400
        result = host.searched(bomb.result())
        assert result.status in (Status.TIMEOUT, Status.EXITED)
        assert box.sh("echo neighbour").stdout == b"neighbour\n"


def test_a_fork_bomb_that_timed_out_leaves_a_usable_sandbox(host: Host) -> None:
    with host.box(limits=Limits(processes=64)) as box:
        # The leader waits: the bomb is killed with it, not left in the background.
        result = box.exec(["bash", "-c", "f(){ f|f& f; }; f"], timeout_s=1.5)
        assert result.status is Status.TIMEOUT
        assert limit_fields(box) == ["timeout_s"]
        assert box.sh("echo on").stdout == b"on\n"


def test_zombies_stop_at_the_quota_and_are_reaped(host: Host) -> None:
    with host.box(limits=Limits(processes=64)) as box:
        ((_, made, error),) = box.probe("zombies", "10000")
        assert (int(made) < 64, error) == (True, "EAGAIN")
        assert box.sh("echo on").stdout == b"on\n"


def test_ten_thousand_orphans_are_reaped(host: Host) -> None:
    count = 10_000 if host.backend == "bubblewrap" else 300  # gVisor forks slowly
    with host.box() as box:
        ((_, made, error),) = box.probe("orphans", str(count))
        assert (int(made), error) == (count, "ok")
        while box.call("stats").processes > 2:  # the agent may be counted
            pass


def test_a_memory_bomb_is_killed_alone_and_called_so(host: Host, box: Box) -> None:
    with host.box(limits=Limits(memory_bytes=200 * MIB)) as bombed:
        install_probe(bombed)
        result = bombed.exec([PROBE, "memory", str(1000 * MIB)], timeout_s=60)
        if bombed.host.events("sandbox_started", bombed)[0]["enforced"]["memory_bytes"] == "rlimit":
            # Each process alone is held to it.
            word, used, error = result.stdout.decode().split()
            assert (word, error) == ("stopped", "ENOMEM")
            assert int(used) <= 200 * MIB
        elif result.status is Status.EXITED:  # told in time, as gVisor does for one process
            word, used, error = result.stdout.decode().split()
            assert (host.backend, word, error) == ("gvisor", "stopped", "ENOMEM")
        else:
            assert (result.status, result.exit_code) == (Status.MEMORY_LIMIT, 137)
            assert limit_fields(bombed) == ["memory_bytes"]
    assert box.sh("echo neighbour").stdout == b"neighbour\n"


def test_memory_of_many_processes_counts_together(host: Host, box: Box) -> None:
    with host.box(limits=Limits(memory_bytes=200 * MIB)) as bombed:
        how = host.events("sandbox_started", bombed)[0]["enforced"]["memory_bytes"]
        if how == "rlimit":
            pytest.skip(f"{host.combination}: memory of each process alone is limited ({how})")
        install_probe(bombed)
        one = f"{PROBE} memory {100 * MIB}"
        result = bombed.sh(f"({one}) & ({one}) & ({one}) & ({one}) & wait; exit 137", timeout_s=60)
        assert result.exit_code == 137
        if result.status is Status.EXITED:  # told in time, as gVisor does
            ends = [line.split() for line in result.stdout.decode().splitlines()]
            used = [int(end[1]) if end[0] == "stopped" else 100 * MIB for end in ends]
            assert (host.backend, len(used)) == ("gvisor", 4)
            assert sum(used) <= 200 * MIB
        else:
            assert result.status is Status.MEMORY_LIMIT
            assert limit_fields(bombed) == ["memory_bytes"]
    assert box.sh("echo neighbour").stdout == b"neighbour\n"


def test_a_full_disk_is_the_sandboxs_own(host: Host) -> None:
    before = used_bytes(host.directory)
    with host.box(limits=Limits(disk_bytes=64 * MIB, memory_bytes=300 * MIB)) as box:
        install_probe(box)
        for place in ("/workspace", "/home/agent", "/tmp", "/dev/shm"):
            result = box.exec([PROBE, "fill", f"{place}/big", str(2000 * MIB)], timeout_s=60)
            assert result.ok, result
            _, wrote, error = result.stdout.decode().split()
            assert error in ("ENOSPC", "EFBIG")
            assert int(wrote) <= 64 * MIB
            # It is still usable.
            assert box.sh(f"rm {place}/big && echo small >{place}/small && cat {place}/small").ok
        answers = dict(box.probe("sparse", "/tmp/sparse", str(100_000 * MIB)))
        assert answers["allocate"] in ("ENOSPC", "EFBIG", "EOPNOTSUPP", "EINVAL")
        assert used_bytes(host.directory) < before + 32 * MIB


def test_many_files_together_stop_at_the_quota(host: Host, box: Box) -> None:
    with host.box(limits=Limits(disk_bytes=64 * MIB, memory_bytes=300 * MIB)) as filled:
        install_probe(filled)
        script = f"for i in $(seq 20); do {PROBE} fill file$i {40 * MIB}; done"
        try:
            result = filled.sh(script, timeout_s=60)
        except SandboxClosedError:
            pytest.fail("the quota was reached, and not named")
        if host.backend == "bubblewrap":
            assert b"ENOSPC" in result.stdout
            assert filled.call("stats").disk_bytes <= 64 * MIB
        else:  # what is written is memory there
            assert result.status is Status.MEMORY_LIMIT
            assert limit_fields(filled) == ["memory_bytes"]
        assert box.sh("echo neighbour").stdout == b"neighbour\n"


def test_empty_files_stop_at_the_quota(host: Host) -> None:
    with host.box(limits=Limits(inodes=2000)) as box:
        if host.events("sandbox_started", box)[0]["enforced"]["inodes"] == "memory":
            pytest.skip(f"{host.combination}: inodes are bounded as memory")
        ((_, made, error),) = box.probe("files", "/workspace/many", "1000000")
        assert (int(made) <= 2000, error) == (True, "ENOSPC")
        assert box.sh("rm -r /workspace/many && touch x").ok


_STAYS = """
trap '' TERM HUP INT
echo partial
setsid sh -c 'trap "" TERM; while :; do sleep 1; done' &
(setsid sh -c 'setsid sleep 1000 &' &)
nohup sleep 1000 >/dev/null 2>&1 &
while :; do sleep 1; done
"""


def test_a_timeout_ends_traps_daemons_and_double_forks(box: Box) -> None:
    seen = len(limit_fields(box))
    result = box.sh(_STAYS, timeout_s=1.0 if box.host.backend == "bubblewrap" else 2.5)
    assert (result.status, result.exit_code) == (Status.TIMEOUT, 137)
    assert result.stdout == b"partial\n"
    left = box.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert b"sleep" not in left
    assert limit_fields(box)[seen:] == ["timeout_s"]


def test_too_much_output_is_cut_and_called_so(host: Host) -> None:
    with host.box(limits=Limits(output_bytes=100_000)) as box:
        result = box.sh("echo first; yes; sleep 1000", timeout_s=30)
        assert result.status is Status.OUTPUT_LIMIT
        assert result.stdout.startswith(b"first\ny\n")
        assert len(result.stdout) == 100_000
        assert limit_fields(box) == ["output_bytes"]


def test_the_life_of_a_sandbox_ends_with_all_that_it_runs(host: Host) -> None:
    with host.box(limits=Limits(wall_s=2.0)) as box:
        with pytest.raises(SandboxClosedError):
            box.sh("setsid sleep 1000 & sleep 1000")
        assert limit_fields(box) == ["wall_s"]


def test_questions_editors_and_pagers_see_the_end_of_input(box: Box) -> None:
    commands = (
        "cat",
        "read answer",
        "rm -i /usr/bin/env",
        "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit --allow-empty",
        "git -C r log; git -C r help -a",
        "more /etc/passwd; less /etc/passwd",
        "perl -e 'print <STDIN>'",
    )
    result = box.sh("\n".join(f"({command})" for command in commands), timeout_s=60)
    assert result.status is Status.EXITED
