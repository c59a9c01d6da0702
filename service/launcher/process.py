"""One worker: its process watched, its output read line by line.

How a process is started is service.launcher.child's and .nursery's; which one when, and what its end means, is decided
elsewhere (plan, supervision).
"""

import threading
from collections import deque
from collections.abc import Callable

from millrace.printable import printable
from service.launcher.child import Child

MAX_LINE_CHARACTERS = 4096
"""A longer line of output is cut into several."""
TAIL_LINES = 20
"""Last lines of output kept to tell how a worker died."""
LAST_WORDS_S = 2.0
"""How long output may still come after a process and its group are gone."""

OnLine = Callable[[str, str], None]
"""Takes a worker's name and one line of its output; called on the worker's reading thread."""
OnExit = Callable[[str, int], None]
"""Takes a worker's name and exit code (minus the signal's number); called once, on a thread of the worker."""


class Worker:
    """A running worker."""

    def __init__(self, name: str, child: Child, on_line: OnLine, on_exit: OnExit) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Its last lines of output."""
        self.terminate, self.kill = child.terminate, child.kill
        self._child, self._on_line, self._on_exit = child, on_line, on_exit
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"{name}-wait", daemon=True)
        self._reader.start()
        self._waiter.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the process is gone, `on_exit` was called, and its last lines were read."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _read(self) -> None:
        with self._child.output as output:
            while line := output.readline(MAX_LINE_CHARACTERS):
                text = printable(line.rstrip("\n"))
                self.tail.append(text)
                self._on_line(self.name, text)

    def _wait(self) -> None:
        self._on_exit(self.name, self._child.wait())  # before its last lines are read: who died first comes first
        self._child.let_go()
        self._reader.join(LAST_WORDS_S)
