"""The fixed hashes of Headrace: text to signs (feature ids), signs to keys, keys to buckets.

They are part of every stored row and export, so they never change; golden vectors are in the tests. Here are the plain
functions that define them; headrace.key_kernels has their twins for arrays, with Numba, which loads slowly.

Shapes: N keys with repeats, U unique keys.
"""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

NUM_BUCKETS = 4096
"""Number of virtual buckets of keys; a shard owns some of them."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the increment of splitmix64."""
MIX_INVERSES = (pow(0xBF58476D1CE4E5B9, -1, 1 << 64), pow(0x94D049BB133111EB, -1, 1 << 64))
"""Inverses of the first and second multiplier of `mix`."""
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def mix_reference(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def unique_keys(*many: U64) -> U64:
    """(U,) The keys of all arrays, each once, ascending.

    As np.unique, which hashes first and takes 50 times as long for a million.
    """
    sorted_N: U64 = np.concatenate(many)
    sorted_N.sort()
    first_N = np.ones(len(sorted_N), np.bool_)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=first_N[1:])
    keys_U: U64 = sorted_N[first_N]
    return keys_U


def are_among(keys_N: U64, sorted_U: U64) -> NDArray[np.bool_]:
    """(N,) Which keys are among ascending ones. As np.isin, which sorts both at each call."""
    if not len(sorted_U):
        return np.zeros(len(keys_N), np.bool_)
    at_N = np.minimum(np.searchsorted(sorted_U, keys_N), len(sorted_U) - 1)
    found_N: NDArray[np.bool_] = sorted_U[at_N] == keys_N
    return found_N


def key_of_reference(sign: int, group: int) -> int:
    """Key of a sign in a slot group: `mix(sign + (group + 1) * GOLDEN)`, a bijection for each group."""
    return mix_reference((sign + (group + 1) * GOLDEN) & MASK)


def sign_of(key: int, group: int) -> int:
    """The sign that `key_of_reference` made `key` from: its inverse."""
    value = key
    value = _unshift(value, 31)
    value = _unshift((value * MIX_INVERSES[1]) & MASK, 27)
    value = _unshift((value * MIX_INVERSES[0]) & MASK, 30)
    return (value - (group + 1) * GOLDEN) & MASK


def _unshift(value: int, by: int) -> int:
    """Undo `value ^ (value >> by)`."""
    result, shift = value, by
    while shift < 64:
        result = value ^ (result >> by)
        shift += by
    return result


def sign_of_text(text: bytes) -> int:
    """64-bit sign of a text value: FNV-1a (Fowler, Noll, Vo) over its UTF-8 bytes."""
    value = FNV_OFFSET
    for byte in text:
        value = ((value ^ byte) * FNV_PRIME) & MASK
    return value


def bucket_of(key: int) -> int:
    """Virtual bucket of a key: its lowest bits, which `mix` has spread."""
    return key % NUM_BUCKETS
