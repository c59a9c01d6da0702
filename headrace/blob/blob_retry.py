"""Repeats a call to a blob store that fails, with pauses, within its deadline."""

import threading
from collections.abc import Callable
from typing import TypeVar

from headrace import retry
from headrace.blob.blob_errors import BlobUnavailable
from headrace.deadline import Deadline
from headrace.retry import Backoff

BACKOFF = Backoff((0.2, 0.5, 1.0, 2.0, 4.0))
"""Between tries; after the last try the call fails."""

Result = TypeVar("Result")


class Retries:
    """The tries of all calls to one store. Any thread may call."""

    def __init__(self, store: str, failures: tuple[type[Exception], ...], explain: Callable[[Exception], str]) -> None:
        """`failures` are repeated; `explain` words the last of them for people."""
        self._store, self._failures, self._explain = store, failures, explain
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """End every call at its next check or pause, whatever its deadline."""
        self._given_up.set()

    def check(self, doing: str, deadline: Deadline) -> None:
        """Raise BlobUnavailable where the calls are given up or the deadline has passed."""
        if self._given_up.is_set():
            raise BlobUnavailable(self._store, doing, "given up, as the process ends")
        if deadline.passed():
            raise BlobUnavailable(self._store, doing, "out of time", out_of_time=True)

    def run(self, doing: str, act: Callable[[], Result], deadline: Deadline) -> Result:
        """`act`, tried again after each pause while it fails; FileNotFoundError is an answer and is raised.

        Raises BlobUnavailable when the last try fails, or when the next pause would outlast the deadline.
        """

        tries = 0

        def attempt(number: int) -> Result:
            nonlocal tries
            self.check(doing, deadline)
            tries = number
            return act()

        def may_pass(error: Exception) -> bool:
            return isinstance(error, self._failures) and not isinstance(error, FileNotFoundError)

        try:
            return retry.call(attempt, BACKOFF, may_pass, deadline=deadline, wait=self._given_up.wait)
        except FileNotFoundError:
            raise
        except self._failures as error:
            early = tries <= len(BACKOFF.pauses_s)  # the next pause would have outlasted the deadline
            raise BlobUnavailable(self._store, doing, self._explain(error), out_of_time=early) from error
