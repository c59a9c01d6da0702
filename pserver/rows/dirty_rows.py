"""The rows of a table that changed since they were committed last.

Each row has a mark: dirty, in flight, or both. Rows touched in a pass become dirty at its close. A snapshot puts every
dirty row in flight. Settling makes the rows in flight clean, or dirty again if the commit failed. A row is clean only
if a manifest exists that holds exactly its value. pserver.tables.table holds the values and the locks.

Shapes: U rows chosen, R rows of a table.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

DIRTY, IN_FLIGHT = np.uint8(1), np.uint8(2)
"""Bits of a mark. Both together: changed again since the snapshot."""
MARKS_AT_ONCE = 8
"""Marks compared as one number, since few rows are dirty."""


class DirtyRows:
    """Counts of the marks of one table, and the rows in flight."""

    def __init__(self) -> None:
        self.num_dirty = 0
        self.in_flight_U: I32 | None = None

    @property
    def num_in_flight(self) -> int:
        """Rows of the unsettled snapshot."""
        rows_U = self.in_flight_U
        return 0 if rows_U is None else len(rows_U)

    def touch(self, marks_R: U8, touched_U: I32) -> None:
        """Mark rows as dirty."""
        self.num_dirty += int(mark(marks_R, touched_U, len(touched_U)))

    def take(self, marks_R: U8, num_rows: int) -> I32:
        """Put the dirty rows among the first `num_rows` in flight; returns them, ascending. None is in flight yet."""
        assert self.in_flight_U is None, "one snapshot at a time"
        self.in_flight_U = np.empty(self.num_dirty, np.int32)
        found = collect(marks_R, num_rows, self.in_flight_U)
        assert found == self.num_dirty, (found, self.num_dirty)
        self.num_dirty = 0
        return self.in_flight_U

    def drop(self, marks_R: U8, rows_U: I32) -> None:
        """Clear the marks of deleted rows."""
        self.num_dirty -= int(np.count_nonzero(marks_R[rows_U] & DIRTY))
        marks_R[rows_U] = 0

    def settle(self, marks_R: U8, committed: bool) -> None:
        """End the snapshot: its rows are clean, or dirty again unless `committed`."""
        assert self.in_flight_U is not None, "no snapshot is in flight"
        self.num_dirty += int(unmark(marks_R, self.in_flight_U, not committed))
        self.in_flight_U = None


@njit(nogil=True, cache=True)
def mark(marks_R, rows_U, count):  # type: ignore[no-untyped-def]
    """Mark rows_U[:count] dirty. -> the number of rows newly marked."""
    fresh = 0
    for u in range(count):
        row = np.uint32(rows_U[u])
        if not marks_R[row] & DIRTY:
            marks_R[row] |= DIRTY
            fresh += 1
    return fresh


@njit(nogil=True, cache=True)
def collect(marks_R, num_rows, rows_U):  # type: ignore[no-untyped-def]
    """Write the dirty rows to `rows_U`, ascending, and mark them in flight instead. -> their number."""
    whole = num_rows // MARKS_AT_ONCE
    eights = marks_R[: whole * MARKS_AT_ONCE].view(np.uint64)
    found = 0
    for eight in range(whole + 1):
        if eight < whole and eights[eight] == 0:
            continue
        for row in range(eight * MARKS_AT_ONCE, min(num_rows, (eight + 1) * MARKS_AT_ONCE)):
            if marks_R[row] & DIRTY:
                marks_R[row] = IN_FLIGHT
                rows_U[found] = row
                found += 1
    return found


@njit(nogil=True, cache=True)
def unmark(marks_R, rows_U, again):  # type: ignore[no-untyped-def]
    """Take rows out of flight; with `again` those still in flight become dirty. -> the number newly dirty."""
    fresh = 0
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        was = marks_R[row] & IN_FLIGHT
        marks_R[row] &= DIRTY
        if again and was and not marks_R[row]:
            marks_R[row] = DIRTY
            fresh += 1
    return fresh


def collect_reference(marks_R: U8) -> list[int]:
    """The twin of `collect`, which also replaces the marks."""
    rows = [row for row, bits in enumerate(marks_R.tolist()) if bits & DIRTY]
    marks_R[rows] = IN_FLIGHT
    return rows


def mark_reference(marks_R: U8, rows: list[int]) -> int:
    """The twin of `mark`."""
    before = int((marks_R & DIRTY).sum())
    marks_R[rows] |= DIRTY
    return int((marks_R & DIRTY).sum()) - before


def unmark_reference(marks_R: U8, rows: list[int], again: bool) -> int:
    """The twin of `unmark`."""
    before = int((marks_R & DIRTY).sum())
    again_U = (marks_R[rows] & IN_FLIGHT).astype(bool) & again
    marks_R[rows] = marks_R[rows] & DIRTY | np.where(again_U, DIRTY, 0).astype(np.uint8)
    return int((marks_R & DIRTY).sum()) - before
