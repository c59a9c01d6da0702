"""Where exports are written: a folder of this machine, or an object store. Both as `Outlet` says.

Paths are relative to the folder of one job's exports. What is written, and in which order, is trainer.exports.writing's
matter; reading is trainer.exports.places'. Imports no torch.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from millrace.deadline import Deadline
from millrace.durable import REAL, write_whole, writing
from millrace.errors import Unavailable, Unwritable
from trainer.mirror.address import Address, Kind, parse
from trainer.mirror.errors import MirrorUnavailable
from trainer.mirror.objects import Objects

MAX_SMALL_BYTES = 64 << 20
"""The longest manifest that is read."""
MAX_APPENDED_BYTES = 8 << 20
"""How long a file that grows by lines may become where there is no appending: then its oldest lines go."""
MAX_LINE_BYTES = 64 << 10
"""More than any line of such a file has."""
UNDO_S = 10.0
"""How long removing what is half done may take."""


class OutletUnavailable(Unavailable):
    """The object store did not do what was asked; later it may."""


class Sink:
    """A file that is being written, hashed on its way; what Parquet asks of one."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file, self._hash = path, file, hashlib.sha256()
        self._failed = False
        self.num_bytes = 0
        self.closed = False
        self.rows: int | None = None
        """Said of it in the manifest."""

    @property
    def sha256(self) -> str:
        """Of all that was written."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> int:
        """Append `data`. Raises Unwritable, once: whoever then closes what is cut off is not told again."""
        view = memoryview(data).cast("B")
        if self._failed:
            return len(view)
        try:
            REAL.append(self._file, view)  # type: ignore[arg-type]  # any bytes will do
        except OSError as error:
            self._failed = True
            raise Unwritable(self._path, error) from error
        self._hash.update(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Its owner closes it."""

    def readable(self) -> bool:
        """No."""
        return False

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No."""
        return False


class Outlet(Protocol):
    """See module docstring. Raises Unwritable, OutletUnavailable."""

    def url(self, path: str) -> str:
        """The whole address of a path."""
        ...

    def make(self, folder: str) -> None:
        """A folder, and those above it, where there is none."""
        ...

    def file(self, path: str) -> AbstractContextManager[Sink]:
        """A new file in a folder that was made: whole and durable once left; after an error nothing counts."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Make `content` that of a small file, whole or not at all, durable once this returns."""
        ...

    def settle(self, folder: str) -> None:
        """All files that were left in the folder are durable, with their names, once this returns."""
        ...

    def append(self, path: str, line: bytes) -> None:
        """Add a line to the end of a file, made where there is none. A torn last line goes."""
        ...

    def tail(self, path: str) -> bytes:
        """The newest whole lines of such a file, at most MAX_APPENDED_BYTES."""
        ...

    def get(self, path: str) -> bytes | None:
        """A small file; None if there is none."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in one, sorted; none where it is not there."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; none where it is not there."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, durably, if it is there."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with its files, if it is there."""
        ...


