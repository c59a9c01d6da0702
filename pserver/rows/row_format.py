"""The format of a row as words, for commits and stores.

A row has W' = HEAD + W words, each a uint32: slot group (low half) and last_seen_day (high half, as int16);
changed_version; the bits of show, click, delta_score; the bits of the slab's W floats. The key is stored separately.

Shapes: U rows chosen, R rows of a table, W floats of a row in the slab.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

U32 = NDArray[np.uint32]

FORMAT = 1
"""Version of this layout."""
HEAD = 5
"""Words before those of the slab."""


@njit(nogil=True, cache=True)
def pack(slab_bits_RW, columns, rows_U, begin, end, keys_U, words_UW):  # type: ignore[no-untyped-def]
    """Write keys and words of rows_U[begin:end]. `slab_bits_RW` and `columns` come from
    pserver.rows.table_rows.bits_of."""
    keys_R, show_R, click_R, delta_R, day_R, changed_R, group_R = columns
    for u in range(begin, end):
        row = np.uint32(rows_U[u])
        keys_U[u] = keys_R[row]
        words_UW[u, 0] = np.uint32(group_R[row]) | (np.uint32(np.uint16(day_R[row])) << np.uint32(16))
        words_UW[u, 1], words_UW[u, 2] = changed_R[row], show_R[row]
        words_UW[u, 3], words_UW[u, 4] = click_R[row], delta_R[row]
        for w in range(slab_bits_RW.shape[1]):
            words_UW[u, HEAD + w] = slab_bits_RW[row, w]


@njit(nogil=True, cache=True)
def unpack(words_UW, rows_U, begin, end, slab_bits_RW, columns):  # type: ignore[no-untyped-def]
    """The inverse of `pack`, without keys: write words_UW[begin:end] to the rows numbered in `rows_U`."""
    _, show_R, click_R, delta_R, day_R, changed_R, group_R = columns
    for u in range(begin, end):
        row = np.uint32(rows_U[u])
        group_R[row] = np.uint16(words_UW[u, 0] & np.uint32(0xFFFF))
        day_R[row] = np.int16(np.uint16(words_UW[u, 0] >> np.uint32(16)))
        changed_R[row], show_R[row] = words_UW[u, 1], words_UW[u, 2]
        click_R[row], delta_R[row] = words_UW[u, 3], words_UW[u, 4]
        for w in range(slab_bits_RW.shape[1]):
            slab_bits_RW[row, w] = words_UW[u, HEAD + w]


def pack_reference(slab_bits_W: U32, statistics: tuple[int, int, int, int, int, int]) -> list[int]:
    """The twin of `pack` on one row: `statistics` are show, click, delta_score (bits), day, version, group."""
    show, click, delta, day, changed, group = statistics
    return [group + ((day & 0xFFFF) << 16), changed, show, click, delta, *slab_bits_W.tolist()]


def unpack_reference(words: list[int]) -> tuple[list[int], tuple[int, int, int, int, int, int]]:
    """The twin of `unpack` on one row: slab bits and statistics."""
    half = words[0] >> 16
    day = half - (1 << 16) if half >= 1 << 15 else half
    return words[HEAD:], (words[2], words[3], words[4], day, words[1], words[0] & 0xFFFF)


def groups_of(words_UW: U32) -> NDArray[np.uint16]:
    """(U,) slot groups."""
    return (words_UW[:, 0] & 0xFFFF).astype(np.uint16)
