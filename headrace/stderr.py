"""The stderr of child processes: its lines go to the log at a limited rate, the last ones are kept for messages."""

import logging
import time
from collections import deque

from headrace.log_limiter import is_logged
from headrace.printable import printable

MAX_TAIL_LINES = 20
MAX_LINE_BYTES = 4096
MAX_LOGGED_LINES, LOGGED_WINDOW_S = 20, 10.0
"""At most so many lines are logged in so many seconds; the others are counted."""
MAX_REMEMBERED_LINES = 1_000
"""Most different lines remembered; beyond it every line counts as a new one."""

log = logging.getLogger(__name__)


class RepeatedLines:
    """Lines that earlier processes of a command printed: a traceback is logged once, not once per process."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._now: set[str] = set()
        self._count = 0

    def begin(self) -> None:
        """A new process starts."""
        self._before |= self._now
        self._now = set()

    def add(self, line: str) -> str | None:
        """The text to log for a line: the line itself, the count of repeats at the 10th, 100th, 1,000th, or nothing."""
        if line not in self._before:
            if len(self._before) + len(self._now) < MAX_REMEMBERED_LINES:
                self._now.add(line)
            return line
        self._count += 1
        if self._count >= 10 and is_logged(self._count):
            return f"{self._count:,} lines so far repeat lines of earlier processes; the last: {line}"
        return None


class StderrLog:
    """The stderr of one process. One thread."""

    def __init__(self, name: str, repeats: RepeatedLines | None = None) -> None:
        """`name` begins each logged line."""
        self._name, self._rest, self._repeats = name, b"", repeats or RepeatedLines()
        self._repeats.begin()
        self._lines: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._window_s, self._num_logged, self._num_silent = -LOGGED_WINDOW_S, 0, 0

    def add(self, data: bytes, now_s: float) -> None:
        """Take bytes that were read."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        for line in lines:
            self._take(_text(line[:MAX_LINE_BYTES]).rstrip(), now_s)

    def tail(self) -> str:
        """The last lines."""
        return "\n".join([*self._lines, *filter(None, [_text(self._rest)])])

    def close(self) -> None:
        """Log an unfinished last line, and the number of lines that were not logged."""
        if self._rest:
            self._take(_text(self._rest), time.monotonic())
            self._rest = b""
        self._report()

    def _take(self, line: str, now_s: float) -> None:
        self._lines.append(line)
        text = self._repeats.add(line)
        if text is None:
            return
        if now_s - self._window_s >= LOGGED_WINDOW_S:
            self._report()
            self._window_s, self._num_logged = now_s, 0
        if self._num_logged < MAX_LOGGED_LINES:
            self._num_logged += 1
            log.info("%s: %s", self._name, text)
        else:
            self._num_silent += 1

    def _report(self) -> None:
        if self._num_silent:
            log.info("%s: %d more lines on stderr were not logged", self._name, self._num_silent)
            self._num_silent = 0


def _text(line: bytes) -> str:
    return printable(line.decode("utf-8", "replace"))
