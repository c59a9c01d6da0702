"""A blob store: what all kinds of it have in common, and the choice of the kind by address.

Mirror and exports know blobs only through BlobStore. Every kind passes tests/contract/test_blobs.py.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headrace.blob.blob_errors import SourceDamaged
from headrace.blob.blob_retry import Retries
from headrace.blob.blob_writer import BlobWriter, open_writer
from headrace.blob.store_address import StoreAddress
from headrace.deadline import Deadline
from headrace.durable import REAL, writing

CHUNK_BYTES = 8 << 20
"""Read, hashed and sent at once: a transfer holds about twice this in memory."""
UNFINISHED = ".unfinished"
"""Ends the name of a local file whose content is not whole yet. An object store has no such state."""
MAX_APPENDED_BYTES = 8 << 20
"""Longest blob that grows by lines where the store cannot append: its oldest lines are dropped."""
REMOVE_S = 10.0
"""Least time to remove the blobs of a folder: what is half done goes also when the time is up."""

Chunks = Callable[[], Iterator[bytes]]
"""Opens the content of a blob; called again for every try."""


class BlobStore(ABC):
    """Blobs by key below one address. A key is a path without empty parts; its folders need not be made.

    A blob is whole or absent: no reader sees a part of one. Once a write returns, the blob is durable. Any thread may
    call. A call that fails is BlobUnavailable; a wrong source raises its own error, and the store stays as it was.
    A call ends soon after its deadline; an object store may outlast it by the time of one request.

    A kind of store has the six abstract members, which are one try each, and replaces others that it does better.
    """

    def __init__(
        self,
        address: StoreAddress,
        role: str,
        failures: tuple[type[Exception], ...],
        explain: Callable[[Exception], str] = str,
    ) -> None:
        """`role` begins its errors: see `open_blobs`. `failures` are tried again; `explain` words the last of them."""
        self.address, self._name = address, f"{role} {address.text}"
        self._retries = Retries(self._name, failures, explain)

    @abstractmethod
    def url(self, key: str) -> str:
        """The whole address of a blob or folder."""

    @abstractmethod
    def _list(self, folder: str) -> tuple[dict[str, int], list[str]]:
        """Names and bytes of the blobs directly in `folder`, and names of the folders; nothing where it is absent."""

    @abstractmethod
    def _content(self, key: str, piece_bytes: int) -> AbstractContextManager[tuple[Iterable[bytes], str | None]]:
        """A blob in pieces of about `piece_bytes`, and its tag; None: a hash is its tag. Raises FileNotFoundError."""

    @abstractmethod
    def _write(self, key: str, pieces: Iterator[bytes]) -> None:
        """Put a blob."""

    @abstractmethod
    def _write_if(self, key: str, content: bytes, tag: str | None) -> bool:
        """Put a small blob where the present one has `tag`; None: where there is none. False: it is another one."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Remove a blob. May raise FileNotFoundError."""

    def give_up(self) -> None:
        """End every call at its next chunk or pause, whatever its deadline. For the end of a process."""
        self._retries.give_up()

    def sizes(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Names and bytes of the blobs directly in `folder`; empty where there is none. Includes UNFINISHED ones."""
        return self._retries.run(f"listing {folder}/", lambda: self._list(folder), deadline)[0]

    def folders(self, folder: str, deadline: Deadline) -> list[str]:
        """Names of the folders directly in `folder`, sorted."""
        return sorted(self._retries.run(f"listing {folder}/", lambda: self._list(folder), deadline)[1])

    def get(self, key: str, max_bytes: int, deadline: Deadline) -> bytes | None:
        """A small blob; None if there is none, its first `max_bytes` if it is larger."""
        found = self.get_tagged(key, max_bytes, deadline)
        return None if found is None else found[0]

    def get_tagged(self, key: str, max_bytes: int, deadline: Deadline) -> tuple[bytes, str] | None:
        """A small blob as `get` has it, and the tag of its content for `replace`; None if there is none."""

        def read() -> tuple[bytes, str]:
            content = bytearray()
            with self._content(key, min(max_bytes, CHUNK_BYTES)) as (pieces, tag):
                for piece in pieces:
                    content += piece
                    if len(content) >= max_bytes:
                        break
            found = bytes(content[:max_bytes])
            return found, hash_tag(found) if tag is None else tag

        with suppress(FileNotFoundError):
            return self._retries.run(f"reading {key}", read, deadline)
        return None

    def tail(self, key: str, max_bytes: int, deadline: Deadline) -> bytes:
        """The last `max_bytes` at most of a blob that `append` makes; nothing if there is none."""
        return (self.get(key, max(max_bytes, MAX_APPENDED_BYTES), deadline) or b"")[-max_bytes:]

    def download(self, key: str, path: Path, deadline: Deadline) -> tuple[str, int]:
        """Write a blob to the new file `path`, synced -> its SHA-256 and size.

        Raises FileNotFoundError where there is none, Unwritable where the local file cannot be written.
        """
        doing = f"reading {key}"

        def copy() -> tuple[str, int]:
            with self._content(key, CHUNK_BYTES) as (pieces, _), open_writer(path) as target:
                for piece in pieces:
                    self._retries.check(doing, deadline)
                    target.write(piece)
            return target.sha256, target.num_bytes

        return self._retries.run(doing, copy, deadline)

    def local(self, key: str, scratch: Path, deadline: Deadline) -> Path:
        """A local file with a blob's content: the blob's own, or a copy in `scratch`, made at the first call.

        Raises FileNotFoundError where there is none, Unwritable where the copy cannot be written.
        """
        copy = scratch / re.sub(r"[^\w.-]", "_", f"{self.address.root}/{key}")
        if not copy.exists():
            part = copy.with_name(copy.name + ".part")
            with writing(copy):
                scratch.mkdir(parents=True, exist_ok=True)
            self.download(key, part, deadline)
            with writing(copy):
                REAL.rename(part, copy)
        return copy

    def put(self, key: str, chunks: Chunks, deadline: Deadline) -> None:
        """Make `chunks` the content of a blob, in place of any other."""
        doing = f"writing {key}"

        def pieces() -> Iterator[bytes]:
            for piece in chunks():
                self._retries.check(doing, deadline)
                yield piece

        self._retries.run(doing, lambda: self._write(key, pieces()), deadline)

    def put_new(self, key: str, content: bytes, deadline: Deadline) -> bool:
        """Make `content` a new small blob; False, and nothing changes, where there is one already.

        Of several calls for one key, in any processes, at most one succeeds. A call whose reply is lost is repeated,
        and may then find its own blob: read it back to know.
        """
        return self.replace(key, content, None, deadline)

    def replace(self, key: str, content: bytes, tag: str | None, deadline: Deadline) -> bool:
        """Make `content` that of a small blob whose content still has `tag`; None: of a new one.

        False, and nothing changes, where the content is another one, or there is none. A lost reply: see `put_new`.
        """
        return self._retries.run(f"writing {key}", lambda: self._write_if(key, content, tag), deadline)

    @contextmanager
    def create(self, key: str, scratch: Path, deadline: Deadline) -> Iterator[BlobWriter]:
        """A new blob that is written piece by piece: durable when the context ends, undefined after an error.

        It is collected in `scratch`, then sent, so that it can be sent again; a folder has it in its place at once.
        Raises Unwritable where a local disk refuses.
        """
        collected = scratch / key.replace("/", "-")
        with writing(collected):
            scratch.mkdir(parents=True, exist_ok=True)
        try:
            with open_writer(collected) as writer:
                yield writer
            self.put(key, checked_file(collected, writer.sha256, writer.num_bytes), deadline)
        finally:
            with suppress(OSError):
                collected.unlink(missing_ok=True)

    def append(self, key: str, line: bytes, deadline: Deadline) -> None:
        """Add a line to the end of a blob of lines. An incomplete last line of it is dropped. One writer at a time.

        The blob is written anew, and beyond MAX_APPENDED_BYTES its oldest lines are dropped; a folder appends in place.
        """
        lines = whole_lines(self.get(key, MAX_APPENDED_BYTES, deadline) or b"", cut=False) + line
        cut = len(lines) > MAX_APPENDED_BYTES
        self.put(key, whole(whole_lines(lines[-MAX_APPENDED_BYTES:], cut=cut)), deadline)

    def remove(self, key: str, deadline: Deadline) -> None:
        """Remove a blob, if it is there."""
        with suppress(FileNotFoundError):
            self._retries.run(f"removing {key}", lambda: self._delete(key), deadline)

    def remove_folder(self, folder: str, deadline: Deadline) -> None:
        """Remove the blobs directly in a folder, and the folder; it has at least REMOVE_S for that."""
        deadline = Deadline.after(max(REMOVE_S, deadline.left_s()))
        for name in self.sizes(folder, deadline):
            self.remove(f"{folder}/{name}", deadline)


def open_blobs(address: StoreAddress, role: str, deadline: Deadline) -> BlobStore:
    """Connect to the store at `address`. `role` begins its errors: "mirror", "exports at".

    Raises BlobUnavailable where the bucket cannot be seen.
    """
    if address.is_folder:
        from headrace.blob.folder import FolderBlobs

        return FolderBlobs(address, role)
    from headrace.blob.bucket import open_bucket  # with its client, for those who use one

    return open_bucket(address, role, deadline)


def hash_tag(content: bytes) -> str:
    """The tag of a content where the store has none of its own."""
    return hashlib.sha256(content).hexdigest()


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
