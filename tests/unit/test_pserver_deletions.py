"""Rows are deleted by request or by a shrink, early or in its sweep, while batches hold them or commits run."""

import threading
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.lifecycle import deletions
from headrace.pserver.lifecycle.aging import TableAging
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.protocol.table_operations import ForgetRow, ShrinkRows
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.rows import row_cache
from headrace.pserver.rows.kernels import EMPTY
from headrace.pserver.rows.row_cache import CacheBound
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.server.pushes import Push
from headrace.pserver.server.shard import Shard
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.tables.sweeping import Sweeper, run
from headrace.pserver.tables.table import ShardTable

SECTION = TableSection(dim=3, optimizer=Adagrad(per="element", lr=0.5), decay=0.5)
ALL_KEYS = np.unique(np.random.default_rng(5).integers(1, 2**63, 64).astype(np.uint64))
EVERYTHING = ShrinkRows(table="t", delete_below=1e9)


@pytest.fixture(params=["whole", "bounded"])
def world(request, monkeypatch):
    monkeypatch.setattr(row_cache, "ROOM_WAIT_S", 0.0)
    return World(bounded=request.param == "bounded")


class World:
    """A table with its store."""

    def __init__(self, bounded):
        self.bounded, self.version = bounded, 0
        self.store = MemoryRowStore(ShardTable("t", SECTION, 1).snapshots.num_words)
        self.table = self.made()
        self.table.snapshots.attach(self.store, {})

    def made(self):
        section = SECTION.model_copy(update={"memory": 8 << 20}) if self.bounded else SECTION
        with patch.object(CacheBound, "of", lambda memory_bytes, width: CacheBound(24, 1000)):
            return ShardTable("t", section, 1)

    def reserve(self, keys_U):
        return frozen(self.table.rows.reserve(frozen(keys_U), np.zeros(len(keys_U), np.uint16)))

    def push(self, rows_U):
        one_U, grads_UD = frozen(np.ones(len(rows_U), np.float32)), frozen(np.ones((len(rows_U), 4), np.float32))
        self.table.apply(rows_U, Gradients(grads_UD, one_U, one_U), 1, self.version)

    def learn(self, keys_U, day=0):
        self.version += 1
        rows_U = self.reserve(keys_U)
        self.table.open_pass()
        self.table.gather(rows_U)
        self.push(rows_U)
        self.table.rows.release(rows_U)
        self.table.close_pass(day)

    def forget(self, *keys):
        for key in keys:
            self.table.operate(ForgetRow(table="t", group=0, key=int(key)), self.version)

    def shrink(self, operation=EVERYTHING):
        self.version += 1
        self.table.operate(operation, self.version)

    def write(self):
        taken = self.table.snapshots.take()
        self.store.write(taken.keys_U, taken.words_UW, taken.gone()[0])
        assert sum(taken.rows_by_group.values()) == len(self.store._rows)
        return taken

    def commit(self):
        taken = self.write()
        self.table.snapshots.settle(True)
        return taken

    def present(self, keys_U=ALL_KEYS):
        """Keys that read as rows, and are told of as such."""
        found = []
        for key in keys_U:
            rows_U = frozen(self.table.rows.find(np.array([key], np.uint64)))
            if self.table.gather_present(rows_U, np.array([key], np.uint64)).any():
                found.append(key)
            self.table.rows.release(rows_U)
        assert found == [key for key in keys_U if self.table.overview.explain(int(key), 0)["row"]]
        return found

    def restored(self):
        """A table that begins with the commit of now."""
        taken = self.commit()
        self.table = self.made()
        self.table.snapshots.attach(self.store, taken.rows_by_group, [taken.life])


def test_a_row_that_a_batch_holds_keeps_its_number_and_starts_anew(world):
    born_UD = world.table.gather(world.reserve(ALL_KEYS[:1]))
    world.learn(ALL_KEYS[:3])
    rows_U = world.reserve(ALL_KEYS[:1])
    world.forget(*ALL_KEYS[:3])
    assert world.table.deletions.num_rows == world.table.dirty.num_dirty == world.table.overview.digest() == 0
    assert (world.table.gather(rows_U) == born_UD).all() and (world.reserve(ALL_KEYS[:1]) == rows_U).all()
    world.version += 1
    world.push(rows_U)
    assert world.present() == [ALL_KEYS[0]] and world.table.deletions.num_rows == 1


def test_unheld_numbers_are_reused(world):
    for begin in range(0, 60, 10):
        world.learn(ALL_KEYS[begin : begin + 10])
        world.forget(*ALL_KEYS[begin : begin + 10])
    assert world.table.rows.num_numbers == 10 and world.table.deletions.num_rows == 0
    world.learn(ALL_KEYS[:20])
    assert world.table.rows.num_numbers == 20 and world.present() == [*ALL_KEYS[:20]]


