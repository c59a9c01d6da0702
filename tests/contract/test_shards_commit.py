"""The contract of shards for rank 0: a commit is one state, and restores to any number of shards."""

import shutil
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from headrace.codec import plain, typed
from headrace.pserver.commit import shard_commits
from headrace.pserver.commit.change_files import read_changes
from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall, StoreDamaged, StoreFailed
from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.row_optimizers import Adam, Ftrl, Sgd
from headrace.pserver.server.commands import (
    CountRows,
    DigestRows,
    RestoreCommit,
    SettleSnapshot,
    TakeSnapshot,
    WriteSnapshot,
)
from headrace.pserver.store.rocks_store import RECOVERY, RocksRowStore
from tests.contract import shards_world as w
from tests.contract.test_shards import SOME, SOME_IDS, batch, some_batches
from tests.small_disk import small_disk


@contextmanager
def job_at(tmp_path, name, kind, folder=None, parts=(), version=0, **more):
    """A World restored from a commit, or fresh."""
    with w.job(kind, live=tmp_path / "live" / name, **more) as world:
        world.one.call(RestoreCommit(folder or tmp_path, parts, version), w.soon())
        yield world


@pytest.fixture(params=SOME, ids=SOME_IDS)
def kind(request):
    return request.param


@pytest.fixture
def world(kind, tmp_path):
    with job_at(tmp_path, "first", kind) as made:
        yield made


def digest_of(world):
    return world.one.call(DigestRows(), w.soon())


def train(world, number):
    return w.train(world.one, number, some_batches(seed=number), seed=number, steps=4, day=number)


def test_a_commit_brings_back_the_same_rows_and_the_same_training(kind, world, tmp_path):
    train(world, 1)
    parts = w.commit(world.one, tmp_path / "commit", 1)
    before, stats = digest_of(world), world.one.call(CountRows(), w.soon()).tables
    train(world, 2)
    with job_at(tmp_path, "second", kind, tmp_path / "commit", parts, 1) as again:
        assert digest_of(again) == before and all(before.values())
        assert {n: s.rows_by_group for n, s in again.one.call(CountRows(), w.soon()).tables.items()} == {
            n: s.rows_by_group for n, s in stats.items()
        }
        train(again, 2)
        assert digest_of(again) == digest_of(world)


@pytest.mark.parametrize("optimizer", [Adam(kind="adam"), Ftrl(kind="ftrl", l1=0.01), Sgd(kind="sgd")])
def test_a_commit_is_restored_onto_any_number_of_shards(tmp_path, optimizer):
    tables = {**w.TABLES, "default": TableSection(dim=4, optimizer=optimizer)}
    parts, folder = [], tmp_path
    expected = {}
    with w.job(0, tables=tables) as plain:
        for number in range(1, 6):
            train(plain, number)
            expected[number] = digest_of(plain)
    for number, kind in enumerate([1, 2, 3, 0, 2], start=1):
        with job_at(tmp_path, str(number), kind, folder, parts, number - 1, tables=tables) as world:
            train(world, number)
            assert digest_of(world) == expected[number]
            folder = tmp_path / f"commit-{number}"
            parts = w.commit(world.one, folder, number)
            assert len(parts) == max(kind, 1) and sum(part.tables["other"].rows for part in parts) > 0
        assert not [path for path in (tmp_path / "live").rglob("*.of-*")]


def test_a_fresh_job_begins_with_empty_stores(world, tmp_path):
    assert not any(digest_of(world).values())
    parts = w.commit(world.one, tmp_path / "commit", 0)
    for facts in (facts for part in parts for facts in part.tables.values()):
        assert (facts.rows, facts.rows_by_group, facts.changes) == (0, {}, [])
    with job_at(tmp_path, "second", 2, tmp_path / "commit", parts) as again:
        assert not any(digest_of(again).values())


