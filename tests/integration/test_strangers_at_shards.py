"""What somebody without the secret can take from a shard, a worker's Role or a feed: nothing that others miss."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.proto import role_pb2
from headrace.pserver.feed.feed_server import FeedServer
from headrace.pserver.proto import feed_pb2, shard_pb2
from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.server.commands import CountRows
from headrace.pserver.server.shard_server import ShardServer
from headrace.rpc import channels, rpc_server, unix_sockets
from headrace.rpc.role import RoleClient, serve_role
from tests.contract import shards_world as w
from tests.fakes.rendezvous import RendezvousHere

NUM_CALLS = 100
SOON_S = 30.0
NOBODY = 65534
REFUSED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


class Source:
    """Nothing is told. See pserver.feed.feed_server.FeedSource."""

    def __init__(self):
        self.num_pokes = 0

    def open(self, subscription, since, generation):
        return iter(())

    def close(self, subscription):
        pass

    def poke(self):
        self.num_pokes += 1

    def end(self):
        pass


@pytest.fixture(params=["shard at a socket", "shard at a port", "role", "feed"])
def served(request, tmp_path):
    """Address, module of messages, and a call of somebody who has the secret."""
    if request.param == "role":
        with serve_role(dict, print, w.SECRET, tmp_path / "trainer-0.socket") as role:
            with closing(RoleClient(role.address, w.SECRET)) as client:
                yield role.address, role_pb2, lambda: client.status(Deadline.after(SOON_S))
    elif request.param == "feed":
        with closing(FeedServer(Source(), w.SECRET)) as feed, channels.open_channel(feed.address) as channel:
            poke = channel.unary_unary(path_of(feed_pb2, "Poke"))
            yield feed.address, feed_pb2, lambda: poke(b"", timeout=SOON_S, metadata=channels.metadata(w.SECRET))
    else:
        path = tmp_path / "shard-0.socket" if request.param.endswith("socket") else None
        with ShardServer(w.process(0, 1, 1, w.TABLES), path) as shard:
            assert shard.address.startswith("unix:" if path else "127.0.0.1:")
            with closing(connected(shard.address)) as client:
                yield shard.address, shard_pb2, lambda: client.call(CountRows(), Deadline.after(SOON_S)).tables


def connected(address):
    return w.remote([address], max_message_bytes=1 << 28)


def path_of(module, method):
    (service,) = module.DESCRIPTOR.services_by_name.values()
    return f"/{service.full_name}/{method}"


def methods(module):
    (service,) = module.DESCRIPTOR.services_by_name.values()
    return [path_of(module, method.name) for method in service.methods]


def test_calls_whose_message_never_comes_keep_nobody_waiting(served):
    """Twelve were enough: each had a thread, which waited for its message."""
    address, module, ask = served
    over = threading.Event()

    def nothing():
        over.wait(30)
        yield b""

    with channels.open_channel(address) as channel:
        paths = methods(module)
        calls = [channel.stream_stream(paths[n % len(paths)])(nothing()) for n in range(NUM_CALLS)]
        try:
            for _ in range(3):
                ask()
            codes = set()
            for call in calls:  # each was answered without its message
                with pytest.raises(grpc.RpcError) as refused:
                    next(call)
                codes.add(refused.value.code())
            # The transport may refuse a call above `rpc_server.MAX_CALLS` itself.
            assert {grpc.StatusCode.UNAUTHENTICATED} <= codes <= {*REFUSED}
        finally:
            over.set()


def test_connections_that_ask_nothing_are_bounded_and_one_that_asked_before_goes_on(served):
    address, _, ask = served
    ask()
    held = [connect(address) for _ in range(rpc_server.MAX_CONNECTIONS + 8)]
    try:
        closed = sum(is_closed(each) for each in held[-8:])
        assert closed == 8
        ask()
    finally:
        for each in held:
            each.close()


def connect(address):
    if address.startswith(unix_sockets.SCHEME):
        connection = socket.socket(socket.AF_UNIX)
        folder, name = os.path.split(address.removeprefix(unix_sockets.SCHEME))
        descriptor = os.open(folder, os.O_PATH)
        connection.connect(f"/proc/self/fd/{descriptor}/{name}")
        os.close(descriptor)
        return connection
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), SOON_S)


def is_closed(connection):
    """Whether the other side has ended it; first it may say what protocol it speaks."""
    connection.settimeout(SOON_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture
def rendezvous(tmp_path):
    with RendezvousHere(tmp_path, "shard-0") as rendezvous:
        yield rendezvous


def memory(pid):
    """At its most, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


