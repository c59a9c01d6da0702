"""How long a trainer has worked on its current step, and what it waits for, so that a status shows a stalled step.

Clocks here decide nothing: a step that waits too long ends by its deadline. service.monitor.alarms formats the message.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

from headrace.trainer.job_status import StallStatus

STALL_SHARE = 0.25
"""A step that has taken this share of `train.step_deadline` is stalled."""


class WaitsFor(StrEnum):
    """Things that a step can wait for."""

    PIPE = "pipe"
    """Samples, from the pipe command or the source."""
    TRAINERS = "trainers"
    """The other trainers, in a collective."""
    SHARDS = "shards"
    """Rows from shards, or the acknowledgement of a push."""
    MODEL = "model"
    """This process's own computation."""
    CLOSE = "close"
    """The close of the pass."""


class StepClock:
    """The clock of one rank. Written by the loop, read by any thread."""

    def __init__(self, max_step_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """A step that takes longer than `max_step_s` is stalled."""
        self._max_step_s, self._now = max_step_s, now
        self.goes_on: Callable[[WaitsFor | None], None] = lambda _: None
        """Called with what the current step waits for next; with None at its end."""
        self._at: tuple[float, WaitsFor] | None = None
        self.unanswered: Callable[[], Sequence[int]] = tuple
        """Returns the numbers of the shards that have not answered yet."""
        self.pass_s = 0.0
        """How long the last pass took on this rank, without waits for other ranks at its end."""
        self._pass_since_s = 0.0

    def begin(self, waits_for: WaitsFor) -> None:
        """A step begins."""
        self._at = self._now(), waits_for
        self.goes_on(waits_for)

    def at(self, waits_for: WaitsFor) -> None:
        """The step now waits for something else."""
        if self._at is not None:
            self._at = self._at[0], waits_for
            self.goes_on(waits_for)

    @contextmanager
    def awaiting(self, waits_for: WaitsFor) -> Iterator[None]:
        """A context in which the step waits for something else; after it, for the same as before."""
        before = self._at
        self.at(waits_for)
        try:
            yield
        finally:
            if before is not None:
                self.at(before[1])

    def end(self) -> None:
        """The step has ended."""
        self._at = None
        self.goes_on(None)

    def pass_begins(self) -> None:
        """The first step of a pass begins."""
        self._pass_since_s = self._now()

    def pass_ends(self) -> None:
        """The last step of this rank is applied."""
        self.pass_s = self._now() - self._pass_since_s

    def stalled(self) -> StallStatus | None:
        """The stalled step; None if no step is stalled."""
        at = self._at
        if at is None or (for_s := self._now() - at[0]) <= self._max_step_s:
            return None
        shards = list(self.unanswered()) if at[1] in (WaitsFor.SHARDS, WaitsFor.CLOSE) else []
        return StallStatus(waits_for=at[1].value, for_s=for_s, max_s=self._max_step_s, shards=shards)