def test_a_commit_lacks_rows_deleted_before_it_and_the_next_one_deletes_later_ones(world):
    world.learn(ALL_KEYS[:10])
    world.forget(ALL_KEYS[0])
    world.commit()
    assert sorted(world.store._rows) == [*ALL_KEYS[1:10]]
    world.forget(ALL_KEYS[1])
    assert world.commit().gone()[0].tolist() == [ALL_KEYS[1]] and sorted(world.store._rows) == [*ALL_KEYS[2:10]]
    assert not len(world.table.snapshots.take().gone()[0])


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("made_again", [True, False])
def test_a_row_deleted_while_in_flight_stays_deleted_with_or_without_the_commit(world, committed, made_again):
    world.learn(ALL_KEYS[:4])
    taken = world.table.snapshots.take()
    assert len(taken.keys_U) == 4
    world.forget(*ALL_KEYS[:2])
    if made_again:
        world.learn(ALL_KEYS[:1])
    if committed:
        world.store.write(taken.keys_U, taken.words_UW, taken.gone()[0])
    world.table.snapshots.settle(committed)
    expected = [*ALL_KEYS[0 if made_again else 2 : 1], *ALL_KEYS[2:4]]
    assert world.present() == expected and world.table.deletions.num_rows == len(expected)
    before = world.table.overview.digest()
    world.restored()
    assert sorted(world.store._rows) == expected == world.present() and world.table.overview.digest() == before


def test_a_deletion_whose_commit_fails_is_in_the_next(world):
    world.learn(ALL_KEYS[:4])
    world.commit()
    world.forget(*ALL_KEYS[:2])
    assert len(world.table.snapshots.take().gone()[0]) == 2
    world.forget(ALL_KEYS[2])
    world.learn(ALL_KEYS[:1])
    world.table.snapshots.settle(False)
    taken = world.commit()
    assert sorted(taken.gone()[0]) == [*ALL_KEYS[1:3]] and sorted(world.store._rows) == [ALL_KEYS[0], ALL_KEYS[3]]


def test_rows_of_a_shrink_are_absent_at_once_and_come_back_as_new(world):
    world.learn(ALL_KEYS[:20])
    world.commit()
    born_UD = ShardTable("t", SECTION, 1)
    born_UD = born_UD.gather(frozen(born_UD.rows.reserve(ALL_KEYS[:5], np.zeros(5, np.uint16))))
    world.shrink()
    assert world.table.deletions.sweeping and world.present() == [] and world.table.overview.digest() == 0
    rows_U = world.reserve(ALL_KEYS[:5])
    assert (world.table.gather(rows_U) == born_UD).all()
    world.table.rows.release(rows_U)
    world.learn(ALL_KEYS[:3])
    assert world.present() == [*ALL_KEYS[:3]]
    before = world.table.overview.digest()
    run(world.table.deletions.sweep())
    assert (
        not world.table.deletions.sweeping
        and world.table.overview.digest() == before
        and world.table.deletions.num_rows == 3
    )
    world.restored()
    assert sorted(world.store._rows) == [*ALL_KEYS[:3]] and world.table.overview.digest() == before


def test_stored_rows_deleted_by_a_shrink_leave_with_the_next_commit_without_being_loaded():
    world = World(bounded=True)
    for begin in (0, 20, 40):
        world.learn(ALL_KEYS[begin : begin + 20])
        world.commit()
    world.restored()
    world.shrink()
    assert (world.table.rows.find(ALL_KEYS[:20]) == EMPTY).all() and world.table.deletions.num_rows == 40
    world.learn(ALL_KEYS[:2])
    run(world.table.deletions.sweep())
    assert world.table.deletions.num_rows == 2 and len(world.store._rows) == 60
    taken = world.commit()
    assert sorted(taken.gone()[0]) == [*ALL_KEYS[2:60]] and sorted(world.store._rows) == [*ALL_KEYS[:2]]


def test_a_restart_in_the_middle_of_a_sweep_goes_on_with_it(world, monkeypatch):
    monkeypatch.setattr(deletions, "PIECE_ROWS", 4)
    world.learn(ALL_KEYS[:20])
    world.commit()
    world.shrink()
    next(world.table.deletions.sweep())
    world.restored()
    assert world.table.deletions.sweeping and world.table.overview.digest() == 0 and world.present() == []
    run(world.table.deletions.sweep())
    assert world.table.deletions.num_rows == 0 and not world.table.deletions.sweeping


def test_a_batch_to_predict_looked_up_before_a_shrink_reads_zeros_after_it(world):
    rows_U = frozen(world.table.rows.find(ALL_KEYS[:10]))
    world.learn(ALL_KEYS[:10])
    held_U = frozen(world.table.rows.find(ALL_KEYS[:10]))
    assert world.table.gather_present(rows_U, ALL_KEYS[:10]).any(axis=1).all()
    world.shrink()
    assert not world.table.gather_present(rows_U, ALL_KEYS[:10]).any()
    assert not world.table.gather_present(held_U, ALL_KEYS[:10]).any() and world.table.overview.digest() == 0


