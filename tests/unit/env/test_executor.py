"""The executor: every job has exactly one result, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import fleet_jobs
import pytest

from megacomposer.env.fleet.executor import Executor, RetryPolicy
from megacomposer.env.fleet.fleet import Fleet, LocalFleet
from megacomposer.env.fleet.job import Job, JobResult, Outcome
from megacomposer.env.fleet.process_fleet import ProcessFleet

FAST = RetryPolicy(pause_s=0.01, hang_s=0.5)


def local() -> Fleet:
    return LocalFleet(slots=4)


def processes() -> Fleet:
    return ProcessFleet(processes=2, slots_per_process=3)


def job(name: str, function: str, /, timeout_s: float = 60.0, **arguments: object) -> Job:
    path = f"fleet_jobs:{function}"
    return Job(id=name, function=path, arguments=arguments, timeout_s=timeout_s)


def squares(folder: Path, count: int, pause_s: float = 0.0) -> list[Job]:
    return [job(f"j{x}", "square", x=x, folder=str(folder), pause_s=pause_s) for x in range(count)]


async def results(executor: Executor, jobs: Iterable[Job]) -> dict[str, JobResult]:
    found: dict[str, JobResult] = {}
    async for result in executor.run(jobs):
        assert result.id not in found, "a second result"
        found[result.id] = result
    return found


both = pytest.mark.parametrize("fleet", [local, processes])


@both
def test_many_jobs_have_one_result_each_and_are_counted(
    fleet: Callable[[], Fleet], tmp_path: Path
) -> None:
    async def main() -> None:
        async with Executor(fleet()) as executor:
            found = await results(executor, squares(tmp_path, 200))
            assert {r.value["square"] for r in found.values()} == {x * x for x in range(200)}
            assert all(r.outcome is Outcome.DONE and r.attempts == 1 for r in found.values())
            assert all(fleet_jobs.starts(tmp_path, f"square-{x}") == 1 for x in range(200))
            metrics = executor.metrics()
            assert metrics["rollout/jobs/done"] == 200
            assert metrics["rollout/jobs/queued"] == metrics["rollout/jobs/running"] == 0
            pids = {r.value["pid"] for r in found.values()}
            assert (os.getpid() in pids) == (fleet is local)

    asyncio.run(main())


def test_no_more_jobs_run_at_once_than_there_are_slots_and_none_are_taken_early(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        taken = 0

        def endless() -> Iterable[Job]:
            nonlocal taken
            for one in squares(tmp_path, 40, pause_s=0.01):
                taken += 1
                yield one

        async with Executor(local()) as executor:
            ended = 0
            async for _ in executor.run(endless()):
                assert executor.metrics()["rollout/jobs/running"] <= 4
                assert taken - ended <= 4
                ended += 1
            assert ended == 40

    asyncio.run(main())


@both
def test_infrastructure_is_tried_again_and_then_reported_as_that_not_as_a_score(
    fleet: Callable[[], Fleet], tmp_path: Path
) -> None:
    async def main() -> None:
        async with Executor(fleet(), retry=FAST) as executor:
            folder = str(tmp_path)
            jobs = [
                job("twice", "no_sandbox", folder=folder, name="twice", times=2),
                job("always", "no_sandbox", folder=folder, name="always", times=99),
            ]
            found = await results(executor, jobs)
            assert (found["twice"].outcome, found["twice"].attempts) == (Outcome.DONE, 3)
            bad = found["always"]
            assert (bad.outcome, bad.attempts, bad.value) == (Outcome.INFRASTRUCTURE, 3, None)
            assert "no memory left" in bad.error
            assert executor.metrics()["rollout/jobs/retried"] == 4

    asyncio.run(main())


@both
def test_defects_of_a_job_are_reported_at_once_and_told_apart(
    fleet: Callable[[], Fleet], tmp_path: Path
) -> None:
    async def main() -> None:
        async with Executor(fleet(), retry=FAST) as executor:
            jobs = [
                job("raises", "defect"),
                job("inner timeout", "own_timeout"),
                job("no json", "no_json"),
                job("missing", "nothing_here"),
                job("slow", "wait_forever", timeout_s=0.2, folder=str(tmp_path), name="slow"),
                Job(id="no module", function="no_such_module:f"),
                Job(
                    id="picklable",
                    function=fleet_jobs.square,
                    arguments={"x": 3, "folder": str(tmp_path)},
                ),
            ]
            found = await results(executor, jobs)
            outcomes = {name: (r.outcome, r.attempts) for name, r in found.items()}
            failed = (Outcome.FAILED, 1)
            assert outcomes == {
                "raises": failed,
                "inner timeout": failed,
                "no json": failed,
                "missing": failed,
                "no module": failed,
                "slow": (Outcome.TIMEOUT, 1),
                "picklable": (Outcome.DONE, 1),
            }
            assert "KeyError: 'no such thing'" in found["raises"].error
            assert (tmp_path / "slow.stopped").exists()

    asyncio.run(main())


def test_a_worker_that_dies_or_hangs_costs_no_job_and_scores_none_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with Executor(processes(), retry=FAST) as executor:
            folder = str(tmp_path)
            jobs = squares(tmp_path, 30, pause_s=0.02)
            jobs.insert(3, job("dies", "die", folder=folder, name="dies", times=1))
            hangs = job("hangs", "block", 0.5, folder=folder, name="hangs", times=1)
            jobs.insert(12, hangs)
            found = await results(executor, jobs)
            assert all(r.outcome is Outcome.DONE for r in found.values()), found
            assert len(found) == 32
            assert found["dies"].attempts == found["hangs"].attempts == 2
            assert found["dies"].value == found["hangs"].value == "at last"

    asyncio.run(main())


def test_a_job_that_kills_every_worker_ends_as_infrastructure(tmp_path: Path) -> None:
    async def main() -> None:
        async with Executor(processes(), retry=FAST) as executor:
            bad = job("kills", "die", folder=str(tmp_path), name="kills", times=99)
            found = await results(executor, [bad])
            assert found["kills"].outcome is Outcome.INFRASTRUCTURE
            assert "died with exit code -9" in found["kills"].error
            after = await results(executor, squares(tmp_path, 4))
            assert all(r.outcome is Outcome.DONE for r in after.values())

    asyncio.run(main())


@both
def test_a_cancelled_job_is_stopped_and_says_so(fleet: Callable[[], Fleet], tmp_path: Path) -> None:
    async def main() -> None:
        async with Executor(fleet()) as executor:
            folder = str(tmp_path)
            jobs = [
                job("stopped", "wait_forever", folder=folder, name="stopped"),
                job("never started", "wait_forever", folder=folder, name="never"),
                *squares(tmp_path, 3),
            ]
            executor.cancel("never started")

            async def stop() -> None:
                while not fleet_jobs.starts(folder, "stopped"):
                    await asyncio.sleep(0.01)
                executor.cancel("stopped")

            stopping = asyncio.create_task(stop())
            found = await results(executor, jobs)
            await stopping
            ended = [r.id for r in found.values() if r.outcome is Outcome.CANCELLED]
            assert sorted(ended) == ["never started", "stopped"]
            assert fleet_jobs.starts(folder, "never") == 0
            while not (tmp_path / "stopped.stopped").exists():
                await asyncio.sleep(0.01)

    asyncio.run(main())


@both
def test_leaving_early_stops_what_runs(fleet: Callable[[], Fleet], tmp_path: Path) -> None:
    async def main() -> None:
        async with Executor(fleet()) as executor:
            waits = job("waits", "wait_forever", folder=str(tmp_path), name="waits")
            run = executor.run([waits, *squares(tmp_path, 5, pause_s=0.1)])
            async with contextlib.aclosing(run):
                async for _ in run:
                    break
            while not (tmp_path / "waits.stopped").exists():
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_draining_lets_running_jobs_end_and_starts_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with Executor(local()) as executor:
            found = []
            async for result in executor.run(squares(tmp_path, 50, pause_s=0.02)):
                found.append(result)
                executor.drain()
            assert 1 <= len(found) <= 5
            assert all(r.outcome is Outcome.DONE for r in found)
            assert executor.metrics()["rollout/jobs/queued"] == 0

    asyncio.run(main())


def test_a_restarted_executor_runs_only_what_has_no_final_result(tmp_path: Path) -> None:
    async def main() -> None:
        journal = tmp_path / "jobs.jsonl"
        folder = str(tmp_path)
        jobs = [
            *squares(tmp_path, 10),
            job("bad", "no_sandbox", folder=folder, name="bad", times=3),
            job("raises", "defect"),
        ]
        async with Executor(local(), journal=journal, retry=FAST) as executor:
            await results(executor, jobs[:5] + jobs[10:])
        with journal.open("a") as file:
            file.write('{"job": "the power went here')
        async with Executor(local(), journal=journal, retry=FAST) as executor:
            assert set(executor.recorded) == {"j0", "j1", "j2", "j3", "j4", "raises"}
            found = await results(executor, jobs)
            assert set(found) == {"j5", "j6", "j7", "j8", "j9", "bad"}
            assert found["bad"].outcome is Outcome.DONE
            assert executor.metrics()["rollout/jobs/skipped"] == 6
            assert len(executor.recorded) == 12
            assert executor.recorded["j3"].value["square"] == 9
        assert all(fleet_jobs.starts(folder, f"square-{x}") == 1 for x in range(10))

    asyncio.run(main())


def test_an_executor_that_is_killed_repeats_no_result_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "jobs.jsonl"
    script = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from megacomposer.env.fleet.executor import Executor
        from megacomposer.env.fleet.job import Job
        from megacomposer.env.fleet.process_fleet import ProcessFleet
        journal, folder, here = sys.argv[1:]
        sys.path.insert(0, here)

        def squares():
            for x in range(60):
                arguments = {"x": x, "folder": folder, "pause_s": 0.05}
                yield Job(id=f"j{x}", function="fleet_jobs:square", arguments=arguments)

        async def main():
            fleet = ProcessFleet(processes=2, slots_per_process=2)
            async with Executor(fleet, journal=Path(journal)) as executor:
                async for result in executor.run(squares()):
                    print(result.id, flush=True)
        asyncio.run(main())
        """
    )
    here = str(Path(fleet_jobs.__file__).parent)
    argv = [sys.executable, "-c", script, str(journal), str(tmp_path), here]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        given = {child.stdout.readline().strip() for _ in range(10)}
        child.send_signal(signal.SIGKILL)
        given |= {line.strip() for line in child.stdout}

    async def main() -> None:
        async with Executor(local(), journal=journal) as executor:
            before = set(executor.recorded)
            assert given <= before, "a result was given out before it was safe"
            found = await results(executor, squares(tmp_path, 60, pause_s=0.05))
            assert set(found) == {f"j{x}" for x in range(60)} - before
            assert len(executor.recorded) == 60
        for pid in {int(p) for f in tmp_path.glob("*.starts") for p in f.read_text().split()}:
            while pid != os.getpid() and _alive(pid):
                await asyncio.sleep(0.05)

    asyncio.run(main())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_journals_that_are_damaged_shared_or_of_other_jobs_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        journal = tmp_path / "jobs.jsonl"
        async with Executor(local(), journal=journal) as executor:
            await results(executor, squares(tmp_path, 1))
            with pytest.raises(ValueError, match="in use"):
                Executor(local(), journal=journal)
        async with Executor(local(), journal=journal) as executor:
            other = job("j0", "square", x=7, folder=str(tmp_path))
            with pytest.raises(ValueError, match="j0"):
                await results(executor, [other])
        journal.write_text("not json\n" + journal.read_text())
        with pytest.raises(ValueError, match="line 1"):
            Executor(local(), journal=journal)

    asyncio.run(main())


def test_wrong_use_is_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with Executor(local()) as executor:
            with pytest.raises(ValueError, match="'j0' comes twice"):
                await results(executor, squares(tmp_path, 1) * 2)
            with pytest.raises(ValueError, match="'x': arguments"):
                job("x", "square", x=object()).fingerprint()
        with pytest.raises(ValueError, match="slots_per_worker"):
            LocalFleet(slots=0)
        with pytest.raises(ValueError, match="processes"):
            ProcessFleet(processes=0, slots_per_process=1)
        with pytest.raises(ValueError, match="attempts"):
            RetryPolicy(attempts=0)

    asyncio.run(main())
