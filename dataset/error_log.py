"""Errors of a generator: caught event by event, and told on stderr, each kind with its traceback once, then counted."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dataset.answers import error_text

log = logging.getLogger(__name__)

MAX_KINDS = 100
"""Kinds of errors told apart; further ones are counted as one."""
OTHERS = "further errors"


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
        kind = self._kind(error)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            log.error("event %d of those at hand is rejected; more of %s are only counted", event, kind, exc_info=error)
        elif str(count).strip("0") == "1":
            log.error("%s events are rejected so far for %s; the last: %s", f"{count:,}", kind, error)

    def _kind(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__, limit=-1)
        place = f" at {frames[0].filename}:{frames[0].lineno}" if frames else ""
        kind = f"{type(error).__name__}{place}"
        return kind if kind in self._counts or len(self._counts) < MAX_KINDS else OTHERS
