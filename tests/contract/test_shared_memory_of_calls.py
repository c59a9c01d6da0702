"""The contract of arrays beside messages: the same bits as in them, and no call reads or writes those of another."""

import struct
from contextlib import closing
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.pserver.errors import InvalidShardCall, StepTimedOut
from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.server.commands import DigestRows
from headrace.pserver.server.shard_server import ShardServer
from headrace.rpc import data_sockets
from headrace.rpc.data_sockets import MemoryOffer, SharedMemory
from tests.contract import shards_world as w

SIGNS = range(3000)
BATCHES = [{"default": w.keys(*SIGNS)}, {"default": w.keys(*SIGNS[1000:]), "other": w.keys(*SIGNS[:50])}]


def connect(server, rank=0, world=1):
    return w.remote([server.address], rank=rank, world=world)


@pytest.fixture
def serve(tmp_path):
    """A server in this process at a unix socket."""
    servers = []

    def begin(num_ranks=1):
        folder = Path(tmp_path) / str(len(servers))
        folder.mkdir()
        servers.append(ShardServer(w.process(0, 1, num_ranks, w.TABLES), folder / "s.socket"))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def refuse(*_):
    raise OSError("not here")


def memory_of(shards):
    return shards._steps._links[0].memory


def trained(shards):
    rows, _ = w.train(shards, 1, BATCHES * 3, seed=1, steps=6)
    return [{name: each.tobytes() for name, each in step.items()} for step in rows], shards.call(DigestRows(), w.soon())


@pytest.mark.parametrize("end", ["create", "open"])
def test_rows_are_the_same_beside_messages_and_in_them(serve, end, monkeypatch):
    with closing(connect(serve())) as shards:
        beside = trained(shards)
        assert memory_of(shards) is not None
    monkeypatch.setattr(SharedMemory, end, refuse)
    with closing(connect(serve())) as shards:
        assert trained(shards) == beside
        assert memory_of(shards) is None


def test_arrays_of_steps_are_not_in_messages(serve, monkeypatch):
    with closing(connect(serve())) as shards:
        shards.open_pass(1, w.soon())
        one = BATCHES[0]
        batch = shards.prepare(one, learn=True)
        shards.pull(batch, w.soon())
        sizes, send = [], data_sockets.send

        def note(socket, message):
            sizes.append(sum(memoryview(frame).nbytes for frame in message))
            send(socket, message)

        monkeypatch.setattr(data_sockets, "send", note)
        push = {"default": w.push_of(one["default"], 5, 0)}
        assert len(shards.exchange(0, batch, push, batch, StepScale(64), w.soon())["default"]) == len(SIGNS)
        assert len(sizes) == 2 and max(sizes) < 200


def test_arrays_without_room_are_in_messages(serve, monkeypatch):
    with closing(connect(serve())) as shards:
        beside = trained(shards)
    monkeypatch.setattr("headrace.rpc.data_sockets.HALF_BYTES", 1 << 14)
    with closing(connect(serve())) as shards:
        assert trained(shards) == beside
        assert memory_of(shards) is not None


def test_a_push_that_waits_for_another_rank_is_not_read_from_the_memory_later(serve):
    one = {"default": w.keys(*SIGNS)}
    pushes = [{"default": w.push_of(one["default"], 5, seed)} for seed in (1, 2)]
    digests = []
    for overwrite in (False, True):
        server = serve(num_ranks=2)
        with closing(connect(server, 0, 2)) as first, closing(connect(server, 1, 2)) as second:
            batches = []
            for shards in (first, second):
                shards.open_pass(1, w.soon())
                batches.append(shards.prepare(one, learn=True))
                shards.pull(batches[-1], w.soon())
            memory = memory_of(first)
            with pytest.raises(StepTimedOut):
                first.exchange(0, batches[0], pushes[0], None, StepScale(64), Deadline.after(0.3))
            if overwrite:
                memory._bytes[memory._mine : memory._mine + (1 << 20)] = 255
            second.exchange(0, batches[1], pushes[1], None, StepScale(64), w.soon())
            first.exchange(0, batches[0], pushes[0], None, StepScale(64), w.soon())
            w.World([first, second]).each(lambda _, shards: shards.close_pass(0, w.soon()))
            digests.append(first.call(DigestRows(), w.soon()))
    assert digests[0] == digests[1]


def test_a_call_that_is_given_up_takes_its_memory_along(serve):
    server = serve()
    with closing(connect(server)) as shards:
        shards.open_pass(1, w.soon())
        batch = shards.prepare(BATCHES[0], learn=True)
        rows = shards.pull(batch, w.soon())["default"]
        before, push = memory_of(shards), {"default": w.push_of(w.keys(*SIGNS), 5, 0)}
        with server._servicer.host.turn, pytest.raises(StepTimedOut, match="did not answer in time"):
            shards.exchange(0, batch, push, batch, StepScale(64), Deadline.after(0.2))
        assert memory_of(shards) is None
        learnt = shards.pull(batch, w.soon())["default"]
        assert memory_of(shards).number != before.number and (learnt != rows).any()
        again = shards.exchange(0, batch, push, batch, StepScale(64), w.soon())
        assert (again["default"] == learnt).all()


def test_memories_of_closed_connections_are_forgotten(serve):
    server = serve()
    for _ in range(9):
        with closing(connect(server)) as shards:
            shards.look(BATCHES[0], w.soon())
    assert len(server._servicer.memories._memories[0]) == 4


@pytest.mark.parametrize(
    "places",
    [
        lambda number: struct.pack("<Q", number ^ 1),
        lambda number: struct.pack("<QQQ", number, 0, 60_000),
        lambda number: struct.pack("<QQQ", number, 1 << 62, 60_000),
        lambda number: b"",
    ],
    ids=["another memory", "before the halves", "beyond the memory", "no places"],
)
def test_a_call_is_refused_whose_arrays_are_not_where_they_may_be(serve, places, monkeypatch):
    with closing(connect(serve())) as shards:
        shards.open_pass(1, w.soon())
        batch = shards.prepare(BATCHES[0], learn=True)
        before = shards.pull(batch, w.soon())["default"]
        memory, push = memory_of(shards), {"default": w.push_of(w.keys(*SIGNS), 5, 0)}
        with monkeypatch.context() as patch, pytest.raises(InvalidShardCall):
            patch.setattr(memory, "places_of", lambda _: places(memory.number))
            shards.exchange(0, batch, push, None, StepScale(64), w.soon())
        assert (shards.pull(batch, w.soon())["default"] == before).all()


def test_a_memory_is_not_opened_where_messages_go_to_a_port(tmp_path):
    (tmp_path / "s.data").touch()
    with ShardServer(w.process(0, 1, 1, w.TABLES), tmp_path / "s.socket") as server:
        with closing(connect(server)) as shards:
            trained(shards)
            assert memory_of(shards) is None
            assert not server._servicer.memories.open(0, MemoryOffer(0, 0, 0))
