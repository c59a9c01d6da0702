"""The files of commits in blob stores: the one way to upload them, and the one way to fetch them.

With `store.parts = "object"` the process that wrote a file uploads it, and the one that needs it fetches it.

    parts/<generation>/<sha256>     the content, as the generation of workers that uploaded it named it

So no process reads a folder of another one, and its own folder is a cache. trainer.checkpoint.object_store decides
which commits count, and removes what no commit names. trainer.checkpoint.mirror names contents in its own way.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from headrace.blob.blob_errors import BlobUnavailable, SourceDamaged
from headrace.blob.blob_store import UNFINISHED, BlobStore, checked_file, open_blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.durable import REAL, writing
from headrace.errors import HeadraceError, Unwritable
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


class ContentLost(HeadraceError):
    """A store has no content under a key, or another one."""

    def __init__(self, path: str, key: str, *, replaced: bool) -> None:
        """`path`: of the file that was wanted."""
        super().__init__(f"{path}: {key} {'has other bytes' if replaced else 'is missing'}")
        self.path, self.key, self.replaced = path, key, replaced


def upload_files(
    blobs: BlobStore,
    folder: Path,
    files: Mapping[str, StoredFile],
    key_of_content: Callable[[str], str],
    deadline: Deadline,
) -> None:
    """Upload every content of `files`, by path in `folder`, to the key for its SHA-256.

    Raises SourceDamaged where a file has other bytes than were written, and BlobUnavailable.
    """
    wanted = {file.sha256: (folder / path, file.num_bytes) for path, file in files.items()}

    def put(sha256: str) -> None:
        path, num_bytes = wanted[sha256]
        blobs.put(key_of_content(sha256), checked_file(path, sha256, num_bytes), deadline)

    run_parallel(put, wanted)


def fetch_files(
    blobs: BlobStore,
    folder: Path,
    files: Mapping[str, StoredFile],
    key_of_content: Callable[[str], str],
    deadline: Deadline,
) -> None:
    """Fetch `files` to their paths in `folder`. A file gets its name when it is whole, right and synced.

    Raises InvalidName where a path leads out of `folder`, and then nothing is fetched; ContentLost, Unwritable, and
    BlobUnavailable.
    """
    targets = {path: path_below(folder, path) for path in files}

    def fetch(path: str) -> None:
        file, target, key = files[path], targets[path], key_of_content(files[path].sha256)
        unfinished = target.with_name(f"{target.name}{UNFINISHED}")
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if blobs.download(key, unfinished, deadline) != (file.sha256, file.num_bytes):
                raise ContentLost(path, key, replaced=True)
            with writing(target):
                REAL.rename(unfinished, target)
        except FileNotFoundError:
            raise ContentLost(path, key, replaced=False) from None
        finally:
            unfinished.unlink(missing_ok=True)

    run_parallel(fetch, targets)
    for parent in {target.parent for target in targets.values()}:
        with writing(parent):
            REAL.sync_folder(parent)


class PartObjects:
    """Connects at the first call.

    Errors: PartsUnavailable; StoreFailed of a disk; StoreDamaged.
    """

    def __init__(self, address: str, generation: int) -> None:
        self._address, self.generation = address, generation
        self._blobs: BlobStore | None = None

    def upload(
        self, folder: Path, files: Mapping[str, StoredFile], known: Mapping[str, int], deadline: Deadline
    ) -> dict[str, int]:
        """Make every content of `files`, by path in `folder`, an object -> which generation uploaded each.

        `known` are those of the parent commit: only these are not uploaded again. StoreDamaged: a file has other bytes
        than were written.
        """
        wanted = {path: file for path, file in files.items() if file.sha256 not in known}
        with _translated():
            upload_files(self._store(deadline), folder, wanted, partial(key_of, self.generation), deadline)
        return {file.sha256: known.get(file.sha256, self.generation) for file in files.values()}

    def complete(
        self, folder: Path, files: Mapping[str, StoredFile], objects: Mapping[str, int], deadline: Deadline
    ) -> list[str]:
        """Make `files`, by path in `folder`, what they should be; returns the paths that were fetched.

        Files that are there are read and compared. StoreDamaged: the store lacks a content, or `objects` does not name
        it; or a path leads out of `folder`, and then nothing is fetched.
        """
        with _translated():
            targets = {path: path_below(folder, path) for path in files}
            missing = {path: file for path, file in files.items() if not is_whole(targets[path], file)}
            for path, file in missing.items():
                if file.sha256 not in objects:
                    raise StoreDamaged(
                        f"{targets[path]}: is not what was committed, and the object store does not have it"
                    )
            if missing:
                at = partial(_key_in, objects)
                fetch_files(self._store(deadline), folder, missing, at, deadline)
        return list(missing)

    def _store(self, deadline: Deadline) -> BlobStore:
        if self._blobs is None:
            self._blobs = open_blobs(parse(self._address), "parts in", deadline)
        return self._blobs


def _key_in(objects: Mapping[str, int], sha256: str) -> str:
    return key_of(objects[sha256], sha256)


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
    except ContentLost as error:
        why = "the object store has other bytes under this name"
        raise StoreDamaged(
            f"{error.key}: {why if error.replaced else 'a part of the commit is not in the object store'}"
        ) from None
    except BlobUnavailable as error:
        raise PartsUnavailable(str(error)) from error
    except (Unwritable, OSError) as error:
        raise StoreFailed(str(error)) from error
