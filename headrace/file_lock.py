"""A lock between processes, on a file, with a bound on the wait. Its users define what it guards."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.deadline import Deadline
from headrace.durable import writing
from headrace.errors import DeadlineExceeded

_POLL_S = 0.005


@contextmanager
def locked(path: Path, deadline: Deadline, *, shared: bool = False) -> Iterator[int]:
    """Hold the lock on the file `path`, made if absent, against every other holder, in this process or another.

    A `shared` lock has any number of holders, but none beside one that is not shared.

    -> the file's descriptor. A process that inherits it holds the lock, too, from its start. The lock ends with the
    processes that hold it, however they end. Raises DeadlineExceeded where another held it too long, and Unwritable
    where the file cannot be made.
    """
    with writing(path):
        lock = path.open("a")
    with lock as file:
        while not _acquired(file.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if deadline.passed():
                raise DeadlineExceeded(
                    f"{path} is locked by another process, which did not release it in time: a worker of this job that"
                    " is stopped or waits for its disk; `fuser` names it, end it or let it continue"
                )
            time.sleep(min(_POLL_S, deadline.left_s()))
        yield file.fileno()  # closing the file releases the lock


def is_locked(path: Path) -> bool:
    """True if a process holds the lock on the file `path` now."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _acquired(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
