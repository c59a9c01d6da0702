"""How urgent a thread is: work done ahead stands behind all others until someone waits for it; long work rests.

Why: the threads of a matrix product wait for the slowest of them, so a thread that shares their cores for a few
milliseconds delays every step. Linux only, and only where the process may take the word back (as root, or with
RLIMIT_NICE): a thread that could not would starve on a busy machine. Elsewhere nothing happens.
"""

import os
import threading
import time
from functools import cache

POLICIES = ("SCHED_IDLE", "SCHED_OTHER")


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
