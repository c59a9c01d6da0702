"""Eviction of rows of a table with bounded memory.

A generalised clock: each use of a row raises a small counter, the hand lowers it as it passes, and a row at 0 is
evicted. Pinned rows, uncommitted rows and rows of the open pass stay. Row numbers without a row are FREE.

Shapes: U rows chosen, R rows of a table.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.pserver.rows.kernels import EMPTY, take_out

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

FREE = np.uint16(0xFFFF)
"""Pins of a row number without a row."""
MAX_USES = np.uint8(3)
"""Bound of the use counter: the hand passes a row that is no longer used this often before it evicts it."""


@njit(nogil=True, cache=True)
def pin(rows_U, pins_R, uses_R):  # type: ignore[no-untyped-def]
    """Pin rows for one more batch, which counts as a use; EMPTY ones are skipped. -> False on overflow of a pin."""
    sound = True
    for u in range(len(rows_U)):
        if rows_U[u] != EMPTY:
            row = np.uint32(rows_U[u])
            pins_R[row] += np.uint16(1)
            sound &= pins_R[row] < FREE
            if uses_R[row] < MAX_USES:
                uses_R[row] += np.uint8(1)
    return sound


@njit(nogil=True, cache=True)
def unpin(rows_U, pins_R):  # type: ignore[no-untyped-def]
    """Unpin rows of one batch; EMPTY ones are skipped. -> whether all of them were pinned."""
    sound = True
    for u in range(len(rows_U)):
        if rows_U[u] != EMPTY:
            row = np.uint32(rows_U[u])
            sound &= pins_R[row] != 0 and pins_R[row] != FREE
            pins_R[row] -= np.uint16(1)
    return sound


@njit(nogil=True, cache=True)
def sweep(hand, num_rows, max_looks, uses_R, pins_R, marks_R, changed_R, open_version, rows_U):  # type: ignore[no-untyped-def]
    """Move the hand over at most `max_looks` rows, until `rows_U` is full of rows to evict.

    `max_looks` is at most `num_rows`, so that no row is chosen twice. -> (hand, looks, rows chosen).
    """
    looks = count = 0
    while looks < max_looks and count < len(rows_U):
        row = np.uint32(hand if hand < num_rows else 0)
        hand = np.int64(row) + 1
        looks += 1
        if pins_R[row] == 0 and marks_R[row] == 0 and changed_R[row] != open_version:
            if uses_R[row] > 0:
                uses_R[row] -= np.uint8(1)
            else:
                rows_U[count] = row
                count += 1
    return hand, looks, count


@njit(nogil=True, cache=True)
def leave(index_I, keys_R, changed_R, pins_R, rows_U):  # type: ignore[no-untyped-def]
    """Take rows out of the index and free their numbers. -> how many were present, not only reserved."""
    present = 0
    take_out(index_I, keys_R, rows_U)
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        present += changed_R[row] != 0
        changed_R[row] = 0
        pins_R[row] = FREE
    return present


def sweep_reference(
    hand: int, max_looks: int, max_rows: int, uses: list[int], stays: list[bool]
) -> tuple[int, int, list[int]]:
    """The twin of `sweep`, which also lowers `uses`; `stays` marks the rows that may not be evicted."""
    chosen: list[int] = []
    for looks in range(max_looks):
        if len(chosen) == max_rows:
            return hand, looks, chosen
        row = hand % len(uses)
        hand = row + 1
        if not stays[row] and uses[row] == 0:
            chosen.append(row)
        elif not stays[row]:
            uses[row] -= 1
    return hand, max_looks, chosen


def leave_reference(row_of: dict[int, int], changed: list[int], rows: list[int]) -> int:
    """The twin of `leave` on a dictionary of keys."""
    for key in [key for key, row in row_of.items() if row in rows]:
        del row_of[key]
    return sum(changed[row] != 0 for row in rows)
