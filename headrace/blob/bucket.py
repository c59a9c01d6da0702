"""Blobs in an object store, through `obstore`: all that the services have in common.

`headrace.blob.s3`, `.gcs` and `.azure` make the client of one service. Nothing but the address says where requests go:
proxies and endpoints in the environment are ignored. Credentials alone come from there.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from urllib.parse import urlsplit

import httpx
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from headrace.blob.blob_errors import BlobChanged, BlobUnavailable
from headrace.blob.blob_store import CHUNK_BYTES, BlobStore
from headrace.blob.store_address import StoreAddress, StoreKind
from headrace.deadline import Deadline

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

CONNECT_S = 3.0
"""Longest wait for a connection."""
SILENCE_S = 5.0
"""Longest wait for an answer, or for more of one, to a request that is small itself."""
SEND_S = 30.0
"""Longest time to send one piece of a blob: at CHUNK_BYTES, some 280 kB a second are enough."""
CLIENT_TRIES, CLIENT_RETRY_S = 2, 10.0
"""Tries of one request by the client, and how long after its beginning it may be tried again: one piece of a large blob
that is lost costs that piece only. A call may outlast its deadline by CLIENT_RETRY_S + SEND_S."""
SMALL_BYTES = 256 << 10
"""Longest blob that is sent within SILENCE_S."""


class BucketBlobs(BlobStore):
    """A call that fails is repeated. Not usable in a process forked after the first call."""

    failures: ClassVar[tuple[type[Exception], ...]] = (BaseError, OSError, ValueError)
    """Errors of the client that are repeated."""
    no_bucket: ClassVar[str]
    """The service's code for a bucket that does not exist."""
    version: ClassVar[Literal["e_tag", "version"]] = "e_tag"
    """The member of an object's facts that a conditional put names."""
    no_credentials: ClassVar[tuple[str, str]] = ("", "")
    """Part of the client's words where it finds no credentials, and what to set then; of S3 the client says it."""

    def __init__(self, address: StoreAddress, role: str) -> None:
        """Makes no request, but to find a region. Raises `failures`, and errors of httpx."""
        super().__init__(address, role, self.failures, self._explained)
        self._prefix = address.root.removeprefix(address.bucket).strip("/")
        self._reader, self._sender = self._client(SILENCE_S), self._client(SEND_S)

    @abstractmethod
    def _client(self, silence_s: float) -> "ObjectStore":
        """A client of the bucket, with `client_options` and `retry_config`."""

    @classmethod
    def open(cls, address: StoreAddress, role: str, deadline: Deadline) -> Self:
        """Connect. Raises BlobUnavailable where the bucket cannot be seen."""
        name = f"{role} {address.text}"
        expected: tuple[type[Exception], ...] = (*cls.failures, httpx.HTTPError)
        try:
            blobs = cls(address, role)
        except expected as error:
            raise BlobUnavailable(name, "connecting", cls._explained(error)) from error
        doing = "looking for the bucket"
        try:
            blobs._retries.run(doing, blobs._look, deadline)
        except FileNotFoundError as error:
            raise BlobUnavailable(name, doing, "there is none of this name; make it first") from error
        return blobs

    def url(self, key: str) -> str:
        """With the options of the store's address."""
        parts = urlsplit(self.address.text)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{key}".rstrip("/")).geturl()

    def _list(self, folder: str) -> tuple[dict[str, int], list[str]]:
        path = self._path(folder)
        found = obstore.list_with_delimiter(self._reader, path or None)
        # An empty object of the folder's own name marks it for other programs.
        sizes = {_name(each["path"]): each["size"] for each in found["objects"] if each["path"] != path}
        return sizes, [_name(path) for path in found["common_prefixes"]]

    @contextmanager
    def _content(self, key: str, piece_bytes: int) -> Iterator[tuple[Iterable[bytes], str]]:
        """With the ETag, or the generation."""
        found = obstore.get(self._reader, self._path(key))
        yield map(bytes, found.stream(piece_bytes)), found.meta[self.version] or ""

    def _write(self, key: str, pieces: Iterator[bytes]) -> None:
        """One piece is one request; a longer blob is sent in parts and exists after the last one."""
        first, second = next(pieces, b""), next(pieces, None)
        if second is None:
            self._send(key, first, "overwrite")
        else:
            parts = chain([first, second], pieces)
            obstore.put(self._sender, self._path(key), parts, chunk_size=CHUNK_BYTES, max_concurrency=1)

    def _write_if(self, key: str, content: bytes, tag: str | None) -> bool:
        """A put on the condition that there is no object, or that it still has its ETag or generation."""
        differs = (AlreadyExistsError,) if tag is None else (PreconditionError, FileNotFoundError)
        try:
            self._send(key, content, "create" if tag is None else {"e_tag": tag, "version": tag})
        except differs:
            return False
        return True

    def _send(self, key: str, content: bytes, mode: "PutMode") -> None:
        client = self._reader if len(content) <= SMALL_BYTES else self._sender
        obstore.put(client, self._path(key), content, mode=mode, use_multipart=False)

    def _delete(self, key: str) -> None:
        obstore.delete(self._reader, self._path(key))

    def read_range(self, key: str, offset: int, num_bytes: int, tag: str, deadline: Deadline) -> bytes:
        """A part of a blob, which still has this ETag: bytes `offset` to `offset` + `num_bytes`, both inside it.

        Raises FileNotFoundError without one, BlobChanged for a blob with another ETag.
        """

        def read() -> bytes:
            options: GetOptions = {"range": (offset, offset + num_bytes), "if_match": tag}
            try:
                return bytes(obstore.get(self._reader, self._path(key), options=options).bytes())
            except PreconditionError as error:
                raise BlobChanged(self._name, f"reading {key}", "it was replaced") from error

        return self._retries.run(f"reading {key}", read, deadline)

    def look(self, key: str, deadline: Deadline) -> tuple[int, str]:
        """Size in bytes and ETag of a blob. Raises FileNotFoundError without one."""
        found = self._retries.run(f"looking at {key}", lambda: obstore.head(self._reader, self._path(key)), deadline)
        return found["size"], found["e_tag"] or ""

    def below(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Keys and bytes of all blobs in `folder` and in its folders."""
        strip = len(self._prefix) + 1 if self._prefix else 0

        def read() -> dict[str, int]:
            found: dict[str, int] = {}
            for page in obstore.list(self._reader, self._path(folder) or None):
                self._retries.check(f"listing {folder}/", deadline)
                found |= {each["path"][strip:]: each["size"] for each in page}
            return found

        return self._retries.run(f"listing {folder}/", read, deadline)

    def _look(self) -> None:
        """Raise FileNotFoundError where there is no bucket. One request, which asks for one key."""
        try:
            next(iter(obstore.list(self._reader, self._prefix or None, chunk_size=1)), None)
        except BaseError as error:
            if self.no_bucket in str(error):
                raise FileNotFoundError(self.address.bucket) from error
            raise

    def _path(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key.strip("/")) if part)

    @classmethod
    def _explained(cls, error: Exception) -> str:
        """One line for people: the client appends a dump of itself, the server XML, a query may hold a signature."""
        text, _, dump = str(error).partition("\n\nDebug source")
        sign, advice = cls.no_credentials
        if sign and sign in text:
            return f"no credentials: {advice}"
        line = " ".join(re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text.partition("<?xml")[0]).split()).rstrip(": ")
        answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text, re.DOTALL)
        system = re.search(r'kind: \w+,\s+message: "([^"]+)"', dump)
        said = [
            " ".join(each.split())
            for each in (*(answer.groups() if answer else ()), *(system.groups() if system else ()))
        ]
        return ": ".join([line, *said])


def open_bucket(address: StoreAddress, role: str, deadline: Deadline) -> BucketBlobs:
    """Connect to an object store, with the client of its service. Raises BlobUnavailable: see BucketBlobs.open."""
    match address.kind:
        case StoreKind.S3:
            from headrace.blob.s3 import S3Blobs

            return S3Blobs.open(address, role, deadline)
        case StoreKind.GCS:
            from headrace.blob.gcs import GcsBlobs

            return GcsBlobs.open(address, role, deadline)
        case StoreKind.AZURE:
            from headrace.blob.azure import AzureBlobs

            return AzureBlobs.open(address, role, deadline)
        case StoreKind.FOLDER:
            raise ValueError(f"{address.text} is a folder")


def client_options(options: Mapping[str, str], endpoint: str, silence_s: float) -> "ClientConfig":
    """How requests are made. `options` of the address; `silence_s`: longest wait for more of an answer."""
    chosen: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "allow_invalid_certificates": False,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=silence_s),
        "timeout": timedelta(days=1),  # of a whole answer: a large one takes its time
        # A proxy for no host: while one is set, the client does not look for others in the environment.
        "proxy_url": "http://127.0.0.1:9",
        "proxy_excludes": "*,0.0.0.0/0,::/0",
    }
    if (authority := options.get("tls_ca_file_path")) is not None:
        chosen["root_certificate"] = Path(authority).read_bytes()
    return chosen


def retry_config() -> "RetryConfig":
    """How often the client itself tries a request again."""
    return {
        "max_retries": CLIENT_TRIES - 1,
        "retry_timeout": timedelta(seconds=CLIENT_RETRY_S),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1)},
    }


def endpoint_of(address: StoreAddress, default: str) -> str:
    """Where requests go: the `endpoint_override` of the address, or `default`, a host, with its scheme."""
    named = address.options.get("endpoint_override", default)
    return named if "://" in named else f"{address.options.get('scheme', 'https')}://{named}"


def _name(path: str) -> str:
    return path.rpartition("/")[2]
