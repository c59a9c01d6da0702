"""The event times of one file by position, so that files advance together with other streams.

It is read from the file on demand, in a reading of its own, and extended as the file grows. Up to MAX_TIMES events it
has the time of each; beyond that of every second, fourth, ... one, so positions are then that much coarser.

Shapes: E events, T times.
"""

import numpy as np

from headrace.dataset.sources.event_file import EventFile
from headrace.dataset.sources.event_time import event_times
from headrace.dataset.spec.config import EventTime
from headrace.dataset.stream.event_values import take_events
from headrace.dataset.stream.source import I64, Events

MAX_TIMES = 1 << 20
"""Most times of a file: 8 MiB."""
BEFORE_ALL_MS = -(1 << 62)


class TimeIndex:
    """Of one file, which it reads and closes."""

    def __init__(self, file: EventFile, event_time: EventTime, max_times: int = MAX_TIMES) -> None:
        self._file, self._event_time, self._max_times = file, event_time, max_times
        self._reached_ms_T: I64 = np.empty(0, np.int64)
        """The greatest time so far, at each event whose position is a multiple of `_step`."""
        self._step, self._num_read = 1, 0

    def extend(self, end: int, identity: str) -> None:
        """Read the events up to `end`. Raises what EventFile.read raises."""
        if self._num_read < end:
            for events in self._file.read(self._num_read, end, identity):
                self._add(events)
            self._file.close()

    def position(self, time_ms: int) -> int | None:
        """The first event with this time or a later one; None if there is none."""
        at = int(np.searchsorted(self._reached_ms_T, time_ms))
        return at * self._step if at < len(self._reached_ms_T) else None

    def _add(self, events: Events) -> None:
        chosen = take_events(events, np.flatnonzero(events.position_E % self._step == 0))
        self._num_read += len(events)
        time_s_E = event_times(self._event_time, chosen)
        time_ms_E = np.floor(np.where(np.isfinite(time_s_E), 1000 * time_s_E, BEFORE_ALL_MS)).astype(np.int64)
        reached_ms = self._reached_ms_T[-1] if len(self._reached_ms_T) else BEFORE_ALL_MS
        added_ms_T = np.maximum.accumulate(np.maximum(time_ms_E, reached_ms))
        self._reached_ms_T = np.concatenate([self._reached_ms_T, added_ms_T])
        while len(self._reached_ms_T) > self._max_times:
            self._reached_ms_T, self._step = self._reached_ms_T[::2].copy(), 2 * self._step
