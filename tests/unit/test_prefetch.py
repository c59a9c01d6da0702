"""Kernels that prefetch: they read what they would read without it, whatever the length of a list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from headrace.prefetch import AHEAD, prefetch_row


@njit(nogil=True)
def gather(flat, width, rows_U, out_UD):  # type: ignore[no-untyped-def]
    last = np.uint64(len(rows_U)) - np.uint64(1)
    for u in range(np.uint64(0), np.uint64(len(rows_U))):
        prefetch_row(flat, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        for d in range(width):
            out_UD[u, d] = flat[np.uint64(rows_U[u]) * width + d]


@given(st.integers(1, 40), st.lists(st.integers(0, 99), max_size=3 * int(AHEAD)))
def test_rows_are_read_as_without_prefetching(width, rows):
    slab_RW = np.random.default_rng(width).normal(size=(100, width)).astype(np.float32)
    rows_U, before = np.array(rows, np.int32), slab_RW.copy()
    out_UD = np.empty((len(rows), width), np.float32)
    gather(slab_RW.reshape(-1), np.uint64(width), rows_U, out_UD)
    assert np.array_equal(out_UD, slab_RW[rows_U])
    assert np.array_equal(slab_RW, before)
