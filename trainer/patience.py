"""Writing the job's log while its disk may be full: again and again, for a stated time, and a status says so."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from millrace.deadline import Deadline
from trainer.log import LogFull

PAUSE_S = 0.5
"""Before a log whose disk is full is written again."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Patience:
    """One writer's; `trouble` may be read by any thread."""

    def __init__(self, max_full_s: float, stopping: threading.Event | None = None) -> None:
        """A full log is tried for `max_full_s`, or until `stopping`; then LogFull is raised."""
        self._max_full_s, self._stopping = max_full_s, stopping or threading.Event()
        self.trouble = ""
        """Why the job waits, for a status; empty where it does not."""

    def write(self, act: Callable[[], Result]) -> Result:
        """What `act`, which writes the log, gives once there is room. Raises LogFull."""
        deadline = Deadline.after(self._max_full_s)
        while True:
            try:
                result = act()
            except LogFull as error:
                if deadline.passed() or self._stopping.is_set():
                    raise
                if not self.trouble:
                    log.warning("training waits, since the log cannot be written: %s", error)
                self.trouble = (
                    f"training waits, for the log cannot be written; the job stops after {self._max_full_s:g} s of it: "
                    f"{error}"
                )
                self._stopping.wait(PAUSE_S)
            else:
                self.trouble = ""
                return result
