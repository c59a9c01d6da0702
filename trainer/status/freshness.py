"""Delay between the time of an event and its learning or serving: summaries of event times, and histograms.

This is for operators: it is in no commit and no digest, and nothing is decided by it. The close reports when a pass
was learnt, a replica when it could be served.

Shapes: B samples, K times kept of a pass, G groups of samples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.spec.config import SourceSection
from headrace.trainer.job_status import LearningDelay

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

MAX_GROUPS = 200
"""Groups of a pass. A quantile computed from them is off by at most half a per cent of the samples."""
MAX_KEPT = 1 << 16
"""Times of a pass that one rank keeps. Beyond, it keeps every second time, then every fourth, and so on."""
BOUNDS_S = (
    0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 15, 30, 60, 300, 900, 3600, 7200, 14400,
    86400,
)  # fmt: skip
"""Upper bounds of a histogram's buckets; one more bucket holds the rest."""


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Event times of samples in groups of about equal size. The oldest time stands for a group: delays never shrink."""

    oldest_s_G: F64
    """Unix seconds, ascending."""
    count_G: I64

    @classmethod
    def of(cls, time_s_K: F64, count_K: I64) -> "EventTimes":
        """From times in any order, each of which stands for `count_K` samples."""
        order_K = np.argsort(time_s_K, kind="stable")
        time_s_K, count_K = time_s_K[order_K], count_K[order_K]
        if len(time_s_K) <= MAX_GROUPS:
            return cls(time_s_K, count_K)
        before_K = np.cumsum(count_K) - count_K
        group_K = before_K * MAX_GROUPS // count_K.sum()
        first_G = np.flatnonzero(np.r_[True, group_K[1:] != group_K[:-1]])
        return cls(time_s_K[first_G], np.add.reduceat(count_K, first_G))

    @classmethod
    def one(cls, time_s: float) -> "EventTimes":
        """From one event."""
        return cls(np.array([time_s]), np.array([1], np.int64))

    @classmethod
    def joined(cls, parts: Sequence["EventTimes"]) -> "EventTimes":
        """The union of several, for example of all ranks or of several passes."""
        if not parts:
            return cls(np.empty(0), np.empty(0, np.int64))
        return cls.of(np.concatenate([p.oldest_s_G for p in parts]), np.concatenate([p.count_G for p in parts]))

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "EventTimes":
        """The inverse of `message`."""
        return cls(np.array(message["oldest_s"], np.float64), np.array(message["count"], np.int64))

    def message(self) -> dict[str, Any]:
        """As JSON-able data, to the millisecond."""
        return {"oldest_s": np.round(self.oldest_s_G, 3).tolist(), "count": self.count_G.tolist()}


class EventTimesCollector:
    """Collects the event times of a pass, batch by batch, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[F64] = []
        self._num_kept = self._num_seen = 0
        self._stride = 1

    def add(self, time_s_B: F64) -> None:
        """Add the times of one batch; all must be finite."""
        kept = time_s_B[-self._num_seen % self._stride :: self._stride]
        self._num_seen += len(time_s_B)
        self._kept.append(kept)
        self._num_kept += len(kept)
        while self._num_kept > MAX_KEPT:
            self._kept = [np.concatenate(self._kept)[::2]]
            self._num_kept, self._stride = len(self._kept[0]), 2 * self._stride

    def take(self) -> EventTimes:
        """Return the times of the pass, and forget them."""
        if not self._num_kept:
            return EventTimes.joined([])
        edge_K1 = self._num_seen * np.arange(self._num_kept + 1) // self._num_kept
        found = EventTimes.of(np.concatenate(self._kept), np.diff(edge_K1))
        self._kept, self._num_kept, self._num_seen, self._stride = [], 0, 0, 1
        return found


class DelayHistogram:
    """A histogram of the seconds between events and something that happened to them."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(BOUNDS_S) + 1, np.int64)
        self._sum_s = 0.0

    def add(self, times: EventTimes, at_s: float) -> None:
        """Add events to which it happened at `at_s`, unix seconds. The delay of an event in the future is 0."""
        delay_s_G = np.maximum(at_s - times.oldest_s_G, 0.0)
        np.add.at(self._counts, np.searchsorted(BOUNDS_S, delay_s_G), times.count_G)
        self._sum_s += float(delay_s_G @ times.count_G)

    def totals(self) -> LearningDelay:
        """As Prometheus has it: by upper bound, the count up to it."""
        upto = np.cumsum(self._counts).tolist()
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        return LearningDelay(buckets=list(zip(bounds, upto, strict=True)), sum_s=self._sum_s)


def is_replay(sources: Iterable[SourceSection], *, bounded: bool) -> bool:
    """Whether old events are no sign of delay: the stream ends, or the times of all its events are made up."""
    return bounded or all(each.made_up_times for each in sources)


class Freshness:
    """Event times of the newest pass, and the delays with which all passes were learnt. Used on rank 0.

    The age of events of a replay means nothing, and is not reported.
    """

    def __init__(self, live_from_s: float = -math.inf) -> None:
        """`live_from_s`: a pass whose newest event is older belongs to a replay. For a replay this is the start of the
        run."""
        self._learnt, self._live_from_s, self._any = DelayHistogram(), live_from_s, False
        self._version, self._times, self._counts = 0, EventTimes.joined([]), False

    def read(self, version: int, messages: Sequence[Mapping[str, Any]], *, counts: bool) -> None:
        """Take the times of all ranks for the pass of `version`. It `counts` if it is learnt for the first time."""
        self._version = version
        self._times = EventTimes.joined([EventTimes.of_message(message) for message in messages])
        self._counts = counts and len(self._times.oldest_s_G) > 0 and self._live(float(self._times.oldest_s_G[-1]))

    def closed(self, now_s: float) -> LearningDelay | None:
        """The pass is closed. Returns the histogram since the start; None in a replay."""
        if self._counts:
            self._learnt.add(self._times, now_s)
            self._counts, self._any = False, True
        return self._learnt.totals() if self._any else None

    def age_s(self, newest_s: float, now_s: float) -> float | None:
        """Seconds since the newest event of a pass; None in a replay."""
        return now_s - newest_s if self._live(newest_s) else None

    def _live(self, newest_s: float) -> bool:
        return newest_s >= self._live_from_s

    def of(self, version: int) -> dict[str, Any] | None:
        """Event times of the pass of a version, as EventTimes.message; None unless it is the newest version."""
        return self._times.message() if version == self._version else None
