"""Errors of a generator: caught event by event, and told on stderr, each kind with its traceback once, then counted."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataset.answers import error_text
from millrace.occurrences import is_told

log = logging.getLogger(__name__)

MAX_KINDS = 100
"""Kinds of errors told apart; further ones are counted as one."""
OTHERS = "further errors"
OURS = str(Path(sys.modules[__name__.partition(".")[0]].__path__[0]))


class ErrorLog:
    """A kind of error is its type and the line that raised it, whatever values its message names."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @contextmanager
    def rejecting(self, errors: dict[int, str], event: int) -> Iterator[None]:
        """What is raised in the context, whatever it is, goes to `errors` as that of `event`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a user's generator may raise anything
            self.add(error, event)
            errors[event] = error_text(error)

    def add(self, error: BaseException, event: int) -> None:
        """`event` is rejected for `error`: the first of a kind with its traceback, then the 10th, 100th, 1,000th."""
        told = traceback.TracebackException.from_exception(error)
        while told.stack and told.stack[0].filename.startswith(OURS):  # the user's code begins behind these
            told.stack.pop(0)
        kind = self._kind(error, told)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            lines = "".join(told.format()).rstrip()
            log.error("event %d of those at hand is rejected; more of %s are only counted\n%s", event, kind, lines)
        elif is_told(count):
            log.error("%s events are rejected so far for %s; the last: %s", f"{count:,}", kind, error)

    def _kind(self, error: BaseException, told: traceback.TracebackException) -> str:
        users = [frame for frame in told.stack if not frame.filename.startswith(OURS)]
        place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
        kind = f"{type(error).__name__}{place}"
        return kind if kind in self._counts or len(self._counts) < MAX_KINDS else OTHERS
