"""Files of the host stay unread and unchanged: E1-E4 of the escape suite."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from megacomposer.env.sandbox import (
    Mount,
    PatchRejectedError,
    SandboxFileError,
    SnapshotError,
)
from sandbox_cases import CANARY, Box, Host


def escaped_names() -> list[str]:
    """Of the host, in directories that commands try to write to."""
    return [
        f"{directory}/{name}"
        for directory in ("/", "/usr", "/usr/bin", "/etc", "/opt", "/var", "/root", "/tmp")
        if os.access(directory, os.R_OK)
        for name in os.listdir(directory)
        if name.startswith("escaped")
    ]


def test_files_of_the_host_are_not_there(box: Box) -> None:
    secret = box.host.directory / "secret"
    assert secret.read_text() == CANARY
    places = f"{secret} /root /home/* /etc/shadow /etc/ssh /var/log /boot {Path(__file__)}"
    result = box.sh(
        f"cat {secret}; cat /etc/shadow; ls -A {places}; (cd /root && cat .*); cat /home/*/.*"
    )
    assert not result.ok
    assert b"root:$" not in result.stdout
    with pytest.raises(SandboxFileError) as caught:
        box.call("read_file", str(secret))
    assert caught.value.code in ("ENOENT", "EACCES")


def test_a_search_of_everything_readable_finds_no_canary(box: Box) -> None:
    script = "grep -rlFs --exclude-dir=usr --exclude-dir=proc --exclude-dir=sys {0} / 2>/dev/null"
    # Half of the word: the command itself must not be what is found.
    result = box.sh(f"{script.format(CANARY[6:20])}; true", timeout_s=60)
    assert result.stdout == b""


def test_nothing_outside_of_its_own_trees_can_be_written(host: Host) -> None:
    name = f"escaped-{host.combination}"
    with host.box() as box:
        script = (
            "for d in / /usr /usr/bin /etc /opt /var /root /proc /sys /dev /run /workspace/..; do "
            f"if touch $d/{name} 2>/dev/null; then echo $d; fi; done; "
            "for f in /bin/env /etc/passwd; do if ( : >>$f ) 2>/dev/null; then echo $f; fi; done"
        )
        written = box.sh(script).stdout.split()
        if host.backend == "bubblewrap":
            assert written == []
        for path in (f"/workspace/../{name}", f"/usr/{name}", f"/tmp/../../{name}"):
            # Where gVisor lets it, it is written to its own memory.
            with contextlib.suppress(SandboxFileError):
                box.call("write_file", path, b"x")
    assert escaped_names() == []
    assert not list(host.directory.rglob(name))


def test_the_temporary_directory_is_its_own(box: Box) -> None:
    box.sh("echo inside >/tmp/only-inside")
    assert not os.path.exists("/tmp/only-inside")
    assert box.host.directory.name.encode() not in box.sh("ls -A /tmp").stdout


def test_mounts_are_read_only(host: Host, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents[:3]:
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "file").write_text("dependency")
    (tmp_path / "file").chmod(0o666)
    with host.box(mounts=(Mount(source=str(tmp_path), target="/opt/dep"),)) as box:
        assert box.sh("cat /opt/dep/file").stdout == b"dependency"
        result = box.sh("echo x >/opt/dep/file; rm -f /opt/dep/file; touch /opt/dep/new; true")
        assert result.stderr.count(b"Read-only") + result.stderr.count(b"denied") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "dependency"


def test_the_host_follows_no_link_that_was_made_inside(host: Host) -> None:
    secret = host.directory / "secret"
    with host.box() as box:
        script = (
            f"ln -s {secret} a; ln -s /etc/shadow b; ln -s / root; ln -s ../../../..{secret} c; "
            f"ln -s {host.directory} directory; ln -s /proc/1/root{secret} d"
        )
        assert box.sh(script).ok
        for path in ("a", "b", "c", "d", f"root{secret}", "directory/secret"):
            with pytest.raises(SandboxFileError) as caught:
                box.call("read_file", path)
            # gVisor of 2022 ends at a link to /, as at a directory.
            assert caught.value.code in ("ENOENT", "EACCES", "ELOOP", "EPERM", "EISDIR")
        box.call("write_file", "/tmp/x", b"x")
        # May make a directory of that name inside.
        with contextlib.suppress(SandboxFileError):
            box.call("write_file", "directory/written", b"x")
        snapshot = box.call("snapshot")
    assert not (host.directory / "written").exists()
    members = {member.name: member for member in layer(host, snapshot.layers[-1]).getmembers()}
    assert members["workspace/a"].issym()
    assert members["workspace/b"].linkname == "/etc/shadow"


def layer(host: Host, digest: str) -> tarfile.TarFile:
    file = host.directory / f"{digest}.exported"
    host.submit("backend_call", "export_layer", (digest, str(file))).result()
    data = file.read_bytes()
    assert CANARY[6:].encode() not in data
    return tarfile.open(fileobj=io.BytesIO(data))


def test_hard_links_and_renames_do_not_cross_the_border(box: Box) -> None:
    script = (
        "ln /usr/bin/env link; ln /proc/1/exe agent; mv /usr/bin/env moved; echo x >mine; "
        "mv mine /usr/bin/env; mv mine /usr/bin/mine; test ! -e link -a -s /usr/bin/env"
    )
    assert box.sh(script).ok


_HUNK = "@@ -0,0 +1 @@\n+x\n"


def test_patches_stay_in_the_workspace(box: Box) -> None:
    box.sh("ln -sfn /tmp out")
    seen = len(box.host.events("refused", box))
    names = ("../escaped", "../../../tmp/escaped", "/tmp/escaped", "out/escaped", ".git/escaped")
    for name in names:
        with pytest.raises(PatchRejectedError):
            box.call("patch", f"--- /dev/null\n+++ b/{name}\n{_HUNK}".encode())
    assert len(box.host.events("refused", box)) == seen + len(names)
    assert box.sh("test ! -e /tmp/escaped -a ! -e /escaped").ok


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("workspace/../../escaped", tarfile.REGTYPE, ""),
        ("/escaped", tarfile.REGTYPE, ""),
        ("etc/escaped", tarfile.REGTYPE, ""),
        ("workspace/device", tarfile.CHRTYPE, ""),
        ("workspace/hard", tarfile.LNKTYPE, "../../etc/passwd"),
    ],
)
def test_a_layer_that_reaches_out_of_its_trees_is_refused(
    host: Host, name: str, kind: bytes, target: str
) -> None:
    file = host.directory / "evil.tar"
    with tarfile.open(file, "w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.mode = kind, target, 0o644
        tar.addfile(member)
    file.chmod(0o644)
    with pytest.raises(SnapshotError):
        host.submit("backend_call", "import_layer", (str(file),)).result()


def test_a_layer_cannot_write_through_a_link_of_its_own(host: Host) -> None:
    file = host.directory / "through.tar"
    target = host.directory / "reached"
    target.mkdir(mode=0o777, exist_ok=True)
    target.chmod(0o777)
    with tarfile.open(file, "w") as tar:
        link = tarfile.TarInfo("workspace/out")
        link.type, link.linkname = tarfile.SYMTYPE, str(target)
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("workspace/out/escaped"))
    file.chmod(0o644)
    with pytest.raises(SnapshotError):
        host.submit("start_of_file", str(file)).result()
    assert list(target.iterdir()) == []
