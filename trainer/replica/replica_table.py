"""The rows of one table in memory: readers use one version while the next one is prepared.

A row is written once and never changed. A new value of a key gets a new row number, and an index (key -> row number)
holds the valid one. There are two indexes, the sides: one is read while the other is updated, then they swap. So a
version is switched by one assignment, readers never wait, and a rollback points keys back to old rows, which are still
in memory. trainer.replica.replica_state knows when readers have left a side.

Shapes: U unique keys, R rows in memory, I places of an index, W floats of a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.rows.arrays import FreeNumbers, allocate, moved
from headrace.pserver.rows.kernels import EMPTY, enter, find, take_out
from headrace.trainer.replica.updates import F32, U64, ReplicaRows
from headrace.trainer.serving.pooling_kernels import replace
from headrace.trainer.serving.slot_layout import MIN_PLACES, TableView, empty_index

I32 = NDArray[np.int32]

MAX_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class TableStep:
    """The changes of one version: each key once, with its row before and after; EMPTY where it has none."""

    keys_U: U64
    before_U: I32
    after_U: I32
    num_kept: int
    """Rows that are kept only for the version before."""

    @classmethod
    def of(cls, keys_U: U64, before_U: I32, after_U: I32) -> "TableStep":
        """A step with its number of kept rows."""
        return cls(keys_U, before_U, after_U, int(np.count_nonzero(before_U != EMPTY)))

    @property
    def num_bytes(self) -> int:
        """Memory of the step, without the rows that it keeps."""
        return int(self.keys_U.nbytes + self.before_U.nbytes + self.after_U.nbytes)


class ReplicaTable:
    """Rows of one table. One thread writes."""

    def __init__(self, width: int, num_rows: int = 0) -> None:
        """`num_rows`: the expected number of rows."""
        self.width = width
        self.num_rows = 0
        self._used, self._free = 0, FreeNumbers()
        room = max(num_rows + num_rows // 4, MIN_PLACES // 2)  # the system allocates memory when it is written
        self._keys_R, self._rows_RW = _arrays(room, width)
        self._index = [empty_index(num_rows), empty_index(num_rows)]

    @property
    def row_bytes(self) -> int:
        """Memory of one row, without indexes."""
        return 8 + 4 * self.width

    @property
    def num_bytes(self) -> int:
        """Memory of everything."""
        return self._used * self.row_bytes + sum(index.nbytes for index in self._index)

    def view(self, side: int) -> TableView:
        """The view of one side."""
        return TableView(self._index[side], self._keys_R, self._rows_RW)

    def stage(self, rows: Iterable[ReplicaRows], gone: U64, side: int) -> TableStep:
        """Write new rows to unused memory -> the step. `side` has the version before.

        Passes errors of `rows` on; then the step is undone.
        """
        before_U = self._find(gone, side)
        had = before_U != EMPTY
        steps = [TableStep.of(gone[had].astype(np.uint64), before_U[had], np.full(int(had.sum()), EMPTY, np.int32))]
        try:
            for chunk in rows:
                steps.append(self._staged(chunk, side))
        except BaseException:
            for step in steps:
                self.discard(step)
            raise
        columns = ("keys_U", "before_U", "after_U")
        return TableStep.of(*(np.concatenate([getattr(step, name) for step in steps]) for name in columns))

    def load(self, rows: Iterable[ReplicaRows]) -> None:
        """Fill an empty table without readers with chunks, in order. A key may repeat; its last row counts."""
        for chunk in rows:
            step = self._staged(chunk, 0)
            self.turn(step, 0)
            self.count(step)
            self.forget(step)
        self._index[1] = moved(self._index[0], len(self._index[0]), len(self._index[0]))

    def turn(self, step: TableStep, side: int, *, back: bool = False) -> None:
        """Apply a step to a side without readers, or undo it with `back`."""
        old_U, new_U = (step.after_U, step.before_U) if back else (step.before_U, step.after_U)
        had, has = old_U != EMPTY, new_U != EMPTY
        made_U, gone_U = new_U[has & ~had], old_U[had & ~has]
        index_I = self._index[side] = self._roomy(side, len(made_U))
        replace(index_I, self._keys_R, old_U[had & has], new_U[had & has])
        take_out(index_I, self._keys_R, gone_U)
        enter(index_I, self._keys_R, made_U)

    def count(self, step: TableStep, *, back: bool = False) -> None:
        """Update the number of rows after both sides have the step."""
        more = int(np.count_nonzero(step.after_U != EMPTY)) - step.num_kept
        self.num_rows += -more if back else more

    def forget(self, step: TableStep) -> None:
        """Free the old rows of a step, once the version before it is dropped."""
        self._free.put(step.before_U[step.before_U != EMPTY])

    def discard(self, step: TableStep) -> None:
        """Free the new rows of a step that no side has."""
        self._free.put(step.after_U[step.after_U != EMPTY])

    def _staged(self, chunk: ReplicaRows, side: int) -> TableStep:
        row_U = self._numbers(len(chunk.keys_U))
        keys_U = np.array(chunk.keys_U, np.uint64)
        self._keys_R[row_U], self._rows_RW[row_U] = keys_U, chunk.rows_UD
        return TableStep.of(keys_U, self._find(keys_U, side), row_U)

    def _find(self, keys_U: U64, side: int) -> I32:
        row_U = np.empty(len(keys_U), np.int32)
        find(self._index[side], self._keys_R, np.array(keys_U, np.uint64), row_U)
        return row_U

    def _numbers(self, count: int) -> I32:
        """Numbers of unused rows."""
        again_U = self._free.take(count).copy()
        fresh, room = count - len(again_U), len(self._keys_R)
        if self._used + fresh > room:
            if self._used + fresh > MAX_ROWS:
                raise MemoryError(f"a table of more than {MAX_ROWS:,} rows does not fit a replica")
            room = min(MAX_ROWS, max(self._used + fresh, room + room // 2))
            self._keys_R, self._rows_RW = (moved(each, self._used, room) for each in (self._keys_R, self._rows_RW))
        fresh_U = np.arange(self._used, self._used + fresh, dtype=np.int32)
        self._used += fresh
        return np.concatenate([again_U, fresh_U])

    def _roomy(self, side: int, more: int) -> I32:
        """A side's index with room for `more` keys while at most half full; a larger one where needed."""
        index_I = self._index[side]
        if 2 * (self.num_rows + more) <= len(index_I):
            return index_I
        larger_I = empty_index(self.num_rows + more)
        enter(larger_I, self._keys_R, index_I[index_I != EMPTY])
        return larger_I


def _arrays(room: int, width: int) -> tuple[U64, F32]:
    return allocate((room,), np.uint64), allocate((room, width), np.float32)