def test_parts_name_every_file_and_all_buckets(world, kind, tmp_path):
    train(world, 1)
    parts = w.commit(world.one, tmp_path / "commit", 1)
    there = {str(path.relative_to(tmp_path / "commit")) for path in (tmp_path / "commit").rglob("*") if path.is_file()}
    assert there == {name for part in parts for name in part.files}
    assert [part.folder for part in parts] == [f"shard-{shard}" for shard in range(max(kind, 1))]
    edges = [0, *(part.buckets[1] for part in parts)]
    assert [part.buckets for part in parts] == list(zip(edges, edges[1:], strict=False)) and edges[-1] == 4096
    stats = world.one.call(CountRows(), w.soon()).tables
    assert all(sum(part.tables[name].rows for part in parts) == stats[name].num_rows for name in w.TABLES)
    assert typed(list[type(parts[0])], plain(parts), "it") == parts


def test_a_later_commit_writes_only_what_changed(world, tmp_path):
    train(world, 1)
    rows = sum(stats.num_rows for stats in world.one.call(CountRows(), w.soon()).tables.values())
    assert world.one.call(TakeSnapshot(1), w.soon()) == rows > 4
    (tmp_path / "commit").mkdir()
    world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon())
    world.one.call(SettleSnapshot(True), w.soon())
    w.train(world.one, 2, [batch(1, 2)], seed=2, steps=1)
    assert world.one.call(TakeSnapshot(2), w.soon()) == 4  # two keys of two tables


def test_a_snapshot_is_not_changed_by_what_comes_after(kind, world, tmp_path):
    train(world, 1)
    before = digest_of(world)
    world.one.call(TakeSnapshot(1), w.soon())
    train(world, 2)
    (tmp_path / "commit").mkdir()
    parts = world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon())
    world.one.call(SettleSnapshot(True), w.soon())
    with job_at(tmp_path, "second", kind, tmp_path / "commit", parts, 1) as again:
        assert digest_of(again) == before != digest_of(world)
    train(world, 3)
    parts = w.commit(world.one, tmp_path / "next", 3)  # rows that changed while in flight are in the next one
    with job_at(tmp_path, "third", kind, tmp_path / "next", parts, 3) as again:
        assert digest_of(again) == digest_of(world)


def test_training_goes_on_while_a_snapshot_is_written(world, tmp_path, monkeypatch):
    train(world, 1)
    world.one.call(TakeSnapshot(1), w.soon())
    (tmp_path / "commit").mkdir()
    may_write, write = threading.Event(), RocksRowStore.write

    def slowly(*args):
        assert may_write.wait(20)
        write(*args)

    monkeypatch.setattr(RocksRowStore, "write", slowly)
    parts = []
    writer = threading.Thread(target=lambda: parts.extend(world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon())))
    writer.start()
    train(world, 2)
    assert not parts
    may_write.set()
    writer.join()
    assert parts


def fail_once(monkeypatch, method):
    """The second store that comes to `method` fails, once."""
    calls, act = [], getattr(RocksRowStore, method)

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise StoreFailed("the disk is full")
        return act(*args)

    monkeypatch.setattr(RocksRowStore, method, failing)


@pytest.mark.parametrize("method", ["write", "checkpoint"])
def test_a_write_that_fails_leaves_nothing_and_its_rows_are_in_the_next_commit(
    kind, world, tmp_path, monkeypatch, method
):
    train(world, 1)
    rows = world.one.call(TakeSnapshot(1), w.soon())
    (tmp_path / "commit").mkdir()
    fail_once(monkeypatch, method)
    with pytest.raises(StoreFailed, match="the disk is full"):
        world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon())
    world.one.call(SettleSnapshot(False), w.soon())
    assert list((tmp_path / "commit").iterdir()) == []
    assert world.one.call(TakeSnapshot(1), w.soon()) == rows
    world.one.call(SettleSnapshot(False), w.soon())
    w.train(world.one, 2, [batch(1, 2)], seed=2, steps=1)
    parts = w.commit(world.one, tmp_path / "next", 2)
    with job_at(tmp_path, "second", kind, tmp_path / "next", parts, 2) as again:
        assert digest_of(again) == digest_of(world)


