"""Kernels between the feature ids of a batch and embedding rows: unique keys, pooling, sums of gradients by key.

Free functions on arrays, each with a plain twin (`_reference`) that defines it. The order of sums is part of the
definition: occurrences are numbered in sample order, so the number of shards does not change a sum.

Shapes: N occurrences of ids in a batch, ordered by sample, slot, place; U unique keys in order of first occurrence;
C cells, which are the vectors that a model reads; D floats of a row; F slots; B samples.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, key_of_reference
from headrace.prefetch import AHEAD, prefetch

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

ONE = np.uint64(1)


@njit(nogil=True, cache=True)
def flatten(value_M, offset_F, offset_FB1, group_F, key_N, slot_N, sample_start_B1):  # type: ignore[no-untyped-def]
    """Write the keys ordered by sample, slot, place; `value_M` holds the columns of all slots one after another.

    Column f begins at `value_M[offset_F[f]]`; sample b owns places offset_FB1[f, b] to offset_FB1[f, b + 1] of it.
    Writes key_N, slot_N (number of the column) and sample_start_B1 (first occurrence of each sample).
    """
    num_slots, num_samples = offset_FB1.shape[0], offset_FB1.shape[1] - 1
    n = 0
    for b in range(num_samples):
        sample_start_B1[b] = n
        for f in range(num_slots):
            step = np.uint64(group_F[f] + 1) * np.uint64(GOLDEN)
            for place in range(offset_F[f] + offset_FB1[f, b], offset_F[f] + offset_FB1[f, b + 1]):
                key_N[n] = mix(value_M[place] + step)
                slot_N[n] = f
                n += 1
    sample_start_B1[num_samples] = n


def flatten_reference(columns: list[list[list[int]]], groups: list[int]) -> list[tuple[int, int, int]]:
    """(key, slot, sample) of every occurrence; `columns[f][b]` are the ids of sample b in slot f."""
    return [
        (key_of_reference(sign, groups[f]), f, b)
        for b in range(len(columns[0]) if columns else 0)
        for f in range(len(columns))
        for sign in columns[f][b]
    ]


@njit(nogil=True, cache=True)
def flatten_single(value_FB, group_F, key_N):  # type: ignore[no-untyped-def]
    """`flatten` for columns with one id in each sample: the occurrence of sample b in slot f is number b * F + f."""
    num_slots, num_samples = value_FB.shape
    for f in range(num_slots):
        step = np.uint64(group_F[f] + 1) * np.uint64(GOLDEN)
        for b in range(num_samples):
            key_N[b * num_slots + f] = mix(value_FB[f, b] + step)


@njit(nogil=True, cache=True)
def one_each(offset_B1):  # type: ignore[no-untyped-def]
    """Whether the offsets are 0, 1, 2, ...: every sample has exactly one id."""
    off = 0
    for b in range(len(offset_B1)):
        off |= offset_B1[b] - b
    return off == 0


@njit(nogil=True, cache=True)
def unique(key_N, number_H, key_U, first_U, inverse_N):  # type: ignore[no-untyped-def]
    """Number the keys of a batch in order of first occurrence. Returns U, or -1 if `number_H` is too small.

    `number_H` (int32, length a power of two, all -1 at the start) is a hash table of numbers, at most half full.
    """
    mask = np.uint64(len(number_H) - 1)
    num_unique, max_unique = 0, len(number_H) // 2
    for n in range(len(key_N)):
        key = key_N[n]
        at = key & mask
        while True:
            number = number_H[at]
            if number < 0:
                if num_unique == max_unique:
                    return -1
                number_H[at] = num_unique
                key_U[num_unique] = key
                first_U[num_unique] = n
                inverse_N[n] = num_unique
                num_unique += 1
                break
            if key_U[number] == key:
                inverse_N[n] = number
                break
            at = (at + np.uint64(1)) & mask
    return num_unique


def unique_reference(keys: list[int]) -> tuple[list[int], list[int]]:
    """(unique keys in order of first occurrence, number of each key)."""
    numbers: dict[int, int] = {}
    inverse = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), inverse


@njit(nogil=True, cache=True)
def group_occurrences(inverse_N, start_U1, order_N):  # type: ignore[no-untyped-def]
    """Counting sort: order_N[start_U1[u]:start_U1[u + 1]] are the occurrences of key u, ascending."""
    start_U1[:] = 0
    for n in range(len(inverse_N)):
        start_U1[inverse_N[n] + 1] += 1
    for u in range(len(start_U1) - 1):
        start_U1[u + 1] += start_U1[u]
    for n in range(len(inverse_N)):
        u = inverse_N[n]
        order_N[start_U1[u]] = n
        start_U1[u] += 1
    for u in range(len(start_U1) - 1, 0, -1):
        start_U1[u] = start_U1[u - 1]
    start_U1[0] = 0


def group_occurrences_reference(inverse: list[int], num_unique: int) -> list[list[int]]:
    """The occurrences of each key, ascending."""
    return [[n for n, u in enumerate(inverse) if u == key] for key in range(num_unique)]


@njit(nogil=True, cache=True)
def expand(rows_UD, inverse_N, begin, end, cell_CD):  # type: ignore[no-untyped-def]
    """Copy the row of occurrence n to cell n, for n from `begin` to `end`: pooling of slots with one id per sample.

    Rows may be longer than cells, which then have their first floats.
    """
    rows, cells, width = rows_UD.reshape(-1), cell_CD.reshape(-1), np.uint64(cell_CD.shape[1])
    last, stride = np.uint64(len(inverse_N) - 1), np.uint64(rows_UD.shape[1])
    for n in range(np.uint64(begin), np.uint64(end)):
        prefetch(rows, np.uint64(inverse_N[min(n + AHEAD, last)]) * stride)
        row, cell = np.uint64(inverse_N[n]) * stride, n * width
        for d in range(width):
            cells[cell + d] = rows[row + d]


@njit(nogil=True, cache=True)
def pool(rows_UD, inverse_N, cell_N, scale_N, begin, end, cell_CD):  # type: ignore[no-untyped-def]
    """Add scale_N[n] times the row of occurrence n to cell cell_N[n], for n from `begin` to `end`, in order; of longer
    rows the first floats."""
    width = cell_CD.shape[1]
    for n in range(begin, end):
        u, c, scale = inverse_N[n], cell_N[n], scale_N[n]
        for d in range(width):
            cell_CD[c, d] += scale * rows_UD[u, d]


def pool_reference(rows_UD: F32, inverse_N: I32, cell_N: I32, scale_N: F32, num_cells: int) -> F32:
    """(C, D) cells."""
    cell_CD = np.zeros((num_cells, rows_UD.shape[1]), np.float32)
    for n, u in enumerate(inverse_N):
        cell_CD[cell_N[n]] += scale_N[n] * rows_UD[u]
    return cell_CD


@njit(nogil=True, cache=True)
def sum_single(grad_CD, order_N, start_U1, begin, end, grads_UD):  # type: ignore[no-untyped-def]
    """Sum the gradients of each key's occurrences in order, where cell n is occurrence n. False if not finite."""
    cells, grads, width = grad_CD.reshape(-1), grads_UD.reshape(-1), np.uint64(grad_CD.shape[1])
    last = np.uint64(len(order_N) - 1)
    check = np.float32(0)
    for u in range(np.uint64(begin), np.uint64(end)):
        grad, first = u * width, np.uint64(start_U1[u])
        prefetch(cells, np.uint64(order_N[min(first + AHEAD, last)]) * width)
        cell = np.uint64(order_N[first]) * width
        for d in range(width):
            grads[grad + d] = cells[cell + d]
        for k in range(first + ONE, np.uint64(start_U1[u + ONE])):
            prefetch(cells, np.uint64(order_N[min(k + AHEAD, last)]) * width)
            cell = np.uint64(order_N[k]) * width
            for d in range(width):
                grads[grad + d] += cells[cell + d]
        for d in range(width):
            check += grads[grad + d] * np.float32(0)  # stays 0 unless a gradient is not finite
    return check == np.float32(0)


