"""Servers of object stores that are not S3's: subsets of Google Cloud Storage (XML) and of Azure Blob Storage.

They answer what the client asks as the services document it, hold everything in memory, and list in pages of PAGE.
The one of Azure was compared with Azurite: with HEADRACE_AZURITE, the path of its `dist/src/blob/main.js`, that runs
instead.
"""

import base64
import contextlib
import hashlib
import hmac
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import httpx
import pytest

PAGE = 3
"""Most names in one answer to a listing."""
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every emulator of Azure has."""


@dataclass(frozen=True)
class Stored:
    """An object."""

    content: bytes
    generation: int
    at_s: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        return f'"0x{self.generation:X}"'


class Objects:
    """Buckets of objects, and uploads in parts. The lock is held for each request."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.parts: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self._last = int(time.time() * 1e6)

    def put(self, bucket: str, key: str, content: bytes) -> Stored:
        self._last += 1
        stored = self.buckets[bucket][key] = Stored(content, self._last)
        return stored

    def page(self, bucket: str, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], list[str], str]:
        """Keys, prefixes, and the mark after which the next page begins; "" if it is the last."""
        names: dict[str, bool] = {}
        for key in sorted(self.buckets[bucket]):
            if key.startswith(prefix):
                head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                names[prefix + head + cut if cut else key] = bool(cut)
        left = [name for name in sorted(names) if name > after]
        taken = left[: min(most, PAGE)]
        more = taken[-1] if len(left) > len(taken) else ""
        return [name for name in taken if not names[name]], [name for name in taken if names[name]], more


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    """What both services share."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is one packet
    objects: ClassVar[Objects]
    no_bucket: ClassVar[str]
    no_key: ClassVar[str]

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(OSError):
            super().handle_one_request()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        bucket, _, key = self.below(parts.path).partition("/")
        bucket, key = unquote(bucket), unquote(key)
        try:
            with self.objects.turn:
                self.objects.requests.append(f"{self.command} {self.path}")
                self.check()
                if bucket not in self.objects.buckets and not (key == "" and self.command == "PUT"):
                    raise Refused(404, self.no_bucket)
                status, headers, content = self.act(bucket, key, body)
        except Refused as error:
            text = f'<?xml version="1.0"?><Error><Code>{error.code}</Code><Message>refused</Message></Error>'
            status, headers, content = error.status, {"content-type": "application/xml"}, text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in headers:
            self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def below(self, path: str) -> str:
        return path.lstrip("/")

    def check(self) -> None:
        """Raise Refused where the request is not signed."""

    def act(self, bucket: str, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content."""
        raise NotImplementedError

    def found(self, bucket: str, key: str) -> Stored:
        stored = self.objects.buckets[bucket].get(key)
        if stored is None:
            raise Refused(404, self.no_key)
        return stored

    def read(self, bucket: str, key: str) -> tuple[int, dict[str, str], bytes]:
        stored = self.found(bucket, key)
        if self.headers.get("if-match") not in (None, stored.etag):
            raise Refused(412, "PreconditionFailed")
        headers, content, status = self.facts(stored), stored.content, 200
        ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or self.headers.get("x-ms-range") or "")
        if ranged:
            begin, end = int(ranged[1]), min(int(ranged[2]) + 1, len(content))
            headers["content-range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content, status = content[begin:end], 206
        return status, {**headers, "content-length": str(len(content))}, content

    def facts(self, stored: Stored) -> dict[str, str]:
        return {
            "etag": stored.etag,
            "last-modified": formatdate(stored.at_s, usegmt=True),
            "content-type": "application/octet-stream",
        }


class GcsHandler(Handler):
    """Google Cloud Storage: its XML interface."""

    no_bucket, no_key = "NoSuchBucket", "NoSuchKey"

    def check(self) -> None:
        if not (self.headers.get("authorization") or "").startswith("Bearer "):
            raise Refused(403, "AccessDenied")

    def act(self, bucket: str, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upload = self.query.get("uploadId")
        match self.command:
            case "GET" if not key:
                return 200, {}, self._listing(bucket)
            case "GET" | "HEAD":
                return self.read(bucket, key)
            case "PUT" if not key:
                self.objects.buckets.setdefault(bucket, {})
                return 200, {}, b""
            case "PUT" if upload is not None:
                self.objects.parts[upload][self.query["partNumber"]] = body
                return 200, {"etag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
            case "PUT":
                self._check_generation(bucket, key)
                return 200, self.facts(self.objects.put(bucket, key, body)), b""
            case "POST" if "uploads" in self.query:
                upload = f"upload-{len(self.objects.requests)}"
                self.objects.parts[upload] = {}
                return (
                    200,
                    {},
                    (
                        f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                    ).encode(),
                )
            case "POST" if upload is not None:
                parts = self.objects.parts.pop(upload)
                order = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
                stored = self.objects.put(bucket, key, b"".join(parts[number] for number in order))
                text = (
                    f"<CompleteMultipartUploadResult><ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>"
                )
                return 200, self.facts(stored), text.encode()
            case "DELETE" if upload is not None:
                self.objects.parts.pop(upload, None)
                return 204, {}, b""
            case "DELETE":
                self.found(bucket, key)
                del self.objects.buckets[bucket][key]
                return 204, {}, b""
        raise Refused(400, "InvalidArgument")

    def facts(self, stored: Stored) -> dict[str, str]:
        return {**super().facts(stored), "x-goog-generation": str(stored.generation)}

    def _check_generation(self, bucket: str, key: str) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        stored = self.objects.buckets[bucket].get(key)
        if wanted is not None and int(wanted) != (0 if stored is None else stored.generation):
            raise Refused(412, "PreconditionFailed")

    def _listing(self, bucket: str) -> bytes:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        keys, folders, more = self.objects.page(bucket, prefix, delimiter, after, int(self.query.get("max-keys", 1000)))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.content)}</Size></Contents>"
            for key in keys
            for stored in [self.objects.buckets[bucket][key]]
        )
        entries += "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        return f'<?xml version="1.0"?><ListBucketResult>{entries}{token}</ListBucketResult>'.encode()


