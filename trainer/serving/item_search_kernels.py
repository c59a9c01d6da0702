"""Exact search for the best items: a pass over rounded vectors, and the product itself where rounding leaves it open.

Each item has its vector in float32, and once more as whole numbers of 8 bits times a scale. The pass reads the short
ones alone, a fourth of the bytes. A product of them is at most `bound` from the score, so an item whose product is
further below the k-th best score cannot be among the best. The score of each other item is computed: float32 products,
added in the order of the numbers. So the answer is that of a search without rounding, bit by bit, whatever else is
searched.

Shapes: I items, G blocks of LANES items, V length of a vector, W the same up to a multiple of UNROLLED, B users, K best
items.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.prefetch import prefetch

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

LANES = 128
"""Items of a block: its rounded vectors and their products stay in the nearest cache."""
UNROLLED = 4
"""Numbers of each vector that are multiplied at a time."""
LARGEST = 127
"""The largest rounded number of an item."""
LARGEST_OF_USER = (1 << 15) - 1
"""The largest rounded number of a user: 256 times finer, so almost all of the bound is that of the items."""
SURE = 1.0 + 2.0**-20
"""Factor by which a bound exceeds what was computed of it in float64."""

TINY = 1e-35
"""Most that numbers too small for float32 add to a bound."""
HUGE = 1e37
"""From this product of lengths on, sums in float32 may overflow, so no bound holds."""


def rounded(vectors_IV: F32) -> tuple[I8, F32, F64, F64]:
    """(G, W, LANES) rounded vectors, (G, LANES) their scales, and by block the bounds of `round_items`."""
    num_items, length = vectors_IV.shape
    num_blocks, padded = -(-num_items // LANES), -(-length // UNROLLED) * UNROLLED
    number_GWL, scale_GL = np.zeros((num_blocks, padded, LANES), np.int8), np.zeros((num_blocks, LANES), np.float32)
    error_G, norm_G = np.zeros(num_blocks), np.zeros(num_blocks)
    round_items(vectors_IV, number_GWL, scale_GL, error_G, norm_G)
    return number_GWL, scale_GL, error_G, norm_G


@njit(nogil=True, cache=True)
def round_items(vectors_IV, number_GWL, scale_GL, error_G, norm_G):  # type: ignore[no-untyped-def]
    """Write each vector as whole numbers times a scale.

    By block: the longest difference between a vector and its rounded one, and the longest rounded one.
    """
    num_items, length = vectors_IV.shape
    for at in range(num_items):
        g, i = at // LANES, at % LANES
        largest = np.float32(0)
        for v in range(length):
            largest = max(largest, abs(vectors_IV[at, v]))
        scale = largest / np.float32(LARGEST)
        scale_GL[g, i] = scale
        error = norm = 0.0
        for v in range(length):
            value, number = np.float64(vectors_IV[at, v]), 0.0
            if scale > 0:
                number = min(max(np.rint(value / np.float64(scale)), -float(LARGEST)), float(LARGEST))
            number_GWL[g, v, i] = np.int8(number)
            kept = number * np.float64(scale)
            error += (value - kept) * (value - kept)
            norm += kept * kept
        error_G[g] = max(error_G[g], np.sqrt(error) * SURE)
        norm_G[g] = max(norm_G[g], np.sqrt(norm) * SURE)


@njit(nogil=True, cache=True)
def _round_users(user_BV, number_BW, scale_B, error_B, norm_B):  # type: ignore[no-untyped-def]
    """As `round_items`; `norm_B` is the length of the vector itself. Sums of products stay within 32 bits."""
    length = user_BV.shape[1]
    most = min(LARGEST_OF_USER, ((1 << 31) - 1) // (LARGEST * length))
    for b in range(len(user_BV)):
        largest = np.float32(0)
        for v in range(length):
            largest = max(largest, abs(user_BV[b, v]))
        scale_B[b] = largest / np.float32(most)
        scale, error, norm = np.float64(scale_B[b]), 0.0, 0.0
        for v in range(length):
            value, number = np.float64(user_BV[b, v]), 0.0
            if scale > 0:
                number = min(max(np.rint(value / scale), -float(most)), float(most))
            number_BW[b, v] = np.int32(number)
            error += (value - number * scale) * (value - number * scale)
            norm += value * value
        error_B[b], norm_B[b] = np.sqrt(error) * SURE, np.sqrt(norm) * SURE


@njit(nogil=True, cache=True)
def _products(number_GWL, g, number_W, product_L):  # type: ignore[no-untyped-def]
    """The products of one block with one user, in whole numbers. The next block is requested meanwhile."""
    flat, width = number_GWL.reshape(-1), number_GWL.shape[1]
    product_L[:] = 0
    for w in range(0, width, UNROLLED):
        if g + 1 < len(number_GWL):
            begin = ((g + 1) * width + w) * LANES
            for ahead in range(0, UNROLLED * LANES, 64):
                prefetch(flat, np.uint64(begin + ahead))
        first, second, third, fourth = number_W[w], number_W[w + 1], number_W[w + 2], number_W[w + 3]
        for i in range(LANES):
            product_L[i] += np.int32(
                first * np.int32(number_GWL[g, w, i])
                + second * np.int32(number_GWL[g, w + 1, i])
                + third * np.int32(number_GWL[g, w + 2, i])
                + fourth * np.int32(number_GWL[g, w + 3, i])
            )


@njit(nogil=True, cache=True, inline="always")
def _hopeless(least, bound):  # type: ignore[no-untyped-def]
    """The greatest rounded score with which no item beats the score `least`; rounded down. nan: all are hopeful."""
    if bound == np.inf:
        return np.float32(np.nan)
    at_most = np.float64(least) - bound
    return np.float32(at_most - abs(at_most) * 2.0**-22)


@njit(nogil=True, cache=True)
def search(  # type: ignore[no-untyped-def]
    vectors_IV, number_GWL, scale_GL, error_G, norm_G, open_I, user_BV, after_B, after_at_B, score_BK, at_BK, count_B
):
    """Write the best open items of each user, best first: their scores, their places, and how many they are.

    The order is by score, then by place. Items up to score `after_B` and place `after_at_B` in that order are passed
    over: with infinity, none.
    """
    num_items, length = vectors_IV.shape
    num_users, most = score_BK.shape
    number_BW = np.zeros((num_users, number_GWL.shape[1]), np.int32)
    user_scale_B = np.empty(num_users, np.float32)
    user_error_B, user_norm_B = np.empty(num_users), np.empty(num_users)
    _round_users(user_BV, number_BW, user_scale_B, user_error_B, user_norm_B)
    product_L, rounded_L = np.empty(LANES, np.int32), np.empty(LANES, np.float32)
    added = (length + 8) * 2.0**-23  # float32 sums and scales differ by so much of the lengths
    count_B[:] = 0
    for g in range(len(number_GWL)):
        begin, num_lanes = g * LANES, min(LANES, num_items - g * LANES)
        for b in range(num_users):
            _products(number_GWL, g, number_BW[b], product_L)
            for i in range(LANES):
                rounded_L[i] = np.float32(product_L[i]) * (scale_GL[g, i] * user_scale_B[b])
            lengths = user_norm_B[b] * (norm_G[g] + error_G[g])
            bound = user_norm_B[b] * error_G[g] + user_error_B[b] * norm_G[g] + added * lengths + TINY
            if lengths >= HUGE:
                bound = np.inf
            count, after, after_at = count_B[b], after_B[b], after_at_B[b]
            least = score_BK[b, 0] if count == most else np.float32(np.nan)  # with nan, all are hopeful
            hopeless, num_hopeful = _hopeless(least, bound), 0
            for i in range(num_lanes):
                num_hopeful += not rounded_L[i] <= hopeless
            if num_hopeful == 0:
                continue
            passed = np.float64(after) + bound
            for i in range(num_lanes):
                at = begin + i
                if rounded_L[i] <= hopeless or rounded_L[i] > passed or not open_I[at]:
                    continue
                score = np.float32(0)
                for v in range(length):
                    score += user_BV[b, v] * vectors_IV[at, v]
                if (count == most and not score > least) or not (score < after or (score == after and at > after_at)):
                    continue
                if count < most:
                    count += 1
                    _rise(score_BK[b], at_BK[b], count - 1, score, at)
                else:
                    _sink(score_BK[b], at_BK[b], most, score, at)
                if count == most:
                    least = score_BK[b, 0]
                    hopeless = _hopeless(least, bound)
            count_B[b] = count
    for b in range(num_users):
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
