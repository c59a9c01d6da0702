"""The loader: passes in order, read ahead but not too far, errors where they are noticed, a sure end."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.loader.batch_loader import QUEUED_PARTS, Loader
from headrace.dataset.samples.batch import Ragged, Samples, cut_batches
from headrace.dataset.stream.errors import PipeFailed
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline

PATIENCE_S = 30.0


def samples(first: int, num: int, per_event: int = 1) -> Samples:
    """Samples numbered from `first`, so many to an event."""
    number = np.arange(first, first + num)
    column = Ragged(number.astype(np.uint64), np.arange(num + 1, dtype=np.int64))
    return Samples({"s": column}, {}, {}, number // per_event, np.full(num, np.nan))


class ScriptedReader:
    """A segment [begin, end) gives a block of its positions; misfortune is data."""

    def __init__(self, *, block: int = 100, per_event: int = 1, fail_at: int | None = None) -> None:
        self.block, self.per_event, self.fail_at = block, per_event, fail_at
        self.started: list[int] = []
        self.num_read = 0
        self.closed = threading.Event()
        self.hold: threading.Event | None = None

    def read(self, pass_number, segments, tally):
        self.started.append(pass_number)
        for segment in segments:
            for begin in range(segment.begin, segment.end, self.block):
                if self.hold is not None:
                    while not self.hold.wait(0.01):
                        if self.closed.is_set():
                            raise PipeFailed("killed")
                if self.fail_at is not None and begin >= self.fail_at:
                    raise PipeFailed("scripted")
                num = min(self.block, segment.end - begin)
                tally.num_events += num
                tally.num_samples += num
                self.num_read += num
                yield samples(begin, num, self.per_event)

    def close(self) -> None:
        self.closed.set()


def segment(begin: int, end: int) -> Segment:
    return Segment("p", 0, begin, end)


@given(st.lists(st.lists(st.integers(1, 3), max_size=6), max_size=8), st.integers(1, 7))
def test_a_batch_ends_at_the_first_event_that_fills_it_wherever_blocks_are_cut(blocks, batch_size):
    expected, cut, event, begin = [[]], [], 0, 0
    for sizes in blocks:  # of the events of each block
        events = []
        for size in sizes:
            expected[-1].extend([event] * size)
            events.extend([event] * size)
            event += 1
            if len(expected[-1]) >= batch_size:
                expected.append([])
        block = samples(begin, len(events))
        begin += len(events)
        cut.append(Samples(block.sparse, {}, {}, np.array(events, np.int64), block.time_s_B))
    batches = list(cut_batches(iter(cut), batch_size))
    assert [batch.event_B.tolist() for batch in batches] == [batch for batch in expected if batch]
    assert [sign for batch in batches for sign in batch.sparse["s"].values_N.tolist()] == list(range(begin))
    assert all(batch.sparse["s"].offset_B1.tolist() == list(range(len(batch) + 1)) for batch in batches)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_columns_that_share_their_offsets_are_cut_and_joined_as_others_are(blocks, data):
    weighted = data.draw(st.sampled_from([None, "a", "b", "c"]))
    shared, apart = [], []
    for lengths in blocks:
        offset_B1 = np.concatenate([[0], np.cumsum(lengths)])
        signs_N = np.arange(offset_B1[-1], dtype=np.uint64)
        weights_N = np.arange(offset_B1[-1], dtype=np.float32)
        for found, each in ((shared, lambda offset_B1: offset_B1), (apart, np.copy)):
            columns = {
                name: Ragged(signs_N + np.uint64(n), each(offset_B1), weights_N if name == weighted else None)
                for n, name in enumerate("abc")
            }
            found.append(Samples(columns, {}, {}, np.arange(len(lengths)), np.zeros(len(lengths))))
    ours, theirs = Samples.concat(shared), Samples.concat(apart)
    begin = data.draw(st.integers(0, len(ours)))
    end = data.draw(st.integers(begin, len(ours)))
    for one, other in ((ours, theirs), (ours.slice(begin, end), theirs.slice(begin, end))):
        for name, column in other.sparse.items():
            assert one.sparse[name].values_N.tolist() == column.values_N.tolist()
            assert one.sparse[name].offset_B1.tolist() == column.offset_B1.tolist()
            assert (one.sparse[name].weights_N is None) == (column.weights_N is None) == (name != weighted)


@pytest.fixture
def load():
    """Makes loaders, and ends them."""
    loaders = []

    def make(reader, batch_size=40, max_batches=3, make=lambda number, batch: (number, batch), **options):
        loaders.append(Loader(reader, make, batch_size, max_batches, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close(Deadline.after(PATIENCE_S))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def eventually(condition) -> bool:
    patience = Deadline.after(PATIENCE_S)
    while not condition() and not patience.passed():
        time.sleep(0.005)
    return condition()


def test_passes_come_in_order_and_batches_never_cross_them(load):
    loader = load(ScriptedReader())
    loader.submit(5, [segment(0, 70), segment(70, 90)])
    loader.submit(6, [segment(90, 100)])
    batches = list(loader.batches(5))
    assert [number for number, _ in batches] == [5, 5, 5]
    assert [len(batch) for _, batch in batches] == [40, 40, 10]
    assert np.concatenate([b.sparse["s"].values_N for _, b in batches]).tolist() == list(range(90))
    assert (loader.tally(5).num_events, loader.tally(5).num_samples) == (90, 90)
    assert [len(batch) for _, batch in loader.batches(6)] == [10]


def test_the_samples_of_an_event_stay_together(load):
    loader = load(ScriptedReader(per_event=7, block=210))
    loader.submit(0, [segment(0, 210)])
    for _, batch in loader.batches(0):
        assert len(batch) in (42, 210 % 42) and batch.event_B[0] * 7 == batch.sparse["s"].values_N[0]


def test_a_pass_without_segments_ends_at_once(load):
    loader = load(ScriptedReader())
    loader.submit(1, [])
    assert list(loader.batches(1)) == []
    assert loader.tally(1).num_events == 0


def test_the_next_pass_is_read_while_this_one_is_taken(load):
    reader = ScriptedReader()
    loader = load(reader)
    loader.submit(0, [segment(0, 400)])
    loader.submit(1, [segment(400, 800)])
    batches = loader.batches(0)
    next(batches)
    assert eventually(lambda: reader.num_read == 800)
    assert reader.started == [0, 1]


@pytest.mark.parametrize("bound", ["samples", "bytes"])
def test_reading_waits_when_it_is_too_far_ahead(load, monkeypatch, bound):
    if bound == "samples":
        monkeypatch.setattr("headrace.dataset.loader.batch_loader.MAX_AHEAD_SAMPLES", 200)
    memory = QUEUED_PARTS * 2 * samples(0, 100).num_bytes if bound == "bytes" else 1 << 30
    reader = ScriptedReader()
    loader = load(reader, batch_size=100, max_batches=2, memory=memory)
    loader.submit(0, [segment(0, 5000)])
    # Ready: 2 batches. One in the hands of the cutter, 200 samples ahead, one block in the hands of the reader.
    assert eventually(lambda: reader.num_read >= 500)
    time.sleep(0.05)
    assert reader.num_read <= 700
    assert sum(len(batch) for _, batch in loader.batches(0)) == 5000


def test_an_error_of_reading_is_raised_where_batches_are_taken_after_what_came_before_it(load):
    loader = load(ScriptedReader(fail_at=100))
    loader.submit(0, [segment(0, 300)])
    taken = []
    with pytest.raises(PipeFailed, match="scripted"):
        for _, batch in loader.batches(0):
            taken.append(len(batch))
    assert taken == [40, 40]
    with pytest.raises(PipeFailed, match="scripted"):
        next(loader.batches(0))


def test_an_error_of_making_is_raised_where_batches_are_taken(load):
    def broken(number, batch):
        raise ZeroDivisionError("scripted")

    loader = load(ScriptedReader(), make=broken)
    loader.submit(0, [segment(0, 300)])
    with pytest.raises(ZeroDivisionError):
        list(loader.batches(0))


def test_waiting_for_samples_is_told_from_waiting_for_batches_to_be_made(load):
    reader, making, made = ScriptedReader(), threading.Event(), threading.Event()
    reader.hold = threading.Event()
    loader = load(reader, make=lambda number, batch: (making.set(), made.wait(PATIENCE_S)))
    loader.submit(0, [segment(0, 10)])
    assert eventually(lambda: loader.starved_s() > 0.05), "the reader gives nothing"
    reader.hold.set()
    assert making.wait(PATIENCE_S)
    starved_s = loader.starved_s()
    time.sleep(0.02)
    assert loader.starved_s() == starved_s, "a batch is being made"
    made.set()
    assert len(list(loader.batches(0))) == 1


def test_batches_are_made_on_a_thread_of_the_loader(load):
    loader = load(ScriptedReader(), make=lambda number, batch: threading.current_thread().name)
    loader.submit(0, [segment(0, 10)])
    assert list(loader.batches(0)) == ["loader-cut"]


def test_closing_ends_a_reader_that_waits_and_one_whose_batches_nobody_takes(load):
    waiting = ScriptedReader()
    waiting.hold = threading.Event()
    for reader in (waiting, ScriptedReader()):
        loader = load(reader)
        loader.submit(0, [segment(0, 10_000)])
        assert eventually(lambda reader=reader: bool(reader.started))
        started_s = time.monotonic()
        loader.close(Deadline.after(PATIENCE_S))
        assert time.monotonic() - started_s < PATIENCE_S / 2 and reader.closed.is_set()


def test_a_third_pass_ahead_is_refused(load):
    reader = ScriptedReader()
    reader.hold = threading.Event()
    loader = load(reader)
    with pytest.raises(AssertionError, match="2 passes already wait to be read"):
        for number in range(8):
            loader.submit(number, [segment(0, 10)])
