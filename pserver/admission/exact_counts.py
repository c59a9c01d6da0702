"""Counts of single keys, in a table of open addressing for each virtual bucket.

A bucket's table is at most 7/8 full. If it is full when a new key comes, the keys with the smallest counts are dropped:
those below the smallest power of two that frees an eighth of the table or more. They are counted in `dropped`, and
start anew if they come again. As long as a bucket has dropped no key, its counts are exact.

A day's tick halves every count, rounding down, and removes counts of 0. A bucket is halved when it is next touched, for
all days passed at once; reads give the halved counts. Admitted keys are removed.

Shapes: U unique keys of a step, B buckets of this shard, S slots of a bucket's table; a slot whose count is 0 is free.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, NUM_BUCKETS
from headrace.pserver.admission.counting import F32, U64, Flags, amount_of, amount_of_reference
from headrace.pserver.admission_entries import CountingRule, Rates


class ExactCounter:
    """The tables of one entry on one shard."""

    units: tuple[str, ...] = ("counts",)

    def __init__(self, measure: CountingRule, bucket_bytes: int, buckets: tuple[int, int]) -> None:
        self._first, num_buckets = buckets[0], buckets[1] - buckets[0]
        self.num_slots = bucket_bytes // (8 + measure.dtype.itemsize)
        self._keys_BS = np.zeros((num_buckets, self.num_slots), np.uint64)
        self._counts_BS = np.zeros((num_buckets, self.num_slots), measure.dtype)
        self._used_B = np.zeros(num_buckets, np.int32)
        self._day_B = np.zeros(num_buckets, np.int32)
        self._dropped_B = np.zeros(num_buckets, np.uint64)
        self._state = self._keys_BS, self._counts_BS, self._used_B, self._day_B, self._dropped_B
        names = "keys", "counts", "used", "day", "dropped"
        self.arrays: dict[str, NDArray[Any]] = dict(zip(names, self._state, strict=True))

    def record(
        self, keys_U: U64, show_U: F32, click_U: F32, rates: Rates, day: int, open_U: Flags, admitted_U: Flags
    ) -> None:
        """Count the records of open keys, in order; clear `admitted_U` for keys below the threshold."""
        record(*self._state, self._first, keys_U, show_U, click_U, rates, day, open_U, admitted_U)

    def estimate(self, key: int, day: int) -> int:
        """Units counted for a key as of a day; changes nothing."""
        b = key % NUM_BUCKETS - self._first
        slot = find(self._keys_BS[b], self._counts_BS[b], np.uint64(key))
        return int(self._counts_BS[b, slot]) >> max(day - int(self._day_B[b]), 0)

    def quality(self, key: int, day: int) -> dict[str, Any]:
        """The possible error of the estimate, in units, and its cause; JSON-able."""
        b = key % NUM_BUCKETS - self._first
        return {"bucket_keys": int(self._used_B[b]), "bucket_dropped_keys": int(self._dropped_B[b])}

    def forget(self, keys_U: U64) -> None:
        """Remove these keys' counts."""
        remove(self._keys_BS, self._counts_BS, self._used_B, self._first, keys_U)

    def digest(self) -> tuple[int, int]:
        """Two sums over buckets, each modulo 2**64, independent of the slots of keys."""
        first, second = digest(self._keys_BS, self._counts_BS, self._day_B, self._dropped_B, self._first)
        return int(first), int(second)


@njit(nogil=True, cache=True)
def _home(key, num_slots):  # type: ignore[no-untyped-def]
    """First slot of a key."""
    return np.int64(((mix(key + np.uint64(GOLDEN)) >> np.uint64(32)) * np.uint64(num_slots)) >> np.uint64(32))


@njit(nogil=True, cache=True)
def find(keys_S, counts_S, key):  # type: ignore[no-untyped-def]
    """Slot of a key, or the free slot where it would be entered."""
    slot = _home(key, len(keys_S))
    while counts_S[slot] != 0 and keys_S[slot] != key:
        slot += 1
        if slot == len(keys_S):
            slot = 0
    return slot


