"""The files of a source in an object store: objects below one address.

An object never grows; one that was replaced has another ETag. Objects are read in ranges, so that what is in memory is
bounded; a range that fails is read again until the call's deadline, and then the store is unavailable.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from headrace.blob.blob_errors import BlobChanged, BlobUnavailable
from headrace.blob.bucket import open_bucket
from headrace.blob.store_address import StoreAddress
from headrace.dataset.sources.source_file import FileLook
from headrace.dataset.spec.path_pattern import Pattern
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.deadline import Deadline
from headrace.errors import BadInput

AHEAD_BYTES = 8 << 20
"""Fetched at once from an object that is read forward; an open object holds this much."""
AGAIN_S = 1.0
"""Pause before a store is asked again that was unavailable; the client has tried several times by then."""
MAX_OBJECTS = 1_000_000
"""Most objects below the fixed part of a pattern; with more, the source is refused."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class BucketTree:
    """The objects below an address; see FileTree."""

    def __init__(self, address: StoreAddress, deadline: Deadline) -> None:
        """Connect. Raises SourceUnavailable where the bucket cannot be seen in time."""
        self._address, self._deadline = address, deadline
        try:
            self._blobs = open_bucket(address, "source", deadline)
        except BlobUnavailable as error:
            raise SourceUnavailable(str(error)) from error
        self._listed: dict[str, dict[str, int]] = {}  # by the folder that was listed

    def __str__(self) -> str:
        return self._address.text

    def begin(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def forget(self) -> None:
        self._listed.clear()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, asked again while the store is unavailable. Raises SourceUnavailable at the deadline."""
        reason = ""
        while True:
            try:
                answer = question()
            except BlobUnavailable as error:
                if not reason:
                    log.warning("asking again: %s", error)
                reason = str(error) if not reason or not error.out_of_time else reason
                if self._deadline.left_s() <= AGAIN_S:
                    raise SourceUnavailable(reason) from error
                time.sleep(AGAIN_S)
            else:
                if reason:
                    log.warning("%s answers again", self)
                return answer

    def matches(self, pattern: Pattern) -> list[str]:
        """One listing of what is below the pattern's fixed folders."""
        fixed = [part.text for part in pattern.parts[:-1]]
        wild = next((number for number, part in enumerate(pattern.parts[:-1]) if not part.is_literal), len(fixed))
        folder = "/".join(fixed[:wild])
        found = self.ask(lambda: self._blobs.below(folder, self._deadline))
        if len(found) > MAX_OBJECTS:
            raise BadInput(
                f"{self}/{folder} has {len(found):,} objects, at most {MAX_OBJECTS:,} are listed; name folders "
                f"nearer to the files in paths"
            )
        self._listed[folder] = found
        named = [path for path in found if not path.endswith("/") and pattern.finds(path)]
        keyed = [(key, path) for path in named if (key := pattern.key(path)) is not None]
        return [path for _, path in sorted(keyed)]

    def marked(self, folders: Collection[str], marker: str) -> Iterator[str]:
        return (folder for folder in folders if self._exists(f"{folder}/{marker}".lstrip("/")))

    def has(self, path: str) -> bool:
        if any(path in listing for listing in self._listed.values()):
            return True
        return not self._is_listed(path) and self._exists(path)

    def file(self, path: str) -> "BucketFile":
        return BucketFile(self, path)

    def look(self, path: str) -> FileLook:
        """Size and ETag of an object. Raises FileNotFoundError."""
        return FileLook(*self.ask(lambda: self._blobs.look(path, self._deadline)))

    def read(self, path: str, offset: int, num_bytes: int, tag: str) -> bytes:
        """A range inside an object. Raises FileNotFoundError, BlobChanged."""
        return self.ask(lambda: self._blobs.read_range(path, offset, num_bytes, tag, self._deadline))

    def _exists(self, path: str) -> bool:
        try:
            self.look(path)
        except FileNotFoundError:
            return False
        return True

    def _is_listed(self, path: str) -> bool:
        """Whether a folder that the object would be in was listed."""
        return any(not folder or path.startswith(f"{folder}/") for folder in self._listed)


class BucketFile:
    """One object; see SourceFile."""

    may_grow = False

    def __init__(self, tree: BucketTree, path: str) -> None:
        self._tree, self._path = tree, path
        self.name = f"{str(tree).partition('?')[0].rstrip('/')}/{path}"

    def look(self) -> FileLook:
        try:
            return self._tree.look(self._path)
        except FileNotFoundError:
            raise self._gone() from None

    def head(self, num_bytes: int) -> bytes:
        return self.open(ahead=False).read_at(num_bytes, 0)

    def open(self, *, ahead: bool = True) -> "BucketBytes":
        return BucketBytes(self, self.look(), AHEAD_BYTES if ahead else 0)

    def read(self, look: FileLook, offset: int, num_bytes: int) -> bytes:
        """A range of the object as it was at `look`. Raises SourceGap if it was replaced."""
        try:
            return self._tree.read(self._path, offset, num_bytes, look.version)
        except FileNotFoundError:
            raise self._gone() from None
        except BlobChanged:
            raise SourceGap(
                f"{self.name}: the object was replaced while it was read; write to a new object instead"
            ) from None

    def _gone(self) -> SourceGap:
        return SourceGap(f"{self.name}: the object is gone; put it back to continue")


class BucketBytes:
    """An object opened for reading; holds the last range that was fetched."""

    def __init__(self, file: BucketFile, look: FileLook, ahead_bytes: int) -> None:
        self._file, self._look, self._ahead_bytes = file, look, ahead_bytes
        self._held, self._held_at = b"", 0

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        at = offset - self._held_at
        if at < 0 or at + num_bytes > len(self._held):
            end = min(offset + max(num_bytes, self._ahead_bytes), self._look.num_bytes)
            if end <= offset:
                return b""
            if min(offset + num_bytes, end) > self._held_at + len(self._held) or at < 0:
                self._held = self._file.read(self._look, offset, end - offset)
                self._held_at, at = offset, 0
        return self._held[at : at + num_bytes]

    def close(self) -> None:
        self._held = b""
