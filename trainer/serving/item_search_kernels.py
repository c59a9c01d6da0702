"""Exact search for the best items: products of vectors and partial selection in one pass over the items.

Vectors lie in blocks: each has LANES items side by side, number by number, so that one pass over a block adds the
products of all its items in the order of the numbers. Scores are therefore the same bits whatever else is searched.

Shapes: I items, G blocks of LANES items, V length of a vector, B users, K best items.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

LANES = 1024
"""Items of a block: its scores, and the part of it that is read at a time, stay in the nearest cache."""


@njit(nogil=True, cache=True)
def search(vectors_GVL, open_I, user_BV, after_B, after_at_B, score_BK, at_BK, count_B):  # type: ignore[no-untyped-def]
    """Write the best open items of each user, best first: their scores, their places, and how many they are.

    The order is by score, then by place. Items up to score `after_B` and place `after_at_B` in that order are passed
    over: with infinity, none.
    """
    num_items, lanes, length = len(open_I), vectors_GVL.shape[2], vectors_GVL.shape[1]
    most = score_BK.shape[1]
    score_L = np.empty(lanes, np.float32)
    count_B[:] = 0
    for g in range(vectors_GVL.shape[0]):
        begin = g * lanes
        end = min(num_items, begin + lanes)
        for b in range(user_BV.shape[0]):
            score_L[:] = np.float32(0)
            v = 0
            while v + 4 <= length:
                first, second = user_BV[b, v], user_BV[b, v + 1]
                third, fourth = user_BV[b, v + 2], user_BV[b, v + 3]
                for i in range(lanes):
                    sum_1 = score_L[i] + first * vectors_GVL[g, v, i]
                    sum_2 = sum_1 + second * vectors_GVL[g, v + 1, i]
                    sum_3 = sum_2 + third * vectors_GVL[g, v + 2, i]
                    score_L[i] = sum_3 + fourth * vectors_GVL[g, v + 3, i]
                v += 4
            while v < length:
                first = user_BV[b, v]
                for i in range(lanes):
                    score_L[i] += first * vectors_GVL[g, v, i]
                v += 1
            count, after, after_at = count_B[b], after_B[b], after_at_B[b]
            least = score_BK[b, 0] if count == most else np.float32(-np.inf)
            for at in range(begin, end):
                score = score_L[at - begin]
                if count == most and not score > least or not open_I[at]:
                    continue
                if score > after or (score == after and at <= after_at):
                    continue
                if count < most:
                    count += 1
                    _rise(score_BK[b], at_BK[b], count - 1, score, at)
                else:
                    _sink(score_BK[b], at_BK[b], most, score, at)
                least = score_BK[b, 0]
            count_B[b] = count
    for b in range(user_BV.shape[0]):
        _sort(score_BK[b], at_BK[b], count_B[b])


@njit(nogil=True, cache=True, inline="always")
def _is_worse(score, at, other, other_at):  # type: ignore[no-untyped-def]
    return score < other or (score == other and at > other_at)


@njit(nogil=True, cache=True)
def _rise(score_K, at_K, place, score, at):  # type: ignore[no-untyped-def]
    """Enter an item at the end of a heap whose root is the worst one."""
    while place > 0:
        above = (place - 1) // 2
        if not _is_worse(score, at, score_K[above], at_K[above]):
            break
        score_K[place], at_K[place] = score_K[above], at_K[above]
        place = above
    score_K[place], at_K[place] = score, at


@njit(nogil=True, cache=True)
def _sink(score_K, at_K, size, score, at):  # type: ignore[no-untyped-def]
    """Put an item in place of the root."""
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and _is_worse(score_K[below + 1], at_K[below + 1], score_K[below], at_K[below]):
            below += 1
        if not _is_worse(score_K[below], at_K[below], score, at):
            break
        score_K[place], at_K[place] = score_K[below], at_K[below]
        place = below
    score_K[place], at_K[place] = score, at


@njit(nogil=True, cache=True)
def _sort(score_K, at_K, size):  # type: ignore[no-untyped-def]
    """Sort a heap, the best item first."""
    for last in range(size - 1, 0, -1):
        score, at = score_K[last], at_K[last]
        score_K[last], at_K[last] = score_K[0], at_K[0]
        _sink(score_K, at_K, last, score, at)


def search_reference(
    vectors_IV: F32, open_I: Bools, user_V: F32, most: int, after: float = np.inf, after_at: int = -1
) -> tuple[F32, I64]:
    """Reference for `search` with one user: scores and places of the best items."""
    score_I = np.zeros(len(vectors_IV), np.float32)
    for v, number in enumerate(user_V):
        score_I += number * vectors_IV[:, v]
    at_I = np.arange(len(vectors_IV))
    later_I = (score_I < after) | ((score_I == after) & (at_I > after_at))
    order = np.lexsort((at_I, -score_I))
    best = order[(open_I & later_I)[order]][:most]
    return score_I[best], best


def in_blocks(vectors_IV: F32) -> F32:
    """(G, V, LANES) the vectors as `search` reads them; zeros behind the last one."""
    num_items, length = vectors_IV.shape
    num_blocks = -(-num_items // LANES)
    padded = np.zeros((num_blocks * LANES, length), np.float32)
    padded[:num_items] = vectors_IV
    return np.ascontiguousarray(padded.reshape(num_blocks, LANES, length).transpose(0, 2, 1))
