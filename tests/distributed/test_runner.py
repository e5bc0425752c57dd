"""The helper that every other multi-process test trusts."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time

import pytest
import torch

from runner import RankFailure, run_distributed


@dataclasses.dataclass(frozen=True)
class Pair:
    rank: int
    total: torch.Tensor


def sum_over_ranks(value: torch.Tensor) -> Pair:
    total = value * (torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(total)
    return Pair(torch.distributed.get_rank(), total)


def raise_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        print("said before the end", file=sys.stderr)
        raise KeyError("no such expert")
    torch.distributed.barrier()


def hang_on_rank_0() -> None:
    if torch.distributed.get_rank() == 0:
        time.sleep(3600)


def die_on_rank_0() -> None:
    if torch.distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def torchrun_environment() -> tuple[bool, str, str, int]:
    initialized = torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo")  # env://, as under torchrun
    total = torch.ones(())
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return (initialized, os.environ["RANK"], os.environ["OMP_NUM_THREADS"], int(total))


def test_results_come_back_in_rank_order_with_classes_and_tensors_of_the_test_module() -> None:
    pairs = run_distributed(sum_over_ranks, 3, torch.tensor([1.0, 2.0]))
    assert [pair.rank for pair in pairs] == [0, 1, 2]
    assert all(torch.equal(pair.total, torch.tensor([6.0, 12.0])) for pair in pairs)


def test_exception_on_one_rank_is_reported_first_with_its_traceback_and_output() -> None:
    with pytest.raises(RankFailure) as failure:
        run_distributed(raise_on_rank_1, 2)
    report = str(failure.value)
    assert report.splitlines()[2] == "rank 1 raised:"
    assert 'raise KeyError("no such expert")' in report
    assert "KeyError: 'no such expert'" in report
    assert "said before the end" in report


def test_hang_is_reported_at_the_timeout_with_the_stack_of_the_rank_that_hung() -> None:
    with pytest.raises(RankFailure) as failure:
        run_distributed(hang_on_rank_0, 2, timeout_s=15)
    report = str(failure.value)
    assert "failed on 1 of 2 ranks" in report
    assert "rank 0 was still running at the timeout" in report
    assert "in hang_on_rank_0" in report


def test_rank_killed_from_outside_is_named_before_the_ranks_that_lost_it() -> None:
    with pytest.raises(RankFailure, match=r"ranks\n\nrank 0 died of SIGKILL"):
        run_distributed(die_on_rank_0, 2)


def test_no_child_outlives_a_failed_call() -> None:
    with pytest.raises(RankFailure):
        run_distributed(hang_on_rank_0, 1, timeout_s=8)
    children = torch.multiprocessing.active_children()
    assert children == []


def test_function_can_make_its_own_process_group_from_the_torchrun_environment() -> None:
    results = run_distributed(torchrun_environment, 2, init_process_group=False)
    assert results == [(False, "0", "1", 2), (False, "1", "1", 2)]


def test_local_function_is_refused_before_any_process_starts() -> None:
    def local() -> None: ...

    with pytest.raises(ValueError, match="top level of a module"):
        run_distributed(local, 2)
