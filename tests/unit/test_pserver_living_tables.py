"""A table that ages, shrinks, forgets and is set anew is the plain one of tests.fakes.plain_rows, wherever rows lie.

And so after any restart, in the middle of a sweep as well.
"""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.pserver.config import Bounds, Initial, SlotLife, TableSection
from headrace.pserver.errors import OutOfMemory
from headrace.pserver.lifecycle import deletions
from headrace.pserver.protocol.shards import Gradients
from headrace.pserver.protocol.table_operations import (
    SLOT_CHANGES,
    AdvanceDay,
    ClearSlot,
    ForgetRow,
    FreezeSlot,
    SetTables,
    ShrinkRows,
    UnfreezeSlot,
)
from headrace.pserver.row_optimizers import Adagrad, Adam, Ftrl, Sgd
from headrace.pserver.rows import row_cache
from headrace.pserver.rows.row_cache import CacheBound
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.tables.table import ShardTable
from tests.fakes.plain_rows import PlainTable

ALL_KEYS = np.unique(np.random.default_rng(5).integers(1, 2**63, 48).astype(np.uint64))
GROUPS = {"users": 0, "items": 1, "rare": 2}
PLAIN = TableSection(
    dim=2,
    init_range=0.5,
    optimizer=Adagrad(per="element", lr=0.5),
    decay=0.9,
    delete_below=0.3,
    slots={
        "items": SlotLife(decay=0.5, lr=0.25, init_range=0.125, bounds=Bounds(low=-0.25, high=0.25)),
        "rare": SlotLife(delete_below=0.0, delete_after_days=2, first_order_lr=1.0),
    },
)
LATER = PLAIN.model_copy(update={"extend_at": 0.5})
ITEMS_LATER = PLAIN.model_copy(
    update={"slots": {"items": SlotLife(extend_at=0.4, decay=0.5), "rare": SlotLife(extend_at=0.0)}}
)
CLIPPED = PLAIN.model_copy(
    update={"init": Initial.NORMAL, "clip_norm": 1.5, "slots": {"items": SlotLife(init=Initial.XAVIER)}}
)
DECAYING = LATER.model_copy(update={"weight_decay": 0.25})
SECTIONS = {"plain": PLAIN, "later": LATER, "items-later": ITEMS_LATER, "clipped": CLIPPED, "decaying": DECAYING}


@pytest.fixture(autouse=True)
def at_once():
    """Nobody waits for room, and a sweep takes many pieces."""
    with patch.object(row_cache, "ROOM_WAIT_S", 0.0), patch.object(deletions, "PIECE_ROWS", 4):
        yield


def groups_of(keys_U):
    return (keys_U % np.uint64(3)).astype(np.uint16)


def table_of(section, store=None):
    if store is None:
        return ShardTable("t", section, 1, groups=GROUPS)
    with patch.object(CacheBound, "of", lambda memory_bytes, width: CacheBound(24, 1000)):
        return ShardTable("t", section.model_copy(update={"memory": 8 << 20}), 1, groups=GROUPS)


