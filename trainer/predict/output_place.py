"""The place of an output: a folder, or a prefix in an object store. The order of its files is output_files' work.

In both, a file is whole or absent. A folder has its unfinished files in WORK, beside the complete ones; those of an
object store are in a local folder of the process. Imports no torch.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from headrace.blob.blob_store import BlobStore, checked_file, open_blobs, whole
from headrace.blob.store_address import StoreAddress, parse
from headrace.deadline import Deadline
from headrace.documents import MAX_BYTES
from headrace.durable import REAL, write_whole, writing
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import hash_of

WORK = ".prediction"
"""Folder of work files, until the output is complete."""
DEAD_LETTERS = "_dead_letters"
CALL_S, SEND_S = 60.0, 3600.0
"""Longest time of a small call to an object store, and to send or fetch a file."""
ROLE = "predictions in"
"""Begins the errors of an object store."""


class OutputPlace(Protocol):
    """The files of one output, by name or folder/name. What a call has written is durable. Any thread may call.

    Raises Unwritable where a disk refuses, BlobUnavailable where an object store does not answer.
    """

    address: str
    """The address for people and other processes: absolute, without secrets."""
    work: Path
    """Local folder of unfinished files."""
    letters: Path
    """Local folder into which dead letters are written."""
    look_s: float
    """Shortest pause between two looks at what is there."""

    def named(self, name: str) -> Path | str:
        """The whole name of a file."""
        ...

    def get(self, name: str) -> bytes | None:
        """A small file; None if there is none."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Make `content` a small file, in place of any other."""
        ...

    def put_new(self, name: str, content: bytes) -> None:
        """Make `content` a new small file; where there is one already, it stays."""
        ...

    def take(self, path: Path, name: str) -> StoredFile:
        """Make the local file `path` the file `name`, in place of any other -> its hash and size. `path` is gone."""
        ...

    def names(self, folder: str = "") -> set[str]:
        """Names of the files directly in a folder, at least; empty where there is none."""
        ...

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Names and bytes of the files directly in a folder; empty where there is none."""
        ...

    def is_empty(self) -> bool:
        """Whether there is nothing, not even a folder."""
        ...

    def has_begun(self) -> bool:
        """Whether there are files of WORK."""
        ...

    def local(self, name: str) -> AbstractContextManager[Path]:
        """A local file with the content of a file. Raises FileNotFoundError where there is none."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_work(self) -> None:
        """Remove the files of WORK."""
        ...

    def remove_all(self) -> None:
        """Remove the whole output."""
        ...


def open_place(place: Path | str, scratch: Path | None = None) -> OutputPlace:
    """The place at a path or an address. `scratch`: where the unfinished files of an object store are.

    Raises ValueError for no address, BlobUnavailable where the bucket cannot be seen.
    """
    address = parse(str(place))
    if address.is_folder:
        return FolderPlace(Path(address.root))
    return BucketPlace(address, scratch)


class FolderPlace:
    """A folder of this machine, or one that all machines see."""

    look_s = 0.5

    def __init__(self, folder: Path) -> None:
        self.address, self.folder = str(folder), folder
        self.work, self.letters = folder / WORK, folder / DEAD_LETTERS

    def named(self, name: str) -> Path | str:
        return self.folder / name

    def get(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes) -> None:
        with writing(self.folder / name):
            write_whole(REAL, self.folder / name, content)

    def put_new(self, name: str, content: bytes) -> None:
        """Only the process that holds the lock of the output calls it."""
        if not (self.folder / name).exists():
            self.put(name, content)

    def take(self, path: Path, name: str) -> StoredFile:
        with writing(self.folder / name):
            stored = hash_of(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, self.folder / name)
            REAL.sync_folder((self.folder / name).parent)
        return stored

    def names(self, folder: str = "") -> set[str]:
        with suppress(FileNotFoundError):
            return {*os.listdir(self.folder / folder)}
        return set()

    def sizes(self, folder: str = "") -> dict[str, int]:
        found = {}
        with suppress(FileNotFoundError), os.scandir(self.folder / folder) as entries:
            for each in entries:
                with suppress(FileNotFoundError):  # another worker has renamed it meanwhile
                    if each.is_file():
                        found[each.name] = each.stat().st_size
        return found

    def is_empty(self) -> bool:
        return not self.folder.exists() or not any(self.folder.iterdir())

    def has_begun(self) -> bool:
        return self.work.exists()

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """The file itself."""
        if not (self.folder / name).is_file():
            raise FileNotFoundError(name)
        yield self.folder / name

    def remove(self, name: str) -> None:
        with writing(self.folder / name):
            REAL.remove(self.folder / name)

    def remove_work(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_all(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class BucketPlace:
    """A prefix in an object store. Whoever writes a file of one plan writes the same bytes, so nothing is locked."""

    look_s = 2.0

    def __init__(self, address: StoreAddress, scratch: Path | None) -> None:
        self.address = address.text
        self.work = scratch or Path(os.devnull)
        self.letters = self.work / DEAD_LETTERS
        self._blobs: BlobStore = open_blobs(address, ROLE, Deadline.after(CALL_S))

    def named(self, name: str) -> Path | str:
        return self._blobs.url(name)

    def get(self, name: str) -> bytes | None:
        return self._blobs.get(name, MAX_BYTES, Deadline.after(CALL_S))

    def put(self, name: str, content: bytes) -> None:
        self._blobs.put(name, whole(content), Deadline.after(CALL_S))

    def put_new(self, name: str, content: bytes) -> None:
        self._blobs.put_new(name, content, Deadline.after(CALL_S))

    def take(self, path: Path, name: str) -> StoredFile:
        stored = hash_of(path)
        self._blobs.put(name, checked_file(path, stored.sha256, stored.num_bytes), Deadline.after(SEND_S))
        path.unlink()
        return stored

    def names(self, folder: str = "") -> set[str]:
        return {*self.sizes(folder)}

    def sizes(self, folder: str = "") -> dict[str, int]:
        return self._blobs.sizes(folder, Deadline.after(CALL_S))

    def is_empty(self) -> bool:
        deadline = Deadline.after(CALL_S)
        return not self._blobs.sizes("", deadline) and not self._blobs.folders("", deadline)

    def has_begun(self) -> bool:
        return bool(self.sizes(WORK))

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A copy, which is removed at the end."""
        self.work.mkdir(parents=True, exist_ok=True)
        copy = self.work / f"fetched-{name.rpartition('/')[2]}.{os.getpid()}"
        try:
            self._blobs.download(name, copy, Deadline.after(SEND_S))
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        self._blobs.remove(name, Deadline.after(CALL_S))

    def remove_work(self) -> None:
        self._blobs.remove_folder(WORK, Deadline.after(SEND_S))

    def remove_all(self) -> None:
        for folder in (WORK, DEAD_LETTERS, ""):
            self._blobs.remove_folder(folder, Deadline.after(SEND_S))
