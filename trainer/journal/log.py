"""The job's log: one ordered, synced record of claims, plans, operations and closes. It is the truth about the job.

A generation of workers claims the job by creating its own file. From then on every older generation is refused, because
each change of the store is made under `log/lock`, after a check that no newer generation has claimed. Each append is
synced by itself. The files' format is trainer.journal.log_file's, the records' content trainer.journal.records', their
meaning trainer.journal.job_history's.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self, assert_never

from headrace.deadline import Deadline
from headrace.durable import NO_ROOM, REAL, UNFINISHED, Disk, locked, unfinished_name
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.failpoints import Failpoint, failpoint
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log_file import (
    AnyRecord,
    LogDamaged,
    LogRecord,
    LogTooNew,
    RecordPlace,
    UnknownRecord,
    file_name,
    file_numbers,
    line_of,
    newest_generation,
    read_files,
    record_of,
)
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import Claim, Content, Operation, PassClose, RecordKind, Void

__all__ = [
    "AnyRecord",
    "Log",
    "LogDamaged",
    "LogFailed",
    "LogFileCopy",
    "LogFull",
    "LogRecord",
    "LogTooNew",
    "RecordKind",
    "RecordPlace",
    "Superseded",
    "UnknownRecord",
    "newest_generation",
    "read",
]

LOCK = "lock"
"""The file in the log's folder under whose lock the store changes."""
PART_BYTES = 1 << 20
"""A file longer than this is followed by another one at the next commit."""
MAX_WAIT_S = 60.0
"""Longest wait of an append for another change of the store; then it raises DeadlineExceeded."""
RESERVE_BYTES = 1 << 20
"""Reserved room behind the log's end, where the file system can: this much can still be logged on a full disk."""
_TRIES = 3  # of a reader whose files are pruned while it reads


class Superseded(HeadraceError):
    """A newer generation of workers has the job. This one may change nothing any more, and ends."""

    exit_code = 75

    def __init__(self, folder: Path | str, generation: int, newest: int) -> None:
        """`folder` is the log's, or the address of the fence that decided."""
        super().__init__(
            f"{folder}: generation {newest} of the workers has claimed this job; generation {generation} is too late "
            "and ends; nothing is lost"
        )
        self.generation, self.newest = generation, newest


class LogFull(HeadraceError):
    """No room for a record. The log is unchanged; the append may be tried again."""

    def __init__(self, path: Path, why: str | None) -> None:
        super().__init__(f"{path}: {why}: there is no room for the next record of the log; make room on this disk")


class LogFailed(HeadraceError):
    """A write or sync of the log failed. It is unknown what is durable, so this process must end."""

    exit_code = 75

    def __init__(self, path: Path, why: str | None) -> None:
        super().__init__(
            f"{path}: {why}: this process cannot continue the log; the next generation continues from what was synced."
            " Check this disk if it happens again"
        )


@dataclass(frozen=True)
class LogFileCopy:
    """One file of the log, for a copy."""

    path: Path
    length: int
    """Good bytes from the start: a copy needs no more."""
    sealed: bool
    """True if it never grows again."""
    first: int
    """Number of its first record."""


class LogFence(Protocol):
    """Decides beyond this disk which claims and records count: see trainer.journal.fenced_log."""

    @property
    def takes_lines(self) -> bool:
        """Whether every record goes to the fence, not only claims."""
        ...

    @property
    def max_wait_s(self) -> float:
        """Longest time that `logged` takes while the fence cannot be reached."""
        ...

    @property
    def trouble(self) -> str:
        """Why a record waits for the fence, for a status; empty while none waits. Any thread."""
        ...

    def claimed(self, folder: Path, file: str, line: bytes, claim: Claim) -> None:
        """Before the claim of a generation is in its file. Raises Superseded, and Unavailable."""
        ...

    def logged(self, file: str, line: bytes) -> None:
        """Before any other record is in its file. Raises Superseded, and Unavailable."""
        ...


