"""When a shard publishes to subscribers; the bound on queued messages; messages are decoded as they were encoded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.feed import feed_messages
from headrace.pserver.feed import payloads as wire
from headrace.pserver.feed.publisher import ShardFeed, SubscriberTooSlow, Subscription, TooManySubscribers
from headrace.pserver.feed.table_changes import PresentRows, TableDelta
from headrace.pserver.proto import feed_pb2 as pb
from headrace.pserver.protocol.table_operations import ForgetRow, ShrinkRows
from headrace.pserver.tables.table import ShardTable
from tests.contract.shards_world import keys, push_of


def part_of(loaded):
    return feed_messages.part_of(pb.FeedPart.FromString(wire.encoded(loaded)))


class World:
    """One table whose passes and sweeps a test makes happen, and its feed."""

    def __init__(self):
        self.table = ShardTable("t", TableSection(dim=2, delete_below=0.5), 1)
        self.feed = ShardFeed({"t": self.table.feed})
        self.table.deletions.on_swept = self.feed.swept
        self.version = 0

    def learn(self, *signs, clicks=True):
        """A pass in which these signs occur; below 0.5 only without clicks."""
        self.version += 1
        self.table.open_pass()
        batch = keys(*signs)
        rows = self.table.rows.reserve(batch.keys_U, batch.group_U)
        self.table.gather(rows)
        push = push_of(batch, 3, self.version, clicks)
        push.click_U[:] = clicks
        self.table.apply(rows, push, 1, self.version)
        self.table.rows.release(rows)
        self.close()

    def close(self):
        self.feed.seal()
        self.table.close_pass(0)
        self.feed.closed(self.version)

    def subscribe(self, since=0, generation=1):
        subscription = Subscription()
        base = [part_of(m) for m in self.feed.open(subscription, since, generation)]
        return subscription, base

    def sweep(self):
        for _ in self.table.deletions.sweep():
            pass


@pytest.fixture
def world():
    return World()


def heard(subscription):
    """By message: its kind and version, or signs told and gone."""
    found = []
    for message in subscription.waiting():
        part = part_of(message)
        found.append(part.version or (signs(part, "rows"), signs(part, "gone")))
    return found


def signs(part, what):
    told = part.tables["t"]
    chosen = set((told.rows.keys_P if what == "rows" else told.gone_U).tolist())
    return [sign for sign, key in enumerate(keys(*range(100)).keys_U.tolist()) if key in chosen]


def test_what_changed_and_went_is_told_when_the_rank0_says_so_and_once(world):
    world.learn(1, 2)
    subscription, base = world.subscribe()
    assert base[0].whole and signs(base[1], "rows") == [1, 2]
    world.learn(2, 3)
    world.table.operate(ForgetRow(table="t", group=1, key=int(keys(1).keys_U[0])), 2)
    assert heard(subscription) == []
    world.feed.publish(2)
    assert heard(subscription) == [([2, 3], []), ([], [1]), 2]
    world.feed.publish(2)
    assert heard(subscription) == [2]


def test_a_version_is_held_until_its_sweep_is_over(world):
    world.learn(1)
    world.learn(2, clicks=False)
    subscription, _ = world.subscribe()
    world.learn(3)
    world.table.operate(ShrinkRows(table="t"), 3)
    world.feed.publish(3)
    assert heard(subscription) == []  # what goes is not known
    world.sweep()
    assert heard(subscription) == [([3], []), ([], [2]), 3]


def test_a_version_whose_sweep_is_not_over_at_the_next_close_is_told_with_that(world):
    world.learn(1)
    world.learn(2, 4, clicks=False)
    subscription, _ = world.subscribe()
    world.learn(3)
    world.table.operate(ShrinkRows(table="t"), 3)
    world.feed.publish(3)
    world.learn(1, 4)  # 4 is gone at 3, and a new row
    world.table.operate(ForgetRow(table="t", group=1, key=int(keys(3).keys_U[0])), 4)
    world.sweep()
    assert heard(subscription) == []
    world.feed.publish(4)
    assert heard(subscription) == [([1, 4], []), ([], [2, 3]), 4]


def test_who_comes_while_a_version_is_held_is_not_told_it_as_one(world):
    """Its base may have rows of the pass after it."""
    world.learn(1, 2, clicks=False)
    first, _ = world.subscribe()
    world.learn(3)
    world.table.operate(ShrinkRows(table="t"), 2)
    world.feed.publish(2)
    second, base = world.subscribe()
    assert signs(base[1], "rows") == [3]  # absent is absent, swept or not
    world.sweep()
    assert heard(first) == [([3], []), ([], [1, 2]), 2] and heard(second) == []


def test_what_changed_since_a_version_is_told_as_long_as_it_is_known(world, monkeypatch):
    world.feed.begin(0)
    for version in range(1, 6):
        world.learn(version, 10)
    world.table.operate(ForgetRow(table="t", group=1, key=int(keys(3).keys_U[0])), 5)
    _, base = world.subscribe(since=4)
    told = [(signs(part, "rows"), signs(part, "gone")) for part in base[1:]]
    assert not base[0].whole and told == [([], [3]), ([5, 10], [])]
    assert world.subscribe(since=6)[1][0].whole  # a version of somebody else's
    assert world.subscribe(since=4, generation=2)[1][0].whole  # this job was restored at 0
    monkeypatch.setattr("headrace.pserver.feed.table_changes.MAX_DELETED_KEYS", 1)
    for sign in (1, 2):
        world.table.operate(ForgetRow(table="t", group=1, key=int(keys(sign).keys_U[0])), 5)
    assert world.subscribe(since=5)[1][0].whole


def test_other_workers_versions_count_from_the_commit_that_both_know(world):
    world.feed.begin(7)
    world.version = 7
    world.learn(1)
    _, base = world.subscribe(since=8, generation=3)
    assert not base[0].whole and signs(base[1], "rows") == [1]
    assert world.subscribe(since=6, generation=3)[1][0].whole


def test_nothing_is_noted_for_nobody(world):
    subscription, _ = world.subscribe()
    world.feed.close(subscription)
    world.learn(1)
    world.feed.publish(1)
    assert heard(subscription) == []
    again, _ = world.subscribe()
    world.feed.publish(1)
    assert heard(again) == [1]


def test_what_waits_for_one_is_bounded_but_one_version_is_kept(monkeypatch):
    monkeypatch.setattr("headrace.pserver.feed.publisher.MAX_WAITING_BYTES", 1000)
    cut = []
    subscription = Subscription(cut.append)
    large = list(feed_messages.rows(pb.FeedPart.ROWS, "t", TableDelta(present(100), np.empty(0, np.uint64))))
    subscription.put(large)
    assert len(list(subscription.waiting())) == 1 and not cut
    for _ in range(3):
        subscription.put(large)
    assert len(cut) == 1 and cut[0] > 1000
    with pytest.raises(SubscriberTooSlow, match="subscribe again"):
        list(subscription.all())


def test_what_waits_at_the_end_is_sent():
    subscription = Subscription()
    subscription.put([feed_messages.version(1)])
    subscription.end()
    subscription.put([feed_messages.version(2)])
    assert [message.message.version for message in subscription.all()] == [1]


def test_there_are_so_many_places(world, monkeypatch):
    monkeypatch.setattr("headrace.pserver.feed.publisher.MAX_SUBSCRIBERS", 2)
    first, _ = world.subscribe()
    world.subscribe()
    with pytest.raises(TooManySubscribers):
        world.subscribe()
    world.feed.close(first)
    world.subscribe()


# --- messages -------------------------------------------------------------------------------------------------------


def present(count, width=3, seed=0):
    draw = np.random.default_rng(seed)
    keys_P, group_P = draw.integers(0, 1 << 63, count).astype(np.uint64), np.arange(count).astype(np.uint16)
    return PresentRows(keys_P, group_P, draw.normal(size=(count, width)).astype(np.float32))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 4), st.integers(60, 2000))
def test_rows_and_keys_come_back_in_parts_of_a_bounded_size(num_rows, num_gone, width, part_bytes):
    told = TableDelta(present(num_rows, width), np.arange(num_gone).astype(np.uint64))
    before, feed_messages.PART_BYTES = feed_messages.PART_BYTES, part_bytes
    try:
        messages = list(feed_messages.rows(pb.FeedPart.BASE, "t", told))
    finally:
        feed_messages.PART_BYTES = before
    assert all(len(wire.encoded(message)) <= part_bytes + 40 for message in messages)
    parts = [part_of(message) for message in messages]
    rows = [part.tables["t"].rows for part in parts]
    assert b"".join(each.keys_P.tobytes() for each in rows) == told.rows.keys_P.tobytes()
    assert b"".join(each.group_P.tobytes() for each in rows) == told.rows.group_P.tobytes()
    assert b"".join(each.rows_PD.tobytes() for each in rows) == told.rows.rows_PD.tobytes()
    assert sum((part.tables["t"].gone_U.tolist() for part in parts), []) == told.gone_U.tolist()
    assert all(part.kind == pb.FeedPart.BASE for part in parts)


def test_tensors_and_facts_come_back():
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "n": np.array(7),
        "none": np.empty((0, 2), np.float32),
    }
    part = part_of(feed_messages.dense(9, tensors, {"event_time_s": 1.5}))
    assert (part.kind, part.version, part.facts) == (pb.FeedPart.VERSION, 9, {"event_time_s": 1.5})
    assert list(part.tensors) == list(tensors)
    for name, value in tensors.items():
        assert part.tensors[name].dtype == value.dtype and part.tensors[name].tolist() == value.tolist()
    introduced = part_of(feed_messages.introduction({"job": "j"}, b"graph"))
    assert introduced.facts == {"job": "j"} and introduced.onnx == b"graph"


def test_nothing_but_numbers_is_taken_for_a_tensor():
    message = pb.FeedPart(kind=pb.FeedPart.VERSION, payload=b"12345678")
    message.tensors.add(name="a", dtype="O", shape=[1])
    with pytest.raises(InvalidShardCall, match="type 'O'"):
        feed_messages.part_of(message)


def test_the_surface_of_the_feed_is_the_one_we_promised():
    messages = pb.DESCRIPTOR.message_types_by_name
    fields = {name: [(field.number, field.name) for field in message.fields] for name, message in messages.items()}
    assert fields["SubscribeRequest"] == [(1, "format"), (2, "since"), (3, "generation")]
    assert fields["FeedPart"] == [
        (1, "kind"),
        (2, "version"),
        (3, "whole"),
        (4, "tables"),
        (5, "tensors"),
        (6, "facts_json"),
        (7, "onnx"),
        (15, "payload"),
    ]
    assert fields["FeedRows"] == [(1, "table"), (2, "num_rows"), (3, "width"), (4, "num_gone")]
    assert pb.FeedPart.Kind.items() == [("BEGIN", 0), ("BASE", 1), ("READ", 2), ("ROWS", 3), ("VERSION", 4)]
    calls = pb.DESCRIPTOR.services_by_name["Feed"].methods
    assert [(call.name, call.server_streaming) for call in calls] == [("Subscribe", True), ("Poke", False)]


@given(st.integers(0, 1 << 20))
def test_a_large_payload_has_protobufs_own_encoding(num_floats):
    array = np.zeros(num_floats % 40_000, np.float32)
    loaded = wire.MessageWithArrays(pb.FeedPart(version=300), [array])
    assert wire.encoded(loaded) == pb.FeedPart(version=300, payload=array.tobytes()).SerializeToString()
