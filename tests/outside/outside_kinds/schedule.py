"""A schedule of the learning rate that falls to its half once."""

from typing import Literal

from headrace.config import PositiveCount
from headrace.pserver.rate_schedules import CountedSchedule


class Steps(CountedSchedule):
    """The whole rate, then half of it."""

    kind: Literal["steps"]
    """Steps."""
    first: PositiveCount
    """Count from which the rate is half."""

    def share(self, count: int) -> float:
        return 1.0 if count < self.first else 0.5