class LogEnd:
    """The newest file of the log, which grows by whole, synced records. Not safe for threads."""

    def __init__(self, disk: Disk, path: Path, first_line: bytes) -> None:
        """Begin the file `path`. Its first line is whole and durable before the file has its name.

        Raises LogFull and LogFailed; and FileExistsError if the name is taken, which leaves nothing behind.
        """
        self.path, self.length = path, len(first_line)
        self._disk, self._failed = disk, False
        self._reserved = 0
        unfinished = unfinished_name(path)
        with translate_disk_errors(path):
            self._file = disk.create(unfinished)
        try:
            with translate_disk_errors(path):
                disk.append(self._file, first_line)
                disk.sync(self._file)
                disk.link(unfinished, path)
            with translate_disk_errors(path, full=False):
                disk.sync_folder(path.parent)
        except (LogFull, LogFailed, FileExistsError):
            self._file.close()
            raise
        finally:
            disk.remove(unfinished)
        self._reserve()

    def append(self, line: bytes) -> None:
        """Write a line and make it durable.

        After LogFull the file is unchanged. After LogFailed every append fails: a failed sync may have discarded
        unwritten data, so the success of a second sync proves nothing.
        """
        self.check()
        try:
            with translate_disk_errors(self.path):
                self._disk.append(self._file, line)
        except LogFull:
            self._cut()
            raise
        except LogFailed:
            self.fail()
            raise
        failpoint(Failpoint.LOG_WRITTEN)
        try:
            with translate_disk_errors(self.path, full=False):
                self._disk.sync(self._file)
        except LogFailed:
            self.fail()
            raise
        failpoint(Failpoint.LOG_SYNCED)
        self.length += len(line)
        self._reserve()

    def check(self) -> None:
        """Raise LogFailed after an earlier failure."""
        if self._failed:
            raise LogFailed(self.path, "an earlier write or sync failed")

    def fail(self) -> None:
        """Refuse further appends, and cut what may not be durable: no caller has a result for it."""
        self._failed = True
        self._cut()

    def end(self) -> None:
        """Release the reserved room, and close the file."""
        if not self._file.closed:
            with self._file, translate_disk_errors(self.path, full=False):
                self._disk.truncate(self._file, self.length)

    def _cut(self) -> None:
        try:
            with translate_disk_errors(self.path, full=False):
                self._disk.truncate(self._file, self.length)
        except LogFailed:
            self._failed = True
            raise
        self._reserved = self.length

    def _reserve(self) -> None:
        if self._reserved - self.length < RESERVE_BYTES // 2 and self._disk.reserve(self._file, RESERVE_BYTES):
            self._reserved = self.length + RESERVE_BYTES


def cut_tail(disk: Disk, path: Path, length: int) -> None:
    """Make the first `length` bytes of an earlier generation's file durable, and cut the rest.

    That generation may have died before its sync, and we continue from what we read.
    """
    with translate_disk_errors(path, full=False), disk.open(path) as file:
        disk.truncate(file, length)
        disk.sync(file)
        disk.sync_folder(path.parent)


