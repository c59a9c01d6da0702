"""Limits the log lines of repeated events: the first, the tenth, the hundredth of a kind is logged.

A stranger decides how often a refusal or a warning occurs, so its lines must be bounded and still say who tried, and
how often. The audit log and the log of every server use it. No clock: the time is an argument.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

QUIET_S = 600.0
"""After so long without an event of its kind, the next one counts as a first."""
BURST, PER_S = 100.0, 1 / 60
"""Lines of all kinds together: so many at once, then one a minute; at most half a million a year."""
MAX_KINDS = 4096
"""Most kinds remembered; beyond it the one that occurred longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """A token bucket: tries that are left."""

    tries: float
    at_s: float
    """The time of this count."""

    def after_failure(self, now_s: float, capacity: float, per_s: float) -> tuple["TokenBucket", float]:
        """The bucket after one more failure, and the seconds until the next try is allowed; 0: this one was."""
        tries = min(capacity, self.tries + max(0.0, now_s - self.at_s) * per_s)
        if tries >= 1:
            return TokenBucket(tries - 1, now_s), 0.0
        return TokenBucket(tries, now_s), (1 - tries) / per_s


@dataclass(frozen=True, slots=True)
class LoggedOccurrence:
    """The figures in the log line of an event."""

    times: int
    """Number of times it occurred, this time included, without a pause of QUIET_S."""
    left_out: int
    """Lines of any kind that were left out since the last one, because there were too many."""


class LogLimiter:
    """Counts events by kind. Any thread."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._bucket, self._left_out = TokenBucket(BURST, 0.0), 0
        self._lock = threading.Lock()

    def note(self, kind: Hashable, now_s: float) -> LoggedOccurrence | None:
        """Count one more of `kind`; what to log, or None."""
        with self._lock:
            times, last_s = self._kinds.pop(kind, (0, now_s))
            times = 1 if now_s - last_s > QUIET_S else times + 1
            self._kinds[kind] = times, now_s
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
            if not is_logged(times):
                return None
            self._bucket, wait_s = self._bucket.after_failure(now_s, BURST, PER_S)
            if wait_s > 0:
                self._left_out += 1
                return None
            found, self._left_out = LoggedOccurrence(times, self._left_out), 0
            return found


def is_logged(times: int) -> bool:
    """True if `times` is 1, 10, 100, ..."""
    return str(times).strip("0") == "1"
