"""When a failed call is tried again: the pauses between tries, bounded in number or by a deadline.

`Backoff` is pure: no clock, no wait. `call` and `Retrier` wait. The caller decides which errors are retried.
There is no jitter, since few processes call one peer and runs stay reproducible.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headrace.deadline import Deadline

PAUSE_S = 0.5
"""Between tries of a Retrier."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses after each failure in a row."""

    pauses_s: tuple[float, ...]
    endless: bool = False
    """Whether the last pause repeats. Otherwise the failure after the last pause is final."""

    @classmethod
    def doubling(cls, first_s: float, max_s: float) -> "Backoff":
        """Each pause is twice the one before, up to `max_s`; endless."""
        num_doubled = max(0, math.ceil(math.log2(max_s / first_s)))
        return cls((*(first_s * 2**number for number in range(num_doubled)), max_s), endless=True)

    def pause_s(self, failures: int) -> float:
        """The pause after `failures` failures in a row, 1 or more; the last pause repeats."""
        return self.pauses_s[min(failures, len(self.pauses_s)) - 1]

    def next_pause_s(self, failures: int, left_s: float, at_least_s: float = 0.0) -> float | None:
        """The pause before the next try, `at_least_s` long.

        None where there is no next try: no pause is left, or it would outlast the `left_s` seconds that remain.
        """
        if failures > len(self.pauses_s) and not self.endless:
            return None
        pause_s = max(at_least_s, self.pause_s(failures))
        return pause_s if pause_s < left_s else None


def call(
    act: Callable[[int], Result],
    backoff: Backoff,
    may_pass: Callable[[Exception], bool],
    *,
    deadline: Deadline | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> Result:
    """Call `act` with the number of the try, from 1, until it succeeds; returns its result.

    Raises the error of the last try, and at once an error for which `may_pass` is false.
    """
    failures = 0
    while True:
        try:
            return act(failures + 1)
        except Exception as error:
            failures += 1
            pause_s = backoff.next_pause_s(failures, math.inf if deadline is None else deadline.left_s())
            if pause_s is None or not may_pass(error):
                raise
        wait(pause_s)


class Retrier:
    """Repeats an action while it fails with one kind of error, for a bounded time; `trouble` reports it meanwhile.

    One thread calls; any may read `trouble`.
    """

    def __init__(
        self,
        error: type[Exception],
        trouble: str,
        max_s: float,
        stopping: threading.Event | None = None,
        *,
        at_end: str = "the job stops",
    ) -> None:
        """`trouble` describes the failure for people. Tries end after `max_s`, or once `stopping` is set.

        `at_end`: what happens after `max_s`, in words.
        """
        self._error, self._words, self._max_s, self._at_end = error, trouble, max_s, at_end
        self._stopping = stopping or threading.Event()
        self.trouble = ""
        """The failure, for a status; empty while there is none."""

    def call(self, act: Callable[[], Result]) -> Result:
        """Return the result of `act` once it succeeds. Raises the error of the last try."""

        def may_pass(error: Exception) -> bool:
            if not isinstance(error, self._error) or self._stopping.is_set():
                return False
            if not self.trouble:
                log.warning("%s: %s", self._words, error)
            self.trouble = f"{self._words}; {self._at_end} after {self._max_s:g} s of it: {error}"
            return True

        result = call(
            lambda _: act(),
            Backoff((PAUSE_S,), endless=True),
            may_pass,
            deadline=Deadline.after(self._max_s),
            wait=self._stopping.wait,
        )
        self.trouble = ""
        return result
