"""A lock keeps others out, ends with its holder, and is not waited for without end."""

import subprocess
import sys
import threading

import pytest

from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import DeadlineExceeded


def test_a_held_lock_is_awaited_until_the_deadline_and_the_error_names_it(tmp_path):
    path = tmp_path / "lock"
    with locked(path, Deadline.after(1)), pytest.raises(DeadlineExceeded, match=f"{path} is locked by another"):
        with locked(path, Deadline.after(0.02)):
            pytest.fail("two hold it")


def test_threads_take_turns(tmp_path):
    inside, most = [], []

    def work():
        for _ in range(5):
            with locked(tmp_path / "lock", Deadline.after(30)):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 15


def test_a_lock_ends_with_an_error_inside(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "lock", Deadline.after(1)):
        raise KeyError
    with locked(tmp_path / "lock", Deadline.after(0)):
        pass


def test_a_lock_ends_with_the_process_that_held_it(tmp_path):
    path = tmp_path / "lock"
    holds = (
        f"import fcntl, sys; f = open({str(path)!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", holds], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(DeadlineExceeded), locked(path, Deadline.after(0)):
            pytest.fail("two hold it")
        holder.kill()
        with locked(path, Deadline.after(30)):
            pass
