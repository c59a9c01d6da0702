"""How long a trainer has been at one step, and what it waits for there: what a status says when a step stands still.

Clocks here decide nothing: a step that waits too long ends by its deadline. service.alarms words what is told here.
"""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

STALL_SHARE = 0.25
"""A step that has taken this share of `train.step_deadline` stands still."""


class WaitsFor(StrEnum):
    """What a step can wait for."""

    PIPE = "pipe"
    """Samples: of the pipe command, or of the source."""
    TRAINERS = "trainers"
    """The other trainers' part of a sum."""
    SHARDS = "shards"
    """Rows, or the acknowledgement of a push."""
    MODEL = "model"
    """This process's own arithmetic."""
    CLOSE = "close"
    """The close of the pass."""


class StepClock:
    """One rank's. Written by the loop, read by any thread."""

    def __init__(self, max_step_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """A step that takes longer than `max_step_s` stands still."""
        self._max_step_s, self._now = max_step_s, now
        self.goes_on: Callable[[WaitsFor | None], None] = lambda _: None
        """Told of what the step in progress waits for next; None: it is over."""
        self._at: tuple[float, WaitsFor] | None = None
        self.unanswered: Callable[[], Sequence[int]] = tuple
        """Numbers of the shards that have not answered yet."""

    def begin(self, waits_for: WaitsFor) -> None:
        """A step begins."""
        self._at = self._now(), waits_for
        self.goes_on(waits_for)

    def at(self, waits_for: WaitsFor) -> None:
        """The step goes on, and now waits for something else."""
        if self._at is not None:
            self._at = self._at[0], waits_for
            self.goes_on(waits_for)

    def end(self) -> None:
        """No step goes on."""
        self._at = None
        self.goes_on(None)

    def stalled(self) -> dict[str, Any] | None:
        """What a status says of a step that stands still; None where none does."""
        at = self._at
        if at is None or (for_s := self._now() - at[0]) <= self._max_step_s:
            return None
        told = {"waits_for": at[1].value, "for_s": for_s, "max_s": self._max_step_s}
        return told | ({"shards": list(self.unanswered())} if at[1] in (WaitsFor.SHARDS, WaitsFor.CLOSE) else {})
