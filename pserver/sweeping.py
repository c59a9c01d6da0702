"""Removing what shrinks took, and counting what one would take: piece by piece, beside the steps.

A piece keeps steps waiting for about a millisecond. What is absent is absent before it is removed, so nobody sees when.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator

from millrace.errors import MillraceError, Unavailable
from pserver.errors import PserverError
from pserver.operations import Shrink, Survey
from pserver.table import Table

STALE_S = 60.0
"""Older counts are not given to whoever asks next."""
PAUSE_S = 0.0005
"""After each piece: a thread that takes a lock again at once leaves it to none of those that wait."""


log = logging.getLogger(__name__)


def run(pieces: Iterator[object]) -> None:
    """All pieces, one after another."""
    deque(pieces, maxlen=0)


class _Count:
    """A survey in a thread of its own."""

    def __init__(self, table: Table, shrink: Shrink, stopping: threading.Event) -> None:
        self._table, self._shrink, self._stopping = table, shrink, stopping
        self._found: Survey | MillraceError = Unavailable("the shard is stopping")
        self._done_s = math.inf
        self.called_off = False
        """It ends after the piece in hand."""
        self.thread = threading.Thread(target=self._run, name="survey", daemon=True)
        self.thread.start()

    def is_stale(self) -> bool:
        """Whether it was counted long ago, for somebody who did not come back."""
        return time.monotonic() - self._done_s > STALE_S

    def result(self) -> Survey:
        """Once the thread has ended. Raises MillraceError."""
        if isinstance(self._found, MillraceError):
            raise self._found
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._table.survey(self._shrink, lambda: self.called_off or self._stopping.is_set())
        except MillraceError as error:
            self._found = error
        except Exception as error:  # noqa: BLE001  # a bug, too, must be told to whoever asked, who would ask for ever
            log.exception("counting rows of table %s", self._shrink.table)
            self._found = PserverError(f"rows of table {self._shrink.table} cannot be counted: {error!r}")
        self._done_s = time.monotonic()


class Sweeper:
    """One shard's background thread for this, there while there is something to do."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._tables: deque[Table] = deque()
        self._surveys: dict[Shrink, _Count] = {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.error: Exception | None = None
        """Why rows could not be removed; whoever asks next is told."""

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
            self._surveys = {each: count for each, count in self._surveys.items() if not count.is_stale()}
            count = self._surveys.get(shrink)
            if count is None:
                count = self._surveys[shrink] = _Count(table, shrink, self._stopping)
            if count.thread.is_alive():
                return None
            del self._surveys[shrink]
        return count.result()

    def recount(self) -> None:
        """Settings have changed: what is being counted by the old ones is given to nobody."""
        with self._turn:
            for count in self._surveys.values():
                count.called_off = True
                count.thread.join()
            self._surveys = {}

    def stop(self) -> None:
        """End after the piece in hand; what is not removed is removed by whoever comes next."""
        self._stopping.set()
        with self._turn:
            counting = [count.thread for count in self._surveys.values()]
        for thread in (self._thread, *counting):
            if thread is not None:
                thread.join()

    def check(self) -> None:
        """Raise what stopped the sweep."""
        if self.error is not None:
            raise self.error

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
                    time.sleep(PAUSE_S)
            except Exception as error:  # noqa: BLE001  # a bug, too, must end the job rather than this thread alone
                self.error = error
