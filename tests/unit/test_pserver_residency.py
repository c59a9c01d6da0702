"""A table with bounded memory has the rows of an unbounded one; it waits for room, within a bound."""

import threading
from collections import deque
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import validate
from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.pserver.errors import OutOfMemory
from headrace.pserver.protocol.shards import Gradients
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.rows import row_cache
from headrace.pserver.rows.kernels import EMPTY
from headrace.pserver.rows.row_cache import CacheBound
from headrace.pserver.rows.table_rows import frozen, row_bytes_of
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.tables.table import ShardTable

SECTION = TableSection(dim=3, optimizer=Adagrad(per="element", lr=0.5))
BOUNDED = SECTION.model_copy(update={"memory": 8 << 20})
NUM_WORDS = ShardTable("t", SECTION, 1).snapshots.num_words
ALL_KEYS = np.unique(np.random.default_rng(5).integers(1, 2**63, 64).astype(np.uint64))


def changed(table):
    taken = table.snapshots.take()
    return taken.keys_U, taken.words_UW


def bounded(max_rows=24, max_dirty=1000, store=None, rows_by_group=None):
    with patch.object(CacheBound, "of", lambda memory_bytes, width: CacheBound(max_rows, max_dirty)):
        table = ShardTable("t", BOUNDED, 1)
    table.snapshots.attach(MemoryRowStore(NUM_WORDS) if store is None else store, rows_by_group or {})
    return table


@pytest.fixture
def impatient(monkeypatch):
    """Nobody waits for room."""
    monkeypatch.setattr(row_cache, "ROOM_WAIT_S", 0.0)


def reserve(table, keys_U):
    return frozen(table.rows.reserve(frozen(keys_U), (keys_U % np.uint64(5)).astype(np.uint16)))


def push(table, rows_U, version, value=1.0):
    ones_U, grads_UD = np.ones(len(rows_U), np.float32), np.full((len(rows_U), 4), value, np.float32)
    table.apply(rows_U, Gradients(frozen(grads_UD), frozen(ones_U), frozen(ones_U * 0)), 1, version)


def learn(table, keys_U, version, value=1.0):
    """A pass of one batch: what the batch read, and the digest of the close."""
    rows_U = reserve(table, keys_U)
    table.open_pass()
    read_UD = table.gather(rows_U)
    push(table, rows_U, version, value)
    table.rows.release(rows_U)
    return read_UD.tolist(), table.close_pass(version)


def predict(table, keys_U):
    rows_U = frozen(table.rows.find(frozen(keys_U)))
    read_UD = table.gather_present(rows_U, keys_U)
    table.rows.release(rows_U)
    return read_UD.tolist()


def commit(table, store):
    store.write(*changed(table))
    table.snapshots.settle(True)


def resident(table):
    return int((table.rows.resident(ALL_KEYS) != EMPTY).sum())


class Pair:
    """A bounded table and an unbounded one, which must behave equally."""

    def __init__(self):
        self.store, self.version, self.in_flight = MemoryRowStore(NUM_WORDS), 0, False
        self.small, self.whole = bounded(store=self.store), ShardTable("t", SECTION, 1)

    def learn(self, keys_U, value):
        self.version += 1
        try:
            of_small = learn(self.small, keys_U, self.version, value)
        except OutOfMemory:
            self.settle(True)
            self.snapshot(True)
            self.settle(True)
            of_small = learn(self.small, keys_U, self.version, value)
        assert of_small == learn(self.whole, keys_U, self.version, value)

    def predict(self, keys_U):
        try:
            assert predict(self.small, keys_U) == predict(self.whole, keys_U)
        except OutOfMemory:
            assert self.small.dirty.num_dirty or self.in_flight

    def snapshot(self, written):
        if not self.in_flight:
            keys_U, words_UW = changed(self.small)
            whole_keys_U, whole_words_UW = changed(self.whole)
            assert dict(zip(keys_U.tolist(), words_UW.tolist(), strict=True)) == dict(
                zip(whole_keys_U.tolist(), whole_words_UW.tolist(), strict=True)
            )
            if written:
                self.store.write(keys_U, words_UW)
            self.in_flight, self.written = True, written

    def settle(self, committed):
        if self.in_flight:
            self.small.snapshots.settle(committed and self.written)
            self.whole.snapshots.settle(committed and self.written)
            self.in_flight = False
        assert self.small.dirty.num_dirty == self.whole.dirty.num_dirty

    def restart(self):
        if not self.in_flight and not self.small.dirty.num_dirty:
            self.small = bounded(store=self.store, rows_by_group=self.whole.deletions.rows_by_group)

    def compare(self):
        assert self.small.overview.digest() == self.whole.overview.digest()
        assert self.small.deletions.rows_by_group == self.whole.deletions.rows_by_group
        assert self.small.stats().num_bytes <= 24 * (row_bytes_of(self.small.rows.width) + 15) + 256