class Histories:
    """One table that is all in memory, one that is not, and the plain one."""

    def __init__(self, section):
        self.section = self.file = section
        self.version = 0
        num_words = ShardTable("t", section, 1, groups=GROUPS).snapshots.num_words
        self.stores = MemoryRowStore(num_words), MemoryRowStore(num_words)
        self.tables = [table_of(section), table_of(section, self.stores[1])]
        self.tables[1].snapshots.attach(self.stores[1], {})
        self.plain = PlainTable(section, GROUPS, self.tables[0].rows.seed)
        self.sweeps, self.in_flight = [iter(()), iter(())], False

    # --- what happens ---

    def learn(self, keys_U, value, click, days):
        self.close()
        grads_UD = np.full((len(keys_U), 3), value, np.float32) * np.arange(1, 4, dtype=np.float32)
        show_U = np.arange(1, len(keys_U) + 1).astype(np.float32)
        click_U = np.minimum(show_U, click).astype(np.float32)
        read = [self.plain.read(int(key), int(group)) for key, group in zip(keys_U, groups_of(keys_U), strict=True)]
        made = np.bincount([int(key % 3) for key in keys_U.tolist() if key not in self.plain.rows], minlength=3)
        for key, group, grad_D, show, clicks in zip(keys_U, groups_of(keys_U), grads_UD, show_U, click_U, strict=True):
            self.plain.learn(int(key), int(group), grad_D, show, clicks, self.version)
        self.plain.close(self.plain.day + days)
        closes = [self.learn_one(table, keys_U, (grads_UD, show_U, click_U), read) for table in self.tables]
        assert closes[0] == closes[1]
        for table in self.tables:
            told = table.stats().new_by_group
            assert [told.get(group, 0) for group in range(3)] == made.tolist(), "whatever is swept"

    def close(self):
        self.version += 1
        self.plain.reach(self.version)

    def learn_one(self, table, keys_U, push, read):
        try:
            rows_U = frozen(table.rows.reserve(keys_U, groups_of(keys_U)))
        except OutOfMemory:
            self.settle(True)
            self.commit(True)
            self.settle(True)
            rows_U = frozen(table.rows.reserve(keys_U, groups_of(keys_U)))
        table.open_pass()
        assert table.gather(rows_U).tolist() == read
        table.apply(rows_U, Gradients(*map(frozen, push)), 1, self.version)
        table.rows.release(rows_U)
        return table.close_pass(self.plain.day)

    def tick(self, days):
        self.plain.tick(self.plain.day + days)
        self.operate(AdvanceDay(to=self.plain.day))

    def operate(self, operation):
        for table in self.tables:
            table.operate(operation, self.version)

    def shrink(self, below, after, pieces):
        self.close()
        self.plain.shrink(below, after)
        self.operate(ShrinkRows(table="t", delete_below=below, delete_after_days=after))
        self.sweep(pieces)

    def sweep(self, pieces):
        for number, table in enumerate(self.tables):
            before = table.overview.digest()
            for _ in range(pieces):
                try:
                    next(self.sweeps[number])
                except StopIteration:
                    self.sweeps[number] = table.deletions.sweep()
            assert table.overview.digest() == before

    def forget(self, key):
        self.plain.forget(int(key))
        self.operate(ForgetRow(table="t", group=int(key % 3), key=int(key)))

    def change(self, change, slot):
        getattr(self.plain, change.name)(GROUPS[slot])
        self.operate(change(slot=slot, table="t", group=GROUPS[slot]))

    def set(self, decay, lr, weight_decay=None):
        self.close()
        changes = {"decay": decay, "optimizer": self.section.optimizer.model_copy(update={"lr": lr})}
        changes |= {} if weight_decay is None else {"weight_decay": weight_decay}
        self.section = self.section.model_copy(update=changes)
        self.plain.set(self.section)
        self.set_tables()

    def set_tables(self):
        for number, table in enumerate(self.tables):
            section = self.section if number == 0 else self.section.model_copy(update={"memory": 8 << 20})
            table.operate(SetTables(tables={"t": section.model_dump(mode="json")}), self.version)

    # --- commits ---

    def commit(self, written):
        if self.in_flight:
            return
        self.taken = [table.snapshots.take() for table in self.tables]
        for taken, store in zip(self.taken, self.stores, strict=True):
            if written:
                store.write(taken.keys_U, taken.words_UW, taken.gone()[0])
                assert sum(taken.rows_by_group.values()) == len(store._rows)
        self.in_flight, self.written = True, written

    def settle(self, committed):
        if self.in_flight:
            for table in self.tables:
                table.snapshots.settle(committed and self.written)
            self.in_flight = False

    def restart(self):
        """Both go on from a commit of now, whatever is swept."""
        self.settle(True)
        self.commit(True)
        lives = [taken.life for taken in self.taken]
        before = [table.overview.digest() for table in self.tables]
        self.settle(True)
        self.tables = [table_of(self.file), table_of(self.file, self.stores[1])]
        for table, store, taken, life in zip(self.tables, self.stores, self.taken, lives, strict=True):
            table.snapshots.attach(store, taken.rows_by_group, [life])
            table.begin(self.version)
        self.set_tables()
        self.sweeps = [iter(()), iter(())]
        assert [table.overview.digest() for table in self.tables] == before

    # --- what is to be seen ---

    def compare(self):
        assert self.tables[0].overview.digest() == self.tables[1].overview.digest()
        for table in self.tables:
            read = [self.plain.read(int(key)) for key in ALL_KEYS]
            for begin in range(0, len(ALL_KEYS), 16):
                keys_U = ALL_KEYS[begin : begin + 16]
                try:
                    rows_U = frozen(table.rows.find(keys_U))
                except OutOfMemory:
                    continue
                assert table.gather_present(rows_U, keys_U).tolist() == read[begin : begin + 16]
                table.rows.release(rows_U)
            for key in ALL_KEYS.tolist():
                self.compare_one(table.overview.explain(key, key % 3), self.plain.rows.get(key))

    def compare_one(self, told, row):
        assert told["row"] == (row is not None) and told["day"] == self.plain.day
        if row is not None:
            assert told["score"] == float(self.plain.score(row)) and told["delta_score"] == float(row.delta)
            assert (told["last_seen_day"], told["vector"]) == (row.seen, row.whole)

    def end(self):
        self.compare()
        for table in self.tables:
            for _ in table.deletions.sweep():
                pass
        self.compare()
        counted = np.bincount([row.group for row in self.plain.rows.values()], minlength=3)
        expected = {group: int(count) for group, count in enumerate(counted) if count}
        self.settle(False)
        self.commit(True)
        for table, store in zip(self.tables, self.stores, strict=True):
            assert table.deletions.rows_by_group == expected and sorted(store._rows) == sorted(self.plain.rows)
        self.restart()
        self.compare()


