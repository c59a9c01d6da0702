"""The fixed hashes of Headrace in kernels: the twins of the functions in headrace.keys.

Shapes: N signs.
"""

import numpy as np

from headrace.kernel_cache import njit
from headrace.keys import FNV_OFFSET, FNV_PRIME, GOLDEN, MIX_INVERSES


@njit(nogil=True, cache=True, inline="always")
def mix(value):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64 on a np.uint64, for use inside kernels."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(nogil=True, cache=True)
def keys_of(sign_N, group, out_N):  # type: ignore[no-untyped-def]
    """Write the keys of `sign_N` (uint64) in slot group `group` to `out_N`."""
    step = np.uint64(group + 1) * np.uint64(GOLDEN)
    for n in range(len(sign_N)):
        out_N[n] = mix(sign_N[n] + step)


@njit(nogil=True, cache=True)
def signs_of(keys_N, group_N, out_N):  # type: ignore[no-untyped-def]
    """Write the signs of `keys_N` (uint64), each in its slot group (uint16), to `out_N`; the twin of `sign_of`."""
    for n in range(len(keys_N)):
        value = keys_N[n]
        value = value ^ (value >> np.uint64(31)) ^ (value >> np.uint64(62))
        value = value * np.uint64(MIX_INVERSES[1])
        value = value ^ (value >> np.uint64(27)) ^ (value >> np.uint64(54))
        value = value * np.uint64(MIX_INVERSES[0])
        value = value ^ (value >> np.uint64(30)) ^ (value >> np.uint64(60))
        out_N[n] = value - (np.uint64(group_N[n]) + np.uint64(1)) * np.uint64(GOLDEN)


@njit(nogil=True, cache=True)
def fnv1a(data, begin, end):  # type: ignore[no-untyped-def]
    """FNV-1a of `data[begin:end]` (uint8), for use inside kernels; the twin of `sign_of_text`."""
    value = np.uint64(FNV_OFFSET)
    for i in range(begin, end):
        value = (value ^ np.uint64(data[i])) * np.uint64(FNV_PRIME)
    return value
