"""Initial values of rows: pure functions of table seed, key and element.

Only + - * / and square root are used, so bits agree between machines. Each kernel has a plain twin.

Shapes: R rows of a table, W floats of a row, D elements of a vector, G slot groups.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, mix_reference, sign_of_text
from headrace.pserver.config import Initial, TableSection

F32 = NDArray[np.float32]

UNIFORM, NORMAL, ZEROS = 0, 1, 2
"""Ways to draw a vector, as kernels know them."""
DRAWS = {Initial.UNIFORM: UNIFORM, Initial.XAVIER: UNIFORM, Initial.NORMAL: NORMAL, Initial.ZEROS: ZEROS}
LN_2 = 0.6931471805599453


def table_seed_of(name: str, seed: int) -> np.uint64:
    """The seed of a table in a job with `seed`."""
    return np.uint64(mix_reference((mix_reference(seed & MASK) + sign_of_text(name.encode()) + GOLDEN) & MASK))


def spread_of(section: TableSection) -> float:
    """The factor of a table's draws: the bound of uniform ones, the standard deviation of normal ones.

    Xavier (Glorot, Bengio 2010): sqrt(6 / (fan in + fan out)). A key is one input, the vector's elements are outputs.
    """
    return math.sqrt(6 / (1 + section.dim)) if section.init is Initial.XAVIER else section.init_range


@njit(nogil=True, cache=True)
def _log(x):  # type: ignore[no-untyped-def]
    """The natural logarithm of x in (0, 1], within 1e-14: the series of atanh, after halvings. Libraries round it."""
    halvings = 0
    while x < 0.7071067811865476:
        x, halvings = x + x, halvings + 1
    s = (x - 1.0) / (x + 1.0)
    square, total = s * s, 0.0
    for power in range(17, 0, -2):
        total = total * square + 1.0 / power
    return 2.0 * s * total - halvings * LN_2


@njit(nogil=True, cache=True)
def normal_quantile(p):  # type: ignore[no-untyped-def]
    """The standard normal value below which a share `p` lies, 2^-25 <= p <= 1 - 2^-25; relative error below 1e-6.

    Source: Wichura 1988, algorithm AS 241, PPND7, without its far tails (p < 1.4e-11).
    """
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        over = ((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179
        return q * over / (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0)
    r = math.sqrt(-_log(p if q < 0 else 1.0 - p)) - 1.6
    over = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
    value = over / ((0.12021132975 * r + 0.73700164250) * r + 1.0)
    return -value if q < 0 else value


@njit(nogil=True, cache=True)
def initialise(  # type: ignore[no-untyped-def]
    slab_RW, keys_R, group_R, begin, end, first_order, num_weights, start_W, spread_G, draw_G, table_seed
):
    """Start rows begin .. end - 1: `start_W`, the vector drawn from (table_seed, key, element) as its group says."""
    width = slab_RW.shape[1]
    for row in range(begin, end):
        for w in range(width):
            slab_RW[row, w] = start_W[w]
        group = group_R[row]
        counter, spread, draw = mix(keys_R[row] ^ table_seed), spread_G[group], draw_G[group]
        if draw == UNIFORM:
            for w in range(first_order, num_weights):
                counter += np.uint64(GOLDEN)
                unit = np.float32(mix(counter) >> np.uint64(40)) * np.float32(2.0**-24)
                slab_RW[row, w] = (unit + unit - np.float32(1)) * spread
        elif draw == NORMAL:
            for w in range(first_order, num_weights):
                counter += np.uint64(GOLDEN)
                share = (np.float64(mix(counter) >> np.uint64(40)) + 0.5) * 2.0**-24
                slab_RW[row, w] = np.float32(normal_quantile(share)) * spread


def initial_vector_reference(key: int, dim: int, spread: float, table_seed: int, draw: int = UNIFORM) -> F32:
    """A key's initial vector, from the top 24 bits of splitmix64 from mix(key ^ table_seed).

    Uniform in plus or minus `spread`, normal with this standard deviation, or zeros.
    """
    counter = mix_reference(key ^ table_seed)
    bits = [mix_reference((counter + (i + 1) * GOLDEN) & MASK) >> 40 for i in range(dim)]
    if draw == ZEROS:
        return np.zeros(dim, np.float32)
    if draw == NORMAL:
        return np.array([normal_quantile.py_func((k + 0.5) / 2**24) for k in bits], np.float32) * np.float32(spread)
    units = np.array([k / 2**24 for k in bits], np.float32)
    return (units * np.float32(2) - np.float32(1)) * np.float32(spread)