def chosen(max_size):
    places = st.lists(st.integers(0, len(ALL_KEYS) - 1), unique=True, min_size=1, max_size=max_size)
    return places.map(lambda chosen: ALL_KEYS[chosen])


LEARN = st.tuples(
    st.just("learn"), chosen(9), st.sampled_from([0.25, 1.0, -2.0]), st.sampled_from([0, 0, 1, 2]), st.integers(0, 2)
)
ACTS = st.lists(
    st.one_of(
        LEARN,
        LEARN,
        LEARN,
        st.tuples(st.just("tick"), st.integers(0, 3)),
        st.tuples(
            st.just("shrink"), st.sampled_from([None, 0.2, 0.6]), st.sampled_from([None, 0, 2]), st.integers(0, 9)
        ),
        st.tuples(st.just("sweep"), st.integers(1, 9)),
        st.tuples(st.just("forget"), st.sampled_from(ALL_KEYS.tolist()[:12])),
        st.tuples(st.just("change"), st.sampled_from(SLOT_CHANGES), st.sampled_from(list(GROUPS))),
        st.tuples(
            st.just("set"),
            st.sampled_from([0.5, 0.97, 1.0]),
            st.sampled_from([0.5, 0.125]),
            st.sampled_from([None, 0.0, 0.25, 0.5]),
        ),
        st.tuples(st.just("commit"), st.booleans()),
        st.tuples(st.just("settle"), st.booleans()),
        st.tuples(st.just("restart")),
        st.tuples(st.just("compare")),
    ),
    max_size=30,
)


@pytest.mark.long
@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTS)
def test_any_history_ends_with_the_rows_of_the_plain_rules(section, acts):
    histories = Histories(section)
    for name, *args in acts:
        getattr(histories, name)(*args)
    histories.end()


@pytest.mark.parametrize(
    "optimizer",
    [Sgd(kind="sgd"), Adagrad(initial=0.5), Adam(kind="adam"), Ftrl(kind="ftrl", l1=0.01)],
    ids=["sgd", "adagrad-row", "adam", "ftrl"],
)
def test_every_optimizer_learns_heads_alone_until_the_vector_joins(optimizer):
    histories = Histories(LATER.model_copy(update={"optimizer": optimizer, "slots": {}}))
    draw = np.random.default_rng(1)
    for number in range(12):
        histories.learn(draw.choice(ALL_KEYS, 9, replace=False), float(draw.normal()), number % 3, number % 2)
        (histories.restart if number % 4 == 3 else histories.compare)()
    assert {row.whole for row in histories.plain.rows.values()} == {True, False}
    histories.end()


def test_a_slot_that_is_cleared_starts_anew_and_the_others_stay():
    histories, draw = Histories(PLAIN), np.random.default_rng(2)
    for number in range(9):
        histories.learn(draw.choice(ALL_KEYS, 9, replace=False), 1.0, 1, 0)
        if number % 3 == 1:
            histories.change(ClearSlot, ["items", "users"][number % 2])
            histories.shrink(0.6, None, 3)
            histories.change(ClearSlot, "rare")
        if number == 5:
            histories.restart()
        histories.compare()
    histories.end()