@njit(nogil=True, cache=True)
def sum_pooled(grad_CD, order_N, start_U1, cell_N, scale_N, begin, end, grads_UD):  # type: ignore[no-untyped-def]
    """As `sum_single`, for occurrences that are pooled into cells with a scale."""
    width = grad_CD.shape[1]
    check = np.float32(0)
    for u in range(begin, end):
        for d in range(width):
            grads_UD[u, d] = 0
        for k in range(start_U1[u], start_U1[u + 1]):
            n = order_N[k]
            c, scale = cell_N[n], scale_N[n]
            for d in range(width):
                grads_UD[u, d] += scale * grad_CD[c, d]
        for d in range(width):
            check += grads_UD[u, d] * np.float32(0)
    return check == np.float32(0)


@njit(nogil=True, cache=True)
def add_cells(grad_CD, inverse_N, cell_N, scale_N, grads_UD):  # type: ignore[no-untyped-def]
    """Add the gradients of occurrences to those of their keys, in order; cell n is occurrence n if `cell_N` is empty.

    False if a sum is not finite."""
    width, single = grad_CD.shape[1], len(cell_N) == 0
    check = np.float32(0)
    for n in range(len(inverse_N)):
        u = inverse_N[n]
        c = n if single else cell_N[n]
        scale = np.float32(1) if single else scale_N[n]
        for d in range(width):
            grads_UD[u, d] += scale * grad_CD[c, d]
            check += grads_UD[u, d] * np.float32(0)
    return check == np.float32(0)


def sum_pooled_reference(grad_CD: F32, occurrences: list[list[int]], cell_N: I32, scale_N: F32) -> F32:
    """(U, D) gradients of the keys."""
    grads_UD = np.zeros((len(occurrences), grad_CD.shape[1]), np.float32)
    for u, numbers in enumerate(occurrences):
        for n in numbers:
            grads_UD[u] += scale_N[n] * grad_CD[cell_N[n]]
    return grads_UD


@njit(nogil=True, cache=True)
def sum_by_key(value_B, sample_N, inverse_N, out_U):  # type: ignore[no-untyped-def]
    """Sum a value of the sample over the occurrences of each key, in order; used for shows and clicks."""
    out_U[:] = 0
    for n in range(np.uint64(len(inverse_N))):
        out_U[np.uint64(inverse_N[n])] += value_B[np.uint64(sample_N[n])]


def sum_by_key_reference(value_B: F32, sample_N: I32, occurrences: list[list[int]]) -> F32:
    """(U,) sums."""
    out_U = np.zeros(len(occurrences), np.float32)
    for u, numbers in enumerate(occurrences):
        for n in numbers:
            out_U[u] += value_B[sample_N[n]]
    return out_U
