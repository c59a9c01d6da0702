"""Removing what shrinks took, and counting what one would take: piece by piece, beside the steps.

A piece keeps steps waiting for about a millisecond. What is absent is absent before it is removed, so nobody sees when.
"""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from pserver.errors import PserverError
from pserver.operations import Shrink, Survey
from pserver.table import Table


def run(pieces: Iterator[object]) -> None:
    """All pieces, one after another."""
    deque(pieces, maxlen=0)


class Sweeper:
    """One shard's background thread for this, there while there is something to do."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._tables: deque[Table] = deque()
        self._surveys: dict[Shrink, Future[Survey]] = {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.error: PserverError | None = None
        """Why rows of a store could not be removed; whoever asks next is told."""

    def sweep(self, table: Table) -> None:
        """Remove what shrinks of a table took, in the background."""
        with self._turn:
            if table not in self._tables:
                self._tables.append(table)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
                self._thread.start()

    def survey(self, table: Table, shrink: Shrink) -> Survey | None:
        """What a shrink would take, once a thread has counted it; None until then. Raises PserverError."""
        with self._turn:
            asked = self._surveys.get(shrink)
            if asked is None:
                asked = self._surveys[shrink] = Future()
                work = threading.Thread(target=self._count, args=(table, shrink, asked), name="survey", daemon=True)
                work.start()
            if not asked.done():
                return None
            del self._surveys[shrink]
        return asked.result()

    def stop(self) -> None:
        """End after the piece in hand; what is not removed is removed by whoever comes next."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def check(self) -> None:
        """Raise what stopped the sweep."""
        if self.error is not None:
            raise self.error

    def _count(self, table: Table, shrink: Shrink, asked: "Future[Survey]") -> None:
        try:
            asked.set_result(table.survey(shrink))
        except PserverError as error:
            asked.set_exception(error)

    def _run(self) -> None:
        while True:
            with self._turn:
                if not self._tables or self._stopping.is_set():
                    self._thread = None
                    return
                table = self._tables.popleft()
            try:
                for _ in table.sweep():
                    if self._stopping.is_set():
                        break
            except PserverError as error:
                self.error = error
