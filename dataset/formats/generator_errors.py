"""Catches the errors of a generator, event by event, and logs each kind once with its traceback, then counts."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.dataset.formats.generator_answers import error_text
from headrace.logs import is_logged

log = logging.getLogger(__name__)

MAX_KINDS = 100
"""Most kinds of errors counted separately; all others are counted as one."""
OTHERS = "further errors"
OURS = str(Path(sys.modules[__name__.partition(".")[0]].__path__[0]))


class ErrorLog:
    """Counts errors by kind: the type and the line that raised it, not the message."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @contextmanager
    def rejecting(self, errors: dict[int, str], event: int) -> Iterator[None]:
        """Put the text of any error raised in the context into `errors[event]`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a user's generator may raise anything
            self.reject(errors, event, error)

    def reject(self, errors: dict[int, str], event: int, error: Exception) -> None:
        """Put the text of an error into `errors[event]`."""
        self.add(error, event)
        errors[event] = error_text(error)

    def add(self, error: BaseException, event: int) -> None:
        """Log that `event` is rejected: the first of a kind with its traceback, then the 10th, 100th, 1,000th."""
        trace = traceback.TracebackException.from_exception(error)
        while trace.stack and trace.stack[0].filename.startswith(OURS):  # drop frames before the user's code
            trace.stack.pop(0)
        kind = self._kind(error, trace)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            lines = "".join(trace.format()).rstrip()
            log.error(
                "event %d of this batch is rejected; more errors of kind %s are only counted\n%s", event, kind, lines
            )
        elif is_logged(count):
            log.error("%s events are rejected so far with %s; the last: %s", f"{count:,}", kind, error)

    def _kind(self, error: BaseException, trace: traceback.TracebackException) -> str:
        users = [frame for frame in trace.stack if not frame.filename.startswith(OURS)]
        place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
        kind = f"{type(error).__name__}{place}"
        return kind if kind in self._counts or len(self._counts) < MAX_KINDS else OTHERS
