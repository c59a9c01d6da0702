"""Predicts in the background: with low priority, and at no more than a share of the cores.

`python -m headrace.trainer.predict.background MODULE ARGUMENTS` runs a module with the lowest priority. Where the
kernel groups processes by session (autogroup), niceness counts only within a session, and each of our processes leads a
session of its own: so the session gets the lowest priority, too. A pipe command leads a session of its own again; the
pauses of the worker that reads from it hold it back.
"""

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

NICENESS = 19
AUTOGROUP = Path("/proc/self/autogroup")


class CpuLimit:
    """Limits the CPU time of a process, over all threads. Call `rest` between pieces of work, on one thread."""

    def __init__(
        self,
        cores: float,
        worked_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`cores`: how many the process may use on average."""
        self._cores, self._worked_s, self._now_s, self._sleep = cores, worked_s, now_s, sleep
        self._begin = worked_s(), now_s()

    def rest(self) -> None:
        """Sleep until the CPU time since the last rest is within the share. Unused time is not saved."""
        worked_s, now_s = self._worked_s(), self._now_s()
        left_s = (worked_s - self._begin[0]) / self._cores - (now_s - self._begin[1])
        if left_s > 0:
            self._sleep(left_s)
        self._begin = self._worked_s(), self._now_s()


def lower_priority() -> None:
    """Give every other process priority."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # no autogroup here, or no permission to change it
        AUTOGROUP.write_text(str(NICENESS))


if __name__ == "__main__":
    lower_priority()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
