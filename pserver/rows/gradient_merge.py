"""Merges the records that several ranks push for the same rows in one step, in rank order.

Shapes: U rows of one rank's push, M rows of the merged one, D weights of a row, H slots of a hash table.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.kernels import EMPTY, find_or_reserve

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@njit(nogil=True, cache=True)
def add_push(place_H, rows_M, grads_MD, show_M, click_M, count, rows_U, grads_UD, show_U, click_U):  # type: ignore[no-untyped-def]
    """Add one rank's push to the `count` merged records; the first record of a row is copied. -> their new count.

    `place_H` is a hash table (a power of two, EMPTY = -1): the number of each row's record.
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


def frozen_gradients(gradients: Gradients) -> Gradients:
    """The same, read-only, as kernels have them."""
    arrays = frozen(gradients.grads_UD), frozen(gradients.show_U), frozen(gradients.click_U)
    return replace(gradients, grads_UD=arrays[0], show_U=arrays[1], click_U=arrays[2])


def merge(pushes: Sequence[tuple[I32, Gradients]]) -> tuple[I32, Gradients]:
    """The pushes of a step, in rank order, merged into one with unique rows. A single push is returned as it is."""
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


def merge_by_key(pushes: Sequence[tuple[Keys, Gradients]]) -> tuple[Keys, Gradients]:
    """The records of keys without rows, in rank order, merged into unique keys in order of first occurrence.

    The result has no gradients: there are no rows to apply them to.
    """
    keys_N = np.concatenate([keys.keys_U for keys, _ in pushes])
    group_N = np.concatenate([keys.group_U for keys, _ in pushes])
    index_I = np.full(1 << (2 * len(keys_N) + 1).bit_length(), EMPTY, np.int32)
    keys_M, group_M, number_N = np.empty_like(keys_N), np.empty_like(group_N), np.empty(len(keys_N), np.int32)
    keys_N.flags.writeable = group_N.flags.writeable = False
    _, count = find_or_reserve(index_I, keys_M, group_M, keys_N, group_N, number_N, 0, 0, len(keys_N))
    show_M, click_M = np.zeros(count, np.float32), np.zeros(count, np.float32)
    np.add.at(show_M, number_N, np.concatenate([push.show_U for _, push in pushes]))
    np.add.at(click_M, number_N, np.concatenate([push.click_U for _, push in pushes]))
    return Keys(keys_M[:count], group_M[:count]), Gradients(np.empty((count, 0), np.float32), show_M, click_M)


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
