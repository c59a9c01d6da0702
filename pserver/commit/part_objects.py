"""The files of commits in an object store: uploaded by the process that wrote them, fetched by the one that needs them.

    parts/<generation>/<sha256>     the content, as the generation of workers that uploaded it named it

So no process reads a folder of another one, and its own folder is a cache. trainer.checkpoint.object_commits decides
which commits count; trainer.checkpoint.part_garbage removes what no commit names.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headrace.blob.blob_errors import BlobUnavailable, SourceDamaged
from headrace.blob.blob_store import UNFINISHED, BlobStore, checked_file, open_blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.durable import REAL
from headrace.errors import Unwritable
from headrace.pserver.errors import PartsUnavailable, StoreDamaged, StoreFailed
from headrace.pserver.store.row_store import StoredFile
from headrace.relative_names import InvalidName, path_below

FOLDER = "parts"
TRANSFERS = 3
"""Files that are transferred at the same time."""
CHUNK_BYTES = 1 << 20

Item = TypeVar("Item")


def key_of(generation: int, sha256: str) -> str:
    """The key of a content that a generation uploaded."""
    return f"{FOLDER}/{generation}/{sha256}"


class PartObjects:
    """Connects at the first call.

    Errors: PartsUnavailable; StoreFailed of a disk; StoreDamaged.
    """

    def __init__(self, address: str, generation: int) -> None:
        self._address, self.generation = address, generation
        self._blobs: BlobStore | None = None
        self.uploaded_bytes = 0
        """Bytes uploaded so far."""

    def upload(
        self, folder: Path, files: Mapping[str, StoredFile], known: Mapping[str, int], deadline: Deadline
    ) -> dict[str, int]:
        """Make every content of `files`, by path in `folder`, an object -> which generation uploaded each.

        `known` are those of the parent commit: only these are not uploaded again. StoreDamaged: a file has other bytes
        than were written.
        """
        wanted = {file.sha256: (path, file.num_bytes) for path, file in files.items() if file.sha256 not in known}

        def put(sha256: str) -> None:
            path, num_bytes = wanted[sha256]
            content = checked_file(folder / path, sha256, num_bytes)
            self._store(deadline).put(key_of(self.generation, sha256), content, deadline)

        with _translated():
            self._store(deadline)
            run_parallel(put, wanted)
        self.uploaded_bytes += sum(num_bytes for _, num_bytes in wanted.values())
        return {file.sha256: known.get(file.sha256, self.generation) for file in files.values()}

    def complete(
        self, folder: Path, files: Mapping[str, StoredFile], objects: Mapping[str, int], deadline: Deadline
    ) -> list[str]:
        """Make `files`, by path in `folder`, what they should be; returns the paths that were fetched.

        Files that are there are read and compared. A fetched file gets its name when it is whole, right and synced.
        StoreDamaged: the store lacks a content, or `objects` does not name it; or a path leads out of `folder`, and
        then nothing is fetched.
        """

        def fetch(path: str) -> None:
            file, target = files[path], targets[path]
            if file.sha256 not in objects:
                raise StoreDamaged(f"{target}: is not what was committed, and the object store does not have it")
            key = key_of(objects[file.sha256], file.sha256)
            self._download(key, file, target, deadline)

        with _translated():
            targets = {path: path_below(folder, path) for path in files}
            missing = [path for path, file in files.items() if not is_whole(targets[path], file)]
            run_parallel(fetch, missing)
            for parent in {targets[path].parent for path in missing}:
                REAL.sync_folder(parent)
        return missing

    def _download(self, key: str, file: StoredFile, target: Path, deadline: Deadline) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}{UNFINISHED}")
        try:
            found = self._store(deadline).download(key, unfinished, deadline)
            if found != (file.sha256, file.num_bytes):
                raise StoreDamaged(f"{key}: the object store has other bytes under this name")
            REAL.rename(unfinished, target)
        except FileNotFoundError:
            raise StoreDamaged(f"{key}: a part of the commit is not in the object store") from None
        finally:
            unfinished.unlink(missing_ok=True)

    def _store(self, deadline: Deadline) -> BlobStore:
        if self._blobs is None:
            self._blobs = open_blobs(parse(self._address), "parts in", deadline)
        return self._blobs


def is_whole(path: Path, file: StoredFile) -> bool:
    """Whether a file on this disk has the right bytes. Raises OSError where it cannot be read."""
    if not path.exists() or path.stat().st_size != file.num_bytes:
        return False
    total = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest() == file.sha256


def run_parallel(act: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call `act` with every item, TRANSFERS at a time. After an error no further call begins, and it is raised."""
    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="transfer") as pool:
        futures = [pool.submit(act, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (SourceDamaged, InvalidName) as error:
        raise StoreDamaged(str(error)) from error
    except BlobUnavailable as error:
        raise PartsUnavailable(str(error)) from error
    except (Unwritable, OSError) as error:
        raise StoreFailed(str(error)) from error
