"""Tombstones: keys of one table whose rows were deleted since the last commit and may still be in its store.

A tombstone waits until a snapshot puts it in flight. Settling drops it, as the store no longer has the row; if the
commit failed, it waits again. While a key has a tombstone and no row in memory, its row in the store does not count. A
key that gets a row again keeps its tombstone: at a snapshot the row wins. pserver.tables.table decides which rows are
deleted.

Threads: any, each call under one lock.

Shapes: U keys of a call, R keys gathered, I slots of an index.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.protocol.shards import U16, U64
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import frozen, moved
from headrace.pserver.rows.table_rows import I32, MAX_LOAD, empty_index

START_KEYS = 64


class Tombstones:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = _Keys()
        self._in_flight: _Keys | None = None

    def __len__(self) -> int:
        """Number of keys that wait for a snapshot, without those in flight."""
        return self._waiting.count

    def add(self, keys_U: U64, group_U: U16) -> None:
        """Add deleted keys; keys may repeat, also within a call."""
        if len(keys_U):
            with self._lock:
                self._waiting.add(keys_U, group_U)

    def make_room(self, num_keys: int) -> None:
        """Grow for `num_keys` more outside the lock: moving many millions of keys takes long."""
        waiting = self._waiting
        count = waiting.count
        if waiting.room >= count + num_keys:
            return
        larger = waiting.larger(count, count + num_keys)
        with self._lock:
            if self._waiting is waiting:  # else a snapshot took them
                keys_U, group_U = waiting.all()
                larger.add(keys_U[count:], group_U[count:])
                self._waiting = larger

    def contains(self, keys_U: U64) -> NDArray[np.bool_]:
        """(U,) whether each key has a tombstone, waiting or in flight."""
        with self._lock:
            found_U = self._waiting.contains(keys_U)
            if self._in_flight is not None:
                found_U |= self._in_flight.contains(keys_U)
        return found_U

    def take(self) -> tuple[U64, U16]:
        """Put all waiting keys in flight; returns views of keys and slot groups, in order of arrival.

        Constant time; the writer sorts them.
        """
        with self._lock:
            assert self._in_flight is None, "one snapshot at a time"
            self._in_flight, self._waiting = self._waiting, _Keys()
            return self._in_flight.all()

    def drop_all(self) -> U64:
        """Drop all keys; returns them. None is in flight."""
        with self._lock:
            assert self._in_flight is None, "a snapshot is in flight"
            dropped, self._waiting = self._waiting, _Keys()
            return dropped.all()[0]

    def settle(self, committed: bool) -> None:
        """End the snapshot: drop the keys in flight, or have them wait again unless `committed`.

        Call it before the snapshot's rows become clean: a row that is only in memory may have a tombstone, too.
        """
        with self._lock:
            assert self._in_flight is not None, "no snapshot is in flight"
            if not committed:
                self._in_flight.add(*self._waiting.all())
                self._waiting = self._in_flight
            self._in_flight = None


class _Keys:
    """A growing set of keys with their slot groups."""

    def __init__(self) -> None:
        self.count = 0
        self._index_I = empty_index(START_KEYS)
        self._keys_R, self._group_R = np.empty(START_KEYS, np.uint64), np.empty(START_KEYS, np.uint16)

    @property
    def room(self) -> int:
        """Number of keys that fit."""
        return min(len(self._keys_R), int(MAX_LOAD * len(self._index_I)))

    def larger(self, count: int, num_keys: int) -> "_Keys":
        """A copy of the first `count` keys with room for `num_keys`, and at least twice the present room.

        Other threads may add keys meanwhile.
        """
        copy = _Keys()
        copy._index_I, copy._keys_R, copy._group_R = self._moved(count, num_keys)
        copy.count = count
        return copy

    def _moved(self, count: int, num_keys: int) -> tuple[I32, U64, U16]:
        keys_R, group_R = self._keys_R, self._group_R
        room = max(num_keys, 2 * len(keys_R))
        index_I, keys_R, group_R = empty_index(room), moved(keys_R, count, room), moved(group_R, count, room)
        kernels.rebuild_index(index_I, keys_R, count)
        return index_I, keys_R, group_R

    def add(self, keys_U: U64, group_U: U16) -> None:
        keys_U, group_U = frozen(keys_U), frozen(group_U)
        rows_U, done = np.empty(len(keys_U), np.int32), 0
        while True:
            done, self.count = kernels.find_or_reserve(
                self._index_I, self._keys_R, self._group_R, keys_U, group_U, rows_U, done, self.count, self.room
            )
            if done == len(keys_U):
                return
            self._grow()

    def contains(self, keys_U: U64) -> NDArray[np.bool_]:
        if not self.count:
            return np.zeros(len(keys_U), np.bool_)
        rows_U = np.empty(len(keys_U), np.int32)
        kernels.find(self._index_I, self._keys_R, frozen(keys_U), rows_U)
        found_U: NDArray[np.bool_] = rows_U != kernels.EMPTY
        return found_U

    def all(self) -> tuple[U64, U16]:
        return frozen(self._keys_R[: self.count]), frozen(self._group_R[: self.count])

    def _grow(self) -> None:
        """Double the room."""
        self._index_I, self._keys_R, self._group_R = self._moved(self.count, 0)