def test_a_commit_given_up_after_it_was_written_leaves_nothing(world, tmp_path):
    train(world, 1)
    rows = world.one.call(TakeSnapshot(1), w.soon())
    (tmp_path / "commit").mkdir()
    world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon())
    world.one.call(SettleSnapshot(False), w.soon())
    assert list((tmp_path / "commit").iterdir()) == []
    assert world.one.call(TakeSnapshot(1), w.soon()) == rows


def test_a_folder_that_is_not_there_or_taken_fails_the_write_and_is_left_alone(world, tmp_path):
    train(world, 1)
    world.one.call(TakeSnapshot(1), w.soon())
    taken = tmp_path / "commit" / "shard-0"
    taken.mkdir(parents=True)
    (taken / "theirs").touch()
    for folder in (tmp_path / "commit", tmp_path / "nowhere"):
        with pytest.raises(StoreFailed, match="cannot be created"):
            world.one.call(WriteSnapshot(folder), w.soon())
    world.one.call(SettleSnapshot(False), w.soon())
    assert (taken / "theirs").exists() and not (tmp_path / "nowhere").exists()


def test_one_snapshot_is_in_flight_at_a_time(world):
    train(world, 1)
    rows = world.one.call(TakeSnapshot(1), w.soon())
    assert world.one.call(TakeSnapshot(1), w.soon()) == rows  # the same one, asked for again
    train(world, 2)
    with pytest.raises(InvalidShardCall, match="no snapshot of version 2: that of 1 is not settled"):
        world.one.call(TakeSnapshot(2), w.soon())
    world.one.call(SettleSnapshot(True), w.soon())
    world.one.call(SettleSnapshot(True), w.soon())  # a repeat
    assert world.one.call(TakeSnapshot(2), w.soon()) > 0


def test_a_snapshot_is_of_the_pass_closed_last(world):
    train(world, 1)
    train(world, 2)
    for version in (0, 1, 3):
        refused = f"no snapshot of version {version}: version 2 is the last one closed"
        with pytest.raises(InvalidShardCall, match=refused):
            world.one.call(TakeSnapshot(version), w.soon())


def test_a_snapshot_is_taken_before_the_first_step_of_the_next_pass(world):
    train(world, 1)
    world.one.open_pass(2, w.soon())
    assert world.one.call(TakeSnapshot(1), w.soon()) > 0
    world.one.call(SettleSnapshot(False), w.soon())
    world.one.exchange(0, None, None, None, StepScale(1), w.soon())
    with pytest.raises(InvalidShardCall, match="no snapshot of version 1: steps of pass 2 are applied"):
        world.one.call(TakeSnapshot(1), w.soon())


def test_a_write_may_be_repeated_and_needs_a_snapshot(world, tmp_path):
    with pytest.raises(InvalidShardCall, match="no snapshot to write"):
        world.one.call(WriteSnapshot(tmp_path), w.soon())
    train(world, 1)
    world.one.call(TakeSnapshot(1), w.soon())
    (tmp_path / "commit").mkdir()
    parts = world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon())
    assert world.one.call(WriteSnapshot(tmp_path / "commit"), w.soon()) == parts


def test_passes_go_on_after_the_version_restored_and_may_be_skipped(kind, world, tmp_path):
    train(world, 1)
    parts = w.commit(world.one, tmp_path / "commit", 1)
    with job_at(tmp_path, "second", kind, tmp_path / "commit", parts, 1) as again:
        with pytest.raises(InvalidShardCall, match="pass 1 cannot open: pass 1 was closed before"):
            again.one.open_pass(1, w.soon())
        again.one.call(RestoreCommit(tmp_path / "commit", parts, 1), w.soon())  # a repeat
        train(again, 4)
        with pytest.raises(InvalidShardCall, match="version 1 cannot be restored: pass 4 is closed"):
            again.one.call(RestoreCommit(tmp_path / "commit", parts, 1), w.soon())


