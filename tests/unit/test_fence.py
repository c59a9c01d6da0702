"""The fence: of heads that write to one sequence, exactly one goes on, whatever the store does to their requests."""

import contextlib
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.blob.blob_store import open_blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import SpecError, Unavailable
from headrace.trainer.journal.fence import (
    BlobFence,
    FenceClaim,
    FenceCommit,
    FenceDamaged,
    FenceHistory,
    FenceLine,
    FenceMoved,
    FenceRecord,
    FenceRetirement,
    FenceSequence,
    LogMode,
    check_conditional_puts,
    decode,
    encode,
    key_of,
)
from headrace.trainer.journal.log import Superseded

SOON = Deadline.after(3600.0)  # from the import of this module on, so longer than all tests
OLD, NEW = "00000001-0001.log", "00000002-0001.log"
AB, CD = "ab" * 32, "cd" * 32
CONTENTS = [
    FenceClaim(log_id="a", timeline="t1", mode=LogMode.SYNC, log={"00000001-0001.log": "1 claim\n"}),
    FenceLine(file="00000001-0001.log", line="2 plan é\n"),
    FenceCommit(
        name="t1-0000000003-g1",
        since=1,
        live={"t1-0000000003-g1": AB},
        retired={"t1-0000000001-g1": 1.5},
        claimed=1,
        log_id="a",
        timeline="t1",
        highest=1,
        mode=LogMode.SYNC,
    ),
    FenceRetirement(retired={"t1-0000000001-g1": 2.5}),
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda each: each.kind)
def test_a_record_is_read_as_it_was_written(content):
    record = FenceRecord(3, "nonce", content)
    assert decode(1, encode(record)) == record


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"format":1,"kind":"dance","generation":1,"nonce":""}', b"\xff"]
)
def test_other_bytes_are_no_record(data):
    with pytest.raises(FenceDamaged, match="fence/7: not a record"):
        decode(7, data)


def test_a_record_of_a_newer_program_is_refused_as_such():
    with pytest.raises(FenceDamaged, match="newer Headrace"):
        decode(7, b'{"format":2,"kind":"dance"}')


# --- a store that loses replies, delays and reorders ------------------------------------------------------------------


class World:
    """A store and the faults of its requests, in order; between a request and its effect other heads may act."""

    name = "fence"

    def __init__(self, faults, nested):
        self.objects, self.faults, self.nested = {}, list(faults), list(nested)
        self.delayed, self.act, self.depth = [], lambda head, what: None, 0

    def put_new(self, number, data, deadline):
        fault = self.faults.pop() if self.faults else "none"
        if fault == "lost request":
            raise Unavailable("lost request")
        if fault == "delayed":
            self.delayed.append((number, data))
            raise Unavailable("delayed")
        self._let_others_act()
        free = number not in self.objects
        self.objects.setdefault(number, data)
        if fault == "lost reply":
            raise Unavailable("lost reply")
        return free

    def get(self, number, deadline):
        self._let_others_act()
        return self.objects.get(number)

    def _let_others_act(self):
        if self.nested and self.depth < 3:
            self.depth += 1
            self.act(*self.nested.pop())
            self.depth -= 1