class AzureHandler(Handler):
    """Azure Blob Storage, of one account."""

    no_bucket, no_key = "ContainerNotFound", "BlobNotFound"

    def below(self, path: str) -> str:
        return path.removeprefix(f"/{ACCOUNT}/")

    def check(self) -> None:
        signed = (self.headers.get("authorization") or "").startswith((f"SharedKey {ACCOUNT}:", "Bearer "))
        if not signed and "sig" not in self.query:
            raise Refused(403, "AuthenticationFailed")

    def act(self, bucket: str, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        comp, blocks = self.query.get("comp"), self.objects.parts.setdefault(f"{bucket}/{key}", {})
        match self.command:
            case "PUT" if self.query.get("restype") == "container":
                self.objects.buckets.setdefault(bucket, {})
                return 201, {}, b""
            case "GET" if comp == "list":
                return 200, {"content-type": "application/xml"}, self._listing(bucket)
            case "PUT" if comp == "block":
                blocks[self.query["blockid"]] = body
                return 201, {}, b""
            case "PUT" if comp == "blocklist":
                names = re.findall(r"<(?:Uncommitted|Latest)>(.*?)</", body.decode())
                content = b"".join(blocks[unescape(name)] for name in names)
                blocks.clear()
                return 201, self.facts(self.objects.put(bucket, key, content)), b""
            case "PUT" if comp is None:
                self._check_conditions(bucket, key)
                return 201, self.facts(self.objects.put(bucket, key, body)), b""
            case "GET" | "HEAD":
                return self.read(bucket, key)
            case "POST" if comp == "batch":
                return self._removed(bucket, body)
            case "DELETE":
                self.found(bucket, key)
                del self.objects.buckets[bucket][key]
                return 202, {}, b""
        raise Refused(400, "InvalidQueryParameterValue")

    def _removed(self, bucket: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """A batch of removals: an answer for each, in one."""
        answers = []
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", body.decode(), re.MULTILINE)):
            key = unquote(self.below(urlsplit(path).path).partition("/")[2])
            there = self.objects.buckets[bucket].pop(key, None) is not None
            line = "202 Accepted" if there else f"404 {self.no_key}\r\nx-ms-error-code: {self.no_key}"
            answers.append(
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {line}\r\n\r\n"
            )
        return 202, {"content-type": "multipart/mixed; boundary=batch"}, ("".join(answers) + "--batch--\r\n").encode()

    def facts(self, stored: Stored) -> dict[str, str]:
        return {**super().facts(stored), "x-ms-blob-type": "BlockBlob", "x-ms-version": "2023-11-03"}

    def _check_conditions(self, bucket: str, key: str) -> None:
        stored = self.objects.buckets[bucket].get(key)
        if self.headers.get("if-none-match") == "*" and stored is not None:
            raise Refused(409, "BlobAlreadyExists")
        wanted = self.headers.get("if-match")
        if wanted is not None and (stored is None or wanted != stored.etag):
            raise Refused(412, "ConditionNotMet")

    def _listing(self, bucket: str) -> bytes:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        most = int(self.query.get("maxresults", 5000))
        keys, folders, more = self.objects.page(bucket, prefix, delimiter, self.query.get("marker", ""), most)
        entries = "".join(f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in folders)
        for key in keys:
            stored = self.objects.buckets[bucket][key]
            entries += (
                f"<Blob><Name>{escape(key)}</Name><Properties>"
                f"<Last-Modified>{formatdate(stored.at_s, usegmt=True)}</Last-Modified>"
                f"<Etag>{escape(stored.etag)}</Etag>"
                f"<Content-Length>{len(stored.content)}</Content-Length><Content-Type>application/octet-stream"
                "</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            )
        blobs = f"<Blobs>{entries}</Blobs><NextMarker>{escape(more)}</NextMarker>"
        return f'<?xml version="1.0"?><EnumerationResults>{blobs}</EnumerationResults>'.encode()


@dataclass
class GcsServer:
    """The server's port, and addresses in it."""

    port: int
    environment: ClassVar[dict[str, str]] = {"GOOGLE_BEARER_TOKEN": "testing"}

    def uri(self, bucket: str, prefix: str, port: int | None = None) -> str:
        return f"gs://{bucket}/{prefix}?scheme=http&endpoint_override={quote(f'127.0.0.1:{port or self.port}')}"

    def make_bucket(self, bucket: str) -> None:
        headers = {"authorization": "Bearer testing"}
        httpx.put(f"http://127.0.0.1:{self.port}/{bucket}", headers=headers, timeout=60).raise_for_status()


@dataclass
class AzureServer:
    """The server's port, and addresses in it."""

    port: int
    environment: ClassVar[dict[str, str]] = {"AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}

    def uri(self, bucket: str, prefix: str, port: int | None = None) -> str:
        endpoint = quote(f"127.0.0.1:{port or self.port}")
        return f"az://{bucket}/{prefix}?account={ACCOUNT}&scheme=http&endpoint_override={endpoint}"

    def make_bucket(self, bucket: str) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
        signed = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{bucket}", "restype:container"])
        made = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
        headers["authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(made).decode()}"
        url = f"http://127.0.0.1:{self.port}/{ACCOUNT}/{bucket}?restype=container"
        httpx.put(url, headers=headers, timeout=60).raise_for_status()


@contextlib.contextmanager
def serving(handler: type[Handler]) -> Iterator[tuple[int, Objects]]:
    """A server in threads of this process -> its port and what it holds."""
    objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Of", (handler,), {"objects": objects}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def azurite(main: str) -> Iterator[int]:
    """The emulator of Azure's makers -> its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        "node",
        main,
        "--blobPort",
        str(port),
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        try:
            next(line for line in process.stdout if "successfully listens" in line)
            yield port
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    """A server for the tests of a module, with "bucket" in it. Credentials are in the environment."""
    with serving(GcsHandler) as (port, _), pytest.MonkeyPatch.context() as patch:
        for name, value in GcsServer.environment.items():
            patch.setenv(name, value)
        server = GcsServer(port)
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    """As `gcs`."""
    real = os.environ.get("HEADRACE_AZURITE")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(azurite(real)) if real else stack.enter_context(serving(AzureHandler))[0]
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in AzureServer.environment.items():
            patch.setenv(name, value)
        server = AzureServer(port)
        server.make_bucket("bucket")
        yield server
