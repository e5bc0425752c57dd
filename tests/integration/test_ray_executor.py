"""The executor on a Ray cluster of several nodes, one of which dies."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleet_jobs
import pytest

from megacomposer.env.fleet.executor import Executor, RetryPolicy
from megacomposer.env.fleet.job import Job, JobResult, Outcome
from megacomposer.env.fleet.ray_executor import RayFleet, RayPlacement
from megacomposer.env.sandbox import BackendUnavailableError

ray = pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NODE = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
PLACEMENT = RayPlacement(resources={"sandbox": 1}, workers_per_node=2, poll_s=0.5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without sandboxes, and two nodes with them."""
    from ray.cluster_utils import Cluster

    path = [str(Path(fleet_jobs.__file__).parent), os.environ.get("PYTHONPATH", "")]
    with (
        # Not pytest's folder: Ray's sockets need a short path.
        tempfile.TemporaryDirectory(
            prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("RAY_TMPDIR", folder)  # else it writes into /tmp/ray
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        Path(folder, "ray").mkdir()
        made = Cluster()
        try:
            made.add_node(**NODE)
            for _ in range(2):
                made.add_node(**NODE, resources={"sandbox": 2})
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def squares(folder: Path, count: int, pause_s: float) -> list[Job]:
    return [
        Job(
            id=f"j{x}",
            function="fleet_jobs:square",
            arguments={"x": x, "folder": str(folder), "pause_s": pause_s},
        )
        for x in range(count)
    ]


def test_a_node_killed_in_the_middle_loses_no_job_and_scores_none_twice(
    cluster: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        fleet = RayFleet(slots_per_worker=4, placement=PLACEMENT)
        journal = tmp_path / "jobs.jsonl"
        async with Executor(fleet, journal=journal) as executor:
            assert fleet.capacity == 16
            found: dict[str, JobResult] = {}
            async for result in executor.run(squares(tmp_path, 60, pause_s=0.5)):
                assert result.id not in found, "scored twice"
                found[result.id] = result
                if len(found) == 10:
                    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            assert {r.value["square"] for r in found.values()} == {x * x for x in range(60)}
            again = [r for r in found.values() if r.attempts > 1]
            assert again, "the node had no job when it died"
            for result in found.values():
                starts = fleet_jobs.starts(tmp_path, f"square-{result.id[1:]}")
                assert starts <= result.attempts, "a job that had ended ran again"
            assert fleet.capacity == 8
            assert len(journal.read_text().splitlines()) == 60
            cluster.add_node(**NODE, resources={"sandbox": 2})
            while fleet.capacity < 16:
                await asyncio.sleep(0.2)
            places = {worker.partition("-")[0] for worker in fleet.workers}
            assert len(places) == 2
        async with Executor(
            RayFleet(slots_per_worker=1, placement=PLACEMENT), journal=journal
        ) as two:
            assert [r async for r in two.run(squares(tmp_path, 60, pause_s=0.5))] == []

    asyncio.run(main())


def test_failures_timeouts_and_cancellation_are_as_on_one_machine(
    cluster: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        folder = str(tmp_path)

        def job(name: str, function: str, timeout_s: float = 60.0, **more: Any) -> Job:
            arguments = {"folder": folder, "name": name, **more}
            return Job(id=name, function=function, arguments=arguments, timeout_s=timeout_s)

        jobs = [
            Job(id="defect", function="fleet_jobs:defect"),
            Job(id="missing", function="no_such_module:f"),
            job("retried", "fleet_jobs:no_sandbox", times=1),
            job("given up", "fleet_jobs:no_sandbox", times=9),
            job("dies", "fleet_jobs:die", times=1),
            job("slow", "fleet_jobs:wait_forever", timeout_s=0.3),
            job("stopped", "fleet_jobs:wait_forever"),
        ]
        retry = RetryPolicy(pause_s=0.05)
        fleet = RayFleet(slots_per_worker=2, placement=PLACEMENT)
        async with Executor(fleet, retry=retry) as executor:

            async def stop() -> None:
                while not fleet_jobs.starts(folder, "stopped"):
                    await asyncio.sleep(0.05)
                executor.cancel("stopped")

            stopping = asyncio.create_task(stop())
            found = {r.id: r async for r in executor.run(jobs)}
            await stopping
            while not (tmp_path / "stopped.stopped").exists():
                await asyncio.sleep(0.05)
        assert {name: r.outcome for name, r in found.items()} == {
            "defect": Outcome.FAILED,
            "missing": Outcome.FAILED,
            "retried": Outcome.DONE,
            "given up": Outcome.INFRASTRUCTURE,
            "dies": Outcome.DONE,
            "slow": Outcome.TIMEOUT,
            "stopped": Outcome.CANCELLED,
        }
        assert (found["given up"].attempts, found["given up"].value) == (3, None)

    asyncio.run(main())


def test_a_cluster_without_the_resources_is_refused_not_waited_for(cluster: Any) -> None:
    async def main() -> None:
        placement = RayPlacement(resources={"moon": 1})
        with pytest.raises(BackendUnavailableError, match="moon"):
            await RayFleet(slots_per_worker=1, placement=placement).start()

    asyncio.run(main())
