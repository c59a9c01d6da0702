"""Splits work on many rows between the calling thread and a shard's second thread, if there is one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_ROWS_A_THREAD = 4096
"""Fewer rows are done before another thread wakes."""


class WorkSplitter:
    """Runs work on the calling thread and, if given, in a pool."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def do(self, total: int, work: Callable[[int, int], object]) -> None:
        """Run `work(begin, end)` over 0 .. total - 1, the second half in the pool."""
        if self._pool is None or total < 2 * MIN_ROWS_A_THREAD:
            work(0, total)
            return
        half = total // 2
        second = self._pool.submit(work, half, total)
        work(0, half)
        second.result()
