"""A real S3 server in a process of its own, and a proxy before it that misbehaves on demand.

moto keeps buckets in memory, so data lives as long as the process. Failures come from the proxy.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import pytest

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


def serve(host: str = "127.0.0.1") -> None:
    """Main of the server's process: prints its free port; ends when its standard input does."""
    os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"  # or "10" of 10.77.0.13 would be a bucket
    from moto.s3.responses import S3Response
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    S3Response.put_object = one_at_a_time(S3Response.put_object)

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: object) -> None:
            pass

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(host, 0, application, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.port, flush=True)
    sys.stdin.read()


def one_at_a_time(put: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`put` under a lock: moto checks a condition and writes in two steps, and two threads could both succeed."""
    turn = threading.Lock()

    def locked(response: Any) -> Any:
        with turn:
            return put(response)

    return locked


class Proxy:
    """Forwards connections. `cut_after` closes them after some bytes to the server, `refuse` answers 503."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._limits = threading.Lock()  # threads of connections use up the limits that a test sets
        self.heal()
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        with self._limits:
            self._budget_bytes: int | None = None
            self.refusals = 0
        self.stalled = False
        self.delay_s = 0.0

    def slow(self, delay_s: float) -> None:
        """Wait before each piece of an answer."""
        self.delay_s = delay_s

    def cut_after(self, num_bytes: int) -> None:
        """Forward this many more bytes to the server, over all connections; then cut them all."""
        self._drop()
        with self._limits:
            self._budget_bytes = num_bytes

    def refuse(self, times: int) -> None:
        """Answer the next connections with 503 Slow Down."""
        self._drop()
        with self._limits:
            self.refusals = times

    def stall(self) -> None:
        """Accept everything and forward nothing."""
        self._drop()
        self.stalled = True

    def close(self) -> None:
        self._listener.close()
        self._drop()

    def _drop(self) -> None:
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            if self._refused():
                near.recv(1 << 16)
                near.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self._target)) as far:
                ends = {near, far}
                self._open |= ends
                back = threading.Thread(target=self._pump, args=(far, near, False), daemon=True)
                back.start()
                self._pump(near, far, True)
                back.join()
                self._open -= ends

    def _refused(self) -> bool:
        with self._limits:
            if self.refusals == 0:
                return False
            self.refusals -= 1
            return True

    def _allowed(self, num_bytes: int) -> tuple[int, bool]:
        """Bytes of these that may still go to the server, and whether the connection is cut after them."""
        with self._limits:
            if self._budget_bytes is None:
                return num_bytes, False
            num_bytes = min(num_bytes, self._budget_bytes)
            self._budget_bytes -= num_bytes
            return num_bytes, self._budget_bytes == 0

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if self.stalled:
                    continue
                if not counted and self.delay_s:
                    time.sleep(self.delay_s)
                num_bytes, cut = self._allowed(len(data)) if counted else (len(data), False)
                target.sendall(data[:num_bytes])
                if cut:
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class S3Server:
    """The server's port, and addresses in it."""

    port: int
    host: str = "127.0.0.1"

    def uri(self, bucket: str, prefix: str, port: int | None = None) -> str:
        endpoint = quote(f"{self.host}:{port or self.port}")
        return f"s3://{bucket}/{prefix}?scheme=http&endpoint_override={endpoint}&region=us-east-1"

    def make_bucket(self, bucket: str) -> None:
        httpx.put(f"http://{self.host}:{self.port}/{bucket}", timeout=60).raise_for_status()  # it checks no signatures


@contextlib.contextmanager
def running() -> Iterator[S3Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.s3_server import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the server prints a traceback for each cut request
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        yield S3Server(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A server for the tests of a module, which use different prefixes. Credentials are in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with running() as server:
            server.make_bucket("bucket")
            yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    """A connection to the server that can be cut."""
    proxy = Proxy(s3.port)
    yield proxy
    proxy.close()
