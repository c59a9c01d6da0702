"""The contract of the data plane: deaths, freezes and restarts of shards, strangers, and messages of any content."""

import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.address import parse_address
from headrace.deadline import Deadline
from headrace.lifecycle import ExitCode
from headrace.pserver.errors import InvalidShardCall, ShardUnavailable, StaleGeneration, StepTimedOut
from headrace.pserver.protocol import frames
from headrace.pserver.protocol.frames import DataCall, DataRequest, TableNumbers
from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.server.commands import DigestRows
from headrace.pserver.server.shard_server import ShardServer
from headrace.pserver.server.step_calls import StepCalls
from headrace.rpc import data_sockets
from headrace.rpc.data_sockets import DataAddress, DataConnection, DataListener, KeyPair
from headrace.service.cluster.child import ForkingStarter
from headrace.service.cluster.runtime import MODULES, PYTHON, WorkerRole
from tests.contract import shards_world as w
from tests.fakes.rendezvous import RendezvousHere
from tests.s3_server import Proxy

WAYS = ["socket", "port"]
SOON_S = 30.0
"""For what is promised within a second or so, on a machine that is busy."""
WIDTHS = {"default": 5, "other": 3}


def connect(address, **changes):
    return w.remote([address], **changes)


class Process:
    """`python -m headrace.pserver`, whose data plane is at a socket, or at a port where a file is in the way."""

    def __init__(self, starter: ForkingStarter, folder: Path, way: str, num_ranks: int = 1) -> None:
        self._starter, self.child = starter, None
        self.rendezvous = RendezvousHere(folder, "shard-0")
        where = {"socket": folder / "shard-0.socket", "launcher": self.rendezvous.contact("shard-0")}
        told = w.process(0, 1, num_ranks, w.TABLES, **where)
        (folder / "config.json").write_text(told.model_dump_json())
        self._folder, self._way = folder, way
        if way == "port":
            (folder / "shard-0.data").touch()
        self.start()

    def start(self) -> None:
        self.rendezvous.forget()
        command = (*PYTHON, "headrace.pserver", "--config", str(self._folder / "config.json"))
        self.child = self._starter.start(command, self._folder)
        self.address = self.rendezvous.address("shard-0", self._alive)

    def _alive(self) -> None:
        assert not self.child.ended.done()

    def freeze(self) -> None:
        """Stop every thread; it takes a moment until all have."""
        self.child.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.child.started.result()[0]}/task")
        while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in tasks.glob("*/stat")):
            time.sleep(0.001)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """The exit code."""
        child, self.child = self.child, None
        child.signal(number)
        code = child.wait()
        child.release()
        child.output.close()
        return code


@pytest.fixture(scope="module")
def starter():
    """What shards load they load once for all tests."""
    with ForkingStarter(MODULES[WorkerRole.SHARD]) as forking:
        yield forking


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def start(starter, tmp_path, way):
    started = []

    def begin(**changes):
        started.append(Process(starter, tmp_path, way, **changes))
        return started[-1]

    yield begin
    for process in started:
        if process.child is not None:
            process.end()
        process.rendezvous.close()


@contextmanager
def closing_listener(listener):
    try:
        yield listener
    finally:
        listener.close(0)


@contextmanager
def serving(folder, way, **changes):
    """A server in this process, and where its data plane is."""
    with ShardServer(
        w.process(0, 1, 1, w.TABLES, **changes), folder / "s.socket" if way == "socket" else None
    ) as server:
        yield server, server._servicer._listener.address


