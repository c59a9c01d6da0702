"""A table: rows that are reserved, made, moved by growth, hashed and counted."""

import threading

import numpy as np
import pytest

from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.row_optimizers import Adagrad, Ftrl
from headrace.pserver.rows import table_rows as rows_module
from headrace.pserver.rows.kernels import EMPTY
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.tables.table import ShardTable

SECTION = TableSection(dim=3, optimizer=Adagrad(per="element", lr=0.5))


@pytest.fixture
def small(monkeypatch):
    """Tables that start with four rows, so that they grow often."""
    monkeypatch.setattr(rows_module, "START_ROWS", 4)


def keys(count, seed=0):
    draw = np.unique(np.random.default_rng(seed).integers(1, 2**63, count).astype(np.uint64))
    np.random.default_rng(seed + 1).shuffle(draw)
    return Keys(draw, (draw % np.uint64(5)).astype(np.uint16))


def ones(rows_U, dim=4, value=1.0):
    one = np.ones(len(rows_U), np.float32)
    return Gradients(*map(frozen, (np.full((len(rows_U), dim), value, np.float32), one, one * 0)))


def reserve(table, some):
    return frozen(table.rows.reserve(some.keys_U, some.group_U))


def test_a_row_number_stays_with_its_key_through_growth(small):
    table, some = ShardTable("t", SECTION, 1), keys(3000)
    first = reserve(table, Keys(some.keys_U[:100], some.group_U[:100]))
    before = table.gather(first)
    assert sorted(reserve(table, some).tolist()) == list(range(len(some.keys_U)))
    assert (reserve(table, some)[:100] == first).all() and (table.rows.find(some.keys_U)[:100] == first).all()
    assert (table.gather(first) == before).all()


def test_growth_keeps_learnt_rows(small):
    table, some = ShardTable("t", SECTION, 1), keys(5)
    rows = reserve(table, some)
    table.apply(rows, ones(rows), 1, 1)
    weights, digest = table.gather(rows), table.overview.digest()
    reserve(table, keys(4000, seed=3))
    assert (table.gather(rows) == weights).all() and table.overview.digest() == digest


def test_a_reserved_row_is_absent_until_its_first_push():
    table, some = ShardTable("t", SECTION, 1), keys(50)
    rows = reserve(table, some)
    assert table.deletions.num_rows == 0 and table.overview.digest() == 0
    assert table.gather(rows)[:, 1:].any() and not table.gather_present(rows).any()
    table.apply(frozen(rows[:7]), ones(rows[:7]), 1, 1)
    assert (
        table.deletions.num_rows == 7 and (table.gather_present(rows).any(axis=1)).tolist() == [True] * 7 + [False] * 43
    )


def test_finding_reserves_nothing():
    table, some = ShardTable("t", SECTION, 1), keys(50)
    assert (table.rows.find(some.keys_U) == EMPTY).all() and (table.rows.find(some.keys_U) == EMPTY).all()
    assert not table.gather_present(frozen(np.full(3, EMPTY, np.int32))).any()


def test_tables_and_seeds_draw_differently():
    tables = [ShardTable(name, SECTION, seed) for name, seed in (("a", 1), ("a", 1), ("b", 1), ("a", 2))]
    values = [table.gather(reserve(table, keys(9))) for table in tables]
    assert (values[0] == values[1]).all()
    assert (values[0][:, 1:] != values[2][:, 1:]).all() and (values[0][:, 1:] != values[3][:, 1:]).all()


def test_initial_ftrl_rows_match_their_state():
    table = ShardTable("t", TableSection(dim=3, optimizer=Ftrl(kind="ftrl", lr=0.5)), 1)
    rows = reserve(table, keys(9))
    before = table.gather(rows)
    table.apply(rows, ones(rows, value=0.0), 1, 1)
    np.testing.assert_allclose(table.gather(rows), before, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [SECTION.optimizer, Ftrl(kind="ftrl")])
