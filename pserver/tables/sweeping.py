"""Background work for shrinks: it removes deleted rows, and counts the rows that a shrink would delete, in pieces.

Steps wait about a millisecond for a piece. Deleted rows are absent before they are removed, so no reader sees when.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator

from headrace.errors import HeadraceError, Unavailable
from headrace.pserver.errors import PserverError
from headrace.pserver.protocol.table_operations import ShrinkRows, ShrinkSurvey
from headrace.pserver.tables.table import ShardTable

STALE_S = 60.0
"""Older counts are dropped and counted again."""
PAUSE_S = 0.0005
"""Pause after each piece: a thread that takes a lock again at once starves the threads that wait for it."""


log = logging.getLogger(__name__)


def run(pieces: Iterator[object]) -> None:
    """Run all pieces, one after another."""
    deque(pieces, maxlen=0)


class _Count:
    """A survey in its own thread."""

    def __init__(self, table: ShardTable, shrink: ShrinkRows, stopping: threading.Event) -> None:
        self._table, self._shrink, self._stopping = table, shrink, stopping
        self._found: ShrinkSurvey | HeadraceError = Unavailable("the shard is stopping")
        self._done_s = math.inf
        self.called_off = False
        """Set to end it after the present piece."""
        self.thread = threading.Thread(target=self._run, name="survey", daemon=True)
        self.thread.start()

    def is_stale(self) -> bool:
        """Whether it was counted long ago, for a caller that did not return."""
        return time.monotonic() - self._done_s > STALE_S

    def result(self) -> ShrinkSurvey:
        """The survey, once the thread has ended. Raises HeadraceError."""
        if isinstance(self._found, HeadraceError):
            raise self._found
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._table.deletions.survey(self._shrink, lambda: self.called_off or self._stopping.is_set())
        except HeadraceError as error:
            self._found = error
        except Exception as error:  # noqa: BLE001  # a bug must reach the caller, too, or it would ask for ever
            log.exception("counting rows of table %s", self._shrink.table)
            self._found = PserverError(f"rows of table {self._shrink.table} cannot be counted: {error!r}")
        self._done_s = time.monotonic()


class Sweeper:
    """The background thread of one shard; it runs while there is work."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._tables: deque[ShardTable] = deque()
        self._surveys: dict[ShrinkRows, _Count] = {}
        self._thread: threading.Thread | None = None
        self._stopping, self._halting = threading.Event(), threading.Event()
        self.error: Exception | None = None
        """Why rows could not be removed; the next call raises it."""

    def sweep(self, table: ShardTable) -> None:
        """Remove the rows that shrinks of a table deleted, in the background."""
        with self._turn:
            if table not in self._tables:
                self._tables.append(table)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
                self._thread.start()

    def survey(self, table: ShardTable, shrink: ShrinkRows) -> ShrinkSurvey | None:
        """The rows that a shrink would delete, once a thread has counted them; None until then. Raises PserverError."""
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
        """Settings have changed: drop counts by the old ones."""
        with self._turn:
            for count in self._surveys.values():
                count.called_off = True
                count.thread.join()
            self._surveys = {}

    def halt(self) -> None:
        """Stop to remove rows, after the present piece, until `sweep` is called again."""
        self._halting.set()
        with self._turn:
            self._tables.clear()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._halting.clear()

    def stop(self) -> None:
        """End after the present piece; the next run removes the rest."""
        self._stopping.set()
        with self._turn:
            counting = [count.thread for count in self._surveys.values()]
        for thread in (self._thread, *counting):
            if thread is not None:
                thread.join()

    def check(self) -> None:
        """Raise the error that stopped the sweep, if any."""
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
                for _ in table.deletions.sweep():
                    if self._stopping.is_set() or self._halting.is_set():
                        break
                    time.sleep(PAUSE_S)
            except Exception as error:  # noqa: BLE001  # a bug must end the job, not only this thread
                self.error = error