@contextmanager
def translate_disk_errors(path: Path, *, full: bool = True) -> Iterator[None]:
    """Translate a failed write to `path`: LogFull for lack of room, if `full`, else LogFailed."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if full and error.errno in NO_ROOM:
            raise LogFull(path, error.strerror) from error
        raise LogFailed(path, error.strerror) from error


class UnsettledFiles:
    """The files with records that a replay may still need: plans without a close, operations that did not act yet.

    A plan is logged before the close of the pass before it, so a file may end between them: a file older than a
    commit's close is not yet a file that may be removed.
    """

    def __init__(self) -> None:
        self._timeline = ""
        self._plans: dict[int, Path] = {}
        self._waiting: set[Path] = set()
        self._settled_at: dict[Path, int] = {}

    def add(self, record: AnyRecord) -> None:
        """Take in the next record of the log. Open plans and operations of an ended timeline are not needed again."""
        file, content = record.place.path, record.content
        if isinstance(content, Operation):
            self._waiting.add(file)
            return
        match content:
            case Claim(timeline=timeline):
                if timeline is not None and timeline != self._timeline:
                    self._timeline = timeline
                    self._plans.clear()
                    self._waiting.clear()
            case PassPlan(number=number):
                self._plans[number] = file
            case Void(number=number):
                self._settle([self._plans.pop(number, file)], record)
            case PassClose(number=number):
                self._settle([self._plans.pop(number, file), *self._waiting], record)
                self._waiting.clear()
            case _:
                assert_never(content)

    def needed(self, file: Path, since: int) -> bool:
        """True if a restart from a commit, whose close is record `since`, needs a record of this older file."""
        return file in self._waiting or file in self._plans.values() or self._settled_at.get(file, 0) > since

    def _settle(self, files: Iterable[Path], by: AnyRecord) -> None:
        self._settled_at |= dict.fromkeys(files, by.number)


def read(folder: Path) -> list[AnyRecord]:
    """Every record of the log in `folder` in order, from the oldest remaining file on; [] without a log.

    It may run beside the writer and then returns everything appended before. Raises LogDamaged and LogTooNew.
    """
    for _ in range(_TRIES - 1):
        try:
            return [record for file in read_files(folder) for record in file.records]
        except FileNotFoundError:  # pruned between listing and reading
            continue
    return [record for file in read_files(folder) for record in file.records]


class Log:
    """The log as its one writer sees it: rank 0 of the newest generation. Any thread may call."""

    def __init__(self, folder: Path, claim: Claim, disk: Disk, fence: LogFence | None) -> None:
        """Steps 1 to 3 of `Log.claim`, its only caller."""
        if (newest := newest_generation(folder)) >= claim.generation:  # 1
            raise Superseded(folder, claim.generation, newest)
        found = read_files(folder)
        self.folder, self.generation = folder, claim.generation
        self._claim, self._disk, self._fence = claim, disk, fence
        self._ahead: bytes | None = None
        """A line that the fence has and the file does not."""
        self._turn, self._inside = threading.RLock(), False
        self._sealed = [LogFileCopy(file.path, file.length, True, file.records[0].number) for file in found]
        records = [record for file in found for record in file.records]
        self._next = records[-1].number + 1 if records else 1
        ours = LogRecord(self._next, claim, RecordPlace(folder, 0))
        self._closed = JobHistory.of([*records, ours]).closed
        self._unsettled = UnsettledFiles()
        for record in (*records, ours):
            self._unsettled.add(record)
        with translate_disk_errors(folder, full=False):
            for leftover in folder.glob(f"*{UNFINISHED}"):
                disk.remove(leftover)
        if found:
            cut_tail(disk, found[-1].path, found[-1].length)  # 2
        self._first, self._open = self._next, self._begun(1)  # 3

    @classmethod
    def claim(
        cls,
        folder: Path,
        generation: int,
        deadline: Deadline,
        *,
        timeline: str | None = None,
        base: str | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
        disk: Disk = REAL,
        fence: LogFence | None = None,
    ) -> Self:
        """Take over the job for `generation`. `folder`'s parent exists.

        `timeline`: None for the present one. `base`: the commit it began from; it is given in every claim of that
        timeline. `facts` are for people. Once this returns, no earlier generation can change anything.

        1. Under the lock, check that no generation as new has claimed, and read the log. 2. Cut its tail, and make the
        rest durable. 3. Link our first file into place; it seals the file before it. From here on the job is ours.
        With a `fence`, the claim is in it before that.

        Raises Superseded, LogDamaged, LogTooNew, LogFull, LogFailed and DeadlineExceeded.
        """
        with translate_disk_errors(folder):
            disk.make_folder(folder)
            disk.sync_folder(folder.parent)
        with locked(folder / LOCK, deadline):
            claim = Claim(generation=generation, timeline=timeline, base=base, facts=facts)
            return cls(folder, claim, disk, fence)

    @property
    def trouble(self) -> str:
        """Why an append waits, for a status; empty while none waits. Any thread."""
        return "" if self._fence is None else self._fence.trouble

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store against every other writer, including our own threads; the holding thread may append.

        Each change of the store's truth is made inside: a manifest's rename, its removal, an append.
        Raises Superseded, and DeadlineExceeded after MAX_WAIT_S, or as much later as an append waits for the fence.
        """
        max_wait_s = MAX_WAIT_S if self._fence is None else MAX_WAIT_S + self._fence.max_wait_s
        if not self._turn.acquire(timeout=max_wait_s):
            raise DeadlineExceeded(f"{self.folder}: another thread held the store's lock for {max_wait_s:.0f} s")
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

    def append(self, content: Content) -> AnyRecord:
        """Write a record and make it durable.

        Raises LogFull (nothing has changed, try again), LogFailed (for good), Superseded and DeadlineExceeded.
        """
        assert not isinstance(content, Claim), "Log.claim writes claims"
        with self.exclusive():
            line = line_of(self._next, content)
            record = record_of(line, RecordPlace(self._open.path, self._open.length))
            assert record is not None, "a new line is good"
            self._fence_line(self._open.path, line)
            self._open.append(line)
            self._ahead = None
            self._next += 1
            self._unsettled.add(record)
            if isinstance(content, PassClose):
                self._closed = content.number
            return record

    def roll(self) -> bool:
        """Continue in a new file once the present one is above PART_BYTES, so that it can be copied and pruned.

        Returns whether it did. Raises as append does; after LogFull the log continues in the present file.
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
            except BaseException:  # the new file may exist, and then it has sealed this one
                self._sealed.pop()
                full.fail()
                raise
            full.end()
            return True

    def prune(self, before: int) -> list[Path]:
        """Remove files that a restart from a commit does not need; returns their paths.

        `before` is the record number of the commit's close. A file is removed if all of its records are older and were
        settled by then. The oldest file is removed first, durably, so the rest is always the log's end without a gap.
        """
        removed = []
        with self.exclusive(), translate_disk_errors(self.folder, full=False):
            while self._sealed and self.files()[1].first <= before:
                oldest = self._sealed[0].path
                if self._unsettled.needed(oldest, before):
                    break
                self._disk.remove(oldest)
                self._disk.sync_folder(self.folder)
                del self._sealed[0]
                removed.append(oldest)
        return removed

    def files(self) -> list[LogFileCopy]:
        """The log's files in order, all but the last one sealed. Copies, each cut at its length, are the log."""
        with self._turn:
            return [*self._sealed, LogFileCopy(self._open.path, self._open.length, False, self._first)]

    def _fence_line(self, path: Path, line: bytes) -> None:
        """Have the fence take a line before the file does. A line that found no room on the disk is in it already."""
        if self._fence is None or not self._fence.takes_lines or self._ahead == line:
            return
        self._open.check()
        if self._ahead is not None:
            self._open.fail()
            raise LogFailed(path, "the fence has another record in this place")
        try:
            self._fence.logged(path.name, line)
        except Unavailable as error:
            self._open.fail()
            raise LogFailed(path, f"{error}, so it is unknown whether the record counts") from error
        self._ahead = line

    def close(self) -> None:
        """Close the open file. There are no appends after this."""
        with self._turn:
            self._open.end()

    def _begun(self, part: int) -> LogEnd:
        """A new file of our generation. It begins with our claim and seals the file before it."""
        sealed = {kept.path.name: kept.length for kept in self._sealed[-1:]}
        claim = replace(self._claim, sealed=sealed, closed=self._closed)
        path = self.folder / file_name(self.generation, part)
        line = line_of(self._next, claim)
        if self._fence is not None and part == 1:
            self._fence.claimed(self.folder, path.name, line, claim)
        else:
            self._fence_line(path, line)
        try:
            begun = LogEnd(self._disk, path, line)
            self._ahead = None
        except FileExistsError:
            raise Superseded(self.folder, self.generation, newest_generation(self.folder)) from None
        self._next += 1
        return begun


def read_history(folder: Path) -> JobHistory:
    """The meaning of the log in `folder`. Raises LogDamaged and LogTooNew."""
    return JobHistory.of(read(folder))


def store_locked(store: Path, deadline: Deadline) -> AbstractContextManager[int]:
    """Hold the lock under which the content of `store` changes. Raises DeadlineExceeded, Unwritable."""
    return locked(store / "log" / LOCK, deadline)