def test_a_commit_is_restored_before_the_first_pass_only(kind, tmp_path):
    with w.job(kind, live=tmp_path / "live") as world:
        train(world, 1)
        with pytest.raises(InvalidShardCall, match="version 0 cannot be restored: pass 1 is closed"):
            world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        with pytest.raises(InvalidShardCall, match="never restored"):
            world.one.call(TakeSnapshot(1), w.soon())
    assert not (tmp_path / "live").exists()


def test_rows_in_memory_only_are_not_committed(kind, tmp_path):
    with w.job(kind) as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        train(world, 1)
        for call in (
            lambda: world.one.call(TakeSnapshot(1), w.soon()),
            lambda: world.one.call(WriteSnapshot(tmp_path), w.soon()),
            lambda: world.one.call(SettleSnapshot(True), w.soon()),
        ):
            with pytest.raises(InvalidShardCall, match="without a folder for committed rows"):
                call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [0, 2])
def test_a_part_that_is_gone_is_named_and_another_commit_may_be_tried(kind, world, tmp_path, target):
    train(world, 1)
    parts = w.commit(world.one, tmp_path / "commit", 1)
    shutil.copytree(tmp_path / "commit", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / parts[-1].folder / "other")
    with w.job(target, live=tmp_path / "second") as again:
        with pytest.raises(StoreDamaged, match=f"copy/{parts[-1].folder}/other"):
            again.one.call(RestoreCommit(tmp_path / "copy", parts, 1), w.soon())
        if target == 0:
            assert not (tmp_path / "second").exists()
            again.one.call(RestoreCommit(tmp_path / "commit", parts, 1), w.soon())
            assert digest_of(again) == digest_of(world)


def test_rows_that_cannot_be_copied_leave_no_store_open(tmp_path):
    with job_at(tmp_path, "first", 2) as world:
        train(world, 1)
        parts = w.commit(world.one, tmp_path / "commit", 1)
        shutil.copytree(tmp_path / "commit", tmp_path / "copy")
        for path in (tmp_path / "copy" / parts[-1].folder / "default").glob("*.sst"):
            content = bytearray(path.read_bytes())
            content[10] ^= 1
            path.write_bytes(content)
        with w.job(0, live=tmp_path / "second") as again:
            with pytest.raises(StoreDamaged, match="a damaged block") as refused:
                again.one.call(RestoreCommit(tmp_path / "copy", parts, 1), w.soon())
            again.one.call(RestoreCommit(tmp_path / "commit", parts, 1), w.soon())  # while the error holds its frames
            assert digest_of(again) == digest_of(world) and refused.tb is not None


def test_points_of_death_come_in_the_order_of_the_steps(world, kind, tmp_path, monkeypatch):
    seen = []
    for module in ("server.embedded", "server.step_calls", "commit.shard_commits"):
        monkeypatch.setattr(f"headrace.pserver.{module}.failpoint", lambda point: seen.append(point.value))
    w.train(world.one, 1, [batch(1)], seed=1, steps=1)
    assert seen == ["partly-pushed"] * max(kind, 1)
    seen.clear()
    w.commit(world.one, tmp_path / "commit", 1)
    once = ["snapshot-taken", "rows-written", "rows-written", "checkpoint-made"]
    assert sorted(seen) == sorted(once * max(kind, 1)) and (kind > 1 or seen == once)


