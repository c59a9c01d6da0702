"""The rim of the mirror: objects in S3 or in a folder, through pyarrow.fs.

A put is whole or not there. Every call is tried again, with pauses, a few times and within its deadline; what fails in
the end is MirrorUnavailable. What the objects mean is trainer.mirror.content's.
"""

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import pyarrow as pa
from pyarrow import fs

from millrace import retry
from millrace.deadline import Deadline
from millrace.durable import REAL
from millrace.errors import SpecError
from millrace.retry import Backoff
from trainer.commits import CommitDamaged
from trainer.mirror.address import Address, Kind, parse
from trainer.mirror.errors import MirrorUnavailable, StoreUnwritable

BACKOFF = Backoff((0.2, 0.5, 1.0, 2.0, 4.0))
"""Between tries; then the call fails."""
CHUNK_BYTES = 8 << 20
"""Read, hashed and sent at once: what a transfer holds in memory, about twice."""
SILENCE_S, CONNECT_S, CLIENT_TRIES = 5.0, 3.0, 2
"""How long the S3 client bears a connection on which nothing moves, and one that is not accepted; and its own tries of
a request, so that a part lost of a large file costs that part only. A call may outlast its deadline by these."""
UNFINISHED = ".unfinished"
"""In the name of an object in a folder that is being written; S3 has no such state."""

Result = TypeVar("Result")


