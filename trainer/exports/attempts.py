"""Makes the exports whose commits exist, one after the other, and tries again those that fail.

trainer.exports.coordinator decides which exports to make; trainer.exports.exporter_process runs the process that makes
them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.retry import Backoff
from headrace.trainer.exports.request import ExportAnswer, ExportRequest

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0
"""Pause before another try of an export: it doubles each time, up to the longest."""
BACKOFF = Backoff.doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S)

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """Makes one export at a time, in another process, and never waits for it. One thread."""

    def submit(self, request: ExportRequest) -> None:
        """Begin an export. None may be in progress."""
        ...

    def poll(self) -> ExportAnswer | None:
        """How the export ended; None while it has not, or where none was begun. Returns each answer once."""
        ...

    def close(self) -> None:
        """End, even in the middle of an export."""
        ...


@dataclass
class ExportAttempt:
    """An export to make."""

    request: ExportRequest
    tried: int = 0
    not_before_s: float = 0.0


class ExportAttempts:
    """One thread, except for `failing`."""

    def __init__(
        self,
        exporter: Exporter,
        clock: Callable[[], float] = time.monotonic,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`trouble`: why none may begin now; empty where one may."""
        self._exporter, self._clock, self._trouble = exporter, clock, trouble
        self._waiting: deque[ExportAttempt] = deque()
        self._flying: ExportAttempt | None = None
        self.failing: dict[str, tuple[float, str]] = {}
        """By stream: since when an export fails that is tried again, and its last error. Replaced, never changed."""

    def add(self, request: ExportRequest) -> None:
        """Make this export after those that wait."""
        self._waiting.append(ExportAttempt(request))

    def __iter__(self) -> Iterator[ExportRequest]:
        """The requests that have not ended."""
        flying = () if self._flying is None else (self._flying,)
        return (attempt.request for attempt in (*flying, *self._waiting))

    def tick(self) -> list[tuple[ExportRequest, ExportAnswer]]:
        """Begin the next export that may begin -> exports that ended for good since the last call, and how."""
        over = []
        if self._flying is not None and (answer := self._exporter.poll()) is not None:
            attempt, self._flying = self._flying, None
            if self._ended(attempt, answer):
                over.append((attempt.request, answer))
        now_s = self._clock()
        ready = next((each for each in self._waiting if each.not_before_s <= now_s), None)
        if self._flying is None and ready is not None and not self._trouble():
            self._waiting.remove(ready)
            self._flying = ready
            self._exporter.submit(ready.request)
        return over

    def close(self) -> None:
        """End the exporter. The next run makes what was not complete."""
        self._exporter.close()

    def _ended(self, attempt: ExportAttempt, answer: ExportAnswer) -> bool:
        """Whether the export ended for good."""
        request, failing = attempt.request, dict(self.failing)
        since_s, _ = failing.pop(request.stream, (self._clock(), ""))
        attempt.tried += 1
        over = answer.outcome == "complete" or answer.final or attempt.tried >= request.section.tries
        if not over:
            attempt.not_before_s = self._clock() + BACKOFF.pause_s(attempt.tried)
            why = answer.error or "it failed"
            log.warning(
                "export %s of %s failed, try %d of %d: %s",
                *(request.name, request.stream, attempt.tried, request.section.tries, why),
            )
            self._waiting.append(attempt)
            failing[request.stream] = (since_s, why)
        self.failing = failing
        return over


def log_export_end(request: ExportRequest, answer: ExportAnswer) -> None:
    """Log how an export ended for good."""
    what = f"export {request.name} of {request.stream}"
    if answer.outcome == "failed":
        log.error("%s failed and is given up; the next one includes what it lacks: %s", what, answer.error)
        return
    log.info("%s: %d rows, %d deleted, %.1f s; %s", what, answer.rows, answer.tombstones, answer.seconds, answer.path)
    if answer.failed_gates:
        log.warning("current.json does not point to %s: %s", what, "; ".join(answer.failed_gates))