@pytest.mark.parametrize("kind", [0, 2], ids=["embedded", "2-shards"])
def test_a_table_larger_than_its_memory_ends_with_the_same_bits(kind, tmp_path):
    """A shard has room for 5,900 of its rows; batches learnt or predicted keep none there once they are over."""

    def key_range(begin, count=1500):
        return {"default": w.keys(*range(begin, begin + count))}

    digests = []
    for name, memory in {"plain": None, "bounded": 8 << 20}.items():
        tables = {"default": TableSection(dim=252, memory=memory)}
        with job_at(tmp_path, name, kind, tables=tables) as world:
            for number in range(1, 16, 2):  # learns and predicts in turn
                w.train(world.one, number, [key_range(0), key_range(1500 * number)], seed=number, steps=2)
                world.one.open_pass(number + 1, w.soon())
                for begin, there in ((0, True), (1500 * number + 700, True), (100_000, False)):
                    predicted = world.one.prepare(key_range(begin), learn=False)
                    assert world.one.pull(predicted, w.soon())["default"].any() == there
                world.one.close_pass(0, w.soon())
                parts = w.commit(world.one, tmp_path / f"{name}-{number}", number + 1)
            digests.append(digest_of(world))
            stats = world.one.call(CountRows(), w.soon()).tables["default"]
            assert stats.num_rows == 13_500 and (stats.max_dirty_rows is None) == (memory is None)
            last = tmp_path / f"{name}-{number}"
    assert digests[0] == digests[1]
    with job_at(tmp_path, "again", kind, last, parts, number + 1, tables=tables) as world:
        assert digest_of(world) == digests[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", [0, 2], ids=["embedded", "2-shards"])
def test_commits_fail_on_a_full_disk_at_any_step_and_succeed_once_there_is_room(kind, tmp_path):
    """Each attempt finds a little more room than the one before, until it is enough.

    Where RocksDB finds none for its own files, it refuses all writes until it looks again, so an attempt lasts for
    seconds. Then the next one finds all the room, or each would last as long.
    """
    with small_disk(tmp_path / "disk", 32 << 20) as disk:
        with job_at(disk.folder, "first", kind) as world:
            for number in (1, 2):
                batches = [{name: w.keys(*range(4000 * number)) for name in w.TABLES}]
                w.train(world.one, number, batches, seed=number, steps=1)
                folder, parts, failed, refuses = disk.folder / f"commit-{number}", [], 0, False
                while not parts:
                    rows = world.one.call(TakeSnapshot(number, 0), w.soon())
                    if not refuses:
                        disk.leave(40_000 * (failed + 2))
                    began_s = time.monotonic()
                    try:
                        folder.mkdir()
                        parts = world.one.call(WriteSnapshot(folder), w.soon())
                        world.one.call(SettleSnapshot(True), w.soon())
                    except StoreFailed:
                        world.one.call(SettleSnapshot(False), w.soon())
                        assert list(folder.iterdir()) == [] and rows == 8000 * number
                        folder.rmdir()
                        failed += 1
                        refuses = time.monotonic() - began_s > sum(RECOVERY.pauses_s) / 2
                    disk.free()
                assert failed > 5 or refuses
            digest = digest_of(world)
        changes = read_changes(folder, parts, "other", 0, 2)
        assert changes is not None and len(changes.changed_U) == 8000 and len(changes.gone_G) == 0
        with job_at(disk.folder, "second", kind, folder, parts, 2) as again:
            assert digest_of(again) == digest


def test_three_ranks_train_on_while_their_rank0_commits(tmp_path):
    def passes(world, number, rank0=lambda shards: None):
        def act(rank, shards):
            batches = some_batches(rank, 4 - rank, seed=number)
            if rank == 0:
                rank0(shards)  # as a step of the others waits for rank 0's
            w.train(shards, number, batches, seed=10 * number + rank, steps=4)

        world.each(act)

    with job_at(tmp_path, "first", 2, num_ranks=3) as world:
        passes(world, 1)
        before = digest_of(world)
        made = []
        passes(world, 2, rank0=lambda shards: made.append(w.commit(shards, tmp_path / "commit", 1)))
        after = digest_of(world)
    with job_at(tmp_path, "second", 3, tmp_path / "commit", made[0], 1, num_ranks=3) as again:
        assert digest_of(again) == before != after
        passes(again, 2)
        assert digest_of(again) == after


def test_a_copy_writes_few_files(monkeypatch):
    monkeypatch.setattr(shard_commits, "COPY_BYTES", 24)
    chunks = [(np.array([n], np.uint64), np.full((1, 2), n, np.uint32)) for n in range(7)]
    joined = list(shard_commits._joined(chunks))
    assert [keys_U.tolist() for keys_U, _ in joined] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [words_UW.tolist() for _, words_UW in joined] == [[[n, n] for n in keys_U] for keys_U, _ in joined]
    assert list(shard_commits._joined([])) == []