class Objects:
    """Objects by key below one address. Any thread may call."""

    def __init__(self, address: Address, files: fs.FileSystem) -> None:
        self.address, self._files = address, files
        self._given_up = threading.Event()

    @classmethod
    def open(cls, uri: str, deadline: Deadline) -> "Objects":
        """Connect. Raises SpecError where the URI is wrong, MirrorUnavailable where the bucket cannot be seen."""
        try:
            address = parse(uri)
        except ValueError as error:
            raise SpecError(str(error), "store.mirror") from None
        if address.kind is Kind.FOLDER:
            return cls(address, fs.LocalFileSystem())
        objects = cls(address, _s3(address))
        info = objects._tried("looking for the bucket", partial(objects._files.get_file_info, address.bucket), deadline)
        if info.type == fs.FileType.NotFound:
            raise MirrorUnavailable(address.text, "looking for the bucket", "there is none of this name; make it first")
        return objects

    def give_up(self) -> None:
        """Have every call end at its next chunk or pause, whatever its deadline. For the end of a process."""
        self._given_up.set()

    def sizes(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Names and bytes of the objects in `folder`; what is half written in a local one, too."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._tried(f"listing {folder}/", lambda: self._files.get_file_info(selector), deadline)
        return {info.base_name: info.size for info in found if info.type == fs.FileType.File}

    def folders(self, folder: str, deadline: Deadline) -> list[str]:
        """Names of the folders in `folder`, sorted."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._tried(f"listing {folder}/", lambda: self._files.get_file_info(selector), deadline)
        return sorted(info.base_name for info in found if info.type == fs.FileType.Directory)

    def put_file(self, key: str, path: Path, sha256: str, num_bytes: int, deadline: Deadline) -> None:
        """Upload a file that must be what `sha256` and `num_bytes` say. Raises CommitDamaged where it is not.

        The last chunk is sent only when the hash is known to be right, so that no object of the right size is wrong.
        """
        self._put(key, lambda: _sound_chunks(path, sha256, num_bytes), deadline)

    def put_bytes(self, key: str, content: bytes, deadline: Deadline) -> None:
        """Upload `content`."""
        self._put(key, lambda: iter((content,)), deadline)

    def put_head(self, key: str, file: BinaryIO, num_bytes: int, deadline: Deadline) -> None:
        """Upload the first bytes of an open file that may be growing."""
        self._put(key, lambda: _head(file, num_bytes), deadline)

    def get(self, key: str, max_bytes: int, deadline: Deadline) -> bytes | None:
        """A small object; None if there is none, its beginning if it is larger than `max_bytes`."""

        def read() -> bytes:
            with self._files.open_input_stream(self._path(key)) as stream:
                return bytes(stream.read(max_bytes))

        try:
            return self._tried(f"reading {key}", read, deadline, absence_is_an_answer=True)
        except FileNotFoundError:
            return None

    def download(self, key: str, path: Path, deadline: Deadline) -> tuple[str, int]:
        """Write an object to `path`, synced -> its hash and size. Raises FileNotFoundError, StoreUnwritable."""
        download = partial(self._download, key, path, deadline)
        return self._tried(f"reading {key}", download, deadline, absence_is_an_answer=True)

    def remove(self, key: str, deadline: Deadline) -> None:
        """Remove an object, if it is there."""
        remove = partial(self._files.delete_file, self._path(key))
        with suppress(FileNotFoundError):
            self._tried(f"removing {key}", remove, deadline, absence_is_an_answer=True)

    def _path(self, key: str) -> str:
        return f"{self.address.root}/{key}"

    def _put(self, key: str, chunks: Callable[[], Iterator[bytes]], deadline: Deadline) -> None:
        def put() -> None:
            match self.address.kind:
                case Kind.S3:
                    self._send(self._path(key), chunks(), deadline)
                case Kind.FOLDER:
                    self._put_in_folder(Path(self._path(key)), chunks(), deadline)

        self._tried(f"writing {key}", put, deadline)

    def _put_in_folder(self, path: Path, chunks: Iterator[bytes], deadline: Deadline) -> None:
        """As S3 does it: synced under a name of its own, then renamed."""
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._send(str(unfinished), chunks, deadline)
            _sync(unfinished)
            REAL.rename(unfinished, path)
            REAL.sync_folder(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)

    def _send(self, path: str, chunks: Iterator[bytes], deadline: Deadline) -> None:
        first = next(chunks, b"")  # what is wrong with the source shows, mostly, before there is a stream
        with self._files.open_output_stream(path) as stream:
            # A stream to S3 cannot be aborted from Python: left early it leaves an object that is too short, and so
            # counts as absent.
            stream.write(first)
            for chunk in chunks:
                self._check(f"writing {path}", deadline)
                stream.write(chunk)

    def _download(self, key: str, path: Path, deadline: Deadline) -> tuple[str, int]:
        total, num_bytes = hashlib.sha256(), 0
        with self._files.open_input_stream(self._path(key)) as stream, _writing(path) as write:
            while chunk := stream.read(CHUNK_BYTES):
                self._check(f"reading {key}", deadline)
                total.update(chunk)
                num_bytes += len(chunk)
                write(chunk)
        return total.hexdigest(), num_bytes

    def _tried(
        self, doing: str, act: Callable[[], Result], deadline: Deadline, *, absence_is_an_answer: bool = False
    ) -> Result:
        """`act`, again after each pause while it fails. An answer that there is no such object: FileNotFoundError."""

        def is_answer(error: Exception) -> bool:
            return absence_is_an_answer and isinstance(error, FileNotFoundError)

        def attempt(_number: int) -> Result:
            self._check(doing, deadline)
            return act()

        def may_pass(error: Exception) -> bool:
            return isinstance(error, OSError | pa.ArrowException) and not is_answer(error)

        try:
            return retry.call(attempt, BACKOFF, may_pass, deadline=deadline, wait=self._given_up.wait)
        except (OSError, pa.ArrowException) as error:
            if is_answer(error):
                raise
            raise MirrorUnavailable(self.address.text, doing, error) from error

    def _check(self, doing: str, deadline: Deadline) -> None:
        if self._given_up.is_set():
            raise MirrorUnavailable(self.address.text, doing, "given up, as the process ends")
        if deadline.passed():
            raise MirrorUnavailable(self.address.text, doing, "out of time")


def _s3(address: Address) -> fs.FileSystem:
    """A client that sends in the calling thread, so that memory is bounded, and puts a small object in one request."""
    options = dict(address.options)
    try:
        if not {"region", "endpoint_override"} & options.keys():
            options["region"] = fs.resolve_s3_region(address.bucket)
        return fs.S3FileSystem(
            **options,
            request_timeout=SILENCE_S,
            connect_timeout=CONNECT_S,
            background_writes=False,
            allow_delayed_open=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=CLIENT_TRIES),
        )
    except (OSError, pa.ArrowException) as error:
        raise MirrorUnavailable(address.text, "connecting", error) from error


def _sound_chunks(path: Path, sha256: str, num_bytes: int) -> Iterator[bytes]:
    """The chunks of a file, each given out only when the one after it has been read and hashed."""
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
        raise CommitDamaged(f"{path}: cannot be read: {error.strerror or error}") from error
    if (total.hexdigest(), found_bytes) != (sha256, num_bytes):
        raise CommitDamaged(f"{path}: has other bytes than were written")
    yield waiting


def _head(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    file.seek(0)
    while num_bytes and (chunk := file.read(min(CHUNK_BYTES, num_bytes))):
        num_bytes -= len(chunk)
        yield chunk


@contextmanager
def _writing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """A new file of the local disk, synced at the end; its errors are kept apart from the mirror's."""

    @contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnwritable(path, error) from error

    def write(chunk: bytes) -> None:
        with told():
            REAL.append(file, chunk)

    with told():
        file = REAL.create(path)
    with file:
        yield write
        with told():
            REAL.sync(file)


def _sync(path: Path) -> None:
    with REAL.open(path) as file:
        REAL.sync(file)
