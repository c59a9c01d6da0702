"""Arrays of many rows: whose memory is taken as it is written, which grow by copying, or are only read.

What is in them is the matter of whoever made them.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]

MIN_MAPPED_BYTES = 1 << 20
"""Smaller arrays come from the heap."""


def roomy(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array, not initialised, whose memory is taken page by page as it is written and given back when it is freed.

    Large arrays of NumPy's own come from the C library's heap once some were freed, and leave holes in it there.
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if num_bytes < MIN_MAPPED_BYTES:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # rows are read at random: fewer, larger pages are found sooner
    return np.frombuffer(pages, dtype).reshape(shape)


def moved(array: NDArray[Any], used: int, room: int) -> NDArray[Any]:
    """A copy of the first `used` with room for more."""
    larger = roomy((room, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only, contiguous view: what comes off the wire is read-only, so kernels need one signature only."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


class FreeNumbers:
    """Numbers that were given out and came back: the last one back goes out first. Callers see to locks."""

    def __init__(self, room: int = 0) -> None:
        self.count = 0
        self._numbers = np.empty(room, np.int32)

    def put(self, numbers_U: I32) -> None:
        """Numbers come back."""
        end = self.count + len(numbers_U)
        if end > len(self._numbers):
            self._numbers = moved(self._numbers, self.count, max(end, 2 * len(self._numbers)))
        self._numbers[self.count : end] = numbers_U
        self.count = end

    def take(self, most: int) -> I32:
        """Up to `most` of them go out; valid until the next `put`."""
        begin = max(0, self.count - most)
        taken_U: I32 = self._numbers[begin : self.count]
        self.count = begin
        return taken_U
