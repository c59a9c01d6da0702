"""Holds a process to a share of the cores: it rests, now and then, for what it worked beyond it."""

import time
from collections.abc import Callable


class ProcessPace:
    """Of one process, all its threads together; `rest` between pieces of work, on one thread."""

    def __init__(
        self,
        cores: float,
        worked_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`cores`: how many it may use on average."""
        self._cores, self._worked_s, self._now_s, self._sleep = cores, worked_s, now_s, sleep
        self._begin = worked_s(), now_s()

    def rest(self) -> None:
        """Sleep until the work since the last rest is within the share; what was not used is not saved up."""
        worked_s, now_s = self._worked_s(), self._now_s()
        left_s = (worked_s - self._begin[0]) / self._cores - (now_s - self._begin[1])
        if left_s > 0:
            self._sleep(left_s)
        self._begin = self._worked_s(), self._now_s()
