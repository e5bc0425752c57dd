"""Snapshots are not confused, and damaged ones are refused: E28 of the escape suite."""

from __future__ import annotations

import dataclasses

import pytest

from megacomposer.env.sandbox import SandboxFileError, Snapshot, SnapshotError
from sandbox_cases import Host


def test_forks_do_not_see_each_other(host: Host) -> None:
    with host.box() as parent:
        parent.call("write_file", "shared", b"parent")
        first, second = parent.call("fork"), parent.call("fork")
        first.call("write_file", "only-first", b"1")
        first.call("write_file", "shared", b"first")
        for other in (parent, second):
            with pytest.raises(SandboxFileError) as caught:
                other.call("read_file", "only-first")
            assert caught.value.code == "ENOENT"
            assert other.call("read_file", "shared") == b"parent"
        first.close()
        second.close()


def test_an_unknown_or_malformed_snapshot_is_refused_and_changes_nothing(host: Host) -> None:
    with host.box() as box:
        box.call("write_file", "file", b"here")
        for digest in ("0" * 64, "../../etc/passwd", ""):
            with pytest.raises(SnapshotError):
                box.call("restore", Snapshot(layers=(digest,)))
            with pytest.raises(SnapshotError):
                host.start(base=Snapshot(layers=(digest,)))
        with pytest.raises(SnapshotError):
            box.call("restore", Snapshot(layers=(), memory="0" * 64))
        assert box.call("read_file", "file") == b"here"


def test_a_snapshot_outlives_the_sandbox_it_was_made_of(host: Host) -> None:
    with host.box() as box:
        box.call("write_file", "file", b"kept")
        snapshot = box.call("snapshot")
        assert [event["snapshot"] for event in host.events("snapshot", box)] == [snapshot.id]
    with host.box(base=dataclasses.replace(snapshot, memory=None)) as later:
        assert later.call("read_file", "file") == b"kept"


def test_a_snapshot_whose_layer_was_damaged_or_deleted_is_refused(host: Host) -> None:
    with host.box() as box:
        box.call("write_file", "file", b"original contents")
        snapshot = box.call("snapshot")
        other = box.call("fork")
        other.call("write_file", "file", b"changed contents")
        layers = other.call("snapshot").layers
        other.close()
    (file,) = host.directory.rglob(f"{layers[-1]}.tar")
    damaged = file.read_bytes().replace(b"changed contents", b"planted contents")
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    fresh = Host(host.combination)  # its store is empty
    try:
        carried = fresh.directory / f"{layers[-1]}.tar"
        carried.write_bytes(damaged)
        with pytest.raises(SnapshotError, match="digest"):
            fresh.submit("backend_call", "import_layer", (str(carried),)).result()
        with pytest.raises(SnapshotError):
            fresh.start(base=Snapshot(layers=snapshot.layers))
    finally:
        fresh.close()
    file.unlink()
    with pytest.raises(SnapshotError):
        host.submit("backend_call", "export_layer", (layers[-1], "/dev/null")).result()


def test_what_a_fork_runs_ends_with_it(host: Host) -> None:
    with host.box() as box:
        box.sh("setsid sleep 1000 >/dev/null 2>&1 &")
        fork = box.call("fork")
        fork.sh("setsid sleep 1000 >/dev/null 2>&1 &")
        fork.close()
        fork.close()
        assert box.sh("echo on").stdout == b"on\n"


def test_a_restore_kills_what_runs(host: Host) -> None:
    with host.box() as box:
        empty = box.call("snapshot")
        box.sh("setsid sh -c 'while :; do echo x >>/workspace/late; sleep 0.05; done' &")
        box.call("restore", dataclasses.replace(empty, memory=None))
        assert not box.sh("sleep 0.5; cat late").ok
