from __future__ import annotations

import os
import signal

import pytest
from checkpoint_samples import hold_lock, quick_processes

from megacomposer.checkpoint.lock import RunLock


def test_a_second_trainer_on_a_run_directory_is_refused_and_told_who_holds_it(tmp_path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(ValueError, match=f"another trainer .process {os.getpid()} on "):
            RunLock(tmp_path).__enter__()
        with RunLock(tmp_path / "another_run"):
            pass
    with RunLock(tmp_path):
        pass


def test_an_error_in_the_run_releases_the_lock(tmp_path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_a_killed_trainer_does_not_leave_the_run_locked(tmp_path) -> None:
    receiver, sender = quick_processes().Pipe(duplex=False)
    holder = quick_processes().Process(target=hold_lock, args=(tmp_path, sender))
    holder.start()
    assert receiver.recv() == "locked"
    try:
        with pytest.raises(ValueError, match=f"process {holder.pid} on "):
            RunLock(tmp_path).__enter__()
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
    with RunLock(tmp_path):
        pass
