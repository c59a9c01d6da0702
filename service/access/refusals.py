"""Which refusals are written down: of many alike the first, the tenth, the hundredth. Pure but for what it remembers.

Whoever is refused chooses how often: what is written of it must be bounded, and still tell who tried, and how much.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from service.access.limiting import Bucket

QUIET_S = 600.0
"""After so long without one of its kind, the next is a first again."""
BURST, PER_S = 100.0, 1 / 60
"""Of all kinds so many are written at once, and then one a minute: half a million lines a year, at most."""
MAX_KINDS = 4096
"""Remembered at a time; beyond it the one is forgotten that came longest ago."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is to be written of a refusal."""

    times: int
    """How often it came, this time included, without a pause of QUIET_S."""
    left_out: int
    """Of any kind: so many lines were not written since the last one, there being too many."""


class Refusals:
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
            if not _is_told(times):
                return None
            self._bucket, wait_s = self._bucket.after_failure(now_s, BURST, PER_S)
            if wait_s > 0:
                self._left_out += 1
                return None
            told, self._left_out = Told(times, self._left_out), 0
            return told


def _is_told(times: int) -> bool:
    return str(times).strip("0") == "1"