def chosen(max_size):
    places = st.lists(st.integers(0, len(ALL_KEYS) - 1), unique=True, min_size=1, max_size=max_size)
    return places.map(lambda chosen: ALL_KEYS[chosen])


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), chosen(9), st.sampled_from([0.25, 1.0, -2.0])),
        st.tuples(st.just("learn"), chosen(9), st.sampled_from([0.25, 1.0, -2.0])),
        st.tuples(st.just("predict"), chosen(20)),
        st.tuples(st.just("snapshot"), st.booleans()),
        st.tuples(st.just("settle"), st.booleans()),
        st.tuples(st.just("restart")),
        st.tuples(st.just("compare")),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(ACTS)
def test_residency_does_not_affect_reads_updates_commits_or_counts(acts):
    with patch.object(row_cache, "ROOM_WAIT_S", 0.0):
        pair = Pair()
        for name, *args in acts:
            getattr(pair, name)(*args)
        pair.compare()


def test_memory_stays_within_its_bound_however_many_rows_there_are():
    for width in (2, 18, 49_000):
        for memory in (8 << 20, 512 << 20):
            bound = CacheBound.of(memory, width)
            index_bytes = 4 * 2 ** int(np.ceil(np.log2(bound.max_rows / 0.65)))
            row_bytes = row_bytes_of(width) + row_cache.BOOKKEEPING_BYTES
            used = index_bytes + bound.max_rows * row_bytes + bound.max_dirty * (4 * (5 + width) + 8)
            assert 0.7 * memory < used <= memory


def test_cold_clean_rows_are_evicted_and_hot_ones_stay():
    store, asked = MemoryRowStore(NUM_WORDS), []
    table = bounded(max_rows=24, store=store)
    hot_U, cold = ALL_KEYS[:6], deque(np.split(ALL_KEYS[6:60], 9))
    store_get = store.get
    store.get = lambda keys_U: (asked.extend(keys_U.tolist()), store_get(keys_U))[1]
    for version in range(1, 40):
        learn(table, np.concatenate([hot_U, cold[0]]), version)
        commit(table, store)
        cold.rotate(-1)
    assert table.deletions.num_rows == 60 and resident(table) <= 24
    assert set(cold[0].tolist()) <= set(asked) and not set(hot_U.tolist()) & set(asked)


def test_reserved_rows_are_evicted_and_start_anew():
    table = bounded(max_rows=24)
    first_U = reserve(table, ALL_KEYS[:20])
    before_UD = table.gather(first_U)
    table.rows.release(first_U)
    for begin in (20, 40):
        table.rows.release(reserve(table, ALL_KEYS[begin : begin + 20]))
    assert (table.rows.find(ALL_KEYS[:20]) == EMPTY).all() and table.deletions.num_rows == 0
    assert (table.gather(reserve(table, ALL_KEYS[:20])) == before_UD).all()