def exchange_in_thread(shards, batch, push, outcome, deadline):
    def run():
        try:
            outcome.append(shards.exchange(0, batch, push, batch, StepScale(64), deadline))
        except (InvalidShardCall, ShardUnavailable, StepTimedOut) as error:
            outcome.append((error, time.monotonic()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while shards.unanswered() != [0]:
        time.sleep(0.001)
    return thread


def pulled(shards, tables):
    """The batch of `tables`, prepared and pulled in a new pass."""
    shards.open_pass(1, w.soon())
    batch = shards.prepare(tables, learn=True)
    shards.pull(batch, w.soon())
    return batch


# --- deaths


def test_a_killed_shard_is_known_within_a_second_and_not_at_the_deadline(start):
    process, outcome = start(num_ranks=2), []
    with closing(connect(process.address, world=2)) as shards:
        batch = pulled(shards, {"default": w.keys(1, 2)})
        push = {"default": w.push_of(w.keys(1, 2), 5, 0)}
        waiting = exchange_in_thread(shards, batch, push, outcome, Deadline.after(600))
        process.end()
        begin_s = time.monotonic()
        waiting.join(60)
        ((error, at_s),) = outcome
        assert isinstance(error, ShardUnavailable) and "did not answer in 5 attempts" in str(error)
        assert at_s - begin_s < SOON_S
        with pytest.raises(ShardUnavailable):
            shards.pull(batch, w.soon())


def test_a_deadline_may_be_longer_than_a_poll(way, tmp_path):
    server = ShardServer(w.process(0, 1, 2, w.TABLES), tmp_path / "s.socket" if way == "socket" else None)
    with server, closing(connect(server.address, world=2)) as shards:
        with closing(connect(server.address, world=2, rank=1)) as other:
            for each in (shards, other):
                each.open_pass(1, w.soon())
            batch = shards.prepare({"default": w.keys(1, 2)}, learn=True)
            push, outcome = {"default": w.push_of(w.keys(1, 2), 5, 0)}, []
            shards.pull(batch, w.soon())
            waiting = exchange_in_thread(shards, batch, push, outcome, Deadline.after(100 * 86400))
            time.sleep(0.1)
            other.exchange(0, None, None, None, StepScale(64), w.soon())
            waiting.join(SOON_S)
            assert list(outcome[0]) == ["default"]


def test_a_client_that_closes_ends_the_calls_that_a_thread_waits_for(way, tmp_path):
    outcome = []
    with ShardServer(w.process(0, 1, 2, w.TABLES), tmp_path / "s.socket" if way == "socket" else None) as server:
        with closing(connect(server.address, world=2)) as shards:
            shards.open_pass(1, w.soon())
            waiting = exchange_in_thread(shards, None, None, outcome, Deadline.after(600))
        waiting.join(SOON_S)
    assert "was closed during a call" in str(outcome[0][0])


def test_a_shard_that_stops_says_so_to_all_that_wait(start):
    process, outcome = start(num_ranks=2), []
    with closing(connect(process.address, world=2)) as shards:
        shards.open_pass(1, w.soon())
        waiting = exchange_in_thread(shards, None, None, outcome, Deadline.after(600))
        code = process.end(signal.SIGTERM)
        waiting.join(60)
        assert isinstance(outcome[0][0], ShardUnavailable)
    assert code == 0


def break_connections(port):
    """Shut the connections of this process to `port`, as a network does that drops them."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            if connection.getpeername()[1:2] == (port,):  # that of a unix socket is a text
                connection.shutdown(socket.SHUT_RDWR)


def test_a_frozen_shard_that_wakes_goes_on_and_counts_each_push_once(start, way):
    process, outcome = start(), []
    one = {"default": w.keys(1, 2)}
    with closing(connect(process.address)) as shards:
        batch = pulled(shards, one)
        process.freeze()
        push = {"default": w.push_of(one["default"], 5, 0)}
        waiting = exchange_in_thread(shards, batch, push, outcome, w.soon())
        if way == "port":  # until it is noticed, and the call is to be repeated
            link = shards._steps._links[0]
            break_connections(int(link.connection.socket.last_endpoint.rpartition(b":")[2]))
            calls = link.open
            while any(call.again_at_s is None for call in list(calls.values())):
                time.sleep(0.001)
        process.child.signal(signal.SIGCONT)
        waiting.join(60)
        shards.close_pass(0, w.soon())
        digest = shards.call(DigestRows(), w.soon())
    with w.job(0) as plain:
        w.train(plain.one, 1, [one], seed=0, steps=1)
        assert plain.one.call(DigestRows(), w.soon()) == digest
        prepared = plain.one.prepare(one, learn=False)
        assert (outcome[0]["default"] == plain.one.pull(prepared, w.soon())["default"]).all()


def test_one_long_message_over_a_slow_link_breaks_no_connection():
    keys, size = KeyPair.make(), 3 << 20
    with closing_listener(DataListener(None, 2 * size)) as listener, zmq.Context() as context:
        listener.allow(keys.public)
        with closing(Proxy(parse_address(listener.address.address)[1])) as proxy:
            proxy.slow(0.01)  # 16 KiB each: two seconds in all
            at = DataAddress(f"127.0.0.1:{proxy.port}", key=listener.address.key)
            with closing(DataConnection(context, at, keys, 2 * size)) as connection:
                data_sockets.send(connection.socket, [b"go"])
                assert listener.admission.poll(20_000)
                listener.admit()
                assert listener.router.poll(20_000)
                peer, _ = listener.router.recv_multipart()
                data_sockets.send(listener.router, [peer, bytes(size)])
                assert connection.socket.poll(20_000) and not connection.broken()
                assert len(connection.socket.recv()) == size


def test_a_frozen_shard_is_named_at_the_deadline(start):
    process = start()
    with closing(connect(process.address)) as shards:
        batch = pulled(shards, {"default": w.keys(1)})
        process.freeze()
        with pytest.raises(StepTimedOut, match="shard 0 at .* did not answer in time"):
            shards.exchange(0, None, None, None, StepScale(1), Deadline.after(0.4))
        process.child.signal(signal.SIGCONT)
        assert len(shards.pull(batch, w.soon())["default"]) == 1  # the late answer is not taken for this one


def test_a_shard_that_starts_again_behind_its_address_refuses_what_it_does_not_know(start):
    process = start()
    with closing(connect(process.address)) as shards:
        batch = pulled(shards, {"default": w.keys(1)})
        process.end()
        process.start()
        if process.address.startswith("unix:"):
            with pytest.raises(InvalidShardCall, match="never announced batch"):
                shards.pull(batch, w.soon())
            with pytest.raises(InvalidShardCall, match="pass 0 is closed"):
                shards.exchange(0, None, None, None, StepScale(1), w.soon())
            assert shards.look({"default": w.keys(1)}, w.soon())["default"].tolist() == [[0.0] * 5]
    with closing(connect(process.address)) as shards:
        assert w.train(shards, 1, [{"default": w.keys(1)}], seed=0, steps=1)
        assert process.end(signal.SIGTERM) == 0


def test_a_newer_generation_behind_the_same_address_refuses_the_older_one(start, tmp_path):
    process = start()
    with closing(connect(process.address)) as shards:
        batch = pulled(shards, {"default": w.keys(1)})
        process.end()
        told = json.loads((tmp_path / "config.json").read_text()) | {"generation": 2}
        (tmp_path / "config.json").write_text(json.dumps(told))
        process.start()
        with pytest.raises(StaleGeneration, match="generation 2 of the job's workers, the caller of 1"):
            shards.pull(batch, w.soon())


def test_nothing_is_left_of_a_socket(tmp_path):
    with serving(tmp_path, "socket") as (_, at):
        folder = tmp_path / "s.data"
        assert at.address == f"unix:{folder}/socket" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


@pytest.mark.parametrize("length", [107, 108, 900])
def test_a_socket_may_have_a_path_of_any_length(tmp_path, length):
    folder = tmp_path
    while (missing := length - len(str(folder)) - len("/s.data/socket")) > 0:
        folder /= "x" * max(1, min(200, missing - 1))
    folder.mkdir(parents=True, exist_ok=True)
    num_open = []
    for _ in range(3):
        with serving(folder, "socket") as (server, at), closing(connect(server.address)) as shards:
            assert at.ticket and len(at.address) >= length
            assert w.train(shards, 1, [{"default": w.keys(1)}], seed=0, steps=1)
        del server, shards
        gc.collect()
        num_open.append(len(os.listdir("/proc/self/fd")))
    assert num_open[2] <= num_open[0]


def buffers_of_unix_sockets():
    """Bytes that each unix socket of this process may send before its peer reads."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=int(name))
            if connection.family == socket.AF_UNIX:
                found.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
            connection.detach()
    return found


def test_both_ends_of_a_socket_get_as_large_a_buffer_as_the_kernel_allows(tmp_path):
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    wanted = 2 * min(allowed, data_sockets.SEND_BUFFER_BYTES)  # the kernel doubles it for its own bookkeeping
    before = buffers_of_unix_sockets().count(wanted)
    with serving(tmp_path, "socket") as (server, _), closing(connect(server.address)) as shards:
        assert w.train(shards, 1, [{"default": w.keys(1)}], seed=0, steps=1)
        assert buffers_of_unix_sockets().count(wanted) - before == 4  # of announcements and steps, at both ends


# --- endings of a server

FAILING = """
from headrace.pserver import __main__ as shard
from headrace.pserver.server.data_server import DataServer


def fail(self):
    raise RuntimeError("nobody foresaw this")


DataServer._give_up_late = fail
shard.main()
"""


def test_an_error_that_nobody_foresaw_ends_the_shard_and_is_told(tmp_path):
    command = [sys.executable, "-c", FAILING, "--config", str(tmp_path / "config.json")]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True, "text": True}
    with RendezvousHere(tmp_path, "shard-0") as rendezvous:
        where = {"socket": tmp_path / "shard-0.socket", "launcher": rendezvous.contact("shard-0")}
        (tmp_path / "config.json").write_text(w.process(0, 1, 1, w.TABLES, **where).model_dump_json())
        child = subprocess.Popen(command, **pipes)
        try:
            with closing(connect(rendezvous.address("shard-0"))) as shards, pytest.raises(ShardUnavailable):
                shards.pull(shards.prepare({"default": w.keys(1)}, learn=True), w.soon())
            said = child.communicate(timeout=20)[1]
        finally:
            child.kill()
            child.wait()
    assert child.returncode == ExitCode.BUG
    assert said.rstrip().endswith("RuntimeError: nobody foresaw this")


def test_an_announcement_that_waits_for_memory_keeps_no_shard_from_closing(tmp_path, way, monkeypatch, caplog):
    waiting, go_on = threading.Event(), threading.Event()

    def wait(*_):
        waiting.set()
        go_on.wait(60)

    monkeypatch.setattr("headrace.pserver.server.data_server.CLOSE_S", 0.05)
    monkeypatch.setattr(StepCalls, "announce", wait)
    tables = {"default": w.TABLES["default"].model_copy(update={"memory": 1 << 24})}
    socket = tmp_path / "s.socket" if way == "socket" else None
    with ShardServer(w.process(0, 1, 1, tables, live=str(tmp_path / "live")), socket) as server:
        with closing(w.remote([server.address], tables)) as shards:
            for sign in (1, 2):  # the second one waits for the first, and never begins
                shards.prepare({"default": w.keys(sign)}, learn=True)
            assert waiting.wait(SOON_S)
    assert "an announcement has not ended" in caplog.text
    waiting.clear()
    go_on.set()
    (thread,) = (announcer._thread for announcer in server._data._announcers)
    thread.join(SOON_S)
    assert not thread.is_alive() and not waiting.is_set()


# --- strangers


@contextmanager
def connected(at, keys):
    with zmq.Context() as context, closing(DataConnection(context, at, keys, 1 << 20)) as connection:
        yield connection


def reaches(at, keys, caller=1):
    """Whether a call is answered; otherwise the connection is refused."""
    request = DataRequest(DataCall.PULL, caller, 0, 5, 1.0, batch=1)
    with connected(at, keys) as connection:
        with suppress(zmq.Again):  # it may be refused by now
            data_sockets.send(connection.socket, [frames.encode_request(request, TableNumbers(WIDTHS))])
        poller = zmq.Poller()
        poller.register(connection.socket, zmq.POLLIN)
        poller.register(connection.events, zmq.POLLIN)
        while poller.poll(20_000):
            if (message := data_sockets.receive(connection.socket)) is not None:
                assert frames.decode_reply(message[0], TableNumbers(WIDTHS)).request == 5
                return True
            if connection.broken():
                return False
        raise AssertionError("neither answered nor refused")


def test_only_the_ticket_opens_a_socket(tmp_path):
    keys = KeyPair.make()
    with serving(tmp_path, "socket") as (_, at):
        assert reaches(at, keys)
        for ticket in ("x", at.ticket[:-1], at.ticket.upper() + "x"):
            assert not reaches(DataAddress(at.address, ticket), keys)
        assert reaches(at, keys)


def test_only_admitted_keys_and_the_right_shard_open_a_port(tmp_path):
    keys, other = KeyPair.make(), KeyPair.make()
    with serving(tmp_path, "port") as (server, at):
        assert not reaches(at, keys)
        server._servicer._listener.allow(keys.public)
        assert reaches(at, keys) and not reaches(at, other)
        assert not reaches(DataAddress(at.address, key=other.public), keys)  # not the shard it takes itself for
        with pytest.raises(InvalidShardCall, match="is no public key"):
            bad = KeyPair("x" * 39, other.secret)
            with closing(connect(server.address)) as shards:
                shards._calls.keys = bad
                shards.look({"default": w.keys(1)}, w.soon())


@pytest.mark.parametrize("mechanism", ["none", "password"])
def test_without_a_key_nothing_reaches_a_port(tmp_path, mechanism):
    with serving(tmp_path, "port") as (_, at), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.reconnect_ivl = 0, -1
        if mechanism == "password":
            socket.plain_username, socket.plain_password = b"headrace", b"x"
        with closing(socket.get_monitor_socket()) as events:
            socket.connect(f"tcp://{at.address}")
            seen = set()
            while not seen & {zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}:
                seen.add(int(zmq.utils.monitor.recv_monitor_message(events)["event"]))
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen
            socket.disable_monitor()


def test_the_wrong_secret_does_not_get_a_ticket(tmp_path, way):
    with serving(tmp_path, way) as (server, _), pytest.raises(InvalidShardCall, match="another job"):
        connect(server.address, secret="another")


# --- messages of any content


def request_of(call, **more):
    return DataRequest(call, 1, 0, 5, 1.0, **more)


VALID = [
    frames.encode_request(request, TableNumbers(WIDTHS))
    for request in (
        request_of(DataCall.ANNOUNCE, batch=1 << 40, learn=True, parts=(("default", 2),)),
        request_of(DataCall.PULL, batch=9),
        request_of(DataCall.EXCHANGE, batch=9, following=9, pass_number=1, parts=(("default", 2), ("other", 1))),
    )
]


@st.composite
def malformed(draw):
    """Frames that begin like a call, or like nothing."""
    header = bytearray(draw(st.sampled_from(VALID)))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(header) - 1))
        header[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=12))
    sizes = st.sampled_from([0, 1, 4, 8, 16, 40])
    rest = [os.urandom(size) for size in draw(st.lists(sizes, max_size=7))]
    return draw(st.sampled_from([[bytes(header), *rest], rest or [b""]]))


