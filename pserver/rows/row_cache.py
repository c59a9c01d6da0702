"""The row cache of a table with bounded memory: cold rows are evicted, and loaded from the store on demand.

Only a clean row is evicted, so the store holds its value. A reserved row is evicted, too, and starts anew.
pserver.rows.eviction chooses the rows.

A key is resident, or in the store, or has no row. Threads: one at a time moves rows in or out (`still`) and reads the
store meanwhile; a step reads, updates and releases pinned rows without waiting for it. A thread that waits for room
holds no lock and no pin.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.deadline import Deadline
from headrace.pserver.errors import OutOfMemory
from headrace.pserver.protocol.shards import F32, U16, U64
from headrace.pserver.rows import eviction, kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.eviction import FREE
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.slab import Slab, SlabMaker
from headrace.pserver.rows.stored_rows import DeletedRows, StoredRows
from headrace.pserver.rows.table_rows import I32, MAX_LOAD, MAX_ROWS, U32, RowArrays, row_bytes_of

COPIES_SHARE = 0.25
"""Share of a table's memory for copies of rows in a commit; rows and index have the rest."""
BOOKKEEPING_BYTES = 2 + 1 + 3 * 4
"""Bytes of a row beside those of `RowArrays`: pins, uses, and its entry in three lists (free, touched, in flight)."""
LEAVE_SHARE = 32
"""When room is needed, one row in this many is evicted, so that the next batches find room."""
LOOKS_AT_ONCE, LEAVE_AT_ONCE = 1 << 16, 1 << 12
"""Rows that the hand passes, and that are evicted, while steps cannot release rows: well below a millisecond."""
ROOM_WAIT_S = 60.0
"""How long a batch waits for rows to become clean or unpinned; then OutOfMemory is raised."""


