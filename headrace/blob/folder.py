"""Blobs in a folder of this machine: a file each, synced, then renamed to its name."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.blob.blob_errors import BlobUnwritable
from headrace.blob.blob_store import UNFINISHED, BlobStore, hash_tag, torn_bytes
from headrace.blob.blob_writer import BlobWriter, open_writer
from headrace.blob.store_address import StoreAddress
from headrace.deadline import Deadline
from headrace.durable import REAL, writing
from headrace.relative_names import InvalidName, shown, stays_below

MAX_TAGGED_BYTES = 64 << 20
"""Longest blob that `replace` compares."""
MAX_LINE_BYTES = 64 << 10
"""Longer than any line that is appended."""
ABSENT = (FileNotFoundError, NotADirectoryError)


class FolderBlobs(BlobStore):
    """Reads that fail are repeated; a write that fails is BlobUnwritable at once."""

    def __init__(self, address: StoreAddress, role: str) -> None:
        super().__init__(address, role, (OSError,))
        self._root = Path(address.root)

    def url(self, key: str) -> str:
        """A path, also where the address is a URI."""
        return str(self._root / key)

    def _list(self, folder: str) -> tuple[dict[str, int], list[str]]:
        sizes: dict[str, int] = {}
        folders: list[str] = []
        at = self._at(folder)
        for path in sorted(at.iterdir()) if at.is_dir() else ():
            with suppress(FileNotFoundError):  # removed meanwhile
                if path.is_dir():
                    folders.append(path.name)
                else:
                    sizes[path.name] = path.stat().st_size
        return sizes, folders

    @contextmanager
    def _content(self, key: str, piece_bytes: int) -> Iterator[tuple[Iterable[bytes], None]]:
        try:
            file = self._at(key).open("rb")
        except NotADirectoryError as error:
            raise FileNotFoundError(key) from error
        with file:
            yield iter(lambda: file.read(piece_bytes), b""), None

    def tail(self, key: str, max_bytes: int, deadline: Deadline) -> bytes:
        def read() -> bytes:
            try:
                return _last(self._at(key), max_bytes)
            except ABSENT:
                return b""

        return self._retries.run(f"reading {key}", read, deadline)

    def local(self, key: str, scratch: Path, deadline: Deadline) -> Path:
        """The blob's own file."""
        found = self._at(key)
        if not found.is_file():
            raise FileNotFoundError(key)
        return found

    def _write(self, key: str, pieces: Iterator[bytes]) -> None:
        self._place(self._at(key), pieces, REAL.rename)

    def _write_if(self, key: str, content: bytes, tag: str | None) -> bool:
        """A link fails where the name is taken; a content is compared and replaced under a lock of its folder."""
        path = self._at(key)
        if tag is None:
            return self._place(path, iter((content,)), REAL.link)
        try:
            with _locked_folder(path.parent):
                with path.open("rb") as file:
                    is_same = hash_tag(file.read(MAX_TAGGED_BYTES)) == tag
                return is_same and self._place(path, iter((content,)), REAL.rename)
        except ABSENT:
            return False

    def _place(self, path: Path, pieces: Iterator[bytes], place: Callable[[Path, Path], None]) -> bool:
        """1. Write the content under a name of this call alone. 2. Sync it. 3. `place` it under its own name: the blob
        exists, or False where `place` finds another one. 4. Sync its folder.
        """
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
        with self._writing(path):
            _make_folder(path.parent)
            try:
                with REAL.create(unfinished) as file:
                    for piece in pieces:
                        REAL.append(file, piece)  # 1
                    REAL.sync(file)  # 2
                place(unfinished, path)  # 3
            except FileExistsError:
                return False
            finally:
                unfinished.unlink(missing_ok=True)
            REAL.sync_folder(path.parent)  # 4
        return True

    @contextmanager
    def create(self, key: str, scratch: Path, deadline: Deadline) -> Iterator[BlobWriter]:
        """Written in its place."""
        path = self._at(key)
        with writing(path):
            _make_folder(path.parent)
        with open_writer(path) as writer:
            yield writer
        with writing(path):
            REAL.sync_folder(path.parent)

    def append(self, key: str, line: bytes, deadline: Deadline) -> None:
        path = self._at(key)
        self._retries.check(f"writing {key}", deadline)
        with self._writing(path):
            is_new = not path.exists()
            if is_new:
                _make_folder(path.parent)
            with REAL.create(path) if is_new else REAL.open(path) as file:
                if torn := torn_bytes(_last(path, MAX_LINE_BYTES)):
                    REAL.truncate(file, path.stat().st_size - torn)
                REAL.append(file, line)
                REAL.sync(file)
            if is_new:
                REAL.sync_folder(path.parent)

    def _delete(self, key: str) -> None:
        path = self._at(key)
        with self._writing(path):
            if path.exists():
                REAL.remove(path)
                REAL.sync_folder(path.parent)

    def remove_folder(self, folder: str, deadline: Deadline) -> None:
        """Also when the time is up, for it takes none."""
        path = self._at(folder)
        with self._writing(path):
            if path.exists():
                shutil.rmtree(path)
                REAL.sync_folder(path.parent)

    def _at(self, key: str) -> Path:
        """The path of a blob or folder; "" is the root. Raises InvalidName for a key that leads out of it."""
        if key and not stays_below(key):
            raise InvalidName(f"{self._name}: {shown(key)} is not a key")
        return self._root / key

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BlobUnwritable(self._name, path, error) from error


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder against other processes of this machine, for a moment; nothing is left of the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """A folder and those above it, durable."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        REAL.sync_folder(each.parent)


def _last(path: Path, max_bytes: int) -> bytes:
    """The end of a file."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes)