def test_a_table_with_all_rows_in_memory_never_reads_its_store():
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=64, store=store)
    store.get = None
    for version in range(1, 4):
        learn(table, ALL_KEYS[:50], version)
        commit(table, store)
        predict(table, ALL_KEYS)
    assert table.deletions.num_rows == 50


def test_steps_go_on_while_the_store_is_read():
    store, asking, answer = MemoryRowStore(NUM_WORDS), threading.Event(), threading.Event()
    table = bounded(max_rows=24, store=store)
    for version, begin in enumerate((0, 20, 40), 1):
        learn(table, ALL_KEYS[begin : begin + 20], version)
        commit(table, store)
    rows_U, store_get = reserve(table, ALL_KEYS[40:50]), store.get

    def slow_get(keys_U):
        asking.set()
        assert answer.wait(20)
        return store_get(keys_U)

    store.get = slow_get
    loader = threading.Thread(daemon=True, target=reserve, args=(table, ALL_KEYS[:10]))
    loader.start()
    assert asking.wait(20)
    table.open_pass()
    push(table, rows_U, 4)
    again_U = reserve(table, ALL_KEYS[40:50])
    assert (again_U == rows_U).all() and table.gather(rows_U).any()
    table.rows.release(rows_U)
    table.close_pass(4)
    assert len(changed(table)[0]) == 10 and loader.is_alive()
    answer.set()
    loader.join(20)
    assert not loader.is_alive() and (table.rows.find(ALL_KEYS[:10]) != EMPTY).all()


@pytest.mark.parametrize("freed", ["release", "settle"])
def test_a_batch_waits_for_room_until_rows_are_released_or_committed(freed):
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=24, store=store)
    learn(table, ALL_KEYS[:20], 1)
    store.write(*changed(table))
    pinned_U = reserve(table, ALL_KEYS[:20])
    (table.rows.release(pinned_U) if freed == "settle" else table.snapshots.settle(True))
    done = threading.Event()
    loader = threading.Thread(daemon=True, target=lambda: (reserve(table, ALL_KEYS[20:30]), done.set()))
    loader.start()
    assert not done.wait(0.05)
    (table.snapshots.settle(True) if freed == "settle" else table.rows.release(pinned_U))
    assert done.wait(20)
    loader.join()
    assert table.deletions.num_rows == 20 and len(changed(table)[0]) == 0


def test_a_memory_full_of_uncommitted_rows_is_an_error_with_advice(impatient):
    table = bounded(max_rows=24)
    learn(table, ALL_KEYS[:20], 1)
    before = table.overview.digest()
    with pytest.raises(OutOfMemory, match=r"table 't'.* 20 rows wait for a commit.*raise tables\.t\.memory.*commit"):
        reserve(table, ALL_KEYS[10:30])
    assert (
        table.overview.digest() == before
        and table.dirty.num_dirty == 20
        and (table.rows.find(ALL_KEYS[20:30]) == EMPTY).all()
    )


def test_a_batch_without_room_holds_no_rows(impatient):
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=24, store=store)
    learn(table, ALL_KEYS[:20], 1)
    with pytest.raises(OutOfMemory):
        reserve(table, ALL_KEYS[10:30])
    commit(table, store)
    assert len(set(reserve(table, ALL_KEYS[40:64]).tolist())) == 24


def test_dirty_rows_are_bounded_by_the_memory_for_their_copies(impatient):
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=60, max_dirty=16, store=store)
    learn(table, ALL_KEYS[:16], 1)
    assert (table.stats().dirty_rows, table.stats().max_dirty_rows) == (16, 16)
    with pytest.raises(OutOfMemory, match="at most 16"):
        reserve(table, ALL_KEYS[:1])
    store.write(*changed(table))
    assert table.stats().dirty_rows == 0
    with pytest.raises(OutOfMemory, match="16 rows wait for a commit"):
        reserve(table, ALL_KEYS[:1])
    table.snapshots.settle(True)
    learn(table, ALL_KEYS[16:20], 2)
    assert table.stats().dirty_rows == 4