@pytest.mark.parametrize("section", [PLAIN, LATER], ids=["whole", "later"])
def test_a_frozen_slot_keeps_its_weights_over_commits_until_it_learns_again(section):
    histories, draw = Histories(section), np.random.default_rng(3)
    kept = {}
    for number in range(12):
        if number == 3:
            histories.change(FreezeSlot, "items")
            rows = histories.plain.rows.items()
            kept = {key: row.floats_W.tolist() for key, row in rows if row.group == 1 and row.whole}
        histories.learn(draw.choice(ALL_KEYS, 9, replace=False), 1.0, number % 2, 0)
        histories.compare()
        if number % 3 == 2:
            histories.restart()
        told = [table.overview.explain(key, key % 3).get("frozen") for table in histories.tables for key in kept]
        assert told == [3 <= number <= 8 or None] * len(told)
        if number == 8:
            assert kept and {key: histories.plain.rows[key].floats_W.tolist() for key in kept} == kept
            histories.change(UnfreezeSlot, "items")
    assert {key: histories.plain.rows[key].floats_W.tolist() for key in kept} != kept
    histories.end()


def test_a_row_of_a_frozen_slot_gets_its_vector_at_its_first_push_after_the_unfreeze():
    histories, keys_U = Histories(LATER), ALL_KEYS[groups_of(ALL_KEYS) == 1][:1]
    row = histories.plain.rows
    histories.learn(keys_U, 1.0, 0, 0)
    histories.change(FreezeSlot, "items")
    told = []
    for clicks in (1, 1, 0, 0):
        histories.learn(keys_U, 1.0, clicks, 0)
        histories.compare()
        told.append((row[int(keys_U[0])].whole, histories.plain.score(row[int(keys_U[0])]) >= 0.5))
        if len(told) == 2:
            histories.restart()
            histories.change(UnfreezeSlot, "items")
            histories.compare()
    assert told == [(False, True), (False, True), (True, True), (True, True)]
    histories.end()


DECAY_WORLD = PLAIN.model_copy(update={"weight_decay": 0.5, "slots": {}})


def weights_after(*acts):
    """Of one row of "items", at its next push without a gradient after it was made and acts followed."""
    histories, keys_U = Histories(DECAY_WORLD), ALL_KEYS[groups_of(ALL_KEYS) == 1][:1]
    histories.learn(keys_U, 1.0, 1, 0)
    before = histories.plain.read(int(keys_U[0]))
    for name, *args in acts:
        getattr(histories, name)(*args)
    histories.learn(keys_U, 0.0, 1, 0)
    histories.compare()
    return [after / each for after, each in zip(histories.plain.read(int(keys_U[0])), before, strict=True)]


PASSES, FREEZE, UNFREEZE = ("close",), ("change", FreezeSlot, "items"), ("change", UnfreezeSlot, "items")


@pytest.mark.parametrize("again", [(), [("restart",)]], ids=["at once", "restarted"])
def test_a_decay_that_is_set_holds_for_the_passes_after_it(again):
    assert weights_after(PASSES, PASSES, *again) == [0.5**3] * 3
    assert weights_after(PASSES, ("set", 1.0, 0.5, 0.75), PASSES, *again) == [0.25**2] * 3
    assert weights_after(("set", 1.0, 0.5, 0.0), PASSES, ("set", 1.0, 0.5, 0.5), *again, PASSES) == [0.5**2] * 3


@pytest.mark.parametrize("again", [(), [("restart",)]], ids=["at once", "restarted"])
def test_rows_of_a_slot_do_not_decay_for_the_time_before_it_was_unfrozen(again):
    assert weights_after(PASSES, FREEZE, PASSES, UNFREEZE, *again, PASSES) == [0.5**2] * 3
    assert weights_after(PASSES, UNFREEZE, *again) == [0.5**2] * 3, "it was not frozen"


def test_a_decay_that_the_job_file_changes_holds_from_the_restart_on():
    histories, keys_U = Histories(DECAY_WORLD), ALL_KEYS[:3]
    for weight_decay in (0.5, 0.25, 0.0, 0.75):
        histories.learn(keys_U, 1.0, 1, 0)
        histories.close()
        histories.file = histories.section = DECAY_WORLD.model_copy(update={"weight_decay": weight_decay})
        histories.plain.set(histories.section)
        histories.restart()
    histories.learn(keys_U, 1.0, 1, 0)
    histories.end()
