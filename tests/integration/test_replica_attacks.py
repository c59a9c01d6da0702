"""A replica's process with few descriptors, and strangers who take all that they can before they show a token."""

import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from tests.fakes.served import Job

pytestmark = pytest.mark.long

TOKEN = "0123456789abcdef"
MINE = {"Authorization": f"Bearer {TOKEN}"}
DESCRIPTORS = 96
WAIT_S = 30


class Replica:
    def __init__(self, folder):
        self.job = Job(folder / "exports")
        self.job.export(1)
        self.log = folder / "log"
        (folder / "token").write_text(TOKEN)
        address = folder / "address"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.health = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "headrace.service", "replica", "--exports", str(self.job.folder)]
        command += ["--listen", "127.0.0.1:0", "--address-file", str(address), "--token-file", str(folder / "token")]
        command += ["--grpc-listen", "127.0.0.1:0"]
        command += ["--health", self.health]
        with self.log.open("wb") as log:
            few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))  # noqa: E731
            self.child = subprocess.Popen(command, stderr=log, preexec_fn=few)  # noqa: PLW1509  # no threads here
        self.until(address.exists)
        host, port = address.read_text().split(":")
        self.place = host, int(port)
        self.grpc_place = host, int(re.search(r"answering gRPC on .*:(\d+)", self.log.read_text())[1])
        self.until(lambda: self.version() == "1")

    def until(self, come):
        end_s = time.monotonic() + WAIT_S
        while not come():
            assert self.child.poll() is None and time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.05)

    def version(self):
        with suppress(httpx.TransportError, KeyError):
            told = httpx.get(f"http://{self.place[0]}:{self.place[1]}/v2/models/small", headers=MINE, timeout=WAIT_S)
            return told.json()["parameters"]["version"]

    def connect(self, place=None):
        return socket.create_connection(place or self.place, WAIT_S)

    def calls(self, method, request, **more):
        """The bytes of an answer over gRPC."""
        with grpc.insecure_channel("{}:{}".format(*self.grpc_place)) as channel:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            return call(request, timeout=WAIT_S, wait_for_ready=True, **more)

    def memory(self):
        """At its most, in bytes."""
        told = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", told)[1]) << 10


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    made = Replica(tmp_path_factory.mktemp("attacked"))
    try:
        yield made
    finally:
        made.child.send_signal(signal.SIGTERM)
        assert made.child.wait(WAIT_S) == 0


def test_idle_connections_stop_neither_updates_nor_others_nor_health_and_fill_no_log(replica):
    held = [replica.connect() for _ in range(2 * DESCRIPTORS)]
    replica.job.export(2)
    replica.until(lambda: b"t1/0000000002" in replica.log.read_bytes())
    replica.until(lambda: replica.version() == "2")
    for page in (f"http://{replica.place[0]}:{replica.place[1]}/v2/health/ready", f"http://{replica.health}/ready"):
        assert httpx.get(page, timeout=2).status_code == 200
    for each in held:
        each.close()
    assert "Too many open files" not in replica.log.read_text()
    assert replica.log.stat().st_size < 2000


def test_a_head_without_an_end_takes_no_memory(replica):
    before = replica.memory()
    for head in (b"GET /v2 HTTP/1.1\r\nx: ", b"GET /v2 HTTP/1.1\r\n"):
        with replica.connect() as connection, pytest.raises(OSError):
            connection.sendall(head)
            for _ in range(64):
                connection.sendall(b"x: y\r\n" * 180_000 if head.endswith(b"\n") else b"x" * (1 << 20))
    assert replica.memory() - before < 24 << 20


def test_invalid_requests_fill_no_log(replica):
    before = replica.log.stat().st_size
    for _ in range(300):
        with replica.connect() as connection:
            connection.sendall(b"nothing that HTTP knows\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")
    assert 0 < replica.log.stat().st_size - before < 1000
    assert replica.version() is not None


def test_idle_connections_for_grpc_stop_neither_updates_nor_http(replica):
    held = [replica.connect(replica.grpc_place) for _ in range(2 * DESCRIPTORS)]
    replica.job.export(3)
    replica.until(lambda: replica.version() == "3")
    for each in held:
        each.close()
    assert replica.calls("ServerReady", b"") == b"\x08\x01"
    assert "Too many open files" not in replica.log.read_text()


def test_strangers_who_send_long_messages_over_grpc_take_no_memory(replica):
    before = replica.memory()
    for _ in range(8):
        with pytest.raises(grpc.RpcError) as found:
            replica.calls("ModelInfer", bytes(8 << 20), compression=grpc.Compression.Gzip)
        assert found.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert replica.memory() - before < 24 << 20
