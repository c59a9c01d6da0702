"""How urgent a thread is: work done ahead stands behind all others until someone waits for it; long work rests; who
answers people goes first.

Why: the threads of a matrix product wait for the slowest of them, so a thread that shares their cores for a few
milliseconds delays every step. Linux only, and only where the process may take the word back (as root, or with
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
"""Niceness of what goes first: of ten milliseconds that it and another want, it has nine."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Of this process's session: where the kernel shares cores among sessions, a thread's niceness counts within one."""


@cache
def can_yield() -> bool:
    """Whether a thread of this process may step back, and forth again; tried once, on a thread that then ends."""
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


class Yielding:
    """The urgency of one thread; made anywhere, `begin` called by the thread itself, the others by any."""

    def __init__(self) -> None:
        self._thread_id: int | None = None
        self._is_ahead = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """This thread is the one."""
        self._thread_id = threading.get_native_id() if can_yield() else None

    def end(self) -> None:
        """The thread is about to end: its id may be given to another."""
        with self._lock:
            self._thread_id = None

    def ahead(self) -> None:
        """Nobody waits for the thread: all others go first."""
        self._set(True)

    def awaited(self) -> None:
        """Somebody waits for the thread: it is as urgent as any."""
        self._set(False)

    def _set(self, is_ahead: bool) -> None:
        with self._lock:
            if self._thread_id is not None and is_ahead != self._is_ahead:
                policy = os.SCHED_IDLE if is_ahead else os.SCHED_OTHER
                os.sched_setscheduler(self._thread_id, policy, os.sched_param(0))
                self._is_ahead = is_ahead


class Pace:
    """Lets one thread's long work rest now and then, for a share of the time that it worked.

    Where training has every core, whatever runs beside it holds up all threads of a matrix product, niced or not.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rested_s = share, time.thread_time()

    def rest(self) -> None:
        """Sleep for the share of what this thread worked since its last rest."""
        time.sleep(self._share * (time.thread_time() - self._rested_s))
        self._rested_s = time.thread_time()


@contextmanager
def ahead_of_others() -> Iterator[None]:
    """This thread, those that it starts, and its session go first meanwhile, where that is allowed.

    Why: an answer that takes two milliseconds waits for fifty where training has every core.
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
    """None where sessions share nothing out."""
    try:
        return int(AUTOGROUP.read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return None


def _set_session(nice: int) -> None:
    with suppress(OSError):
        AUTOGROUP.write_text(str(nice))
