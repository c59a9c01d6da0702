"""Rows of a table are copied for a commit, and restored from a store."""

import numpy as np
import pytest

from headrace.pserver.config import TableSection
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.rows import table_rows as rows_module
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.tables.table import ShardTable

SECTION = TableSection(dim=3, optimizer=Adagrad(per="element", lr=0.5))


def changed(table):
    taken = table.snapshots.take()
    return taken.keys_U, taken.words_UW


def keys(count, seed=0):
    draw = np.unique(np.random.default_rng(seed).integers(1, 2**63, count).astype(np.uint64))
    return Keys(draw, (draw % np.uint64(5)).astype(np.uint16))


def learn(table, some, version, value=1.0):
    """One pass that pushes `some` once."""
    rows = frozen(table.rows.reserve(some.keys_U, some.group_U))
    one = np.ones(len(rows), np.float32)
    table.open_pass()
    table.apply(rows, Gradients(*map(frozen, (np.full((len(rows), 4), value, np.float32), one, one * 0))), 1, version)
    table.close_pass(version)


def part(some, begin, end):
    return Keys(some.keys_U[begin:end], some.group_U[begin:end])


def commit(table, store, committed=True):
    store.write(*changed(table))
    table.snapshots.settle(committed)


def test_rows_wait_for_a_commit_from_the_close_of_their_pass_and_are_copied_once():
    table, some = ShardTable("t", SECTION, 1), keys(60)
    learn(table, part(some, 0, 40), 1)
    learn(table, part(some, 30, 50), 2)
    assert table.dirty.num_dirty == table.stats().dirty_rows == 50
    keys_U, words_UW = changed(table)
    assert sorted(keys_U.tolist()) == some.keys_U[:50].tolist() and words_UW.shape == (50, table.snapshots.num_words)
    assert table.dirty.num_dirty == 0
    table.snapshots.settle(True)
    assert len(changed(table)[0]) == 0


def test_a_snapshot_stays_what_it_was_while_training_goes_on():
    table, some = ShardTable("t", SECTION, 1), keys(60)
    learn(table, some, 1)
    keys_U, words_UW = changed(table)
    before = words_UW.copy()
    learn(table, some, 2)
    assert (words_UW == before).all() and table.dirty.num_dirty == 60


def test_rows_of_a_failed_commit_are_in_the_next_at_their_newest_value():
    table, some, store = ShardTable("t", SECTION, 1), keys(60), MemoryRowStore(13)
    learn(table, some, 1)
    table.snapshots.take()
    learn(table, part(some, 0, 9), 2)
    table.snapshots.settle(False)
    assert table.dirty.num_dirty == 60
    commit(table, store)
    other = ShardTable("t", SECTION, 1)
    other.snapshots.attach(store, table.deletions.rows_by_group)
    assert other.overview.digest() == table.overview.digest()


@pytest.mark.parametrize("start_rows", [4, 1 << 16])
def test_a_table_restored_from_its_commits_is_the_table(monkeypatch, start_rows):
    monkeypatch.setattr(rows_module, "START_ROWS", start_rows)
    table, store = ShardTable("t", SECTION, 1), MemoryRowStore(13)
    for version in range(1, 5):
        learn(table, keys(300, seed=version // 2), version, value=0.25 * version)
        commit(table, store)
    life = table.snapshots.take().life
    table.snapshots.settle(committed=True)
    other = ShardTable("t", SECTION, 1)
    other.snapshots.attach(store, table.deletions.rows_by_group, [life])
    assert (other.overview.digest(), other.deletions.num_rows, other.deletions.rows_by_group) == (
        table.overview.digest(),
        table.deletions.num_rows,
        table.deletions.rows_by_group,
    )
    assert other.dirty.num_dirty == 0
    for each in (table, other):
        learn(each, keys(300, seed=2), 9)
        learn(each, keys(300, seed=7), 10)
    assert other.overview.digest() == table.overview.digest() and other.dirty.num_dirty == table.dirty.num_dirty


def test_a_store_with_other_rows_than_its_commit_counted_is_refused():
    table, store = ShardTable("t", SECTION, 1), MemoryRowStore(13)
    learn(table, keys(60), 1)
    commit(table, store)
    with pytest.raises(StoreDamaged, match="table 't': the store holds 60 rows"):
        ShardTable("t", SECTION, 1).snapshots.attach(store, {0: 61})
