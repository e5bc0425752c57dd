"""The sandbox of a task: its files, its variables, and its only way out."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megacomposer.env.audit import AuditLog
from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import Limits, Snapshot
from megacomposer.env.task import EgressRule, Task, TestPlan
from megacomposer.env.task_sandbox import CA_PATH, task_sandbox
from tool_cases import PATH, write_files

FETCH = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=20)
except urllib.error.HTTPError as error:
    print(error.code)
except urllib.error.URLError as error:
    print("unreachable")
"""


def make_task(base: Snapshot, *egress: EgressRule) -> Task:
    return Task(
        id="t",
        instruction="",
        base=base,
        pristine=base,
        tests=TestPlan(),
        egress=egress,
        env={"PATH": PATH, "GIVEN": "1"},
        limits=Limits(output_bytes=1 << 20),
    )


def test_a_task_with_rules_gets_the_proxy_and_one_without_gets_no_network(tmp_path: Path) -> None:
    async def main() -> None:
        log = AuditLog()
        backend = await open_backend("bubblewrap", store=tmp_path / "store", record=log.record)
        try:
            base = await backend.import_tree(str(write_files(tmp_path / "t", {"a": "x\n"})))
            fetch = ["python3", "-c", FETCH, "http://other.test/x"]
            async with task_sandbox(backend, make_task(base), record=log.record) as sandbox:
                assert await sandbox.read_file("a") == b"x\n"
                assert sandbox.spec.limits.output_bytes == 1 << 20
                assert (await sandbox.exec(["printenv", "GIVEN"])).stdout == b"1\n"
                assert (await sandbox.exec(fetch)).stdout == b"unreachable\n"
            ruled = make_task(base, EgressRule(host="allowed.test"))
            async with task_sandbox(backend, ruled, record=log.record) as sandbox:
                folder = Path(sandbox.spec.egress_socket or "").parent
                assert folder.is_dir()
                assert (await sandbox.exec(fetch)).stdout == b"403\n"
                assert b"BEGIN CERTIFICATE" in await sandbox.read_file(CA_PATH)
                trusted = await sandbox.exec(["printenv", "SSL_CERT_FILE"])
                assert trusted.stdout.decode() == f"{CA_PATH}\n"
            assert not folder.exists()
        finally:
            await backend.close()
        denied = [event for event in log.events if event["kind"] == "egress_denied"]
        assert [(event["sandbox"], event["host"]) for event in denied] == [("t", "other.test")]

    asyncio.run(main())
