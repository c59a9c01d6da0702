"""The events of a source between `since` and `until`, by their own time.

Shapes: E events.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.sources.event_time import unscaled_times
from headrace.dataset.spec.config import EventTime, RecordedSource, SourceSection, unix_us
from headrace.dataset.stream.source import Events

BEFORE, AFTER = "before since", "at or after until"
"""Reasons why an event is left out."""
MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


@dataclass(frozen=True, slots=True)
class WindowMasks:
    """A window's answer about the events of a block; an event is in at most one."""

    before_E: NDArray[np.bool_]
    after_E: NDArray[np.bool_]
    untimed_E: NDArray[np.bool_]
    """Events without a time: nobody can say whether they belong to the stream."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Events at or after `since_us` and before `until_us`, in microseconds since 1970; None: no bound."""

    event_time: EventTime
    since_us: int | None
    until_us: int | None

    @classmethod
    def of(cls, section: SourceSection) -> "TimeWindow | None":
        """The window of a source; None where it takes all events."""
        if not isinstance(section, RecordedSource) or (section.since is None and section.until is None):
            return None
        since_us, until_us = (None if each is None else unix_us(each) for each in (section.since, section.until))
        return cls(section.event_time, since_us, until_us)

    def masks(self, events: Events) -> WindowMasks:
        """Compared in the unit of the event's time: two sources with one bound never both take, or both leave out, a
        time that they write alike."""
        times_E = unscaled_times(self.event_time, events)
        unit = MICROSECONDS["ms" if self.event_time.kind == "record" else self.event_time.unit]
        before_E = times_E < (-np.inf if self.since_us is None else self.since_us / unit)
        after_E = times_E >= (np.inf if self.until_us is None else self.until_us / unit)
        return WindowMasks(before_E, after_E & ~before_E, np.isnan(times_E))