@pytest.mark.long
def test_a_message_that_is_refused_is_not_read(tmp_path, rendezvous):
    """Four of 200 MB took 1.2 GB; each is as long as a message may be."""
    where = {"socket": tmp_path / "shard-0.socket", "launcher": rendezvous.contact("shard-0")}
    config = w.process(0, 1, 1, w.TABLES, **where)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "headrace.pserver", "--config", str(tmp_path / "config.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        try:
            alive = lambda: None if child.poll() is None else pytest.fail("it ended")  # noqa: E731
            address = rendezvous.address("shard-0", alive)
            with closing(connected(address)) as client:
                client.call(CountRows(), w.soon())
            before, message = memory(child.pid), bytes(200 << 20)

            def send(_):
                with channels.open_channel(address, max_message_bytes=1 << 30) as channel:
                    with pytest.raises(grpc.RpcError) as refused:
                        channel.unary_unary(path_of(shard_pb2, "Call"))(message, timeout=60)
                    return refused.value.code()

            with ThreadPoolExecutor(2) as pool:
                assert set(pool.map(send, range(4))) == {grpc.StatusCode.UNAUTHENTICATED}
            assert memory(child.pid) - before < 48 << 20
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_socket_is_its_owners_alone(tmp_path):
    path = tmp_path / "shard-0.socket"
    with ShardServer(w.process(0, 1, 1, w.TABLES), path) as server:
        assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600
        with closing(connected(server.address)) as client:
            client.open_pass(1, w.soon())
            client.exchange(0, None, None, None, StepScale(1), w.soon())
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_connect_even_where_the_folder_is_open(tmp_path):
    """In /tmp, which everybody may enter."""
    folder = Path("/tmp") / f"headrace-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    path = folder / "shard-0.socket"
    script = f"import socket, os; os.setuid({NOBODY}); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    try:
        with ShardServer(w.process(0, 1, 1, w.TABLES), path):
            found = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)  # noqa: PLW1510
            assert "PermissionError" in found.stderr
    finally:
        folder.rmdir()


@pytest.mark.parametrize("length", [1, 60, 107, 108, 200, 900])
def test_a_path_of_any_length_can_be_a_sockets(tmp_path, length):
    folder = tmp_path
    while len(str(folder)) + len("/r.socket") < length:
        missing = length - len(str(folder)) - len("/r.socket")
        folder /= "x" * max(1, min(200, missing - 1))
    folder.mkdir(parents=True, exist_ok=True)
    with serve_role(lambda: {"alive": True}, print, "s", folder / "r.socket") as role:
        assert role.address == f"unix:{folder}/r.socket"
        before = os.listdir("/proc/self/fd")
        with closing(RoleClient(role.address, "s")) as client:
            assert client.status(w.soon()) == {"alive": True}
        del client
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2  # gRPC's own; none for each channel


def test_where_no_socket_can_be_a_port_is_taken_and_the_log_says_so(tmp_path, caplog):
    name = "x" * 150  # longer than a socket's address, whatever its folder is called
    with serve_role(lambda: {"alive": True}, print, "s", tmp_path / f"{name}.socket") as role:
        assert role.address.startswith("127.0.0.1:")
        with closing(RoleClient(role.address, "s")) as client:
            assert client.status(w.soon()) == {"alive": True}
    assert "cannot be a unix socket" in caplog.text and "listening on 127.0.0.1 instead" in caplog.text


def test_a_worker_whose_folder_is_gone_is_unavailable(tmp_path):
    folder = tmp_path / ("x" * 150)
    with pytest.raises(Unavailable, match="is not there: No such file or directory; has that process ended"):
        RoleClient(f"unix:{folder}/trainer-0.socket", "s")
    client = RoleClient(f"unix:{tmp_path}/trainer-0.socket", "s")
    with pytest.raises(Unavailable):
        client.status(w.soon())
    client.close()


def test_a_socket_that_a_killed_process_left_is_taken_over(tmp_path):
    with socket.socket(socket.AF_UNIX) as killed:
        descriptor = os.open(tmp_path, os.O_PATH)
        killed.bind(f"/proc/self/fd/{descriptor}/trainer-0.socket")
        os.close(descriptor)
    with serve_role(lambda: {"alive": True}, print, "s", tmp_path / "trainer-0.socket") as role:
        with closing(RoleClient(role.address, "s")) as client:
            assert client.status(w.soon()) == {"alive": True}


def test_a_connection_that_begins_no_protocol_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(rpc_server, "HANDSHAKE_MS", 200)
    with ShardServer(w.process(0, 1, 1, w.TABLES)) as server, connect(server.address) as connection:
        begin_s = time.monotonic()
        assert is_closed(connection) and time.monotonic() - begin_s < SOON_S
