"""The hot loops of features: crosses, hashes, lists by index, membership. Each has a plain twin.

Shapes: R rows, N values of all rows: row r has `value_N[offset_R1[r]:offset_R1[r + 1]]`.
"""

import math

import numpy as np

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, mix_reference


def crossed_reference(parts: list[int]) -> int:
    """The sign of a cross of signs, in their order: `s = mix((s ^ part) + GOLDEN)` for each part, beginning with 0."""
    sign = 0
    for part in parts:
        sign = mix_reference(((sign ^ part) + GOLDEN) & MASK)
    return sign


@njit(nogil=True, cache=True)
def cross_signs(sign_N, part_N, out_N):  # type: ignore[no-untyped-def]
    """Cross each sign with the part at its place; see `crossed_reference`."""
    for n in range(len(sign_N)):
        out_N[n] = mix((sign_N[n] ^ part_N[n]) + np.uint64(GOLDEN))


@njit(nogil=True, cache=True)
def cross_lists(sign_N, offset_R1, part_M, part_offset_R1, out_K, out_offset_R1):  # type: ignore[no-untyped-def]
    """Cross each sign of a row with each part of it: signs outside, parts inside. `out_offset_R1` is given."""
    for r in range(len(offset_R1) - 1):
        at = out_offset_R1[r]
        for n in range(offset_R1[r], offset_R1[r + 1]):
            for m in range(part_offset_R1[r], part_offset_R1[r + 1]):
                out_K[at] = mix((sign_N[n] ^ part_M[m]) + np.uint64(GOLDEN))
                at += 1


def hashed_reference(sign: int, num: int) -> int:
    """A sign among `num` ids: mixed, modulo `num`."""
    return mix_reference(sign) % num


@njit(nogil=True, cache=True)
def hash_signs(sign_N, num, out_N):  # type: ignore[no-untyped-def]
    """`hashed_reference`, compiled."""
    for n in range(len(sign_N)):
        out_N[n] = mix(sign_N[n]) % np.uint64(num)


@njit(nogil=True, cache=True)
def log_values(value_N, out_N):  # type: ignore[no-untyped-def]
    """log(1 + value), by the C library as math.log1p; NaN for a value below -1."""
    for n in range(len(value_N)):
        value = value_N[n]
        out_N[n] = math.log1p(value) if value > -1.0 else np.nan


@njit(nogil=True, cache=True)
def take_lists(value_N, offset_R1, index_B, out_K, out_offset_B1):  # type: ignore[no-untyped-def]
    """The lists of rows `index_B`, one after another. `out_offset_B1` is given."""
    for b in range(len(index_B)):
        begin = offset_R1[index_B[b]]
        for k in range(out_offset_B1[b], out_offset_B1[b + 1]):
            out_K[k] = value_N[begin + k - out_offset_B1[b]]


@njit(nogil=True, cache=True)
def find_members(value_B, row_B, member_N, offset_R1, out_B):  # type: ignore[no-untyped-def]
    """Set `out_B` to 1 where a value is in the list of its row, else to 0. `row_B` never falls."""
    row = -1
    members = member_N[:0].copy()
    for b in range(len(value_B)):
        if row_B[b] != row:
            row = row_B[b]
            members = np.sort(member_N[offset_R1[row] : offset_R1[row + 1]])
        place = np.searchsorted(members, value_B[b])
        out_B[b] = 1.0 if place < len(members) and members[place] == value_B[b] else 0.0
