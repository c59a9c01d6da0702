"""Log lines of every process: one line for each event on stderr, with time, level and role."""

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.printable import printable


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters: log lines quote text of events and pipe commands."""

    def format(self, record: logging.LogRecord) -> str:
        """As Formatter."""
        return printable(super().format(record))


def setup(role: str, level: str = "INFO") -> None:
    """Send log records to stderr as `12:00:01 INFO  trainer-0: text`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter(f"%(asctime)s %(levelname)-5s {role}: %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class RepeatFilter(logging.Filter):
    """Passes the first, tenth, hundredth of equal records, and a bounded number in all. Any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._occurrences, self._now = LogLimiter(), now

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; then it also says how often it occurred, and how many others were dropped."""
        occurrence = self._occurrences.note((record.name, record.levelno, str(record.msg)), self._now())
        if occurrence is None:
            return False
        if occurrence.times > 1:
            record.msg = f"{record.msg} (this occurred {occurrence.times} times)"
        if occurrence.left_out:
            record.msg = f"{record.msg} ({occurrence.left_out} other lines were left out)"
        return True


@contextmanager
def repeats_filtered(*loggers: str) -> Iterator[None]:
    """Bound the lines of these loggers while the context lasts, as clients can cause them."""
    repeats = RepeatFilter()
    for name in loggers:
        logging.getLogger(name).addFilter(repeats)
    try:
        yield
    finally:
        for name in loggers:
            logging.getLogger(name).removeFilter(repeats)


# Limits the log lines of repeated events: the first, the tenth, the hundredth of a kind is logged.
#
# A stranger decides how often a refusal or a warning occurs, so its lines must be bounded and still say who tried, and
# how often. The audit log and the log of every server use it. No clock: the time is an argument.

QUIET_S = 600.0
"""After so long without an event of its kind, the next one counts as a first."""
BURST, PER_S = 100.0, 1 / 60
"""Lines of all kinds together: so many at once, then one a minute; at most half a million a year."""
MAX_KINDS = 4096
"""Most kinds remembered; beyond it the one that occurred longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """A token bucket: tries that are left."""

    tries: float
    at_s: float
    """The time of this count."""

    def after_failure(self, now_s: float, capacity: float, per_s: float) -> tuple["TokenBucket", float]:
        """The bucket after one more failure, and the seconds until the next try is allowed; 0: this one was."""
        tries = min(capacity, self.tries + max(0.0, now_s - self.at_s) * per_s)
        if tries >= 1:
            return TokenBucket(tries - 1, now_s), 0.0
        return TokenBucket(tries, now_s), (1 - tries) / per_s


@dataclass(frozen=True, slots=True)
class LoggedOccurrence:
    """The figures in the log line of an event."""

    times: int
    """Number of times it occurred, this time included, without a pause of QUIET_S."""
    left_out: int
    """Lines of any kind that were left out since the last one, because there were too many."""


class LogLimiter:
    """Counts events by kind. Any thread."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._bucket, self._left_out = TokenBucket(BURST, 0.0), 0
        self._lock = threading.Lock()

    def note(self, kind: Hashable, now_s: float) -> LoggedOccurrence | None:
        """Count one more of `kind`; what to log, or None."""
        with self._lock:
            times, last_s = self._kinds.pop(kind, (0, now_s))
            times = 1 if now_s - last_s > QUIET_S else times + 1
            self._kinds[kind] = times, now_s
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
            if not is_logged(times):
                return None
            self._bucket, wait_s = self._bucket.after_failure(now_s, BURST, PER_S)
            if wait_s > 0:
                self._left_out += 1
                return None
            found, self._left_out = LoggedOccurrence(times, self._left_out), 0
            return found


def is_logged(times: int) -> bool:
    """True if `times` is 1, 10, 100, ..."""
    return str(times).strip("0") == "1"


# The stderr of child processes: its lines go to the log at a limited rate, the last ones are kept for messages.

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
