"""Work on disks that a request asks for: on a thread of its own, within a deadline, some at a time.

A folder that is huge, or on a server that is away, so keeps no thread that answers, and no other job's supervision.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, NotYet

MAX_AT_ONCE = 4
"""Beyond it a request is told to ask again."""
WITHIN_S = 30.0
"""How long one may take. A thread that its disk keeps for longer is left to itself, and keeps its place."""
Result = TypeVar("Result")
_places = threading.BoundedSemaphore(MAX_AT_ONCE)


class Background(Generic[Result]):
    """One piece of work, begun."""

    def __init__(
        self,
        work: Callable[[], Result],
        *,
        within_s: float = WITHIN_S,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        """`at_end` is called on the thread of the work, once `result` needs not wait."""
        self._deadline = Deadline.after(within_s)
        self._within_s = within_s
        self._future: Future[Result] = Future()
        # A daemon: a thread that waits for a disk must not keep the service from ending.
        threading.Thread(target=self._run, args=(work, at_end), name="background", daemon=True).start()

    def ended(self) -> bool:
        """Whether it is done, or out of time."""
        return self._future.done() or self._deadline.passed()

    def result(self) -> Result:
        """What the work gave or raised, waited for. Raises DeadlineExceeded where it takes too long."""
        try:
            return self._future.result(self._deadline.left_s())
        except TimeoutError:
            raise DeadlineExceeded(
                f"looking at the folders that the request names takes longer than {self._within_s:g} s: their disk is "
                "slow or away; ask again, or name other folders"
            ) from None

    def _run(self, work: Callable[[], Result], at_end: Callable[[], object]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # whoever waits has it
            self._future.set_exception(error)
        at_end()


def in_background(work: Callable[[], Result], *, within_s: float = WITHIN_S) -> Result:
    """What `work` gives or raises. Raises NotYet where MAX_AT_ONCE are under way, DeadlineExceeded."""
    if not _places.acquire(blocking=False):
        raise NotYet(f"{MAX_AT_ONCE} requests have folders looked at; ask again")
    return Background(work, within_s=within_s, at_end=_places.release).result()
