"""How the agent reads and writes files, on a real agent outside any sandbox."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from agent_process import with_agent
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.sandbox import SandboxFileError


def test_files_of_any_content_and_size_come_back_as_written(tmp_path: Path) -> None:
    async def test(link: AgentLink) -> None:
        for size in (0, 1, 65535, 65536, 65537, 1_000_000):
            data = random.Random(size).randbytes(size)
            path = str(tmp_path / "new/deep" / f"{size}")
            await link.write_file(path, data, mode=0o640)
            assert Path(path).read_bytes() == data
            assert Path(path).stat().st_mode & 0o777 == 0o640
            assert await link.read_file(path, max_bytes=size) == data
        assert len(list((tmp_path / "new/deep").iterdir())) == 6  # no temporary is left

    with_agent(test)


def test_replacing_a_file_keeps_its_mode_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("old")
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "link").symlink_to("script")
    (tmp_path / "loop").symlink_to("loop")

    async def test(link: AgentLink) -> None:
        await link.write_file(str(tmp_path / "link"), b"new", mode=0o600)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "script").read_text() == "new"
        assert (tmp_path / "script").stat().st_mode & 0o777 == 0o755
        with pytest.raises(SandboxFileError) as caught:
            await link.write_file(str(tmp_path / "loop"), b"new", mode=0o600)
        assert caught.value.code == "ELOOP"

    with_agent(test)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    versions = [letter * 400_000 for letter in (b"a", b"b")]

    async def test(link: AgentLink) -> None:
        await link.write_file(str(path), versions[0], mode=0o644)

        async def write() -> None:
            for i in range(20):
                await link.write_file(str(path), versions[i % 2], mode=0o644)

        task = asyncio.create_task(write())
        while not task.done():
            assert path.read_bytes() in versions
            await asyncio.sleep(0)
        await task

    with_agent(test)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("none", "ENOENT"),
        ("", "EISDIR"),
        ("fifo", "EINVAL"),
        ("long", "EFBIG"),
        ("long/x", "ENOTDIR"),
        ("n" * 300, "ENAMETOOLONG"),
    ],
)
def test_reading_what_is_no_regular_file_fails_and_never_hangs(
    tmp_path: Path, name: str, code: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(b"x" * 11)

    async def test(link: AgentLink) -> None:
        with pytest.raises(SandboxFileError) as caught:
            await link.read_file(str(tmp_path / name), max_bytes=10)
        assert caught.value.code == code

    with_agent(test)


def test_reading_an_endless_file_stops_at_the_limit() -> None:
    async def test(link: AgentLink) -> None:
        with pytest.raises(SandboxFileError) as caught:
            await link.read_file("/dev/zero", max_bytes=10)
        assert caught.value.code == "EINVAL"
        with pytest.raises(SandboxFileError) as caught:  # its size is given as 0
            await link.read_file("/proc/kallsyms", max_bytes=100_000)
        assert caught.value.code == "EFBIG"

    with_agent(test)


@pytest.mark.parametrize(("name", "code"), [("", "EISDIR"), ("fifo", "EINVAL"), ("f/x", "ENOTDIR")])
def test_writing_over_what_is_no_regular_file_is_refused(
    tmp_path: Path, name: str, code: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "f").touch()

    async def test(link: AgentLink) -> None:
        with pytest.raises(SandboxFileError) as caught:
            await link.write_file(str(tmp_path / name), b"x" * 200_000, mode=0o644)
        assert caught.value.code == code

    with_agent(test)


def test_a_cancelled_write_leaves_nothing(tmp_path: Path) -> None:
    async def test(link: AgentLink) -> None:
        task = asyncio.create_task(
            link.write_file(str(tmp_path / "file"), bytes(50_000_000), mode=0o644)
        )
        while not list(tmp_path.iterdir()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await link.stats()
        assert list(tmp_path.iterdir()) == []

    with_agent(test)
