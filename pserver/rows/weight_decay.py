"""Kernels of weight decay on rows, before a step: weights shrink (decoupled), or they join the gradient (L2).

Decoupled weight decay is lazy: a row that is pushed shrinks once for each pass since its last push, or since the decay
was set or its slot unfrozen, so a pass costs only the rows that it touches. Only products are used, so bits agree
between machines. Each kernel has a plain twin.

Shapes: U rows of a step, D weights of a row, W floats of a row in the slab: D weights, then the optimizer's state.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

F32 = NDArray[np.float32]


@njit(nogil=True, cache=True)
def decay(slab_RW, rows_U, passes_U, begin, end, num_weights, kept):  # type: ignore[no-untyped-def]
    """Multiply the weights of rows_U[begin:end] by `kept` to the power of their passes, by repeated squares."""
    for u in range(begin, end):
        passes, square, factor = passes_U[u], np.float32(kept), np.float32(1)
        if not passes:
            continue
        while passes:
            if passes & np.uint32(1):
                factor *= square
            square *= square
            passes >>= np.uint32(1)
        row = np.uint32(rows_U[u])
        for d in range(num_weights):
            slab_RW[row, d] *= factor


def decay_reference(row_W: F32, passes: int, num_weights: int, kept: np.float32) -> None:
    """The twin of `decay` on one row."""
    factor = np.float32(1)
    for place, bit in enumerate(reversed(f"{passes:b}")):
        square = kept
        for _ in range(place):
            square = square * square
        factor = factor * square if bit == "1" else factor
    if passes:
        row_W[:num_weights] *= factor


@njit(nogil=True, cache=True)
def add_weights(slab_RW, rows_U, grads_UD, l2, out_UD):  # type: ignore[no-untyped-def]
    """Write gradients with `l2` times the weights of their rows to `out_UD`."""
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        for d in range(grads_UD.shape[1]):
            out_UD[u, d] = grads_UD[u, d] + l2 * slab_RW[row, d]


def add_weights_reference(row_W: F32, grad_D: F32, l2: np.float32) -> F32:
    """The twin of `add_weights` on one row."""
    return grad_D + l2 * row_W[: len(grad_D)]
