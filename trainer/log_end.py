"""The end of the log: one open file that grows by whole, synced records, and how such a file begins.

Which files there are, and who may write them, is trainer.log's to know; what the lines say, trainer.log_file's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.durable import NO_ROOM, Disk, unfinished_name
from millrace.errors import MillraceError
from millrace.points import Point, reach

RESERVE_BYTES = 1 << 20
"""Room kept ahead of the log's end where the file system can: so much is still logged on a full disk."""


class LogFull(MillraceError):
    """No room for a record. The log is as it was before; the append may be tried again."""

    def __init__(self, path: Path, why: str | None) -> None:
        super().__init__(f"{path}: {why}: there is no room to log what comes next; make room on this disk")


class LogFailed(MillraceError):
    """The disk did not keep what the log wrote. What is durable is unknown, so this process must end."""

    exit_code = 75

    def __init__(self, path: Path, why: str | None) -> None:
        super().__init__(
            f"{path}: {why}: this process cannot go on with the log; the next generation goes on from what was synced."
            " Look at this disk if it happens again"
        )


class OpenFile:
    """The newest file of the log, under our hands alone. Not safe for threads."""

    def __init__(self, disk: Disk, path: Path, first_line: bytes) -> None:
        """Begin the file `path`: its first line is whole and durable before the file has its name.

        Raises LogFull and LogFailed, and FileExistsError where the name is taken: then nothing is left of it.
        """
        self.path, self.length = path, len(first_line)
        self._disk, self._failed = disk, False
        self._reserved = 0
        unfinished = unfinished_name(path)
        with failing(path):
            self._file = disk.create(unfinished)
        try:
            with failing(path):
                disk.append(self._file, first_line)
                disk.sync(self._file)
                disk.link(unfinished, path)
            with failing(path, full=False):
                disk.sync_folder(path.parent)
        except (LogFull, LogFailed, FileExistsError):
            self._file.close()
            raise
        finally:
            disk.remove(unfinished)
        self._reserve()

    def append(self, line: bytes) -> None:
        """Write a line and make it durable.

        After LogFull the file is as it was. After LogFailed nothing is appended any more: a sync that failed may have
        thrown away what it did not write, so a second one that succeeds says nothing.
        """
        if self._failed:
            raise LogFailed(self.path, "an earlier write or sync failed")
        try:
            with failing(self.path):
                self._disk.append(self._file, line)
        except LogFull:
            self._cut()
            raise
        except LogFailed:
            self.fail()
            raise
        reach(Point.LOG_WRITTEN)
        try:
            with failing(self.path, full=False):
                self._disk.sync(self._file)
        except LogFailed:
            self.fail()
            raise
        reach(Point.LOG_SYNCED)
        self.length += len(line)
        self._reserve()

    def fail(self) -> None:
        """Append nothing any more, and take back what is not known to be durable: nobody was told of it."""
        self._failed = True
        self._cut()

    def end(self) -> None:
        """Give back what was reserved, and close the file."""
        if not self._file.closed:
            with self._file, failing(self.path, full=False):
                self._disk.truncate(self._file, self.length)

    def _cut(self) -> None:
        try:
            with failing(self.path, full=False):
                self._disk.truncate(self._file, self.length)
        except LogFailed:
            self._failed = True
            raise
        self._reserved = self.length

    def _reserve(self) -> None:
        if self._reserved - self.length < RESERVE_BYTES // 2 and self._disk.reserve(self._file, RESERVE_BYTES):
            self._reserved = self.length + RESERVE_BYTES


def settle(disk: Disk, path: Path, length: int) -> None:
    """Make the first `length` bytes of what an earlier generation left durable, and cut the rest.

    It may have died before its sync, and we build on what we read.
    """
    with failing(path, full=False), disk.open(path) as file:
        disk.truncate(file, length)
        disk.sync(file)
        disk.sync_folder(path.parent)


@contextmanager
def failing(path: Path, *, full: bool = True) -> Iterator[None]:
    """Say what a failed write to `path` means: LogFull for want of room, if `full`, else LogFailed."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if full and error.errno in NO_ROOM:
            raise LogFull(path, error.strerror) from error
        raise LogFailed(path, error.strerror) from error
