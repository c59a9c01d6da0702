"""Output of a job's processes in files of a bounded size: of its workers, and of its launcher itself.

Lines of the workers lie in a few files and are read again from any position. A position counts bytes since the first
line ever; each file is named by the position where it begins. The job's launcher writes the files, the service reads
them. The launcher's own output goes to one file of which only the end is kept: anything may print there, also C
libraries and a dying interpreter, so the file is shortened from outside."""

import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from itertools import islice
from pathlib import Path

from headrace.durable import SymbolicLinkFound, check_no_link
from headrace.periodic import periodically
from headrace.service.jobs.host import LineFilter, PrintedLine

FILES = 4
"""Files kept; the oldest is deleted when the newest is full."""
SUFFIX = ".log"
NAME = re.compile(r"\d{1,20}\.log", re.ASCII)
MAX_LINES = 10_000
"""Most lines of one answer."""


class OutputWriter:
    """Writes lines. Any thread. On a full disk lines are lost, and no error is raised."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Append to the files in `folder`. Raises OSError."""
        self._folder, self._max_file = folder, max(1, max_bytes // FILES)
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        files = files_of(folder)
        begin = files[-1][0] if files else 0
        self._file, self._end = self._open(begin), begin
        if size := os.fstat(self._file.fileno()).st_size:
            self._end += size
            if not _ends_a_line(self._folder / _name(begin), size):  # its writer was killed
                self._append(b"\n")
        self._begin = begin

    def write(self, worker: str, text: str) -> None:
        """One line of a worker."""
        line = f"{_now()} {worker}: {text}\n".encode(errors="replace")
        with self._lock:
            try:
                if self._end - self._begin >= self._max_file:
                    self._next_file()
                self._append(line)
            except OSError:
                return

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _append(self, data: bytes) -> None:
        self._end += os.write(self._file.fileno(), data)

    def _next_file(self) -> None:
        file = self._open(self._end)
        self._file.close()
        self._file, self._begin = file, self._end
        for _, path in files_of(self._folder)[:-FILES]:
            path.unlink(missing_ok=True)

    def _open(self, begin: int) -> FileIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return FileIO(os.open(self._folder / _name(begin), flags, 0o666), "ab")


def read_lines(folder: Path, wanted: LineFilter | None, after: int, limit: int) -> list[PrintedLine]:
    """At most `limit` lines after the position `after`, or all wanted ones; the last if `after` is negative."""
    wanted = wanted or LineFilter()
    limit = min(limit, MAX_LINES)
    files = files_of(folder)
    if after < 0:
        return _last(files, wanted, limit)
    first = max((number for number, (begin, _) in enumerate(files) if begin <= after), default=0)
    begin_at = after if wanted.level is None else 0  # an earlier line of the file may tell the level
    lines = (line for begin, path in files[first:] for line in _lines_of(begin, path, begin_at))
    return list(islice((line for line in wanted.chosen(lines) if line.after > after), limit))


def _last(files: list[tuple[int, Path]], wanted: LineFilter, limit: int) -> list[PrintedLine]:
    found: list[PrintedLine] = []
    for begin, path in reversed(files):
        found[:0] = wanted.chosen(_lines_of(begin, path, 0))
        if len(found) >= limit:
            break
    return found[max(0, len(found) - limit) :]


def files_of(folder: Path) -> list[tuple[int, Path]]:
    """The files with the positions where they begin. Raises SymbolicLinkFound: viewers would read what it names."""
    return sorted(
        (int(path.stem), check_no_link(path)) for path in folder.glob(f"*{SUFFIX}") if NAME.fullmatch(path.name)
    )


def _lines_of(begin: int, path: Path, after: int) -> Iterator[PrintedLine]:
    """Complete lines of a file that begin at or after the position `after`."""
    try:
        content = _content(path)
    except FileNotFoundError:  # it was the oldest and is deleted
        return
    place = begin
    for line in content.split(b"\n")[:-1]:  # an incomplete last line is being written
        start, place = place, place + len(line) + 1
        if start >= after:
            yield _parsed(place, line.decode(errors="replace"))


def _content(path: Path) -> bytes:
    """The bytes of a file. Raises SymbolicLinkFound, also for a link that was made a moment ago."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SymbolicLinkFound(path) from None
        raise
    with FileIO(descriptor, "rb") as file:
        return file.readall() if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _parsed(place: int, text: str) -> PrintedLine:
    at, _, rest = text.partition(" ")
    worker, colon, line = rest.partition(": ")
    return PrintedLine(place, at, worker, line) if colon else PrintedLine(place, "", "", text)


def _ends_a_line(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _name(begin: int) -> str:
    return f"{begin:020d}{SUFFIX}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


MAX_BYTES = 1 << 20
"""A longer file is cut to its last half of this size."""
LOOK_S = 1.0
"""Time between two checks of its size."""


def emptied_file(path: Path) -> FileIO:
    """The file, emptied, open for appending. Raises OSError."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


@contextmanager
def shortened_periodically(path: Path, max_bytes: int = MAX_BYTES, look_s: float = LOOK_S) -> Iterator[None]:
    """Shorten the file on a thread while the context lasts."""

    def look() -> None:
        with suppress(OSError):  # the file is gone, or the disk is full: it is checked again later
            shorten(path, max_bytes)

    with periodically(look, look_s, "printed"):
        yield


def shorten(path: Path, max_bytes: int) -> None:
    """Cut a longer file to its last `max_bytes` // 2, from the start of a line. Raises OSError."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= max_bytes:
            return
        file.seek(size - max_bytes // 2)
        end = file.read()
        file.truncate(0)  # output of this instant is lost; writers append after the text below
    with path.open("ab") as file:
        file.write(end.partition(b"\n")[2])