@dataclass
class Head:
    """A head that claims, and appends lines that are all different."""

    number: int
    world: World
    sequence: FenceSequence | None = None
    busy: bool = False
    ended: bool = False
    num_lines: int = 0
    acknowledged: list = field(default_factory=list)

    def act(self, what):
        if self.busy:  # it waits for the store
            return
        self.busy = True
        try:
            if what == "claim":
                self.claim()
            elif self.sequence is not None:
                self.append(what)
        except Unavailable:
            pass  # the outcome is unknown; the next call finds out
        except FenceMoved:
            pass  # the next claim decides again
        except Superseded:
            self.ended = True
        finally:
            self.busy = False

    def claim(self):
        """A new process, which forgets what the one before it waited for."""
        sequence = FenceSequence(self.world, 0)
        sequence.generation = sequence.catch_up(SOON).generation + 1
        self.sequence, self.ended = None, False
        log_id = f"log-{self.number}"
        number = sequence.claim(FenceClaim(log_id=log_id, timeline="t1", mode=LogMode.SYNC), SOON)
        self.sequence = sequence
        self.acknowledged.append((number, sequence.generation, log_id))

    def append(self, what):
        self.num_lines += 1
        name = f"t1-{self.num_lines:010d}-g{self.number}"
        if what == "commit":
            number = self.sequence.append_commit(name, AB, [OLD], SOON)
        elif what == "patient line":
            number = self.append_patiently(FenceLine(file=OLD, line=name))
        else:
            number = self.sequence.append(FenceLine(file=OLD, line=name), SOON)
        assert not self.ended, "a head that lost a number never writes again"
        self.acknowledged.append((number, self.sequence.generation, name))

    def append_patiently(self, content):
        """As the log does: in two halves, of which the second is repeated."""
        self.sequence.propose(content, SOON)
        for _ in range(3):
            with contextlib.suppress(Unavailable):
                self.sequence.settle(SOON)
                return self.sequence.number
        raise Unavailable("three times")


def name_in(content):
    match content:
        case FenceClaim():
            return content.log_id
        case FenceLine():
            return content.line
        case FenceCommit():
            return content.name


STEP = st.tuples(st.integers(0, 2), st.sampled_from(["claim", "line", "patient line", "commit", "wake"]))
FAULT = st.sampled_from(["none", "none", "lost request", "lost reply", "delayed"])


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=40), st.lists(FAULT, max_size=60), st.lists(STEP, max_size=30))
def test_there_is_one_history_and_never_two(steps, faults, nested):
    world = World(faults, nested)
    heads = [Head(number, world) for number in range(3)]

    def act(number, what):
        if what == "wake" and world.delayed:
            at, data = world.delayed.pop(number % len(world.delayed))
            world.objects.setdefault(at, data)
        elif what != "wake":
            heads[number].act(what)

    world.act = act
    for step in steps:
        act(*step)
    for at, data in world.delayed:
        world.objects.setdefault(at, data)
    records = {number: decode(number, data) for number, data in world.objects.items()}
    assert sorted(records) == list(range(1, len(records) + 1)), "no gaps"
    whole, newest = FenceHistory(), 0
    for number in sorted(records):
        if isinstance(records[number].content, FenceClaim):
            assert records[number].generation > newest
            newest = records[number].generation
        assert records[number].generation == newest, "nothing of an older generation after a claim"
        whole.take(number, records[number])
    for head in heads:
        for number, generation, name in head.acknowledged:
            assert (records[number].generation, name_in(records[number].content)) == (generation, name)
    names = [name_in(each.content) for each in records.values() if not isinstance(each.content, FenceClaim)]
    assert len(names) == len(set(names)), "nothing counts twice"
    world.faults, world.nested = [], []
    seen = FenceSequence(world, 0).catch_up(SOON)
    assert (seen.number, seen.generation, seen.commits) == (whole.number, whole.generation, whole.commits)
    if not any(isinstance(each.content, FenceCommit) for each in records.values()):
        assert {n: f.lines for n, f in seen.files.items()} == {n: f.lines for n, f in whole.files.items()}


# --- in a real store --------------------------------------------------------------------------------------------------


@pytest.fixture
def blobs(tmp_path):
    return open_blobs(parse(str(tmp_path / "store")), "store", SOON)


def head(blobs, generation, **more):
    sequence = FenceSequence(BlobFence(blobs), generation)
    sequence.catch_up(SOON)
    sequence.claim(FenceClaim(**{"log_id": "a", "timeline": f"t{generation}", "mode": LogMode.SYNC, **more}), SOON)
    return sequence


def test_a_head_that_wakes_after_a_newer_claim_is_superseded_for_good(blobs):
    old, new = head(blobs, 1), head(blobs, 2)
    for _ in range(2):
        with pytest.raises(Superseded, match="generation 2 of the workers has claimed this job; generation 1 is too"):
            old.append_commit("t1-0000000001-g1", AB, [], SOON)
    new.append_commit("t2-0000000001-g2", CD, [], SOON)
    assert FenceSequence(BlobFence(blobs), 0).catch_up(SOON).commits == {"t2-0000000001-g2": CD}


