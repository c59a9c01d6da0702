"""The job's log: the one ordered record of claims, plans, operations and closes. What happened is what it says.

A generation of workers claims the job by making its own file; from then on every older generation is refused, because
each change of the store is made under `log/lock` after a look that nobody newer has claimed. Appends are synced one by
one. The files' format and their reading are in trainer.log_file, what the records mean in trainer.history.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from millrace.deadline import Deadline
from millrace.durable import REAL, UNFINISHED, Disk
from millrace.errors import DeadlineExceeded, MillraceError
from millrace.locks import locked
from trainer.history import History
from trainer.log_end import LogFailed, LogFull, OpenFile, failing, settle
from trainer.log_file import (
    CLOSED,
    SEALED,
    Kind,
    LogDamaged,
    LogTooNew,
    Place,
    Record,
    file_name,
    file_numbers,
    line_of,
    newest_generation,
    read_files,
    record_of,
)
from trainer.log_unsettled import Unsettled

__all__ = [
    "Kept",
    "Kind",
    "Log",
    "LogDamaged",
    "LogFailed",
    "LogFull",
    "LogTooNew",
    "Place",
    "Record",
    "Superseded",
    "newest_generation",
    "read",
]

LOCK = "lock"
"""The file in the log's folder under whose lock the store changes."""
PART_BYTES = 1 << 20
"""A file longer than this is followed by another one at the next commit."""
MAX_WAIT_S = 60.0
"""How long an append waits for another change of the store; then it raises DeadlineExceeded."""
_LOOKS = 3  # how often a reader begins again whose files were pruned while it read


class Superseded(MillraceError):
    """A newer generation of workers has the job; this one may change nothing any more, and ends."""

    exit_code = 75

    def __init__(self, folder: Path, generation: int, newest: int) -> None:
        super().__init__(
            f"{folder}: generation {newest} of the workers has claimed this job, generation {generation} comes too late"
            " and ends; nothing is lost"
        )
        self.generation, self.newest = generation, newest


@dataclass(frozen=True)
class Kept:
    """One file of the log, for whoever copies it."""

    path: Path
    length: int
    """Good bytes from the start: all that a copy needs."""
    sealed: bool
    """Whether it will never grow."""
    first: int
    """The number of its first record."""


def read(folder: Path) -> list[Record]:
    """Every record of the log in `folder` in order, from the oldest kept file on; [] where there is none.

    It may run beside the writer: it then sees all that was appended before. Raises LogDamaged and LogTooNew.
    """
    for _ in range(_LOOKS - 1):
        try:
            return [record for file in read_files(folder) for record in file.records]
        except FileNotFoundError:  # pruned between our look and our reading
            continue
    return [record for file in read_files(folder) for record in file.records]


