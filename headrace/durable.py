"""Durable writes: the few disk operations under the log and the manifests.

Data that must survive a power cut is written through a `Disk`. So a test can record the order of writes, syncs and
renames, and examine every image of the disk that a cut could leave. Reading does not need this seam.
"""

import ctypes
import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol, cast

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, Unwritable

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or quota; nothing is broken."""
UNFINISHED = ".tmp"
"""Suffix of a file that is not complete yet; the owner of the folder may remove such files."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h


class Disk(Protocol):
    """Writing to a disk. Nothing is durable until it is synced: contents by `sync`, names by `sync_folder`.

    Every call may raise OSError. Only `link`, `rename` and `remove` are atomic.
    """

    def create(self, path: Path) -> FileIO:
        """Create an empty file, replacing any file of that name, and open it for appending."""

    def open(self, path: Path) -> FileIO:
        """Open an existing file for appending."""

    def append(self, file: FileIO, data: bytes) -> None:
        """Append `data`; after an error any part of it may be written."""

    def truncate(self, file: FileIO, length: int) -> None:
        """Cut the file to `length` bytes and release reserved space after it."""

    def reserve(self, file: FileIO, length: int) -> bool:
        """Reserve space for `length` bytes after the file's end, which does not move; False if not supported."""

    def sync(self, file: FileIO) -> None:
        """Make the file's content durable. After an error the durable content is unknown; do not retry."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing any file of the new name."""

    def link(self, source: Path, target: Path) -> None:
        """Give the file a second name. Raises FileExistsError if the name is taken."""

    def remove(self, path: Path) -> None:
        """Remove a name, if it exists."""

    def make_folder(self, path: Path) -> None:
        """Create a folder if it does not exist; its parent exists."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""


class RealDisk:
    """The disk of this machine."""

    def create(self, path: Path) -> FileIO:
        """A file with a second name keeps its content."""
        path.unlink(missing_ok=True)
        return FileIO(path, "ab")

    def open(self, path: Path) -> FileIO:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return FileIO(path, "ab")

    def append(self, file: FileIO, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(file.fileno(), left) :]

    def truncate(self, file: FileIO, length: int) -> None:
        os.ftruncate(file.fileno(), length)

    def reserve(self, file: FileIO, length: int) -> bool:
        """Uses fallocate(2), on Linux."""
        if _fallocate is None:
            return False
        return _fallocate(file.fileno(), _KEEP_SIZE, os.fstat(file.fileno()).st_size, length) == 0

    def sync(self, file: FileIO) -> None:
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


REAL: Disk = RealDisk()


def write_whole(disk: Disk, path: Path, data: bytes, before: Callable[[], None] = lambda: None) -> None:
    """Write `data` to `path`, whole or not at all; durable once this returns.

    1. Write it under a temporary name. 2. Sync it; call `before`. 3. Rename it: it exists from here on. 4. Sync the
    folder.
    After an error in 1 or 2 the temporary file is removed.
    """
    unfinished = unfinished_name(path)
    try:
        with disk.create(unfinished) as file:  # 1
            disk.append(file, data)
            disk.sync(file)  # 2
    except OSError:
        disk.remove(unfinished)
        raise
    before()
    disk.rename(unfinished, path)  # 3
    disk.sync_folder(path.parent)  # 4


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise Unwritable for an OSError while `path` is written."""
    try:
        yield
    except OSError as error:
        raise Unwritable(path, error) from error


class SymbolicLinkFound(HeadraceError):
    """A path is a symbolic link where none is allowed."""

    exit_code = 2

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is a symbolic link, and what a job makes stays in its store; move what it names to this place, or "
            "remove the link"
        )


def check_no_link(path: Path) -> Path:
    """`path`, which need not exist. Raises SymbolicLinkFound if it is a symbolic link."""
    if path.is_symlink():
        raise SymbolicLinkFound(path)
    return path


def unfinished_name(path: Path) -> Path:
    """The temporary name of `path` until it is complete."""
    return path.with_name(path.name + UNFINISHED)


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2), which Python does not offer with flags; None if the platform lacks it."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", function)


_fallocate = _load_fallocate()


# A lock between processes, on a file, with a bound on the wait. Its users define what it guards.

_POLL_S = 0.005


@contextmanager
def locked(path: Path, deadline: Deadline, *, shared: bool = False) -> Iterator[int]:
    """Hold the lock on the file `path`, made if absent, against every other holder, in this process or another.

    A `shared` lock has any number of holders, but none beside one that is not shared.

    -> the file's descriptor. A process that inherits it holds the lock, too, from its start. The lock ends with the
    processes that hold it, however they end. Raises DeadlineExceeded where another held it too long, and Unwritable
    where the file cannot be made.
    """
    with writing(path):
        lock = path.open("a")
    with lock as file:
        while not _acquired(file.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if deadline.passed():
                raise DeadlineExceeded(
                    f"{path} is locked by another process, which did not release it in time: a worker of this job that"
                    " is stopped or waits for its disk; `fuser` names it, end it or let it continue"
                )
            time.sleep(min(_POLL_S, deadline.left_s()))
        yield file.fileno()  # closing the file releases the lock


def is_locked(path: Path) -> bool:
    """True if a process holds the lock on the file `path` now."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _acquired(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