def test_no_message_ends_a_shard_or_changes_its_rows(tmp_path, way):
    with serving(tmp_path, way) as (server, at), closing(connect(server.address)) as shards:
        shards.open_pass(1, w.soon())
        batch = shards.prepare({"default": w.keys(1, 2)}, learn=True)
        before = shards.pull(batch, w.soon())["default"].tobytes()
        keys, data = KeyPair.make(), server._data
        server._servicer._listener.allow(keys.public)
        with connected(at, keys) as connection:

            @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
            @given(st.lists(malformed(), min_size=1, max_size=8))
            def send(messages):
                for message in messages:
                    data_sockets.send(connection.socket, message)
                assert shards.pull(batch, w.soon())["default"].tobytes() == before
                while data_sockets.receive(connection.socket) is not None:
                    pass
                assert not connection.broken()

            send()
        assert not data._held and len(server._servicer.steps._pushes) == 0
        shards.exchange(0, batch, {"default": w.push_of(w.keys(1, 2), 5, 0)}, None, StepScale(64), w.soon())


def test_a_frame_beyond_the_bound_ends_its_connection_alone(tmp_path, way):
    with serving(tmp_path, way, max_message=1 << 16) as (server, at), closing(connect(server.address)) as shards:
        shards.open_pass(1, w.soon())
        keys = KeyPair.make()
        server._servicer._listener.allow(keys.public)
        with connected(at, keys) as connection:
            data_sockets.send(connection.socket, [VALID[1], bytes(1 << 17)])
            reason = ""
            while not reason and connection.events.poll(20_000):
                reason = connection.broken()
            assert reason == "the connection was closed"
        batch = shards.prepare({"default": w.keys(1, 2)}, learn=True)
        assert len(shards.pull(batch, w.soon())["default"]) == 2


def test_a_peer_that_reads_no_answers_keeps_nobody_waiting(tmp_path, way):
    with serving(tmp_path, way) as (server, at), closing(connect(server.address)) as shards:
        batch = pulled(shards, {"default": w.keys(*range(2000))})
        number = batch.number
        keys = KeyPair.make()
        server._servicer._listener.allow(keys.public)
        header = frames.encode_request(request_of(DataCall.PULL, batch=number), TableNumbers(WIDTHS))
        with connected(at, keys) as connection:
            connection.socket.sndtimeo = 20_000
            for _ in range(3000):  # 120 MB of answers
                connection.socket.send(header)
            assert len(shards.pull(batch, w.soon())["default"]) == 2000