class FolderOutlet:
    """See Outlet: files are written where they belong."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def url(self, path: str) -> str:
        """See Outlet."""
        return str(self._root / path)

    def make(self, folder: str) -> None:
        """See Outlet."""
        path = self._root / folder
        missing = [each for each in (path, *path.parents) if not each.is_dir()]
        with writing(path):
            for each in reversed(missing):
                each.mkdir(exist_ok=True)
                REAL.sync_folder(each.parent)

    @contextmanager
    def file(self, path: str) -> Iterator[Sink]:
        """See Outlet."""
        with _sink(self._root / path) as sink:
            yield sink

    def put(self, path: str, content: bytes) -> None:
        """See Outlet."""
        with writing(self._root / path):
            write_whole(REAL, self._root / path, content)

    def settle(self, folder: str) -> None:
        """See Outlet."""
        with writing(self._root / folder):
            REAL.sync_folder(self._root / folder)

    def append(self, path: str, line: bytes) -> None:
        """See Outlet."""
        target = self._root / path
        with writing(target):
            is_new = not target.exists()
            with REAL.create(target) if is_new else REAL.open(target) as file:
                end = target.stat().st_size
                torn = _torn(_last(target, MAX_LINE_BYTES))
                if torn:
                    REAL.truncate(file, end - torn)
                REAL.append(file, line)
                REAL.sync(file)
            if is_new:
                REAL.sync_folder(target.parent)

    def tail(self, path: str) -> bytes:
        """See Outlet."""
        try:
            return _whole_lines(_last(self._root / path, MAX_APPENDED_BYTES), cut=True)
        except FileNotFoundError:
            return b""

    def get(self, path: str) -> bytes | None:
        """See Outlet."""
        try:
            with (self._root / path).open("rb") as file:
                return file.read(MAX_SMALL_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Unwritable(self._root / path, error) from error

    def folders(self, folder: str) -> list[str]:
        """See Outlet."""
        path = self._root / folder
        return sorted(each.name for each in path.iterdir() if each.is_dir()) if path.is_dir() else []

    def names(self, folder: str) -> list[str]:
        """See Outlet."""
        path = self._root / folder
        return sorted(each.name for each in path.iterdir()) if path.is_dir() else []

    def remove(self, path: str) -> None:
        """See Outlet."""
        target = self._root / path
        with writing(target):
            if target.exists():
                REAL.remove(target)
                REAL.sync_folder(target.parent)

    def remove_folder(self, folder: str) -> None:
        """See Outlet."""
        path = self._root / folder
        with writing(path):
            if path.exists():
                shutil.rmtree(path)
                REAL.sync_folder(path.parent)


class ObjectOutlet:
    """See Outlet: a file is gathered in `scratch`, then sent, so that it can be sent again; one at a time."""

    def __init__(self, address: Address, objects: Objects, below: str, scratch: Path, deadline: Deadline) -> None:
        self._address, self._objects, self._below = address, objects, below
        self._scratch, self._deadline = scratch, deadline

    def url(self, path: str) -> str:
        """See Outlet."""
        parts = urlsplit(self._address.text)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{self._below}/{path}".rstrip("/")).geturl()

    def make(self, folder: str) -> None:
        """An object store has none."""

    @contextmanager
    def file(self, path: str) -> Iterator[Sink]:
        """See Outlet."""
        gathered = self._scratch / path.replace("/", "-")
        with writing(gathered):
            self._scratch.mkdir(parents=True, exist_ok=True)
        try:
            with _sink(gathered) as sink:
                yield sink
            with _told():
                self._objects.put_file(self._key(path), gathered, sink.sha256, sink.num_bytes, self._deadline)
        finally:
            gathered.unlink(missing_ok=True)

    def put(self, path: str, content: bytes) -> None:
        """See Outlet."""
        with _told():
            self._objects.put_bytes(self._key(path), content, self._deadline)

    def settle(self, folder: str) -> None:
        """An object is durable once it is there."""

    def append(self, path: str, line: bytes) -> None:
        """See Outlet."""
        lines = self.tail(path) + line
        self.put(path, _whole_lines(lines[-MAX_APPENDED_BYTES:], cut=len(lines) > MAX_APPENDED_BYTES))

    def tail(self, path: str) -> bytes:
        """See Outlet."""
        return _whole_lines(self.get(path) or b"", cut=False)

    def get(self, path: str) -> bytes | None:
        """See Outlet."""
        with _told():
            return self._objects.get(self._key(path), MAX_SMALL_BYTES, self._deadline)

    def folders(self, folder: str) -> list[str]:
        """See Outlet."""
        with _told():
            return self._objects.folders(self._key(folder), self._deadline)

    def names(self, folder: str) -> list[str]:
        """See Outlet."""
        return self._names(folder, self._deadline)

    def remove(self, path: str) -> None:
        """See Outlet."""
        with _told():
            self._objects.remove(self._key(path), self._deadline)

    def remove_folder(self, folder: str) -> None:
        """See Outlet; also, for a while, when time is up."""
        deadline = Deadline.after(max(UNDO_S, self._deadline.left_s()))
        for name in self._names(folder, deadline):
            with _told():
                self._objects.remove(self._key(f"{folder}/{name}"), deadline)

    def _names(self, folder: str, deadline: Deadline) -> list[str]:
        with _told():
            return sorted(self._objects.sizes(self._key(folder), deadline))

    def _key(self, path: str) -> str:
        return f"{self._below}/{path}".rstrip("/")


def open_outlet(text: str, job: str, scratch: Path, deadline: Deadline) -> Outlet:
    """The folder of a job's exports at an address. Raises OutletUnavailable, SpecError."""
    address = parse(text)
    match address.kind:
        case Kind.FOLDER:
            return FolderOutlet(Path(address.root) / job)
        case Kind.S3:
            with _told():
                return ObjectOutlet(address, Objects.open(text, deadline), job, scratch, deadline)


@contextmanager
def _sink(path: Path) -> Iterator[Sink]:
    """A new file, synced at the end."""
    with writing(path):
        file = REAL.create(path)
    with file:
        sink = Sink(path, file)
        yield sink
        with writing(path):
            REAL.sync(file)


@contextmanager
def _told() -> Iterator[None]:
    """Errors of an object store in words of exports."""
    try:
        yield
    except MirrorUnavailable as error:
        raise OutletUnavailable(f"exports at {str(error).removeprefix('mirror ')}") from error


def _last(path: Path, max_bytes: int) -> bytes:
    """The end of a file."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes)


def _torn(content: bytes) -> int:
    """Bytes after the last whole line."""
    return len(content) - (content.rfind(b"\n") + 1)


def _whole_lines(content: bytes, *, cut: bool) -> bytes:
    """Without a torn last line; and, where the beginning may be `cut` off, without the rest of a first."""
    begin = content.find(b"\n") + 1 if cut and len(content) >= MAX_APPENDED_BYTES else 0
    return content[begin : len(content) - _torn(content)]