def test_a_pass_waits_for_the_commit_in_flight_and_goes_on():
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=60, max_dirty=16, store=store)
    learn(table, ALL_KEYS[:10], 1)
    store.write(*changed(table))
    learn(table, ALL_KEYS[10:16], 2)
    settling = threading.Timer(0.05, table.snapshots.settle, [True])
    settling.start()
    learn(table, ALL_KEYS[16:24], 3)
    settling.join()
    assert table.dirty.num_dirty == 14


def test_a_batch_that_could_never_fit_is_refused_at_once():
    with pytest.raises(OutOfMemory, match="a batch of 40 keys.*24 fit"):
        reserve(bounded(max_rows=24), ALL_KEYS[:40])


def test_rows_of_the_open_pass_stay_when_an_earlier_commit_succeeds(impatient):
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=24, store=store)
    learn(table, ALL_KEYS[:20], 1)
    store.write(*changed(table))
    rows_U = reserve(table, ALL_KEYS[:20])
    table.open_pass()
    push(table, rows_U, 2)
    table.rows.release(rows_U)
    table.snapshots.settle(True)
    with pytest.raises(OutOfMemory):
        reserve(table, ALL_KEYS[20:30])
    table.close_pass(2)
    commit(table, store)
    reserve(table, ALL_KEYS[20:30])


def test_a_row_made_after_a_lookup_is_read_even_if_it_was_evicted_meanwhile():
    store = MemoryRowStore(NUM_WORDS)
    table = bounded(max_rows=24, store=store)
    rows_U = frozen(table.rows.find(ALL_KEYS[:20]))
    assert (rows_U == EMPTY).all()
    for version, begin in enumerate((0, 20, 40), 1):
        learn(table, ALL_KEYS[begin : begin + 20], version)
        commit(table, store)
    assert (table.rows.find(ALL_KEYS[40:60]) != EMPTY).all()
    read_UD, whole = table.gather_present(rows_U, ALL_KEYS[:20]), ShardTable("t", SECTION, 1)
    learn(whole, ALL_KEYS[:20], 1)
    assert read_UD.any(axis=1).all() and read_UD.tolist() == predict(whole, ALL_KEYS[:20])


def test_a_loader_ahead_of_steps_and_commits_gives_the_rows_of_an_unbounded_table():
    store, draw = MemoryRowStore(NUM_WORDS), np.random.default_rng(3)
    table, whole = bounded(max_rows=40, store=store), ShardTable("t", SECTION, 1)
    batches = [draw.choice(ALL_KEYS, 8, replace=False) for _ in range(300)]
    ready, spare = deque(), threading.Semaphore(2)

    def prepare():
        for keys_U in batches:
            assert spare.acquire(timeout=20)
            ready.append(reserve(table, keys_U))

    loader = threading.Thread(daemon=True, target=prepare)
    loader.start()
    for step, keys_U in enumerate(batches):
        while not ready:
            assert loader.is_alive() or ready
            loader.join(0.001)
        rows_U = ready.popleft()
        whole_U = reserve(whole, keys_U)
        assert table.gather(rows_U).tolist() == whole.gather(whole_U).tolist()
        for each, numbers in ((table, rows_U), (whole, whole_U)):
            each.open_pass()
            push(each, numbers, step + 1)
            each.close_pass(step)
        table.rows.release(rows_U)
        spare.release()
        if step % 2:
            commit(table, store)
    loader.join()
    assert (
        table.overview.digest() == whole.overview.digest()
        and table.deletions.rows_by_group == whole.deletions.rows_by_group
    )


def test_too_little_memory_is_refused_with_a_message():
    with pytest.raises(SpecError, match="memory: is less than 8MiB, .*4MiB"):
        validate(TableSection, {"memory": "4MiB"})
