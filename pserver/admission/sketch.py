"""Counts in a sketch: little memory; an estimate may be too high, never too low.

A count-min sketch (Cormode, Muthukrishnan 2005) for each virtual bucket, DEPTH rows of `width` counters, with
conservative update (Estan, Varghese 2002): a record of `a` units raises the key's DEPTH counters to their minimum + a,
if they are lower. The minimum is the estimate.

A day's tick halves every counter, rounding down. A bucket is halved when it is next touched, for all days passed at
once; reads give the halved estimates.

**Error.** Let t be the plain rule's count of a key (halved and rounded down at each tick) and N the units of all
records of its bucket (`mass`, halved at each tick, rounded up). As long as no counter is full,
    t <= estimate                                    always;
    estimate <= t + e / width * N + 1                with probability 1 - exp(-DEPTH) or more;
the 1 is for rounding and applies after the first tick. In practice conservative update makes the error far smaller.
Counters saturate at their maximum, which is at least the threshold; later ticks halve that maximum.

Shapes: U unique keys of a step, B buckets of this shard, C counters of a bucket (DEPTH rows, one after the other),
W words of 64 bits of a bucket.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, NUM_BUCKETS, mix_reference
from headrace.pserver.admission.counting import F32, U64, Flags, amount_of, amount_of_reference
from headrace.pserver.admission_entries import CountingRule, Rates

DEPTH = 4
"""Counters for each key."""
SECOND = (2 * GOLDEN) & MASK


class SketchCounter:
    """The sketches of one entry on one shard."""

    units: tuple[str, ...] = ("cells", "mass")

    def __init__(self, measure: CountingRule, bucket_bytes: int, buckets: tuple[int, int]) -> None:
        self._first, num_buckets = buckets[0], buckets[1] - buckets[0]
        num_words = bucket_bytes // 8
        self._words_BW = np.zeros((num_buckets, num_words), np.uint64)
        self._cells_BC = self._words_BW.view(measure.dtype)
        self.width = self._cells_BC.shape[1] // DEPTH
        self._day_B = np.zeros(num_buckets, np.int32)
        self._mass_B = np.zeros(num_buckets, np.uint64)
        self.arrays: dict[str, NDArray[Any]] = {"cells": self._cells_BC, "day": self._day_B, "mass": self._mass_B}

    def record(
        self, keys_U: U64, show_U: F32, click_U: F32, rates: Rates, day: int, open_U: Flags, admitted_U: Flags
    ) -> None:
        """Count the records of open keys, in order; clear `admitted_U` for keys below the threshold."""
        state = self._cells_BC, self._day_B, self._mass_B
        record(*state, self._first, self.width, keys_U, show_U, click_U, rates, day, open_U, admitted_U)

    def estimate(self, key: int, day: int) -> int:
        """Units counted for a key as of a day; changes nothing."""
        b = key % NUM_BUCKETS - self._first
        least = min(int(self._cells_BC[b, c]) for c in probes_of_reference(key, self.width))
        return least >> max(day - int(self._day_B[b]), 0)

    def quality(self, key: int, day: int) -> dict[str, Any]:
        """The possible error of the estimate, in units, and its cause; JSON-able."""
        b = key % NUM_BUCKETS - self._first
        mass = halved_mass(int(self._mass_B[b]), max(day - int(self._day_B[b]), 0))
        error = math.e / self.width * mass + 1
        return {"too_high_by_at_most": error, "with_probability": 1 - math.exp(-DEPTH), "bucket_units": mass}

    def forget(self, keys_U: U64) -> None:
        """Does nothing: a sketch stores no keys, and its counters are shared."""

    def digest(self) -> tuple[int, int]:
        """Two sums over buckets, each modulo 2**64."""
        first, second = digest(self._words_BW, self._day_B, self._mass_B, self._first)
        return int(first), int(second)


@njit(nogil=True, cache=True)
def record(  # type: ignore[no-untyped-def]
    cells_BC, day_B, mass_B, first_bucket, width, keys_U, show_U, click_U, rates, day, open_U, admitted_U
):
    """Count the records of open keys, in order; clear `admitted_U` for keys below the threshold."""
    most, threshold, width = np.int64(rates[2]), np.int64(rates[3]), np.uint64(width)
    for u in range(len(keys_U)):
        if not open_U[u]:
            continue
        key = keys_U[u]
        b = np.int64(key & np.uint64(NUM_BUCKETS - 1)) - first_bucket
        if day_B[b] < day:
            _halve(cells_BC, day_B, mass_B, b, day)
        cells_C = cells_BC[b]
        # DEPTH probes, unrolled: each a 32-bit part of a hash, scaled to the width, in its own row.
        one, two = mix(key + np.uint64(GOLDEN)), mix(key + np.uint64(SECOND))
        c0 = ((one >> np.uint64(32)) * width) >> np.uint64(32)
        c1 = (((one & np.uint64(0xFFFFFFFF)) * width) >> np.uint64(32)) + width
        c2 = (((two >> np.uint64(32)) * width) >> np.uint64(32)) + width + width
        c3 = (((two & np.uint64(0xFFFFFFFF)) * width) >> np.uint64(32)) + width + width + width
        v0, v1, v2, v3 = np.int64(cells_C[c0]), np.int64(cells_C[c1]), np.int64(cells_C[c2]), np.int64(cells_C[c3])
        amount = amount_of(show_U[u], click_U[u], rates)
        estimate = min(min(min(v0, v1), min(v2, v3)) + amount, most)
        cells_C[c0], cells_C[c1] = max(v0, estimate), max(v1, estimate)
        cells_C[c2], cells_C[c3] = max(v2, estimate), max(v3, estimate)
        mass_B[b] += np.uint64(amount)
        if estimate < threshold:
            admitted_U[u] = False


@njit(nogil=True, cache=True)
def _halve(cells_BC, day_B, mass_B, b, day):  # type: ignore[no-untyped-def]
    """Bring bucket `b` up to a later day. A shift by 63 empties every counter."""
    days = min(np.int64(day) - np.int64(day_B[b]), np.int64(63))
    for c in range(cells_BC.shape[1]):
        cells_BC[b, c] = np.uint64(cells_BC[b, c]) >> np.uint64(days)
    for _ in range(days):
        mass_B[b] = (mass_B[b] + np.uint64(1)) >> np.uint64(1)
    day_B[b] = day


def halved_mass(mass: int, days: int) -> int:
    """`mass` after `days` ticks, each of which halves it, rounding up."""
    for _ in range(min(days, 63)):
        mass = (mass + 1) >> 1
    return mass


def probes_of_reference(key: int, width: int) -> list[int]:
    """The key's counters, one in each row: four 32-bit parts of two hashes, scaled to the width."""
    hashes = mix_reference((key + GOLDEN) & MASK), mix_reference((key + SECOND) & MASK)
    parts = [part for value in hashes for part in (value >> 32, value & 0xFFFFFFFF)]
    return [row * width + ((part * width) >> 32) for row, part in enumerate(parts)]


