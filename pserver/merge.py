"""The records that several ranks push for the same rows in one step, added in rank order.

Shapes: U rows of one rank's push, M rows of the merged one, D weights of a row, H slots of a hash table.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pserver.client import Gradients

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@njit(nogil=True, cache=True)
def add_push(place_H, rows_M, grads_MD, show_M, click_M, count, rows_U, grads_UD, show_U, click_U):  # type: ignore[no-untyped-def]
    """Add one rank's push to the `count` records merged so far; a row's first record is copied. -> their new count.

    `place_H` is a hash table of row numbers (a power of two, EMPTY = -1): number of a row's record.
    """
    mask = np.uint32(len(place_H) - 1)
    for u in range(len(rows_U)):
        row = rows_U[u]
        slot = (np.uint32(row) * np.uint32(0x9E3779B1)) & mask
        while place_H[slot] >= 0 and rows_M[place_H[slot]] != row:
            slot = (slot + np.uint32(1)) & mask
        m = place_H[slot]
        if m < 0:
            place_H[slot] = m = np.int32(count)
            count += 1
            rows_M[m], show_M[m], click_M[m] = row, show_U[u], click_U[u]
            for d in range(grads_UD.shape[1]):
                grads_MD[m, d] = grads_UD[u, d]
        else:
            show_M[m] += show_U[u]
            click_M[m] += click_U[u]
            for d in range(grads_UD.shape[1]):
                grads_MD[m, d] += grads_UD[u, d]
    return count


def merge(pushes: Sequence[tuple[I32, Gradients]]) -> tuple[I32, Gradients]:
    """The pushes of a step, in rank order, as one with unique rows. A single push comes back as it is."""
    if len(pushes) == 1:
        return pushes[0]
    most = sum(len(rows_U) for rows_U, _ in pushes)
    place_H = np.full(1 << (2 * most).bit_length(), -1, np.int32)
    rows_M, show_M, click_M = np.empty(most, np.int32), np.empty(most, np.float32), np.empty(most, np.float32)
    grads_MD = np.empty((most, pushes[0][1].grads_UD.shape[1]), np.float32)
    count = 0
    for rows_U, push in pushes:
        count = add_push(
            place_H, rows_M, grads_MD, show_M, click_M, count, rows_U, push.grads_UD, push.show_U, push.click_U
        )
    return rows_M[:count], Gradients(grads_MD[:count], show_M[:count], click_M[:count])


def merge_reference(pushes: Sequence[tuple[I32, Gradients]]) -> tuple[I32, Gradients]:
    """The twin of `merge`, on a dictionary."""
    merged: dict[int, tuple[F32, np.float32, np.float32]] = {}
    for rows_U, push in pushes:
        for row, grad_D, show, click in zip(rows_U.tolist(), push.grads_UD, push.show_U, push.click_U, strict=True):
            if row in merged:
                before_D, shows, clicks = merged[row]
                merged[row] = (before_D + grad_D, shows + show, clicks + click)
            else:
                merged[row] = (grad_D, show, click)
    grads_MD = np.stack([record[0] for record in merged.values()])
    show_M, click_M = (np.array([record[i] for record in merged.values()], np.float32) for i in (1, 2))
    return np.array(list(merged), np.int32), Gradients(grads_MD, show_M, click_M)
