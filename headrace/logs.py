"""Log lines of every process: one line for each event on stderr, with time, level and role."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.log_limiter import LogLimiter
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