@njit(nogil=True, cache=True)
def digest(words_BW, day_B, mass_B, first_bucket):  # type: ignore[no-untyped-def]
    """-> two sums over buckets of hashes of the bucket's number, day, mass and words, in that order."""
    total_first, total_second = np.uint64(0), np.uint64(0)
    for b in range(len(words_BW)):
        start = mix(np.uint64(first_bucket + b) + mix(np.uint64(day_B[b]) + mix(mass_B[b])))
        first, second = start, mix(start + np.uint64(GOLDEN))
        for word in words_BW[b]:
            first = (first ^ word) * np.uint64(0xBF58476D1CE4E5B9)
            first ^= first >> np.uint64(32)
            second = (second ^ word) * np.uint64(0x94D049BB133111EB)
            second ^= second >> np.uint64(29)
        total_first += mix(first)
        total_second += mix(second)
    return total_first, total_second


class SketchCounterReference:
    """The twin of `SketchCounter` for one bucket: lists of Python numbers."""

    def __init__(self, width: int, most: int) -> None:
        self.cells, self.day, self.mass, self._width, self._most = [0] * (DEPTH * width), 0, 0, width, most

    def record(self, key: int, show: float, click: float, rates: Rates, day: int) -> bool:
        """Count one record; returns whether the estimate has reached the threshold."""
        while self.day < day:
            self.cells, self.mass, self.day = (
                [cell // 2 for cell in self.cells],
                halved_mass(self.mass, 1),
                self.day + 1,
            )
        amount, probes = amount_of_reference(show, click, rates), probes_of_reference(key, self._width)
        estimate = min(min(self.cells[c] for c in probes) + amount, self._most)
        for c in probes:
            self.cells[c] = max(self.cells[c], estimate)
        self.mass += amount
        return estimate >= rates[3]
