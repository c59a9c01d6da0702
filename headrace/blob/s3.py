"""Blobs in a bucket of S3, or of a server that speaks its protocol, through `obstore`.

Credentials come from where every AWS client finds them (environment, profile, role of the machine), through botocore.
Nothing but the address says where requests go: proxies and endpoints in the environment are ignored.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import botocore.exceptions
import botocore.session
import httpx
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from headrace.blob.blob_errors import BlobChanged, BlobUnavailable
from headrace.blob.blob_retry import Retries
from headrace.blob.blob_store import CHUNK_BYTES, MAX_APPENDED_BYTES, Chunks, checked_file, whole, whole_lines
from headrace.blob.blob_writer import BlobWriter, open_writer
from headrace.blob.store_address import StoreAddress
from headrace.deadline import Deadline
from headrace.durable import REAL, writing

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig

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
CREDENTIALS_S = 600.0
"""How long credentials are used before botocore is asked again, which renews those that end."""
REMOVE_S = 10.0
"""Least time to remove the blobs of a folder: what is half done goes also when the time is up."""
FAILURES = (BaseError, OSError, ValueError, botocore.exceptions.BotoCoreError)


class S3Blobs:
    """A call that fails is repeated. Not usable in a process forked after the first call."""

    def __init__(self, address: StoreAddress, role: str, region: str | None) -> None:
        self._address, self._name = address, f"{role} {address.text}"
        self._prefix = address.root.removeprefix(address.bucket).strip("/")
        self._retries = Retries(self._name, FAILURES, _explained)
        self._reader, self._sender = (_client(address, region, silence_s) for silence_s in (SILENCE_S, SEND_S))

    @classmethod
    def open(cls, address: StoreAddress, role: str, deadline: Deadline) -> "S3Blobs":
        """Connect. Raises BlobUnavailable where the bucket cannot be seen."""
        name = f"{role} {address.text}"
        try:
            blobs = cls(address, role, _region_of(address))
        except (*FAILURES, httpx.HTTPError) as error:
            raise BlobUnavailable(name, "connecting", _explained(error)) from error
        doing = "looking for the bucket"
        try:
            blobs._retries.run(doing, blobs._look, deadline)
        except FileNotFoundError as error:
            raise BlobUnavailable(name, doing, "there is none of this name; make it first") from error
        return blobs

    @property
    def address(self) -> StoreAddress:
        return self._address

    def give_up(self) -> None:
        self._retries.give_up()

    def url(self, key: str) -> str:
        """With the options of the store's address."""
        parts = urlsplit(self._address.text)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{key}".rstrip("/")).geturl()

    def sizes(self, folder: str, deadline: Deadline) -> dict[str, int]:
        path = self._path(folder)
        objects = self._list(folder, deadline)["objects"]
        # An empty object of the folder's own name marks it for other programs.
        return {each["path"].rpartition("/")[2]: each["size"] for each in objects if each["path"] != path}

    def folders(self, folder: str, deadline: Deadline) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self._list(folder, deadline)["common_prefixes"])

    def get(self, key: str, max_bytes: int, deadline: Deadline) -> bytes | None:
        def read() -> bytes:
            content = bytearray()
            for piece in obstore.get(self._reader, self._path(key)).stream(min(max_bytes, CHUNK_BYTES)):
                content += piece
                if len(content) >= max_bytes:
                    break
            return bytes(content[:max_bytes])

        try:
            return self._retries.run(f"reading {key}", read, deadline)
        except FileNotFoundError:
            return None

    def tail(self, key: str, max_bytes: int, deadline: Deadline) -> bytes:
        return (self.get(key, max(max_bytes, MAX_APPENDED_BYTES), deadline) or b"")[-max_bytes:]

    def download(self, key: str, path: Path, deadline: Deadline) -> tuple[str, int]:
        def copy() -> tuple[str, int]:
            total = hashlib.sha256()
            pieces = obstore.get(self._reader, self._path(key)).stream(CHUNK_BYTES)
            with open_writer(path) as target:
                for piece in pieces:
                    self._retries.check(f"reading {key}", deadline)
                    total.update(piece)
                    target.write(piece)
            return total.hexdigest(), target.num_bytes

        return self._retries.run(f"reading {key}", copy, deadline)

    def local(self, key: str, scratch: Path, deadline: Deadline) -> Path:
        """A copy."""
        copy = scratch / re.sub(r"[^\w.-]", "_", f"{self._address.root}/{key}")
        if not copy.exists():
            part = copy.with_name(copy.name + ".part")
            with writing(copy):
                scratch.mkdir(parents=True, exist_ok=True)
            self.download(key, part, deadline)
            with writing(copy):
                REAL.rename(part, copy)
        return copy

    def put(self, key: str, chunks: Chunks, deadline: Deadline) -> None:
        """One chunk is one request; a longer blob is sent in parts and exists after the last one."""

        def send() -> None:
            pieces = chunks()
            first, second = next(pieces, b""), next(pieces, None)
            if second is None:
                client = self._reader if len(first) <= SMALL_BYTES else self._sender
                obstore.put(client, self._path(key), first, use_multipart=False)
            else:
                parts = self._checked(f"writing {key}", chain([first, second], pieces), deadline)
                obstore.put(self._sender, self._path(key), parts, chunk_size=CHUNK_BYTES, max_concurrency=1)

        self._retries.run(f"writing {key}", send, deadline)

    def put_new(self, key: str, content: bytes, deadline: Deadline) -> bool:
        """A put with "If-None-Match"."""

        def send() -> bool:
            client = self._reader if len(content) <= SMALL_BYTES else self._sender
            try:
                obstore.put(client, self._path(key), content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        return self._retries.run(f"writing {key}", send, deadline)

    def get_tagged(self, key: str, max_bytes: int, deadline: Deadline) -> tuple[bytes, str] | None:
        """Its ETag."""

        def read() -> tuple[bytes, str]:
            found = obstore.get(self._reader, self._path(key))
            return bytes(found.bytes())[:max_bytes], found.meta["e_tag"] or ""

        try:
            return self._retries.run(f"reading {key}", read, deadline)
        except FileNotFoundError:
            return None

    def replace(self, key: str, content: bytes, tag: str | None, deadline: Deadline) -> bool:
        """A put with "If-Match"."""
        if tag is None:
            return self.put_new(key, content, deadline)

        def send() -> bool:
            client = self._reader if len(content) <= SMALL_BYTES else self._sender
            try:
                obstore.put(client, self._path(key), content, mode={"e_tag": tag}, use_multipart=False)
            except (PreconditionError, FileNotFoundError):
                return False
            return True

        return self._retries.run(f"writing {key}", send, deadline)

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

    @contextmanager
    def create(self, key: str, scratch: Path, deadline: Deadline) -> Iterator[BlobWriter]:
        """Collected in `scratch`, then sent, so that it can be sent again."""
        collected = scratch / key.replace("/", "-")
        with writing(collected):
            scratch.mkdir(parents=True, exist_ok=True)
        try:
            with open_writer(collected) as writer:
                yield writer
            self.put(key, checked_file(collected, writer.sha256, writer.num_bytes), deadline)
        finally:
            with contextlib.suppress(OSError):
                collected.unlink(missing_ok=True)

    def append(self, key: str, line: bytes, deadline: Deadline) -> None:
        """Read, then written anew; beyond MAX_APPENDED_BYTES the oldest lines are dropped."""
        lines = whole_lines(self.get(key, MAX_APPENDED_BYTES, deadline) or b"", cut=False) + line
        cut = len(lines) > MAX_APPENDED_BYTES
        self.put(key, whole(whole_lines(lines[-MAX_APPENDED_BYTES:], cut=cut)), deadline)

    def remove(self, key: str, deadline: Deadline) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retries.run(f"removing {key}", lambda: obstore.delete(self._reader, self._path(key)), deadline)

    def remove_folder(self, folder: str, deadline: Deadline) -> None:
        """It takes up to REMOVE_S when the time is up."""
        deadline = Deadline.after(max(REMOVE_S, deadline.left_s()))
        for name in self.sizes(folder, deadline):
            self.remove(f"{folder}/{name}", deadline)

    def _list(self, folder: str, deadline: Deadline) -> Any:
        path = self._path(folder) or None
        return self._retries.run(
            f"listing {folder}/", lambda: obstore.list_with_delimiter(self._reader, path), deadline
        )

    def _look(self) -> None:
        """Raise FileNotFoundError where there is no bucket. One request, which asks for one key."""
        try:
            next(iter(obstore.list(self._reader, self._prefix or None, chunk_size=1)), None)
        except BaseError as error:
            if "NoSuchBucket" in str(error):
                raise FileNotFoundError(self._address.bucket) from error
            raise

    def _path(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key.strip("/")) if part)

    def _checked(self, doing: str, pieces: Iterator[bytes], deadline: Deadline) -> Iterator[bytes]:
        for piece in pieces:
            self._retries.check(doing, deadline)
            yield piece


