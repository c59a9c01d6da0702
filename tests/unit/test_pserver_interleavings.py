"""Sweeps and surveys run between single operations of other threads, where they could do harm."""

import threading
import time
from queue import SimpleQueue
from unittest.mock import patch

import numpy as np
import pytest

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.lifecycle.aging import TableAging
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.rows import row_cache
from headrace.pserver.rows.row_cache import CacheBound
from headrace.pserver.server.pushes import Push
from headrace.pserver.server.shard import Shard
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.tables.sweeping import run
from headrace.pserver.tables.table_overview import TableOverview
from tests.unit.test_pserver_deletions import ALL_KEYS, World


def cold_and_hot():
    """A bounded table, some of whose rows are in the store alone, and others in memory."""
    world = World(bounded=True)
    for keys_U in np.split(ALL_KEYS[:40], 5):
        world.learn(keys_U)
        world.commit()
    hot_U = ALL_KEYS[:40][world.table.rows.resident(ALL_KEYS[:40]) >= 0]
    return world, np.setdiff1d(ALL_KEYS[:40], hot_U), hot_U


def test_a_batch_that_asks_the_store_keeps_the_numbers_of_rows_that_a_sweep_removes_meanwhile(monkeypatch):
    world, cold_U, hot_U = cold_and_hot()
    keys_U, get, swept = np.concatenate([hot_U[:8], cold_U[:8]]), world.store.get, []
    world.shrink()

    def swept_meanwhile(keys_U):
        if not swept:
            swept.append(next(world.table.deletions.sweep()))
        return get(keys_U)

    monkeypatch.setattr(world.store, "get", swept_meanwhile)
    rows_U = world.reserve(keys_U)
    assert swept and len(np.unique(rows_U)) == len(keys_U)
    assert (world.table.rows.resident(keys_U) == rows_U).all()
    world.version += 1
    world.push(rows_U)
    assert world.table.deletions.num_rows >= len(keys_U)
    assert set(keys_U) == set(world.present())


