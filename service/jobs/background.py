"""Disk work for a request: on a thread of its own, with a deadline, a few at a time.

So a huge folder, or one on a file server that is down, blocks neither a thread that answers requests nor the
supervision of other jobs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, NotYet

MAX_AT_ONCE = 4
"""Beyond it a request is refused with a hint to retry."""
WITHIN_S = 30.0
"""How long one may take. A thread that its disk blocks for longer is abandoned, and still counts."""
Result = TypeVar("Result")
_places = threading.BoundedSemaphore(MAX_AT_ONCE)


class BackgroundWork(Generic[Result]):
    """One piece of work that has started."""

    def __init__(
        self,
        work: Callable[[], Result],
        *,
        within_s: float = WITHIN_S,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        """`at_end` is called on the thread of the work, once `result` does not block."""
        self._deadline = Deadline.after(within_s)
        self._within_s = within_s
        self._future: Future[Result] = Future()
        # A daemon: a thread that waits for a disk must not keep the service from exiting.
        threading.Thread(target=self._run, args=(work, at_end), name="background", daemon=True).start()

    def ended(self) -> bool:
        """Whether it is done, or out of time."""
        return self._future.done() or self._deadline.passed()

    def result(self) -> Result:
        """Wait for the work; return or raise what it did. Raises DeadlineExceeded where it takes too long."""
        try:
            return self._future.result(self._deadline.left_s())
        except TimeoutError:
            raise DeadlineExceeded(
                f"reading the folders that the request names takes longer than {self._within_s:g} s: their disk is "
                "slow or unavailable; retry, or name other folders"
            ) from None

    def _run(self, work: Callable[[], Result], at_end: Callable[[], object]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            self._future.set_exception(error)
        at_end()


def in_background(work: Callable[[], Result], *, within_s: float = WITHIN_S) -> Result:
    """Return or raise what `work` does. Raises NotYet where MAX_AT_ONCE are running, DeadlineExceeded."""
    if not _places.acquire(blocking=False):
        raise NotYet(f"{MAX_AT_ONCE} requests are reading folders already; retry")
    return BackgroundWork(work, within_s=within_s, at_end=_places.release).result()