@njit(nogil=True, cache=True)
def record(  # type: ignore[no-untyped-def]
    keys_BS,
    counts_BS,
    used_B,
    day_B,
    dropped_B,
    first_bucket,
    keys_U,
    show_U,
    click_U,
    rates,
    day,
    open_U,
    admitted_U,
):
    """Count the records of open keys, in order; clear `admitted_U` for keys below the threshold."""
    num_slots, most, threshold = keys_BS.shape[1], np.int64(rates[2]), np.int64(rates[3])
    limit = num_slots * 7 // 8
    for u in range(len(keys_U)):
        if not open_U[u]:
            continue
        key = keys_U[u]
        b = np.int64(key & np.uint64(NUM_BUCKETS - 1)) - first_bucket
        if day_B[b] < day:
            days = min(np.int64(day) - np.int64(day_B[b]), np.int64(63))
            used_B[b] = _keep(keys_BS[b], counts_BS[b], days, np.int64(1))
            day_B[b] = day
        amount = amount_of(show_U[u], click_U[u], rates)
        slot = find(keys_BS[b], counts_BS[b], key)
        before = np.int64(counts_BS[b, slot])
        if before == 0 and amount > 0:
            if used_B[b] >= limit:
                least = _least_that_stays(counts_BS[b], max(num_slots // 8, 1))
                used = _keep(keys_BS[b], counts_BS[b], np.int64(0), least)
                dropped_B[b] += np.uint64(used_B[b] - used)
                used_B[b] = used
                slot = find(keys_BS[b], counts_BS[b], key)
            keys_BS[b, slot] = key
            used_B[b] += 1
        count = min(before + amount, most)
        if amount > 0:
            counts_BS[b, slot] = count
        if count < threshold:
            admitted_U[u] = False


@njit(nogil=True, cache=True)
def _least_that_stays(counts_S, room):  # type: ignore[no-untyped-def]
    """The smallest power of two that has `room` or more counts below it."""
    least = np.int64(1)
    while True:
        below = 0
        for count in counts_S:
            below += 0 < count < least
        if below >= room:
            return least
        least *= 2


@njit(nogil=True, cache=True)
def _keep(keys_S, counts_S, days, least):  # type: ignore[no-untyped-def]
    """Halve a bucket's counts `days` times and remove those then below `least`. -> the number that stays."""
    keys, counts = keys_S.copy(), counts_S.copy()
    keys_S[:], counts_S[:] = 0, 0
    used = 0
    for s in range(len(keys)):
        count = np.int64(counts[s]) >> days
        if count >= least:
            slot = find(keys_S, counts_S, keys[s])
            keys_S[slot], counts_S[slot] = keys[s], count
            used += 1
    return used


@njit(nogil=True, cache=True)
def remove(keys_BS, counts_BS, used_B, first_bucket, keys_U):  # type: ignore[no-untyped-def]
    """Remove keys; later keys of a chain move up, so that each is still found (Knuth, volume 3, 6.4 R)."""
    num_slots = keys_BS.shape[1]
    for key in keys_U:
        b = np.int64(key & np.uint64(NUM_BUCKETS - 1)) - first_bucket
        keys_S, counts_S = keys_BS[b], counts_BS[b]
        hole = find(keys_S, counts_S, key)
        if counts_S[hole] == 0:
            continue
        used_B[b] -= 1
        slot = hole
        while True:
            slot = (slot + 1) % num_slots
            if counts_S[slot] == 0:
                break
            if (slot - _home(keys_S[slot], num_slots)) % num_slots >= (slot - hole) % num_slots:
                keys_S[hole], counts_S[hole] = keys_S[slot], counts_S[slot]
                hole = slot
        keys_S[hole], counts_S[hole] = 0, 0


@njit(nogil=True, cache=True)
def digest(keys_BS, counts_BS, day_B, dropped_B, first_bucket):  # type: ignore[no-untyped-def]
    """-> two sums: over buckets of hashes of number, day and dropped; over keys of hashes of key and count."""
    first, second = np.uint64(0), np.uint64(0)
    for b in range(len(keys_BS)):
        start = mix(np.uint64(first_bucket + b) + mix(np.uint64(day_B[b]) + mix(dropped_B[b])))
        first += start
        second += mix(start + np.uint64(GOLDEN))
        for s in range(keys_BS.shape[1]):
            count = np.uint64(counts_BS[b, s])
            if count != 0:
                value = mix(keys_BS[b, s] + mix(count))
                first += value
                second += mix(value + np.uint64(GOLDEN))
    return first, second


class ExactCounterReference:
    """The twin of `ExactCounter` for one bucket: a dictionary."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.counts: dict[int, int] = {}
        self.day, self.dropped, self._num_slots, self._most = 0, 0, num_slots, most

    def record(self, key: int, show: float, click: float, rates: Rates, day: int) -> bool:
        """Count one record; returns whether the count has reached the threshold."""
        while self.day < day:
            self._keep(lambda count: count // 2)
            self.day += 1
        amount = amount_of_reference(show, click, rates)
        if amount and key not in self.counts and len(self.counts) >= self._num_slots * 7 // 8:
            self._make_room(max(self._num_slots // 8, 1))
        count = min(self.counts.get(key, 0) + amount, self._most)
        if amount:
            self.counts[key] = count
        return count >= rates[3]

    def _keep(self, becomes: Callable[[int], int]) -> None:
        self.counts = {key: left for key, count in self.counts.items() if (left := becomes(count))}

    def _make_room(self, room: int) -> None:
        least, before = 1, len(self.counts)
        while sum(count < least for count in self.counts.values()) < room:
            least *= 2
        self._keep(lambda count: count if count >= least else 0)
        self.dropped += before - len(self.counts)

    def forget(self, key: int) -> None:
        """Remove a key."""
        self.counts.pop(key, None)