def test_a_batch_lets_go_of_its_rows_where_the_store_fails(monkeypatch):
    world, cold_U, hot_U = cold_and_hot()
    pins_R = world.table.rows._pins_R.copy()
    monkeypatch.setattr(world.store, "get", lambda keys_U: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.reserve(np.concatenate([hot_U[:8], cold_U[:8]]))
    assert (world.table.rows._pins_R == pins_R).all()


def test_a_batch_that_read_the_store_as_a_shrink_acted_brings_back_nothing_that_it_took(monkeypatch):
    world, cold_U, _ = cold_and_hot()
    born = World(bounded=True)
    asked, answered, found = threading.Event(), threading.Event(), []
    rows, make_room = world.table.rows, world.table.rows._make_room

    def slowly(num_rows):
        asked.set()
        answered.wait(10)
        return make_room(num_rows)

    monkeypatch.setattr(rows, "_make_room", slowly)
    loader = threading.Thread(target=lambda: found.append(world.reserve(cold_U[:4])))
    loader.start()
    asked.wait(10)
    world.shrink()
    pieces = world.table.deletions.sweep()
    next(pieces)  # those in memory
    sweeper = threading.Thread(target=run, args=(pieces,))
    sweeper.start()
    answered.set()
    for thread in (loader, sweeper):
        thread.join()
    assert not world.table.deletions.sweeping and world.table.deletions.num_rows == 0
    assert (world.table.gather(found[0]) == born.table.gather(born.reserve(cold_U[:4]))).all()


def test_a_row_that_came_back_was_committed_and_left_since_the_store_was_read_stays(monkeypatch):
    world, cold_U, _ = cold_and_hot()
    world.shrink()
    rows, sweep_stored = world.table.rows, world.table.deletions._sweep_stored
    back_U = cold_U[:4]

    def late(*given):
        if not (rows.resident(back_U) >= 0).any():
            world.learn(back_U)
            world.commit()
            for keys_U in np.split(ALL_KEYS[40:64], 3) * 2:
                world.learn(keys_U)
                world.commit()
            assert (rows.resident(back_U) < 0).all(), "they have left"
        sweep_stored(*given)

    monkeypatch.setattr(world.table.deletions, "_sweep_stored", late)
    run(world.table.deletions.sweep())
    assert set(back_U) <= set(world.present())
    assert world.table.deletions.num_rows == len(world.present()) == 28


def test_a_sweep_that_still_runs_takes_what_the_next_shrink_takes(monkeypatch):
    world, arrange, sweepers = World(bounded=False), TableAging._arrange, []
    world.learn(ALL_KEYS[:8])

    def swept_before(life, *args):
        if not sweepers:
            sweepers.append(threading.Thread(target=run, args=(world.table.deletions.sweep(),)))
            sweepers[0].start()
            sweepers[0].join(0.2)
        arrange(life, *args)

    monkeypatch.setattr(TableAging, "_arrange", swept_before)
    world.shrink()
    sweepers[0].join()
    run(world.table.deletions.sweep())
    assert world.table.deletions.num_rows == 0 and world.present() == []


def test_a_digest_has_no_row_that_a_sweep_removes_meanwhile(monkeypatch):
    world, present = World(bounded=False), TableOverview._present
    world.learn(ALL_KEYS[:8])
    world.shrink()

    def swept_after(overview):
        there_R = present(overview)
        run(world.table.deletions.sweep())
        return there_R

    monkeypatch.setattr(TableOverview, "_present", swept_after)
    assert world.table.overview.digest() == World(bounded=False).table.overview.digest()


@pytest.mark.parametrize("admission", [(), (CountEntry(kind="count", n=1, exact=True),)])
def test_batches_that_are_ahead_leave_room_for_the_rows_that_a_step_admits(admission, monkeypatch):
    monkeypatch.setattr(row_cache, "ROOM_WAIT_S", 60.0)
    with patch.object(CacheBound, "of", lambda memory_bytes, width: CacheBound(60, 1000)):
        shard = Shard(ShardProcess.alone({"t": TableSection(dim=2, memory=8 << 20, admission=admission)}, 1))
    table, draw, ready = shard.tables["t"], np.random.default_rng(1), SimpleQueue()
    table.snapshots.attach(store := MemoryRowStore(table.snapshots.num_words), {})
    batches = [Keys(draw.choice(ALL_KEYS, 8, replace=False), np.zeros(8, np.uint16)) for _ in range(60)]

    def load():
        for keys in batches:
            ready.put(shard.resolve({"t": keys}, learn=True))

    threading.Thread(target=load, daemon=True).start()
    for number, _ in enumerate(batches, 1):
        batch = ready.get(timeout=120)
        time.sleep(0.002)  # the loader fills what it may
        shard.open_pass()
        rows_UD, one_U = shard.rows(batch)["t"], np.ones(8, np.float32)
        shard.apply([Push(batch, {"t": Gradients(rows_UD, one_U, one_U)}, 8)], number)
        shard.release(batch)
        shard.close_pass(0, number)
        taken = table.snapshots.take()
        store.write(taken.keys_U, taken.words_UW, taken.gone()[0])
        table.snapshots.settle(True)
    assert table.deletions.num_rows == len(np.unique(np.concatenate([keys.keys_U for keys in batches])))
    assert table.rows._num_pins == 0


def test_a_row_that_leaves_memory_while_rows_are_ranked_is_ranked_once(monkeypatch):
    world, *_ = cold_and_hot()
    overview, pieces = world.table.overview, TableOverview._pieces
    calm = overview.ranked(100)
    assert len(calm.rows) == 40

    def leaving(of):
        held = [(keys_U.copy(), statistics) for keys_U, statistics in pieces(of)]
        yield from held
        yield held[0]  # as the rows of the disk have them

    monkeypatch.setattr(TableOverview, "_pieces", leaving)
    assert overview.ranked(100).rows == calm.rows and overview.ranked(5).rows == calm.rows[:5]