def _client(address: StoreAddress, region: str | None, silence_s: float) -> S3Store:
    endpoint = _endpoint(address, region)
    virtual = "endpoint_override" not in address.options and "." not in address.bucket
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "allow_invalid_certificates": False,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=silence_s),
        "timeout": timedelta(days=1),  # of a whole answer: a large one takes its time
        # A proxy for no host: while one is set, the client does not look for others in the environment.
        "proxy_url": "http://127.0.0.1:9",
        "proxy_excludes": "*,0.0.0.0/0,::/0",
    }
    if (authority := address.options.get("tls_ca_file_path")) is not None:
        options["root_certificate"] = Path(authority).read_bytes()
    return S3Store(
        address.bucket,
        config={
            "aws_endpoint_url_s3": endpoint,
            **({} if region is None else {"region": region}),
            "virtual_hosted_style_request": virtual,
            "disable_bulk_delete": True,  # a request that every server has
        },
        client_options=options,
        retry_config={
            "max_retries": CLIENT_TRIES - 1,
            "retry_timeout": timedelta(seconds=CLIENT_RETRY_S),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1)},
        },
        credential_provider=_Credentials(),
    )


def _endpoint(address: StoreAddress, region: str | None) -> str:
    """Where requests go: always said, or the environment would say it."""
    scheme, named = address.options.get("scheme", "https"), address.options.get("endpoint_override")
    if named is not None:
        return named if "://" in named else f"{scheme}://{named}"
    host = f"s3.{region or 'us-east-1'}.amazonaws.com" + (".cn" if (region or "").startswith("cn-") else "")
    return f"{scheme}://{host}" if "." in address.bucket else f"{scheme}://{address.bucket}.{host}"


