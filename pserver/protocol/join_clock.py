"""How far an event's time may move the clock of a join ahead: a decision from the log alone. Pure.

The clock is the greatest event time so far that is sound. In the order of time, an event is sound if it is at most
`max_ahead` later than the clock, which it then moves; the others of the pass are too far ahead, and are rejected. So
the decision is one bound on time, and ranks need to send spans only: event times without a greater gap between them.

The clock itself may be wrong, after a first event from 2099 or a long silence of the stream. So events that are too
far ahead vote, and the others against them; so do events that are behind by more than `max_ahead`, until a pass has one
near the clock. When the votes reach MOVED, the clock begins anew at the median of that pass.

Shapes: X spans of event times, in order; Q event times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.keys import mix_reference
from headrace.pserver.errors import InvalidShardCall

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

MOVED = 100
"""Votes that move the clock: a stream that really moved loses fewer events than this."""
CLOCK_KEY = mix_reference(0x6A6F696E)
"""Key of the row with the clock, in the table of what waits. An event with this key is dropped as a repeated one."""


@dataclass(frozen=True, slots=True)
class TimeSpans:
    """Event times, as spans that have no gap greater than `max_ahead` inside, and greater gaps between them."""

    first_X: F64
    last_X: F64
    count_X: I64
    """Events in each span."""

    def check(self) -> None:
        """Raise InvalidShardCall for what are no spans."""
        first_X, last_X, count_X = self.first_X, self.last_X, self.count_X
        fits = len(first_X) == len(last_X) == len(count_X)
        if not fits or not (np.isfinite(first_X) & np.isfinite(last_X) & (first_X <= last_X) & (count_X > 0)).all():
            raise InvalidShardCall("event times of a join that are no spans")

    @classmethod
    def of_times(cls, time_Q: F64, max_ahead_s: float) -> "TimeSpans":
        """The spans of finite times in any order."""
        time_Q = np.sort(time_Q)
        return cls(time_Q, time_Q, np.ones(len(time_Q), np.int64)).joined(max_ahead_s)

    @classmethod
    def merged(cls, parts: Sequence["TimeSpans"], max_ahead_s: float) -> "TimeSpans":
        """The spans of the times of several ranks: those of all their times together."""
        first_X, last_X = (np.concatenate(each) for each in zip(*((p.first_X, p.last_X) for p in parts), strict=True))
        count_X = np.concatenate([part.count_X for part in parts])
        order_X = np.argsort(first_X, kind="stable")
        return cls(first_X[order_X], last_X[order_X], count_X[order_X]).joined(max_ahead_s)

    def joined(self, max_ahead_s: float) -> "TimeSpans":
        """Spans in the order of their first times, put together where no greater gap is between them."""
        if not len(self.first_X):
            return self
        last_X = np.maximum.accumulate(self.last_X)
        begins_X = np.flatnonzero(np.r_[True, self.first_X[1:] > last_X[:-1] + max_ahead_s])
        ends_X = np.r_[begins_X[1:], len(last_X)] - 1
        return TimeSpans(self.first_X[begins_X], last_X[ends_X], np.add.reduceat(self.count_X, begins_X))


@dataclass(frozen=True, slots=True)
class JoinClock:
    """The clock between two passes."""

    newest_s: float | None = None
    """The greatest sound event time; None before the first event."""
    num_ahead: int = 0
    """Events too far ahead, less the others of passes with events near the clock; never below 0."""
    num_behind: int = 0
    """Events since the last one near the clock."""

    def after(self, spans: TimeSpans, max_ahead_s: float) -> "JoinClock":
        """The clock after a pass with these event times. Later times than it plus `max_ahead_s` are too far ahead."""
        total = int(spans.count_X.sum())
        if not total:
            return self
        if self.newest_s is None:
            return JoinClock(_median(spans))
        newest_s, num_sound = self._moved(spans, max_ahead_s)
        if (spans.last_X[spans.last_X <= newest_s] >= self.newest_s - max_ahead_s).any():
            num_ahead, num_behind = max(0, self.num_ahead + total - 2 * num_sound), 0
        else:
            num_ahead, num_behind = self.num_ahead + total - num_sound, self.num_behind + num_sound
        if num_ahead + num_behind >= MOVED:
            return JoinClock(_median(spans))
        return JoinClock(newest_s, num_ahead, num_behind)

    def _moved(self, spans: TimeSpans, max_ahead_s: float) -> tuple[float, int]:
        """The clock as sound events move it, and their number."""
        assert self.newest_s is not None, "it has begun"
        newest_s, num_sound = self.newest_s, 0
        columns = spans.first_X.tolist(), spans.last_X.tolist(), spans.count_X.tolist()
        for first_s, last_s, count in zip(*columns, strict=True):
            if first_s > newest_s + max_ahead_s:
                break
            newest_s, num_sound = max(newest_s, last_s), num_sound + count
        return newest_s, num_sound


def _median(spans: TimeSpans) -> float:
    """The end of the span with the lower median of all events."""
    half = (int(spans.count_X.sum()) + 1) // 2
    return float(spans.last_X[int(np.searchsorted(np.cumsum(spans.count_X), half))])


def clock_reference(clock: JoinClock, time_Q: list[float], max_ahead_s: float) -> tuple[JoinClock, list[bool]]:
    """The twin, one event at a time: the clock after a pass, and which of its events are too far ahead."""
    newest_s, num_ahead, num_behind = clock.newest_s, clock.num_ahead, clock.num_behind
    in_order = sorted(time_Q)
    if not in_order:
        return clock, []

    def chain(from_s: float) -> float:
        for at_s in in_order:
            if at_s <= from_s + max_ahead_s:
                from_s = max(from_s, at_s)
        return from_s

    median_s = in_order[(len(in_order) - 1) // 2]
    begin_s = median_s if newest_s is None else newest_s
    end_s = chain(begin_s)
    if newest_s is not None:
        near = any(newest_s - max_ahead_s <= at_s <= end_s for at_s in in_order)
        for at_s in in_order:
            num_ahead += 1 if at_s > end_s else -near
            num_behind += at_s <= end_s
        num_ahead, num_behind = max(0, num_ahead), 0 if near else num_behind
        if num_ahead + num_behind >= MOVED:
            end_s, num_ahead, num_behind = chain(median_s), 0, 0
    return JoinClock(end_s, num_ahead, num_behind), [at_s > end_s + max_ahead_s for at_s in time_Q]
