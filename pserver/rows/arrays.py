"""Large arrays: allocated page by page, grown in place or by copying, or read-only; and recycled row numbers.

Callers decide what the arrays hold.
"""

import mmap
import os
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
Empty = Callable[..., NDArray[np.float32]]
"""empty(*shape): an array of floats to be written."""

MIN_MAPPED_BYTES = 1 << 20
"""Smaller arrays come from the heap."""
MAX_RESERVED_BYTES = 128 << 30
"""Most addresses reserved for an array that grows; a process has 128 TiB of them."""


def empty_floats(*shape: int) -> NDArray[np.float32]:
    """An uninitialised array."""
    return np.empty(shape, np.float32)


def allocate(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An uninitialised array whose pages are allocated when first written, and returned when it is freed.

    NumPy takes large arrays from the C library's heap once some were freed, which fragments it.
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if num_bytes < MIN_MAPPED_BYTES:
        return np.empty(shape, dtype)
    array: NDArray[Any] = _mapped(num_bytes).view(dtype).reshape(shape)
    return array


def _mapped(num_bytes: int) -> NDArray[np.uint8]:
    """Fresh pages. Raises OSError if the system has no address space for them."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # rows are read at random: fewer, larger pages are found sooner
    return np.frombuffer(pages, np.uint8)


def moved(array: NDArray[Any], used: int, room: int) -> NDArray[Any]:
    """A copy of the first `used` entries, `room` long."""
    larger = allocate((room, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def grown(array: NDArray[Any], used: int, room: int) -> NDArray[Any]:
    """The array, `room` long, with its first `used` entries; the old array stays valid.

    A large array moves once, to addresses reserved for as much as the machine's memory. From then on it grows in place:
    a copy would stop steps for a while, and double the memory.
    """
    num_bytes = array[:1].nbytes * room
    if num_bytes < MIN_MAPPED_BYTES:
        return moved(array, used, room)
    whole = _pages_of(array)
    if whole is not None and whole.nbytes >= num_bytes:
        return _longer(whole, array, room)
    larger = _longer(_reserved(num_bytes), array, room)
    larger[:used] = array[:used]
    return larger


def _longer(whole: NDArray[np.uint8], array: NDArray[Any], room: int) -> NDArray[Any]:
    """The first `room` entries of reserved pages, in the shape of `array`."""
    longer: NDArray[Any] = whole[: array[:1].nbytes * room].view(array.dtype).reshape(room, *array.shape[1:])
    return longer


def _pages_of(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """All pages below an array from `allocate` or `grown`; None for an array from the heap."""
    whole = array.base
    mapped = isinstance(whole, np.ndarray) and isinstance(getattr(whole.base, "obj", None), mmap.mmap)
    return whole if mapped else None


def _reserved(num_bytes: int) -> NDArray[np.uint8]:
    """Pages for at least `num_bytes`. Those never written take no memory."""
    try:
        return _mapped(max(num_bytes, _reservation()))
    except OSError:  # for example a limit on the address space (ulimit -v)
        return _mapped(num_bytes)


@cache
def _reservation() -> int:
    """Bytes of addresses for an array that grows: the memory of the machine; 0 where addresses are limited."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if is_limited or not policy.exists() or policy.read_text().strip() == "2":
        return 0
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), MAX_RESERVED_BYTES)


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
            self._numbers = grown(self._numbers, self.count, max(end, 2 * len(self._numbers)))
        self._numbers[self.count : end] = numbers_U
        self.count = end

    def take(self, most: int) -> I32:
        """Up to `most` freed numbers; the array is valid until the next `put`."""
        begin = max(0, self.count - most)
        taken_U: I32 = self._numbers[begin : self.count]
        self.count = begin
        return taken_U
