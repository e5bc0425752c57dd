"""What a sandbox must not be able to ask of the kernel: E20-E24, E26, E27 of the escape suite."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from megacomposer.env.backend.agent_sandbox import agent_program
from megacomposer.env.sandbox import Limits, SandboxClosedError
from sandbox_cases import CANARY, PROBE, Box, Host

REFUSED = {
    "EPERM",
    "EACCES",
    "ENOSYS",
    "ENOENT",
    "EINVAL",  # an id that this user namespace does not have
    "EOPNOTSUPP",
    "EAFNOSUPPORT",
    "ENODEV",
}
GVISOR_GIVES = {
    # Of gVisor's own kernel, which is one process without rights on the host: namespaces, nodes and
    # rings that it makes do not exist outside, and its log is its own.
    *("unshare_user", "unshare_mount", "unshare_user_mount", "clone_user"),
    *("mknod_null", "mknod_disk", "dev_fuse", "io_uring", "kernel_log", "nice"),
}


def test_no_call_gives_privileges_namespaces_or_kernel_attack_surface(box: Box) -> None:
    answers = dict(box.probe("kernel"))
    assert len(answers) > 60
    gained = {name for name, answer in answers.items() if answer not in REFUSED}
    assert gained <= (GVISOR_GIVES if box.host.backend == "gvisor" else set())
    if box.host.backend == "bubblewrap":
        refused_by_filter = ("keyctl", "bpf", "io_uring", "userfaultfd", "perf", "ptrace_keeper")
        assert {answers[name] for name in refused_by_filter} == {"EPERM"}


def test_a_namespace_made_inside_gives_no_rights_on_the_files(box: Box) -> None:
    script = "unshare -Urm sh -c 'mount -o remount,rw /usr; touch /usr/escaped /etc/escaped'"
    box.sh(script)
    assert not os.path.exists("/usr/escaped")
    assert not os.path.exists("/etc/escaped")


def test_a_device_node_made_inside_reaches_no_device(box: Box) -> None:
    script = "mknod /tmp/d b 254 0 && head -c1 /tmp/d; mknod /tmp/m c 1 1 && head -c1 /tmp/m"
    result = box.sh(script)
    assert not result.ok
    assert result.stdout == b""


def test_commands_have_no_capability_and_can_gain_none(box: Box) -> None:
    status = dict(
        line.split(":\t") for line in box.sh("cat /proc/self/status").stdout.decode().splitlines()
    )
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd"):
        assert int(status[name], 16) == 0, name
    if box.host.backend == "bubblewrap":
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize("command", ["su -c id", "mount -t tmpfs x /tmp", "passwd -d root"])
def test_setuid_programs_gain_nothing(box: Box, command: str) -> None:
    result = box.sh(f"{command} </dev/null; id -u >/tmp/uid", timeout_s=30)
    before = box.sh("id -u").stdout
    assert b"uid=0(root)" not in result.stdout
    assert box.call("read_file", "/tmp/uid") == before


def test_a_setuid_copy_of_a_shell_gains_nothing(box: Box) -> None:
    script = (
        "cp /bin/dash /tmp/rootsh && chmod 6755 /tmp/rootsh && id -u && /tmp/rootsh -p -c 'id -u'"
    )
    lines = box.sh(script).stdout.split()
    assert len(set(lines)) == 1


def test_the_launchers_environment_and_arguments_are_not_in_proc(box: Box) -> None:
    # `Host` has put the canary into both of its process, and searches what comes back.
    result = box.sh("cat /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ /proc/*/mountinfo")
    assert CANARY.encode() not in result.stdout
    for place in (str(box.host.directory), str(agent_program().parent)):
        assert place.encode() not in result.stdout
    host = box.sh("uname -n; cat /etc/hostname /proc/sys/kernel/hostname").stdout.decode().split()
    assert set(host) == {"sandbox"}


def test_process_1_leads_to_no_place_of_the_host(box: Box) -> None:
    script = "cat /proc/1/root/{0}; ls /proc/1/cwd/ /proc/1/fd/; cat /proc/1/maps; cat /proc/1/mem"
    result = box.sh(script.format(box.host.directory / "secret"))
    assert str(box.host.directory).encode() not in result.stdout


# Of the sandbox's own IPC and pid namespaces (pid_max since Linux 6.14): they do not exist outside.
_OWN_SETTINGS = re.compile(
    r"/proc/sys/(fs/mqueue/.*|kernel/((shm|msg|sem|auto_msg).*|ns_last_pid|pid_max))"
)


def test_kernel_settings_of_the_host_cannot_be_written(host: Host) -> None:
    find = "find /proc/sys /sys -type f 2>/dev/null | head -3000"
    with host.box() as box:
        script = f'for f in $({find}); do if ( : >"$f" ) 2>/dev/null; then echo "$f"; fi; done'
        opened = box.sh(script, timeout_s=60).stdout.decode().split()
        if host.backend == "bubblewrap":
            assert [path for path in opened if not _OWN_SETTINGS.fullmatch(path)] == []
        before = {path: contents(path) for path in opened}
        box.sh(f"for f in {' '.join(opened)}; do echo 7 >$f; done")
        changed = {path for path in opened if contents(path) != before[path]}
        assert changed <= {"/proc/sys/kernel/ns_last_pid"}  # it counts what the host starts


def contents(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # gVisor has some that this kernel has not
        return b""


def test_processes_of_the_host_do_not_exist_inside(box: Box) -> None:
    numbers = box.sh("cd /proc && ls -d [0-9]*").stdout.split()
    assert len(numbers) < 20
    ours = f"{os.getpid()} {box.host.pid}"
    result = box.sh(f"for pid in {ours}; do kill -0 $pid && echo $pid is there; done; true")
    assert b"is there" not in result.stdout


def test_process_1_cannot_be_killed_or_stopped(host: Host) -> None:
    with host.box() as box:
        try:
            box.sh("kill -9 1; kill -STOP 1; kill -SEGV 1", timeout_s=10)
        except SandboxClosedError:
            # gVisor of 2022 does not protect process 1: the sandbox is gone, and nothing else.
            assert host.backend == "gvisor"
        else:
            assert box.sh("echo on").stdout == b"on\n"


def test_the_agents_program_cannot_be_overwritten(host: Host) -> None:
    digest = hashlib.sha256(agent_program().read_bytes()).digest()
    with host.box() as box:
        box.probe("tty")  # puts the probe there
        paths = "/proc/1/exe /run/agent /run/megacomposer/agent"
        result = box.sh(
            f"for p in {paths}; do {PROBE} overwrite $p; rm -f $p; cp /bin/true $p; done"
        )
        answers = set(result.stdout.decode().replace("overwrite", "").split())
        assert answers <= {"EACCES", "EROFS", "ENOENT", "ETXTBSY"}
        # A program that is being run, overwritten through its own link in /proc (as in runc 2019).
        box.sh(f"cp {PROBE} /tmp/self; /tmp/self overwrite /proc/self/exe")
        assert box.sh("echo on").stdout == b"on\n"
    assert hashlib.sha256(agent_program().read_bytes()).digest() == digest


def test_there_is_no_terminal_to_type_into(box: Box) -> None:
    answers = box.probe("tty")
    assert [name for name, _ in answers] == ["inject", "inject", "inject", "dev_tty", "console"]
    assert "ok" not in {answer for _, answer in answers}
    result = box.sh("ps -o tty= -p $$; tty; test -t 0 -o -t 1 -o -t 2")
    assert result.exit_code != 0
    assert b"/dev" not in result.stdout


def test_a_spin_of_many_threads_gets_no_more_than_its_cpus(host: Host) -> None:
    cpus = 0.5
    with host.box(limits=Limits(cpus=cpus)) as box:
        box.probe("tty")  # puts the probe there
        before = box.call("stats")
        how = before.enforced["cpus"]
        if how != "cgroup":
            pytest.skip(f"{host.combination}: cpus are limited by: {how}")
        result = box.exec([PROBE, "spin", "64", "2"])
        after = box.call("stats")
        # A period of the quota (0.1 s) may be used at each end.
        assert after.cpu_s - before.cpu_s <= cpus * (result.wall_s + 0.4) + 0.1
