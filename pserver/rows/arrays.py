"""Large arrays: allocated page by page, grown by copying, or read-only; and recycled row numbers.

Callers decide what the arrays hold.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]

MIN_MAPPED_BYTES = 1 << 20
"""Smaller arrays come from the heap."""


def allocate(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An uninitialised array whose pages are allocated when first written, and returned when it is freed.

    NumPy takes large arrays from the C library's heap once some were freed, which fragments it.
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if num_bytes < MIN_MAPPED_BYTES:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # rows are read at random: fewer, larger pages are found sooner
    return np.frombuffer(pages, dtype).reshape(shape)


def moved(array: NDArray[Any], used: int, room: int) -> NDArray[Any]:
    """A copy of the first `used` entries, `room` long."""
    larger = allocate((room, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only, contiguous view. Arrays from the wire are read-only, so kernels need only this signature."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


class FreeNumbers:
    """A stack of freed numbers: the last one freed is used first. Callers lock."""

    def __init__(self, room: int = 0) -> None:
        self.count = 0
        self._numbers = np.empty(room, np.int32)

    def put(self, numbers_U: I32) -> None:
        """Free numbers."""
        end = self.count + len(numbers_U)
        if end > len(self._numbers):
            self._numbers = moved(self._numbers, self.count, max(end, 2 * len(self._numbers)))
        self._numbers[self.count : end] = numbers_U
        self.count = end

    def take(self, most: int) -> I32:
        """Up to `most` freed numbers; the array is valid until the next `put`."""
        begin = max(0, self.count - most)
        taken_U: I32 = self._numbers[begin : self.count]
        self.count = begin
        return taken_U
