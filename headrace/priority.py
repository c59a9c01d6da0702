"""The priority of threads: prefetching runs last until somebody waits for it, long work pauses, answers run first.

Why: the threads of a matrix product wait for the slowest of them, so a thread that takes a core for a few milliseconds
delays every step. This works on Linux, where the process may raise a lowered priority again (as root, or with
RLIMIT_NICE): a thread that could not would starve on a busy machine. Elsewhere nothing happens.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

POLICIES = ("SCHED_IDLE", "SCHED_OTHER")
AHEAD = -10
"""Niceness of a thread that runs first: it gets nine of ten milliseconds that it and another thread want."""
AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of this session. Where the kernel groups by session, a thread's niceness counts only within its own."""


@cache
def can_lower_priority() -> bool:
    """True if a thread may lower its priority and raise it again; tried once, on a thread that then ends."""
    if not all(hasattr(os, policy) for policy in POLICIES):
        return False
    allowed: list[bool] = []

    def attempt() -> None:
        try:
            for policy in POLICIES:
                os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
            allowed.append(True)
        except OSError:
            allowed.append(False)

    thread = threading.Thread(target=attempt, name="priority-probe")
    thread.start()
    thread.join()
    return allowed[0]


class ThreadPriority:
    """The priority of one thread. That thread calls `begin`; any thread calls the others."""

    def __init__(self) -> None:
        self._thread_id: int | None = None
        self._is_ahead = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Take this thread as the one to manage."""
        self._thread_id = threading.get_native_id() if can_lower_priority() else None

    def end(self) -> None:
        """The thread is about to end: the system may reuse its id."""
        with self._lock:
            self._thread_id = None

    def ahead(self) -> None:
        """Nobody waits for the thread: it runs after all others."""
        self._set(True)

    def awaited(self) -> None:
        """Somebody waits for the thread: it has normal priority."""
        self._set(False)

    def _set(self, is_ahead: bool) -> None:
        with self._lock:
            if self._thread_id is not None and is_ahead != self._is_ahead:
                policy = os.SCHED_IDLE if is_ahead else os.SCHED_OTHER
                os.sched_setscheduler(self._thread_id, policy, os.sched_param(0))
                self._is_ahead = is_ahead


class Pace:
    """Pauses in one thread's long work, each for a share of the time that the thread worked.

    Where training uses every core, other work delays all threads of a matrix product, whatever its niceness.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rested_s = share, time.thread_time()

    def rest(self) -> None:
        """Sleep for the share of this thread's work since its last rest."""
        time.sleep(self._share * (time.thread_time() - self._rested_s))
        self._rested_s = time.thread_time()


@contextmanager
def prioritized() -> Iterator[None]:
    """This thread, the threads that it starts, and its session run first meanwhile, where that is allowed.

    Why: an answer that takes two milliseconds waits for fifty where training uses every core.
    """
    try:
        before = os.getpriority(os.PRIO_PROCESS, 0)  # Linux: of this thread
        os.setpriority(os.PRIO_PROCESS, 0, AHEAD)
    except OSError:
        yield
        return
    session = _nice_of_session()
    if session is not None:
        _set_session(AHEAD)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
        if session is not None:
            _set_session(session)


def _nice_of_session() -> int | None:
    """None where the kernel does not group by session."""
    try:
        return int(AUTOGROUP.read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return None


def _set_session(nice: int) -> None:
    with suppress(OSError):
        AUTOGROUP.write_text(str(nice))
