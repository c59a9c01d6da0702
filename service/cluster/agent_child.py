"""The worker that an agent runs as its child, and its output until that is reported."""

import threading
import time
from collections import deque

from headrace.service.cluster.child import WorkerProcess
from headrace.service.cluster.local import LocalWorker
from headrace.service.cluster.runtime import KILL_S

MAX_LINES = 2000
"""Most lines that wait to be reported. A worker that writes faster waits."""
GATHER_S = 0.02
"""Lines of this time go into one report."""


class AgentChild:
    """A running worker. One thread; its output and its end come on others."""

    def __init__(self, name: str, process: WorkerProcess) -> None:
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._closed = self._asked = False
        self._worker = LocalWorker(name, process, self._take_line, self._take_exit)

    @property
    def code(self) -> int | None:
        """Its exit code once it and its group are gone."""
        return self._worker.poll()

    @property
    def over(self) -> bool:
        """Whether it is gone and no further line follows."""
        return self._worker.poll() is not None and self._worker.kill(within_s=0)

    def take_lines(self) -> tuple[str, ...]:
        """The lines since the last call."""
        with self._changed:
            lines = tuple(self._lines)
            self._lines.clear()
            self._changed.notify_all()
        return lines

    def wait(self, within_s: float) -> None:
        """Wait until there is something to report."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self.code is not None, within_s)
        if self.code is None:
            time.sleep(GATHER_S)
        else:
            self._worker.kill(within_s)  # it is gone; this waits for its last lines

    def terminate(self) -> None:
        """Ask it to end, once."""
        if not self._asked:
            self._asked = True
            self._worker.terminate()

    def kill(self) -> None:
        """End it; does not wait."""
        self._worker.kill(within_s=0)

    def end(self) -> None:
        """End it with its group, and forget its output."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.kill(KILL_S)

    def _take_line(self, _name: str, text: str) -> None:
        print(text, flush=True)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._lines) < MAX_LINES)
            self._lines.append(text)
            self._changed.notify_all()

    def _take_exit(self, _name: str, _code: int) -> None:
        with self._changed:
            self._changed.notify_all()