def test_two_threads_give_the_bits_of_one(optimizer):
    from concurrent.futures import ThreadPoolExecutor

    section = TableSection(dim=5, optimizer=optimizer)
    with ThreadPoolExecutor(1) as pool:
        tables = [ShardTable("t", section, 1), ShardTable("t", section, 1, pool)]
        some = keys(20_000)
        grads = np.random.default_rng(0).normal(size=(len(some.keys_U), 6)).astype(np.float32)
        for table in tables:
            rows = reserve(table, some)
            table.apply(rows, Gradients(frozen(grads), *[frozen(np.ones(len(rows), np.float32))] * 2), 1, 1)
        assert tables[0].overview.digest() == tables[1].overview.digest()
        assert (tables[0].gather(rows) == tables[1].gather(rows)).all()


def test_growing_in_one_thread_while_learning_in_another_loses_nothing(small):
    table, learnt = ShardTable("t", SECTION, 1), keys(64)
    rows = reserve(table, learnt)
    stop = threading.Event()

    def read_ahead():
        seed = 10
        while not stop.is_set() and seed < 60:
            reserve(table, keys(997, seed))
            seed += 1

    reader = threading.Thread(target=read_ahead)
    reader.start()
    for version in range(1, 400):
        table.apply(rows, ones(rows), 1, version)
    stop.set()
    reader.join()
    alone = ShardTable("t", SECTION, 1)
    rows = reserve(alone, learnt)
    for version in range(1, 400):
        alone.apply(rows, ones(rows), 1, version)
    assert table.overview.digest() == alone.overview.digest()


def test_scaling_by_shows():
    tables = [
        ShardTable("t", TableSection(dim=3, init_range=0.0, optimizer={"kind": "sgd", "lr": 1.0}, grad_scale=scale), 1)
        for scale in ("mean", "show", "sum")
    ]
    values = []
    for table in tables:
        rows = reserve(table, keys(1))
        push = ones(rows)
        table.apply(rows, Gradients(push.grads_UD, frozen(np.array([4], np.float32)), push.click_U), 2, 1)
        values.append(table.gather(rows)[0, 0])
    assert values == [-1.0, -0.5, -2.0]


def test_rows_and_new_rows_are_counted_by_group():
    table, some = ShardTable("t", SECTION, 1), keys(100)
    rows = reserve(table, some)
    table.open_pass()
    table.apply(frozen(rows[:60]), ones(rows[:60]), 1, 1)
    table.close_pass(3)
    table.open_pass()
    table.apply(frozen(rows[50:80]), ones(rows[50:80]), 1, 2)
    stats = table.stats()
    assert (stats.num_rows, stats.new_rows) == (80, 20)
    counted = np.bincount(some.group_U[:80], minlength=5)
    assert stats.rows_by_group == {group: int(count) for group, count in enumerate(counted) if count}
    assert stats.num_bytes > 100 * 4 * table.rows.width


def test_the_digest_of_a_close_is_that_of_the_rows_touched():
    table, some = ShardTable("t", SECTION, 1), keys(40)
    rows = reserve(table, some)
    table.open_pass()
    table.apply(rows, ones(rows), 1, 1)
    assert table.close_pass(1) == table.overview.digest()
    table.open_pass()
    table.apply(frozen(rows[:9]), ones(rows[:9]), 1, 2)
    table.apply(frozen(rows[:9]), ones(rows[:9]), 1, 2)
    close = table.close_pass(2)
    assert close != table.overview.digest() and close != 0
    table.open_pass()
    assert table.close_pass(3) == 0


def test_a_full_table_is_an_error_with_advice(monkeypatch, small):
    from headrace.pserver.errors import InvalidShardCall

    monkeypatch.setattr(rows_module, "MAX_ROWS", 16)
    with pytest.raises(InvalidShardCall, match="16 rows on one shard; use more shards"):
        reserve(ShardTable("t", SECTION, 1), keys(40))
