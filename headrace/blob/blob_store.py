"""The protocol of a blob store, and the choice of its implementation by address.

Mirror and exports know blobs only through this protocol. Every implementation passes tests/contract/test_blobs.py.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from headrace.blob.blob_errors import SourceDamaged
from headrace.blob.blob_writer import BlobWriter
from headrace.blob.store_address import StoreAddress, StoreKind
from headrace.deadline import Deadline

CHUNK_BYTES = 8 << 20
"""Read, hashed and sent at once: a transfer holds about twice this in memory."""
UNFINISHED = ".unfinished"
"""Ends the name of a local file whose content is not whole yet. An object store has no such state."""
MAX_APPENDED_BYTES = 8 << 20
"""Longest blob that grows by lines where the store cannot append: its oldest lines are dropped."""

Chunks = Callable[[], Iterator[bytes]]
"""Opens the content of a blob; called again for every try."""


class BlobStore(Protocol):
    """Blobs by key below one address. A key is a path without empty parts; its folders need not be made.

    A blob is whole or absent: no reader sees a part of one. Once a write returns, the blob is durable. Any thread may
    call. A call that fails is BlobUnavailable; a wrong source raises its own error, and the store stays as it was.
    A call ends soon after its deadline; an object store may outlast it by the time of one request.
    """

    @property
    def address(self) -> StoreAddress:
        """Where the store is."""
        ...

    def give_up(self) -> None:
        """End every call at its next chunk or pause, whatever its deadline. For the end of a process."""
        ...

    def url(self, key: str) -> str:
        """The whole address of a blob or folder."""
        ...

    def sizes(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Names and bytes of the blobs directly in `folder`; empty where there is none. Includes UNFINISHED ones."""
        ...

    def folders(self, folder: str, deadline: Deadline) -> list[str]:
        """Names of the folders directly in `folder`, sorted."""
        ...

    def get(self, key: str, max_bytes: int, deadline: Deadline) -> bytes | None:
        """A small blob; None if there is none, its first `max_bytes` if it is larger."""
        ...

    def tail(self, key: str, max_bytes: int, deadline: Deadline) -> bytes:
        """The last `max_bytes` of a blob at most; nothing if there is none."""
        ...

    def download(self, key: str, path: Path, deadline: Deadline) -> tuple[str, int]:
        """Write a blob to the new file `path`, synced -> its SHA-256 and size.

        Raises FileNotFoundError where there is none, Unwritable where the local file cannot be written.
        """
        ...

    def local(self, key: str, scratch: Path, deadline: Deadline) -> Path:
        """A local file with a blob's content: the blob's own, or a copy in `scratch`, made at the first call.

        Raises FileNotFoundError where there is none, Unwritable where the copy cannot be written.
        """
        ...

    def put(self, key: str, chunks: Chunks, deadline: Deadline) -> None:
        """Make `chunks` the content of a blob, in place of any other."""
        ...

    def put_new(self, key: str, content: bytes, deadline: Deadline) -> bool:
        """Make `content` a new small blob; False, and nothing changes, where there is one already.

        Of several calls for one key, in any processes, at most one succeeds. A call whose reply is lost is repeated,
        and may then find its own blob: read it back to know.
        """
        ...

    def get_tagged(self, key: str, max_bytes: int, deadline: Deadline) -> tuple[bytes, str] | None:
        """A small blob as `get` has it, and the tag of its content for `replace`; None if there is none."""
        ...

    def replace(self, key: str, content: bytes, tag: str | None, deadline: Deadline) -> bool:
        """Make `content` that of a small blob whose content still has `tag`; None: of a new one.

        False, and nothing changes, where the content is another one, or there is none. A lost reply: see `put_new`.
        """
        ...

    def create(self, key: str, scratch: Path, deadline: Deadline) -> AbstractContextManager[BlobWriter]:
        """A new blob that is written piece by piece: durable when the context ends, undefined after an error.

        A store without such writes collects the blob in `scratch`. Raises Unwritable where a local disk refuses.
        """
        ...

    def append(self, key: str, line: bytes, deadline: Deadline) -> None:
        """Add a line to the end of a blob of lines. An incomplete last line of it is dropped. One writer at a time."""
        ...

    def remove(self, key: str, deadline: Deadline) -> None:
        """Remove a blob, if it is there."""
        ...

    def remove_folder(self, folder: str, deadline: Deadline) -> None:
        """Remove the blobs directly in a folder, and the folder."""
        ...


def open_blobs(address: StoreAddress, role: str, deadline: Deadline) -> BlobStore:
    """Connect to the store at `address`. `role` begins its errors: "mirror", "exports at".

    Raises BlobUnavailable where the bucket cannot be seen.
    """
    match address.kind:
        case StoreKind.FOLDER:
            from headrace.blob.folder import FolderBlobs

            return FolderBlobs(address, role)
        case StoreKind.S3:
            from headrace.blob.s3 import S3Blobs  # with its client, for those who use one

            return S3Blobs.open(address, role, deadline)


def whole(content: bytes) -> Chunks:
    """A blob's content that is in memory."""
    return lambda: iter((content,))


def checked_file(path: Path, sha256: str, num_bytes: int) -> Chunks:
    """A file that must be what `sha256` and `num_bytes` say. Raises SourceDamaged where it is not.

    The last chunk is given out only when the hash is known to be right, so that no wrong blob is ever whole.
    """

    def chunks() -> Iterator[bytes]:
        total, found_bytes, waiting = hashlib.sha256(), 0, b""
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    total.update(chunk)
                    found_bytes += len(chunk)
                    if waiting:
                        yield waiting
                    waiting = chunk
        except OSError as error:
            raise SourceDamaged(f"{path}: cannot be read: {error.strerror or error}") from error
        if (total.hexdigest(), found_bytes) != (sha256, num_bytes):
            raise SourceDamaged(f"{path}: has other bytes than were written")
        yield waiting

    return chunks


def head_of(file: BinaryIO, num_bytes: int) -> Chunks:
    """The first bytes of an open file that may be growing."""

    def chunks() -> Iterator[bytes]:
        file.seek(0)
        left_bytes = num_bytes
        while left_bytes and (chunk := file.read(min(CHUNK_BYTES, left_bytes))):
            left_bytes -= len(chunk)
            yield chunk

    return chunks


def whole_lines(content: bytes, *, cut: bool) -> bytes:
    """`content` without an incomplete last line and, where its beginning was `cut` off, without the first."""
    begin = content.find(b"\n") + 1 if cut else 0
    return content[begin : len(content) - torn_bytes(content)]


def torn_bytes(content: bytes) -> int:
    """How many bytes follow the last complete line."""
    return len(content) - (content.rfind(b"\n") + 1)
