"""One time budget for a whole call, however many hops it takes."""

import time
from dataclasses import dataclass

from headrace.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock until which a call may take."""

    at_s: float
    """time.monotonic() at which the budget is used up."""

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """A deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def at_most(self, seconds: float) -> "Deadline":
        """This deadline, or `seconds` from now where that is earlier."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at_s - time.monotonic())

    def passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self.at_s

    def check(self, doing: str) -> None:
        """Raise DeadlineExceeded, naming what was being done, once nothing is left."""
        if self.passed():
            raise DeadlineExceeded(f"out of time while {doing}")