@dataclass(frozen=True, slots=True)
class CacheBound:
    """The numbers of rows that a table's memory allows."""

    max_rows: int
    """Most resident rows."""
    max_dirty: int
    """Most rows that wait for a commit, in flight and changed since; batches prepared before may exceed it a little.

    A commit begins between passes once half of this waits. So a pass that changes at most half always ends: the room
    that it lacks is free once the commit in flight is settled.
    """

    @classmethod
    def of(cls, memory_bytes: int, width: int) -> "CacheBound":
        """For rows of `width` floats."""
        copies_bytes = int(memory_bytes * COPIES_SHARE)
        rows_bytes, row_bytes = memory_bytes - copies_bytes, row_bytes_of(width) + BOOKKEEPING_BYTES
        max_rows, num_slots = 0, 2
        while 4 * num_slots < rows_bytes:
            within = min(int(MAX_LOAD * num_slots), (rows_bytes - 4 * num_slots) // row_bytes)
            max_rows, num_slots = max(max_rows, within), 2 * num_slots
        return cls(min(max_rows, MAX_ROWS), copies_bytes // (8 + 4 * (HEAD + width)))


class RowCache(RowArrays):
    """The rows of a table of which only some are in memory."""

    max_dirty: int

    def __init__(
        self,
        name: str,
        settings: RowSettings,
        seed: int,
        memory_bytes: int,
        waiting: Callable[[], int],
        touched: Callable[[], int],
        is_deleted: DeletedRows,
        slab: SlabMaker = Slab,
    ) -> None:
        """`waiting` counts the rows that wait for a commit: changed since the last one, and in flight. `touched` counts
        those of them that the open pass changed, which no commit takes before its close. `is_deleted` says which rows
        of the store are deleted."""
        bound = CacheBound.of(memory_bytes, len(settings.start_W))
        self.max_rows, self.max_dirty = bound.max_rows, bound.max_dirty
        super().__init__(name, settings, seed, room=self.max_rows, bounded=True, slab=slab)
        self.stored = StoredRows(HEAD + self.width, is_deleted)
        self._waiting, self._touched = waiting, touched
        self._pins_R = np.full(self.max_rows, FREE, np.uint16)
        self._uses_R = np.zeros(self.max_rows, np.uint8)
        self._num_pins = 0
        """The sum over all rows."""
        self._hand = 0
        self._room = threading.Condition()
        self._num_room_made = 0

    @property
    def row_bytes(self) -> int:
        return super().row_bytes + BOOKKEEPING_BYTES

    def find(self, keys_U: U64) -> I32:
        """Loads rows from the store."""
        return self._pinned(keys_U, None)

    def find_ahead(self, keys_U: U64) -> I32:
        """Leaves room for the rows that a step makes of admitted keys."""
        if self._num_pins + len(keys_U) > self.max_rows // 2:
            return np.full(len(keys_U), kernels.EMPTY, np.int32)
        return self.find(keys_U)

    def reserve(self, keys_U: U64, group_U: U16, *, start: bool = True) -> I32:
        """Raises OutOfMemory."""
        assert start
        return self._pinned(keys_U, group_U)

    def release(self, rows_U: I32) -> None:
        self._unpin(rows_U)
        self.made_room()

    def _pin(self, rows_U: I32) -> None:
        sound = eviction.pin(frozen(rows_U), self._pins_R, self._uses_R)
        self._num_pins += int(np.count_nonzero(rows_U != kernels.EMPTY))
        assert sound, f"table {self._name!r}: {FREE:,} batches hold one row; are they never released?"

    def _unpin(self, rows_U: I32) -> None:
        with self._numbering:
            sound = eviction.unpin(frozen(rows_U), self._pins_R)
            self._num_pins -= int(np.count_nonzero(rows_U != kernels.EMPTY))
        assert sound, f"table {self._name!r}: rows released that no batch held"

    def made_room(self) -> None:
        with self._room:
            self._num_room_made += 1
            self._room.notify_all()

    def gather_present(self, keys_U: U64, out_UD: F32, purge: Callable[[I32], None]) -> None:
        """Loads nothing into memory, so it never waits for room."""
        with self.still:
            super().gather_present(keys_U, out_UD, purge)
            away_U = np.flatnonzero(self.resident(keys_U) == kernels.EMPTY)
            found_A, words_FW = self.stored.get(keys_U[away_U])
        out_UD[away_U[found_A]] = words_FW[:, HEAD : HEAD + self.num_weights].view(np.float32)

    # --- loading -----------------------------------------------------------------------------------------------------

    def _pinned(self, keys_U: U64, group_U: U16 | None) -> I32:
        """Row number of each key, pinned; without `group_U`, EMPTY for a key without a row."""
        deadline = Deadline.after(ROOM_WAIT_S)
        while True:
            room_made = self._num_room_made
            if group_U is None or self._waiting() < self.max_dirty:
                complete = self._resident_pinned(keys_U, or_none=group_U is not None or self.stored.num_away > 0)
                if complete is not None:
                    return complete
                with self.still:
                    brought = self._brought(keys_U, group_U)
                if brought is not None:
                    return brought
            self._await_room(room_made, len(keys_U), deadline)

    def _resident_pinned(self, keys_U: U64, *, or_none: bool) -> I32 | None:
        """Numbers of resident keys, pinned; with `or_none`, of all keys, or None."""
        with self._numbering:
            rows_U = self.look_up(keys_U)
            if or_none and (rows_U == kernels.EMPTY).any():
                return None
            self._pin(rows_U)
            return rows_U

    def _brought(self, keys_U: U64, group_U: U16 | None) -> I32 | None:
        """As `_pinned`, loading missing rows; None if there is no room. Holds `still` meanwhile."""
        with self._numbering:  # a sweep does not wait for `still` and must find them pinned
            rows_U = self.look_up(keys_U)
            self._pin(rows_U)
        missing_U = np.flatnonzero(rows_U == kernels.EMPTY)
        try:
            found_M, words_FW = self.stored.get(keys_U[missing_U])
        except BaseException:
            self._unpin(rows_U)
            raise
        fresh_U = missing_U[~found_M] if group_U is not None else missing_U[:0]
        if not self._make_room(len(fresh_U) + len(words_FW)):
            self._unpin(rows_U)
            return None
        if group_U is not None:
            rows_U[fresh_U] = self._started(keys_U[fresh_U], group_U[fresh_U])
        rows_U[missing_U[found_M]] = self._returned(keys_U[missing_U[found_M]], words_FW)
        return rows_U

    def _started(self, keys_U: U64, group_U: U16) -> I32:
        """New rows at their initial values."""
        with self._numbering:
            rows_U = self._numbered(keys_U)
            self._start_at(rows_U, keys_U, group_U)
        return rows_U

    def _returned(self, keys_U: U64, words_UW: U32) -> I32:
        """Load rows that are only in the store."""
        with self._numbering:
            rows_U = self._numbered(keys_U)
            self.floats.hold(words_UW, rows_U)
            self.floats.unpack(frozen(words_UW), rows_U, 0, len(rows_U), self.bits())
            self.stored.left(len(rows_U))
        return rows_U

    def _numbered(self, keys_U: U64) -> I32:
        """The numbers are pinned once; there is room."""
        rows_U = super()._numbered(keys_U)
        self._uses_R[rows_U] = 0
        self._pins_R[rows_U] = 1
        self._num_pins += len(rows_U)
        return rows_U

    # --- eviction ----------------------------------------------------------------------------------------------------

    @property
    def _spare(self) -> int:
        return self.max_rows - self.num_numbers + self._free.count

    def _make_room(self, num_rows: int) -> bool:
        """Make room for `num_rows` more, evicting cold rows if needed; returns whether there is room."""
        if self._spare >= num_rows:
            return True
        wanted = max(num_rows, self.max_rows // LEAVE_SHARE)
        looks = (int(eviction.MAX_USES) + 1) * self.num_numbers
        while self._spare < wanted and looks > 0:
            looks -= self._leave(min(wanted - self._spare, LEAVE_AT_ONCE), min(looks, LOOKS_AT_ONCE, self.num_numbers))
        return self._spare >= num_rows

    def _leave(self, max_rows: int, max_looks: int) -> int:
        """Evict some rows; returns how many the hand passed."""
        rows_U = np.empty(max_rows, np.int32)
        changed_R = self.columns["changed_version"]
        with self._numbering:
            self._hand, looks, count = eviction.sweep(
                self._hand,
                self.num_numbers,
                max_looks,
                self._uses_R,
                self._pins_R,
                self.marks_R,
                changed_R,
                np.uint32(self.open_version),
                rows_U,
            )
            rows_U = rows_U[:count]
            present = int(eviction.leave(self.index_I, self.columns["keys"], changed_R, self._pins_R, rows_U))
            self.floats.free(rows_U)
            self._free.put(rows_U)
            self.stored.left(-present)
        return int(looks)

    def remove(self, rows_U: I32) -> None:
        held_U = self._pins_R[rows_U] != 0
        self._remove(rows_U, held_U)
        self._pins_R[rows_U[~held_U]] = FREE
        self.made_room()

    def hand_over(self, found_U: I32, rows_U: I32) -> None:
        """Each row is pinned once, in whichever list."""

    def _await_room(self, room_made: int, num_keys: int, deadline: Deadline) -> None:
        """Wait until room was made more than `room_made` times."""
        with self._room:
            hopeless = num_keys > self.max_rows or self._touched() >= self.max_dirty
            if not hopeless and self._room.wait_for(lambda: self._num_room_made > room_made, deadline.left_s()):
                return
        with self._numbering:
            pinned = int(np.count_nonzero((self._pins_R != 0) & (self._pins_R != FREE)))
        raise OutOfMemory(
            f"table {self._name!r}: no room for a batch of {num_keys:,} keys, waited for up to {ROOM_WAIT_S:g} s: "
            f"{self._waiting():,} rows wait for a commit (at most {self.max_dirty:,} may), {self._touched():,} of them "
            f"for the close of the pass in training, {pinned:,} are in use by batches, {self.max_rows:,} fit; raise "
            f"tables.{self._name}.memory, or lower passes.max_events, commit.every or train.batch_size"
        )
