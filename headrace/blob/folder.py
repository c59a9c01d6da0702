"""Blobs in a folder of this machine: a file each, synced, then renamed to its name."""

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.blob.blob_errors import BlobUnwritable
from headrace.blob.blob_retry import Retries
from headrace.blob.blob_store import CHUNK_BYTES, UNFINISHED, Chunks, torn_bytes, whole
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


class FolderBlobs:
    """Reads that fail are repeated; a write that fails is BlobUnwritable at once."""

    def __init__(self, address: StoreAddress, role: str = "files in") -> None:
        self._address, self._root, self._name = address, Path(address.root), f"{role} {address.text}"
        self._retries = Retries(self._name, (OSError,), str)

    @property
    def address(self) -> StoreAddress:
        return self._address

    def give_up(self) -> None:
        self._retries.give_up()

    def url(self, key: str) -> str:
        """A path, also where the address is a URI."""
        return str(self._root / key)

    def sizes(self, folder: str, deadline: Deadline) -> dict[str, int]:
        found = self._retries.run(f"listing {folder}/", lambda: _entries(self._at(folder)), deadline)
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes is not None}

    def folders(self, folder: str, deadline: Deadline) -> list[str]:
        found = self._retries.run(f"listing {folder}/", lambda: _entries(self._at(folder)), deadline)
        return [name for name, num_bytes in found.items() if num_bytes is None]

    def get(self, key: str, max_bytes: int, deadline: Deadline) -> bytes | None:
        def read() -> bytes | None:
            try:
                with self._at(key).open("rb") as file:
                    return file.read(max_bytes)
            except ABSENT:
                return None

        return self._retries.run(f"reading {key}", read, deadline)

    def tail(self, key: str, max_bytes: int, deadline: Deadline) -> bytes:
        def read() -> bytes:
            try:
                return _last(self._at(key), max_bytes)
            except ABSENT:
                return b""

        return self._retries.run(f"reading {key}", read, deadline)

    def download(self, key: str, path: Path, deadline: Deadline) -> tuple[str, int]:
        def copy() -> tuple[str, int]:
            total = hashlib.sha256()
            with self._at(key).open("rb") as source, open_writer(path) as target:
                while chunk := source.read(CHUNK_BYTES):
                    self._retries.check(f"reading {key}", deadline)
                    total.update(chunk)
                    target.write(chunk)
            return total.hexdigest(), target.num_bytes

        return self._retries.run(f"reading {key}", copy, deadline)

    def local(self, key: str, scratch: Path, deadline: Deadline) -> Path:
        """The blob's own file."""
        found = self._at(key)
        if not found.is_file():
            raise FileNotFoundError(key)
        return found

    def put(self, key: str, chunks: Chunks, deadline: Deadline) -> None:
        """1. Write the content under a name of this call alone. 2. Sync it. 3. Rename it: the blob exists. 4. Sync its
        folder.
        """
        path = self._at(key)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
        self._retries.check(f"writing {key}", deadline)
        with self._writing(path):
            _make_folder(path.parent)
            try:
                with REAL.create(unfinished) as file:
                    for chunk in chunks():
                        self._retries.check(f"writing {key}", deadline)
                        REAL.append(file, chunk)  # 1
                    REAL.sync(file)  # 2
                REAL.rename(unfinished, path)  # 3
                REAL.sync_folder(path.parent)  # 4
            finally:
                unfinished.unlink(missing_ok=True)

    def put_new(self, key: str, content: bytes, deadline: Deadline) -> bool:
        """Written under a name of this call alone, synced, then linked to its own."""
        path = self._at(key)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
        self._retries.check(f"writing {key}", deadline)
        with self._writing(path):
            _make_folder(path.parent)
            try:
                with REAL.create(unfinished) as file:
                    REAL.append(file, content)
                    REAL.sync(file)
                REAL.link(unfinished, path)
            except FileExistsError:
                return False
            finally:
                unfinished.unlink(missing_ok=True)
            REAL.sync_folder(path.parent)
        return True

    def get_tagged(self, key: str, max_bytes: int, deadline: Deadline) -> tuple[bytes, str] | None:
        """A hash of the content."""
        found = self.get(key, max_bytes, deadline)
        return None if found is None else (found, hashlib.sha256(found).hexdigest())

    def replace(self, key: str, content: bytes, tag: str | None, deadline: Deadline) -> bool:
        """Compared and replaced under a lock of the blob's folder."""
        if tag is None:
            return self.put_new(key, content, deadline)
        folder = self._at(key).parent
        if not folder.is_dir():
            return False
        with self._writing(folder), _locked_folder(folder):
            found = self.get_tagged(key, MAX_TAGGED_BYTES, deadline)
            if found is None or found[1] != tag:
                return False
            self.put(key, whole(content), deadline)
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

    def remove(self, key: str, deadline: Deadline) -> None:
        path = self._at(key)
        self._retries.check(f"removing {key}", deadline)
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


def _entries(folder: Path) -> dict[str, int | None]:
    """Names in a folder, sorted: the size of a file, None for a folder."""
    if not folder.is_dir():
        return {}
    found: dict[str, int | None] = {}
    for path in sorted(folder.iterdir()):
        try:
            found[path.name] = None if path.is_dir() else path.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return found


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
