"""Work on many rows, half of it in a shard's other thread where there is one. What is done is the caller's matter."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_ROWS_A_THREAD = 4096
"""Fewer are done sooner than another thread wakes."""


class Halves:
    """See module docstring."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def do(self, total: int, work: Callable[[int, int], object]) -> None:
        """Do `work(begin, end)` on 0 .. total - 1, the second half in the pool."""
        if self._pool is None or total < 2 * MIN_ROWS_A_THREAD:
            work(0, total)
            return
        half = total // 2
        second = self._pool.submit(work, half, total)
        work(0, half)
        second.result()