class Log:
    """The log as the one worker sees it who may write: the chief of the newest generation. Any thread may call."""

    def __init__(self, folder: Path, generation: int, body: Mapping[str, Any], disk: Disk) -> None:
        """Steps 1 to 3 of `Log.claim`, which is the only one to call this."""
        if (newest := newest_generation(folder)) >= generation:  # 1
            raise Superseded(folder, generation, newest)
        found = read_files(folder)
        self.folder, self.generation = folder, generation
        self._body, self._disk = {**body, "generation": generation}, disk
        self._turn, self._inside = threading.RLock(), False
        self._sealed = [Kept(file.path, file.length, True, file.records[0].number) for file in found]
        records = [record for file in found for record in file.records]
        self._next = records[-1].number + 1 if records else 1
        ours = Record(self._next, Kind.CLAIM, self._body, Place(folder, 0))
        self._closed = History.of([*records, ours]).closed
        self._unsettled = Unsettled()
        for record in (*records, ours):
            self._unsettled.add(record)
        with failing(folder, full=False):
            for leftover in folder.glob(f"*{UNFINISHED}"):
                disk.remove(leftover)
        if found:
            settle(disk, found[-1].path, found[-1].length)  # 2
        self._first, self._open = self._next, self._begun(1)  # 3

    @classmethod
    def claim(
        cls, folder: Path, generation: int, body: Mapping[str, Any], deadline: Deadline, disk: Disk = REAL
    ) -> Self:
        """Take the job over for `generation`, with a first record that carries `body`. `folder`'s parent exists.

        `body` may hold "timeline", and "base": the commit it began from; both again in every claim on that timeline.
        Added are "generation", "sealed" and "closed". Nobody who claimed earlier can change anything once this returns.

        1. Under the lock, nobody as new has claimed: read what is there. 2. Cut its tail, make what is left durable.
        3. Link the first file of our own into place, which seals the file before it: the job is ours from here on.

        Raises Superseded, LogDamaged, LogTooNew, LogFull, LogFailed and DeadlineExceeded.
        """
        with failing(folder):
            disk.make_folder(folder)
            disk.sync_folder(folder.parent)
        with locked(folder / LOCK, deadline):
            return cls(folder, generation, body, disk)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store against every other writer, of our own threads too; the thread that holds it may append.

        Each change of the store's truth is made inside: a manifest's rename, its removal, an append.
        Raises Superseded, and DeadlineExceeded after MAX_WAIT_S.
        """
        if not self._turn.acquire(timeout=MAX_WAIT_S):
            raise DeadlineExceeded(f"{self.folder}: another thread kept the store's lock for {MAX_WAIT_S:.0f} s")
        try:
            if self._inside:
                yield
                return
            with locked(self.folder / LOCK, Deadline.after(MAX_WAIT_S)):
                if (newest := newest_generation(self.folder)) > self.generation:
                    raise Superseded(self.folder, self.generation, newest)
                self._inside = True
                try:
                    yield
                finally:
                    self._inside = False
        finally:
            self._turn.release()

    def append(self, kind: Kind, body: Mapping[str, Any]) -> Record:
        """Write a record and make it durable; when this returns it has happened.

        Raises LogFull (nothing was changed, try again), LogFailed (for good), Superseded and DeadlineExceeded.
        """
        assert kind is not Kind.CLAIM, "Log.claim writes claims"
        with self.exclusive():
            line = line_of(self._next, kind, body)
            record = record_of(line, Place(self._open.path, self._open.length))
            assert record is not None, "a line just made is good"
            self._open.append(line)
            self._next += 1
            self._unsettled.add(record)
            if kind is Kind.CLOSE:
                self._closed = record.body["number"]
            return record

    def roll(self) -> bool:
        """Go on in a new file once the present one is above PART_BYTES, so that it can be copied and pruned.

        Returns whether it did. Raises as append does; after LogFull the log goes on in the present file.
        """
        with self.exclusive():
            full = self._open
            numbers = file_numbers(full.path)
            if full.length <= PART_BYTES or numbers is None:
                return False
            self._sealed.append(replace(self.files()[-1], sealed=True))
            try:
                self._first, self._open = self._next, self._begun(numbers[1] + 1)
            except LogFull:
                self._sealed.pop()
                raise
            except BaseException:  # the new file may be there, and has sealed this one
                self._sealed.pop()
                full.fail()
                raise
            full.end()
            return True

    def prune(self, before: int) -> list[Path]:
        """Remove what going on from a commit does not need whose close is record number `before`; returns the paths.

        That is every file all of whose records are older and were settled by then. The oldest goes first, each for good
        before the next, so what is left is always the log's end without a gap.
        """
        removed = []
        with self.exclusive(), failing(self.folder, full=False):
            while self._sealed and self.files()[1].first <= before:
                oldest = self._sealed[0].path
                if self._unsettled.needed(oldest, before):
                    break
                self._disk.remove(oldest)
                self._disk.sync_folder(self.folder)
                del self._sealed[0]
                removed.append(oldest)
        return removed

    def files(self) -> list[Kept]:
        """The log's files in order, all but the last one sealed; a copy of them, each cut at its length, is the log."""
        with self._turn:
            return [*self._sealed, Kept(self._open.path, self._open.length, False, self._first)]

    def close(self) -> None:
        """Close the open file; nothing is appended any more."""
        with self._turn:
            self._open.end()

    def _begun(self, part: int) -> OpenFile:
        """A new file of our generation, which begins with our claim and seals the file before it."""
        sealed = {kept.path.name: kept.length for kept in self._sealed[-1:]}
        line = line_of(self._next, Kind.CLAIM, {**self._body, SEALED: sealed, CLOSED: self._closed})
        try:
            begun = OpenFile(self._disk, self.folder / file_name(self.generation, part), line)
        except FileExistsError:
            raise Superseded(self.folder, self.generation, newest_generation(self.folder)) from None
        self._next += 1
        return begun
