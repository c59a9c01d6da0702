"""How the number of distinct ids grows with the stream: Heaps' law, fitted to counts of a sample. Pure.

The law: after n events there are K * n ** b distinct ids, with b between 0 (nothing new comes) and 1 (all are new).
Source: Heaps, "Information Retrieval: Computational and Theoretical Aspects" (1978), for words of a text. It is not
known to hold for a stream of events, so its error is measured on the sample itself, and grows with the distance.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FITTED = 2.5
"""The law is fitted to the last part of the sample, from 1 / FITTED of its events on. So a slot whose ids are complete
early is seen to be complete. On two real streams, fits to longer parts were further off."""
TESTED = 4.0
"""The error is that of the law fitted to the first 1 / TESTED of the sample, at the sample's end."""
LEAST_ERROR = 1.15
"""Taken as the error of the test where it was less."""
MOST_DOUBT = 10.0
"""Bounds that are this many times above and below a number say nothing about it."""


@dataclass(frozen=True, slots=True)
class IdCurve:
    """Distinct ids after so many events of a sample."""

    events: tuple[int, ...]
    """Ascending, at least one."""
    ids: tuple[float, ...]
    """As many; never descending. Not whole where ids are admitted by chance."""

    def exponent(self, first: int = 0) -> float:
        """The law's b, by least squares of logarithms over the last part of the first points.

        `first`: how many points; 0: all.
        """
        events, ids = self._part(first)
        some = [n for n, count in enumerate(ids) if count]
        if len(some) < 2:
            return 1.0 if some else 0.0
        chosen = some[min(len(some) - 2, sum(events[n] * FITTED < events[-1] for n in some)) :]
        x, y = np.log([events[n] for n in chosen]), np.log([ids[n] for n in chosen])
        slope = float(np.polyfit(x, y, 1)[0])
        return min(1.0, max(0.0, slope))

    def at(self, events: float, first: int = 0) -> float:
        """Distinct ids after so many events: measured ones interpolated, beyond the sample by the law."""
        known, ids = self._part(first)
        if events <= known[-1]:
            return float(np.interp(events, (0, *known), (0.0, *ids)))
        return float(ids[-1] * (events / known[-1]) ** self.exponent(first))

    def _part(self, first: int) -> tuple[Sequence[int], Sequence[float]]:
        return (self.events[:first], self.ids[:first]) if first else (self.events, self.ids)


def backtest(curves: Sequence[IdCurve]) -> float | None:
    """Ids that the law, fitted to the first part of the sample, expects at its end, divided by those counted there.

    For all curves together, which have the same events. None where the sample is too short for the test.
    """
    if not curves:
        return None
    events = curves[0].events
    first = sum(at * TESTED <= events[-1] for at in events)
    measured = sum(curve.ids[-1] for curve in curves)
    if first < 3 or not measured:
        return None
    return sum(curve.at(events[-1], first) for curve in curves) / measured


def factor_of_doubt(ratio: float | None, sample: float, events: float) -> float:
    """By what the true number may be larger or smaller than the law's, at least 1; infinite without a test.

    The error of the test is taken to repeat each time that the stream grows as much as in the test.
    """
    if events <= sample:
        return 1.0
    if not ratio:
        return math.inf
    power = math.log(events / sample) / math.log(TESTED) * math.log(_once(ratio))
    return math.exp(power) if power < math.log(sys.float_info.max) else math.inf


def sample_for(ratio: float | None, events: float) -> float | None:
    """Events of a sample whose bounds would say something, if its test had the same error; None without a test."""
    return None if not ratio else events / TESTED ** (math.log(MOST_DOUBT) / math.log(_once(ratio)))


def _once(ratio: float) -> float:
    return max(ratio, 1 / ratio, LEAST_ERROR)
