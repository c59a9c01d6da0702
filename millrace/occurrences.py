"""Which of many like events are written down: the first, the tenth, the hundredth. Pure but for what it remembers.

A stranger chooses how often a refusal or a warning comes: what is written of it must be bounded, and still tell who
tried, and how much. The audit log and the log of every server use it.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

QUIET_S = 600.0
"""After so long without one of its kind, the next is a first again."""
BURST, PER_S = 100.0, 1 / 60
"""Of all kinds so many are written at once, and then one a minute: half a million lines a year, at most."""
MAX_KINDS = 4096
"""Remembered at a time; beyond it the one is forgotten that came longest ago."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tries that are left."""

    tries: float
    at_s: float
    """When there were so many."""

    def after_failure(self, now_s: float, capacity: float, per_s: float) -> tuple["Bucket", float]:
        """The bucket after one more failure, and the seconds until the next is allowed: 0 where this one was."""
        tries = min(capacity, self.tries + max(0.0, now_s - self.at_s) * per_s)
        if tries >= 1:
            return Bucket(tries - 1, now_s), 0.0
        return Bucket(tries, now_s), (1 - tries) / per_s


@dataclass(frozen=True, slots=True)
class Told:
    """What is to be written of an event."""

    times: int
    """How often it came, this time included, without a pause of QUIET_S."""
    left_out: int
    """Of any kind: so many lines were not written since the last one, there being too many."""


class Occurrences:
    """See module docstring. Any thread."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._bucket, self._left_out = Bucket(BURST, 0.0), 0
        self._lock = threading.Lock()

    def note(self, kind: Hashable, now_s: float) -> Told | None:
        """One more of `kind`; what is to be written of it, if anything."""
        with self._lock:
            times, last_s = self._kinds.pop(kind, (0, now_s))
            times = 1 if now_s - last_s > QUIET_S else times + 1
            self._kinds[kind] = times, now_s
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
            if not is_told(times):
                return None
            self._bucket, wait_s = self._bucket.after_failure(now_s, BURST, PER_S)
            if wait_s > 0:
                self._left_out += 1
                return None
            told, self._left_out = Told(times, self._left_out), 0
            return told


def is_told(times: int) -> bool:
    """Whether that many is 1, 10, 100, ..."""
    return str(times).strip("0") == "1"