def _region_of(address: StoreAddress) -> str | None:
    """As the address says it, or else as Amazon does; None where nothing says it."""
    options = address.options
    if "region" in options or "endpoint_override" in options:
        region = options.get("region") or os.environ.get("AWS_REGION")
        return region or botocore.session.Session().get_config_variable("region")
    with httpx.Client(trust_env=False, timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S)) as client:
        answer = client.head(f"https://s3.amazonaws.com/{quote(address.bucket, safe='')}")
    region = answer.headers.get("x-amz-bucket-region")
    if region is None:
        raise ValueError(f"Amazon knows no region of the bucket {address.bucket}")
    return str(region)


class _Credentials:
    """Keys as botocore finds them, whenever the client asks."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()

    def __call__(self) -> Any:
        found = self._session.get_credentials()
        if found is None:
            raise ValueError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S),
        }


def _explained(error: Exception) -> str:
    """One line for people: the client appends a dump of itself, the server XML."""
    text, _, dump = str(error).partition("\n\nDebug source")
    line = " ".join(text.partition("<?xml")[0].split()).rstrip(": ")
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text, re.DOTALL)
    system = re.search(r'kind: \w+,\s+message: "([^"]+)"', dump)
    return ": ".join([line, *(answer.groups() if answer else ()), *(system.groups() if system else ())])