def test_a_survey_counts_the_rows_that_the_shrink_then_deletes(world):
    world.learn(ALL_KEYS[:20], day=0)
    world.commit()
    world.learn(ALL_KEYS[20:40], day=3)
    world.commit()
    rule = ShrinkRows(table="t", delete_below=0.3, delete_after_days=2)
    survey = world.table.deletions.survey(rule)
    assert (survey.rows, survey.below, survey.unseen) == (40, {0: 40}, {}) == (40, {0: survey.going}, {})
    assert world.table.deletions.survey(ShrinkRows(table="t", delete_after_days=2)).unseen == {0: 20}
    world.shrink(ShrinkRows(table="t", delete_after_days=2))
    assert world.present() == [*ALL_KEYS[20:40]]


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_shrink_of_the_same_close_that_comes_during_a_sweep_removes_its_rows_all_the_same(world, pieces):
    world.learn(ALL_KEYS[:8])
    world.shrink(ShrinkRows(table="t", delete_below=0.01))
    with patch.object(deletions, "PIECE_ROWS", 2):
        sweep = world.table.deletions.sweep()
        for _ in range(pieces):
            next(sweep)
        world.table.operate(EVERYTHING, world.version)
        run(sweep)
    assert world.present() == [] and world.table.deletions.num_rows == 0


def test_a_restart_takes_up_every_shrink_of_a_close_that_some_shard_has_not_swept(world):
    world.learn(ALL_KEYS[:8])
    world.shrink(EVERYTHING)
    world.table.operate(ShrinkRows(table="t", delete_below=0.01), world.version)
    taken = world.commit()
    ahead = msgspec.structs.replace(taken.life, shrinks=taken.life.shrinks[1:])
    for states in ([taken.life, ahead], [ahead, taken.life]):
        life = TableAging(SECTION, {})
        life.load(states)
        assert life.state.shrinks == taken.life.shrinks


def test_sweeps_begin_after_all_operations_of_a_close(monkeypatch):
    shard, waiting = Shard(ShardProcess.alone({"t": SECTION}, 1)), []
    monkeypatch.setattr(Sweeper, "sweep", lambda _, table: waiting.append(table.overview.life.shrinks))
    shard.operate([ShrinkRows(table="t", delete_below=0.01), EVERYTHING], 1)
    assert [len(each) for each in waiting] == [2]


def test_a_sweep_beside_steps_and_a_loader_changes_nothing_and_counts_every_row_once():
    draw = np.random.default_rng(2)
    batches = [draw.choice(ALL_KEYS, 8, replace=False) for _ in range(240)]
    ends = []
    for threads in (False, True):
        world, done = World(bounded=True), threading.Event()

        def sweep(table=world.table, done=done):
            while not done.is_set():
                run(table.deletions.sweep())

        sweeper = threading.Thread(target=sweep)
        if threads:
            sweeper.start()
        with patch.object(deletions, "PIECE_ROWS", 2):
            for number, keys_U in enumerate(batches):
                world.learn(keys_U, day=number // 10)
                if number % 7 == 6:
                    world.shrink(ShrinkRows(table="t", delete_below=0.6))
                if number % 2:
                    world.table.snapshots.settle(True) if world.table.dirty.in_flight_U is not None else None
                    taken = world.table.snapshots.take()
                    world.store.write(taken.keys_U, taken.words_UW, taken.gone()[0])
                    world.table.snapshots.settle(True)
        done.set()
        if threads:
            sweeper.join()
        run(world.table.deletions.sweep())
        world.commit()
        assert world.table.deletions.num_rows == len(world.store._rows)
        ends.append((world.table.overview.digest(), world.table.deletions.rows_by_group, sorted(world.store._rows)))
    assert ends[0] == ends[1] and 0 < len(ends[0][2]) < len(ALL_KEYS)


@pytest.mark.parametrize("memory", [None, 8 << 20])
def test_a_selective_table_deletes_and_admits_again_with_the_digest_of_a_new_one(memory):
    section = SECTION.model_copy(update={"admission": (CountEntry(kind="count", n=2, exact=True),), "memory": memory})
    shards = [Shard(ShardProcess.alone({"t": section}, 1)) for _ in range(2)]
    keys_U = ALL_KEYS[:6]
    ones_U, grads_UD = np.ones(6, np.float32), np.ones((6, 4), np.float32)

    def step(shard, version):
        batch = shard.resolve({"t": Keys(keys_U, np.zeros(6, np.uint16))}, learn=True)
        shard.open_pass()
        read_UD = shard.rows(batch)["t"]
        shard.apply([Push(batch, {"t": Gradients(grads_UD, ones_U, ones_U)}, 1)], version)
        shard.release(batch)
        shard.close_pass(0, version)
        return read_UD.any(axis=1).tolist()

    assert [step(shards[0], version) for version in (1, 2, 3)] == [[False] * 6, [False] * 6, [True] * 6]
    shards[0].operate([ForgetRow(table="t", group=0, key=int(key)) for key in keys_U], 3)
    assert shards[0].tables["t"].overview.digest() == shards[1].tables["t"].overview.digest()
    for shard in shards:
        assert [step(shard, version) for version in (4, 5, 6)] == [[False] * 6, [False] * 6, [True] * 6]
    assert shards[0].tables["t"].overview.digest() == shards[1].tables["t"].overview.digest()
