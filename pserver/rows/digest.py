"""A hash over rows that does not depend on their order or their shard.

Each row is hashed to two independent 64-bit numbers. A digest is the sum over rows, so digests of disjoint sets of rows
add up. It covers key, slot group, weight bits, state bits and statistics.

Shapes: U rows chosen, R rows of a table, W floats of a row in the slab.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, mix_reference
from headrace.prefetch import AHEAD, prefetch, prefetch_row

U64 = NDArray[np.uint64]
NUM_STATISTICS = 6
"""Words hashed after a row's floats: show, click, delta_score, last_seen_day, changed_version, group."""


def multipliers_of(width: int) -> U64:
    """(2, W + 6) odd numbers, one for each sum and word. A row's words times these are added, then mixed."""
    words = range(width + NUM_STATISTICS)
    return np.array([[mix_reference((w + 1) * GOLDEN + s) | 1 for w in words] for s in (0, 1 << 32)], np.uint64)


@njit(nogil=True, cache=True)
def digest_rows(words_RW, columns, rows_U, multipliers):  # type: ignore[no-untyped-def]
    """-> the two sums over `rows_U`. `words_RW`: the bits of the slab; `columns`: keys and six statistics as bits.

    Columns are uint64 (keys), uint32 (show, click, delta_score), int16 (day), uint32 (version), uint16 (group).
    """
    keys_R, show_R, click_R, delta_R, day_R, changed_R, group_R = columns
    words, width = words_RW.reshape(-1), np.uint64(words_RW.shape[1])
    first, second = multipliers[0], multipliers[1]
    total_first, total_second = np.uint64(0), np.uint64(0)
    last = np.uint64(len(rows_U)) - np.uint64(1)
    for u in range(np.uint64(len(rows_U))):
        later = np.uint64(np.uint32(rows_U[min(u + AHEAD, last)]))
        prefetch_row(words, later * width, width)
        prefetch(keys_R, later)
        prefetch(show_R, later)
        prefetch(click_R, later)
        prefetch(delta_R, later)
        prefetch(changed_R, later)
        row = np.uint64(np.uint32(rows_U[u]))
        a, b, begin = keys_R[row], mix(keys_R[row]), row * width
        for w in range(width):
            word = np.uint64(words[begin + w])
            a += word * first[w]
            b += word * second[w]
        rest = (
            np.uint64(show_R[row]),
            np.uint64(click_R[row]),
            np.uint64(delta_R[row]),
            np.uint64(day_R[row]),
            np.uint64(changed_R[row]),
            np.uint64(group_R[row]),
        )
        for i in range(np.uint64(NUM_STATISTICS)):
            a += rest[i] * first[width + i]
            b += rest[i] * second[width + i]
        total_first += mix(a)
        total_second += mix(b)
    return total_first, total_second


def digest_row_reference(words: list[int], key: int, multipliers: U64) -> tuple[int, int]:
    """The twin of `digest_rows` on one row: `words` are its W floats' bits and its six statistics."""
    sums = []
    for start, odd in zip((key, mix_reference(key)), multipliers.tolist(), strict=True):
        total = start + sum((word & MASK) * m for word, m in zip(words, odd, strict=True))
        sums.append(mix_reference(total & MASK))
    return sums[0], sums[1]


def join(first: int, second: int) -> int:
    """Both sums as one 128-bit number."""
    return (int(first) << 64) | int(second)


def add(digests: Iterable[int]) -> int:
    """The digest of the union of disjoint sets of rows, from their digests."""
    first = second = 0
    for digest in digests:
        first, second = (first + (digest >> 64)) & MASK, (second + (digest & MASK)) & MASK
    return join(first, second)