def test_a_generation_that_is_taken_cannot_be_claimed_again(blobs):
    head(blobs, 2)
    for generation in (1, 2):
        with pytest.raises(Superseded, match="generation 2 of the workers has claimed"):
            head(blobs, generation)


def test_a_look_does_not_wait_longer_than_its_deadline_for_a_record_on_its_way(blobs, monkeypatch):
    writer, under_way, answered = head(blobs, 1), threading.Event(), threading.Event()
    put_new = blobs.put_new

    def put_late(*call):
        under_way.set()
        assert answered.wait(20)
        return put_new(*call)

    monkeypatch.setattr(blobs, "put_new", put_late)
    thread = threading.Thread(target=lambda: writer.append(FenceLine(file=OLD, line="late\n"), SOON))
    thread.start()
    try:
        assert under_way.wait(20)
        with pytest.raises(Unavailable, match="another record waits for an answer"):
            writer.check_newest(Deadline.after(0.01))
    finally:
        answered.set()
        thread.join()
    writer.check_newest(SOON)


def test_a_claim_that_finds_new_records_of_an_old_generation_decides_again(blobs):
    old, new = head(blobs, 1), FenceSequence(BlobFence(blobs), 2)
    new.catch_up(SOON)
    old.append(FenceLine(file=OLD, line="late\n"), SOON)
    claim = FenceClaim(log_id="b", timeline="t1", mode=LogMode.SYNC)
    with pytest.raises(FenceMoved, match="record 2 of generation 1 came first"):
        new.claim(claim, SOON)
    assert new.catch_up(SOON).files[OLD].content() == b"late\n"
    assert new.claim(claim, SOON) == 3


def test_a_reader_needs_the_records_since_the_newest_commit_and_the_lines_before_it(blobs):
    writer = head(blobs, 1, log={OLD: "a\n"})
    writer.append(FenceLine(file=OLD, line="b\n"), SOON)
    writer.append(FenceLine(file=NEW, line="c\n"), SOON)
    writer.append_commit("t1-0000000001-g1", AB, [OLD, NEW], SOON)
    writer.append(FenceLine(file=NEW, line="d\n"), SOON)
    writer.append_commit("t1-0000000002-g1", CD, [NEW], SOON)
    writer.append(FenceRetirement(retired={"t1-0000000001-g1": 5.0}), SOON)
    writer.append(FenceLine(file=NEW, line="e\n"), SOON)
    for number in (1, 2):  # not even looked at
        blobs.put_new(key_of(100 + number), b"", SOON)
    seen = FenceSequence(BlobFence(blobs), 0).catch_up(SOON)
    assert {name: file.content() for name, file in seen.files.items()} == {NEW: b"c\nd\ne\n"}
    assert (seen.commits, seen.retired) == ({"t1-0000000002-g1": CD}, {"t1-0000000001-g1": 5.0})
    assert (seen.number, seen.generation, seen.timeline, seen.log_id) == (8, 1, "t1", "a")


def test_a_long_sequence_is_found_in_a_few_requests(blobs):
    writer = head(blobs, 1)
    for number in range(150):
        writer.append(FenceLine(file=OLD, line=f"{number}\n"), SOON)
    assert FenceSequence(BlobFence(blobs), 0).catch_up(SOON).number == 151


def test_a_store_without_conditional_puts_is_refused_with_words(blobs, monkeypatch):
    check_conditional_puts(blobs, "store.parts", SOON)
    assert blobs.sizes("fence-probe", SOON) == {}

    def replacing(key, content, deadline):
        blobs.put(key, lambda: iter((content,)), deadline)
        return True

    monkeypatch.setattr(blobs, "put_new", replacing)
    with pytest.raises(SpecError, match='does not know conditional puts .*use a store that does, or store.parts = "sh'):
        check_conditional_puts(blobs, "store.parts", SOON)
