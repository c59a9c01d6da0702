"""The place of a source's files: a folder of this machine, or a bucket. The protocol, and folders.

dataset.sources.bucket_files implements it for buckets.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.dataset.spec.path_pattern import Pattern, listed_markers
from headrace.dataset.stream.errors import SourceGap
from headrace.deadline import Deadline
from headrace.errors import BadInput


@dataclass(frozen=True, slots=True)
class FileLook:
    """A file as it is now."""

    num_bytes: int
    version: str
    """Differs if the file was replaced: its inode, or an object's ETag."""


class RawBytes(Protocol):
    """A file opened for reading at any offset."""

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        """At most `num_bytes` from `offset`; fewer, or b"", only at the file's end."""
        ...

    def close(self) -> None:
        """Close it. May be called twice."""
        ...


class SourceFile(Protocol):
    """One file. Each call raises SourceGap if it is gone, BadInput if it cannot be read, SourceUnavailable without an
    answer in time."""

    name: str
    """For people: its path or address."""
    may_grow: bool
    """Whether bytes may be added to it; else it can only be replaced."""

    def look(self) -> FileLook:
        """Its size and version now."""
        ...

    def head(self, num_bytes: int) -> bytes:
        """Its first bytes."""
        ...

    def open(self, *, ahead: bool = True) -> RawBytes:
        """Open it. `ahead`: it is read forward, so bytes may be fetched before they are asked for."""
        ...


class FileTree(Protocol):
    """The files below one place, by path relative to it."""

    def begin(self, deadline: Deadline) -> None:
        """The calls that follow, of its files too, end by this deadline."""
        ...

    def forget(self) -> None:
        """Forget listings, so that `has` asks again."""
        ...

    def matches(self, pattern: Pattern) -> list[str]:
        """The files that match now, in order."""
        ...

    def marked(self, folders: Collection[str], marker: str) -> Iterator[str]:
        """The `folders` that contain the file `marker`."""
        ...

    def has(self, path: str) -> bool:
        """Whether the file exists; in a bucket, at the last listing if there was one."""
        ...

    def file(self, path: str) -> SourceFile:
        """One file, which may not exist."""
        ...


class LocalTree:
    """The files below a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def begin(self, deadline: Deadline) -> None:
        """A disk answers at once."""

    def forget(self) -> None:
        """Nothing to do."""

    def matches(self, pattern: Pattern) -> list[str]:
        return pattern.matches(self._folder)

    def marked(self, folders: Collection[str], marker: str) -> Iterator[str]:
        return listed_markers(self._folder, folders, marker)

    def has(self, path: str) -> bool:
        return (self._folder / path).is_file()

    def file(self, path: str) -> "LocalFile":
        return LocalFile(self._folder / path)


class LocalFile:
    """A file of this machine."""

    may_grow = True

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def look(self) -> FileLook:
        with _readable(self.path):
            status = os.stat(self.path)
        return FileLook(status.st_size, f"{status.st_dev}:{status.st_ino}")

    def head(self, num_bytes: int) -> bytes:
        with _readable(self.path), self.path.open("rb") as file:
            return file.read(num_bytes)

    def open(self, *, ahead: bool = True) -> "LocalBytes":
        with _readable(self.path):
            return LocalBytes(self.path, os.open(self.path, os.O_RDONLY))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise SourceGap if the file is gone, BadInput if it may not or cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise SourceGap(f"{path}: the file is gone; put it back to continue") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}; repair it, or let this user read it") from error


class LocalBytes:
    """An open file of this machine."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        assert self._descriptor is not None
        with _readable(self._path):
            return os.pread(self._descriptor, num_bytes, offset)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
