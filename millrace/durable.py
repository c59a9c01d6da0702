"""What survives a power cut: the few operations on a disk under the log, the manifests and nothing else.

What must outlive a power cut is written through a `Disk`, so that a test can record the order of writes, syncs and
renames and look at every image of the disk that a cut could leave. Reading needs no seam.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol, cast

from millrace.errors import MillraceError, Unwritable

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers that say: nothing is broken, the disk or the quota is full."""
UNFINISHED = ".tmp"
"""Ends the name under which content is gathered until it is whole; the folder's owner may remove what has it."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h


class Disk(Protocol):
    """Writing to a disk. Nothing is durable until it is synced: contents by `sync`, names by `sync_folder`.

    Every call may raise OSError. Only `link`, `rename` and `remove` are atomic.
    """

    def create(self, path: Path) -> FileIO:
        """A new empty file in place of whatever had the name, open for appending."""

    def open(self, path: Path) -> FileIO:
        """The file that is there, open for appending."""

    def append(self, file: FileIO, data: bytes) -> None:
        """Write all of `data` at the end; after an error any part of it may be there."""

    def truncate(self, file: FileIO, length: int) -> None:
        """Cut the file to `length` bytes and release what was reserved behind it."""

    def reserve(self, file: FileIO, length: int) -> bool:
        """Set room aside for `length` bytes behind the file's end, which stays; False where that cannot be had."""

    def sync(self, file: FileIO) -> None:
        """Make the file's content durable. After an error it is unknown what is; it must not be asked again."""

    def rename(self, source: Path, target: Path) -> None:
        """Give the file another name, in place of whatever had it."""

    def link(self, source: Path, target: Path) -> None:
        """Give the file a second name; FileExistsError where the name is taken."""

    def remove(self, path: Path) -> None:
        """Remove a name; one that is not there is no error."""

    def make_folder(self, path: Path) -> None:
        """Make a folder where there is none; its parent exists."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""


class RealDisk:
    """The disk of this machine."""

    def create(self, path: Path) -> FileIO:
        """As `Disk` says; never the content of another name of the same file is lost."""
        path.unlink(missing_ok=True)
        return FileIO(path, "ab")

    def open(self, path: Path) -> FileIO:
        """As `Disk` says."""
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return FileIO(path, "ab")

    def append(self, file: FileIO, data: bytes) -> None:
        """As `Disk` says."""
        left = memoryview(data)
        while left:
            left = left[os.write(file.fileno(), left) :]

    def truncate(self, file: FileIO, length: int) -> None:
        """As `Disk` says."""
        os.ftruncate(file.fileno(), length)

    def reserve(self, file: FileIO, length: int) -> bool:
        """As `Disk` says; by fallocate(2), on Linux."""
        if _fallocate is None:
            return False
        return _fallocate(file.fileno(), _KEEP_SIZE, os.fstat(file.fileno()).st_size, length) == 0

    def sync(self, file: FileIO) -> None:
        """As `Disk` says."""
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """As `Disk` says."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """As `Disk` says."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        """As `Disk` says."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """As `Disk` says."""
        path.mkdir(exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """As `Disk` says."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


REAL: Disk = RealDisk()


def write_whole(disk: Disk, path: Path, data: bytes, before: Callable[[], None] = lambda: None) -> None:
    """Make `data` the content of `path`, whole or not at all, and durable once this returns.

    1. Write it under a temporary name. 2. Sync it; call `before`. 3. Rename it: it exists from here on. 4. Sync the
    folder.
    After an error in 1 or 2 nothing of it is left.
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
    """What is done here writes `path`: where it cannot, Unwritable says so."""
    try:
        yield
    except OSError as error:
        raise Unwritable(path, error) from error


class Linked(MillraceError):
    """What should lie here is a symbolic link to somewhere else."""

    exit_code = 2

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is a symbolic link, and what a job makes stays in its store; move what it names to this place, or "
            "remove the link"
        )


def check_no_link(path: Path) -> Path:
    """`path`, which need not exist. Raises Linked."""
    if path.is_symlink():
        raise Linked(path)
    return path


def unfinished_name(path: Path) -> Path:
    """Where the content of `path` is gathered until it is whole."""
    return path.with_name(path.name + UNFINISHED)


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2), which Python does not offer with flags; None where the platform lacks it."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", function)


_fallocate = _load_fallocate()
