"""The contract of shards for commits of living tables: deleted rows are absent, and changed keys are recorded."""

import json
from contextlib import contextmanager

import pytest

from headrace.codec import plain, typed
from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.commit.change_files import read_changes
from headrace.pserver.config import TableSection
from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.protocol.table_operations import ForgetRow
from headrace.pserver.server.commands import (
    CountRows,
    DigestRows,
    Operate,
    RestoreCommit,
    SettleSnapshot,
    TakeSnapshot,
    WriteSnapshot,
)
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.service.history.verification import damage_of
from headrace.trainer.checkpoint.commits import Commit
from tests.contract import shards_world as w
from tests.contract.test_shards import SOME, SOME_IDS
from tests.fakes.manifests import manifest_of

MEMORY = pytest.mark.parametrize("memory", [None, 8 << 20], ids=["all in memory", "bounded"])
SIGNS = range(60)


@pytest.fixture(params=SOME, ids=SOME_IDS)
def kind(request):
    return request.param


def tables_of(memory=None, **more):
    return {"default": TableSection(dim=4, init_range=0.5, memory=memory, **more)}


@contextmanager
def job_at(tmp_path, name, kind, folder=None, parts=(), version=0, tables=None):
    with w.job(kind, live=tmp_path / "live" / name, tables=tables or tables_of()) as world:
        world.one.call(RestoreCommit(folder or tmp_path, parts, version), w.soon())
        yield world.one


def learn(shards, version, signs):
    """One pass over some signs."""
    w.train(shards, version, [{"default": w.keys(*signs)}], seed=version, steps=1)


def forget(shards, version, signs):
    keys = w.keys(*signs).keys_U.tolist()
    shards.call(Operate(version, [ForgetRow(table="default", group=1, key=key) for key in keys]), w.soon())


def commit(shards, folder, version, since=None):
    shards.call(TakeSnapshot(version, since), w.soon())
    folder.mkdir(parents=True)
    parts = shards.call(WriteSnapshot(folder), w.soon())
    shards.call(SettleSnapshot(True), w.soon())
    return parts


def signs_of(keys_U):
    sign_of = {key: sign for sign, key in enumerate(w.keys(*range(1000)).keys_U.tolist())}
    return {sign_of[key] for key in keys_U.tolist()}


def told(folder, parts, since, upto):
    """Signs that changed, and that went."""
    changes = read_changes(folder, parts, "default", since, upto)
    if changes is None:
        return None
    assert set(changes.gone_group_G.tolist()) <= {1}
    return signs_of(changes.changed_U), signs_of(changes.gone_G)


def stored(folder, parts, tmp_path):
    """Signs of all rows that the stores of a commit hold."""
    found, scratch = set(), tmp_path / "opened"
    for part in parts:
        number = json.loads((folder / part.folder / "default" / "rows.json").read_bytes())["words"]
        store = RocksRowStore.open(scratch / part.folder, folder / part.folder / "default", num_words=number)
        found |= {sign for keys_U, _ in store.scan() for sign in signs_of(keys_U)}
        store.close()
    for path in sorted(scratch.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    return found


@MEMORY
def test_a_commit_holds_no_row_that_went_and_neither_does_what_is_restored(kind, tmp_path, memory):
    tables = tables_of(memory)
    with job_at(tmp_path, "first", kind, tables=tables) as shards:
        learn(shards, 1, SIGNS)
        first = commit(shards, tmp_path / "c1", 1)
        forget(shards, 1, [3, 4, 5, 999])
        learn(shards, 2, [5, 6])
        second = commit(shards, tmp_path / "c2", 2)
        digest = shards.call(DigestRows(), w.soon())
    assert stored(tmp_path / "c1", first, tmp_path) == set(SIGNS)
    assert stored(tmp_path / "c2", second, tmp_path) == set(SIGNS) - {3, 4}
    assert sum(part.tables["default"].rows for part in second) == len(SIGNS) - 2
    for number, other in enumerate({0, kind, 2, 3}):
        with job_at(tmp_path, f"again-{number}", other, tmp_path / "c2", second, 2, tables) as again:
            assert again.call(DigestRows(), w.soon()) == digest
            learn(again, 3, [3])
            commit(again, tmp_path / f"c3-{number}", 3)
    again = commit_of(tmp_path / "c2", second)
    assert damage_of(again, tmp_path / "scratch") == {}


def commit_of(folder, parts):
    files = {path: file for part in parts for path, file in part.files.items()}
    return Commit(folder, manifest_of("t1-0000000002-g1", files=files, shards=parts))


@MEMORY
def test_rows_that_went_in_a_failed_commit_go_with_the_next(kind, tmp_path, monkeypatch, memory):
    with job_at(tmp_path, "first", kind, tables=tables_of(memory)) as shards:
        learn(shards, 1, SIGNS)
        commit(shards, tmp_path / "c1", 1, 0)
        forget(shards, 1, [1, 2])
        learn(shards, 2, [2, 7])
        shards.call(TakeSnapshot(2, 0), w.soon())
        (tmp_path / "c2").mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(RocksRowStore, "checkpoint", failing)
            with pytest.raises(StoreFailed, match="the disk is full"):
                shards.call(WriteSnapshot(tmp_path / "c2"), w.soon())
        shards.call(SettleSnapshot(False), w.soon())
        assert list((tmp_path / "c2").iterdir()) == []
        forget(shards, 2, [2, 8])
        learn(shards, 3, [8])
        parts = commit(shards, tmp_path / "c3", 3, 0)
        assert told(tmp_path / "c3", parts, 1, 3) == ({7, 8}, {1, 2, 8})
        assert told(tmp_path / "c3", parts, 0, 3) == (set(SIGNS), {1, 2, 8})
        digest = shards.call(DigestRows(), w.soon())
    assert stored(tmp_path / "c3", parts, tmp_path) == set(SIGNS) - {1, 2}
    with job_at(tmp_path, "second", kind, tmp_path / "c3", parts, 3, tables_of(memory)) as again:
        assert again.call(DigestRows(), w.soon()) == digest


def failing(*_):
    raise StoreFailed("the disk is full")


def test_changes_are_told_since_any_commit_that_somebody_builds_on(kind, tmp_path):
    with job_at(tmp_path, "first", kind) as shards:
        learn(shards, 1, SIGNS)
        assert told(tmp_path / "c1", commit(shards, tmp_path / "c1", 1), 0, 1) is None
        learn(shards, 2, [1, 2])
        second = commit(shards, tmp_path / "c2", 2, 1)
        learn(shards, 3, [2, 3, 100])
        learn(shards, 4, [4])
        forget(shards, 4, [1, 2])
        fourth = commit(shards, tmp_path / "c4", 4, 1)
        learn(shards, 5, [5])
        fifth = commit(shards, tmp_path / "c5", 5, 4)
    assert told(tmp_path / "c2", second, 1, 2) == ({1, 2}, set())
    assert told(tmp_path / "c4", fourth, 1, 4) == ({1, 2, 3, 4, 100}, {1, 2})
    assert told(tmp_path / "c4", fourth, 2, 4) == ({3, 4, 100}, {1, 2})
    assert told(tmp_path / "c4", fourth, 0, 4) is None
    assert told(tmp_path / "c5", fifth, 4, 5) == ({5}, set()) and told(tmp_path / "c5", fifth, 2, 5) is None
    there = {str(path.relative_to(tmp_path / "c4")) for path in (tmp_path / "c4").rglob("*") if path.is_file()}
    assert there == {name for part in fourth for name in part.files}
    assert sum(".changes/" in name for name in there) == 2 * max(kind, 1)
    assert typed(list[ShardCommitPart], json.loads(json.dumps(plain(fourth))), "it") == fourth
    assert damage_of(commit_of(tmp_path / "c4", fourth), tmp_path / "scratch") == {}


def test_changes_go_on_after_a_restore_onto_any_number_of_shards(tmp_path):
    parts, folder, expected = [], tmp_path, set()
    for number, kind in enumerate([1, 2, 3, 0, 2], start=1):
        with job_at(tmp_path, str(number), kind, folder, parts, number - 1) as shards:
            learn(shards, number, range(10 * number, 10 * number + 20))
            forget(shards, number, [10 * number])
            folder = tmp_path / f"c{number}"
            parts = commit(shards, folder, number, 0)
        expected |= {*range(10 * number + 1, 10 * number + 20)}
        gone = {10 * n for n in range(1, number + 1)}
        assert told(folder, parts, 0, number) == (expected, gone)
        assert told(folder, parts, number - 1, number) == ({*range(10 * number + 1, 10 * number + 20)}, {10 * number})


def test_a_damaged_file_of_changes_is_seen_by_who_verifies_and_who_reads(tmp_path):
    with job_at(tmp_path, "first", 2) as shards:
        learn(shards, 1, SIGNS)
        parts = commit(shards, tmp_path / "c1", 1, 0)
    name = next(name for name in parts[1].files if ".changes/" in name)
    path = tmp_path / "c1" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert list(damage_of(commit_of(tmp_path / "c1", parts), tmp_path / "scratch")) == [name]
    with pytest.raises(StoreDamaged, match=name):
        read_changes(tmp_path / "c1", parts, "default", 0, 1)


def test_what_admission_counted_comes_back_onto_any_number_of_shards(tmp_path):
    tables = tables_of(admission=(CountEntry(kind="count", n=40, memory=1 << 20),))
    with w.job(0, tables=tables) as plain:
        plain.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        expected = []
        for number in range(1, 6):
            learn(plain.one, number, SIGNS)
            expected.append(
                (
                    plain.one.call(DigestRows(), w.soon()),
                    plain.one.call(CountRows(), w.soon()).tables["default"].num_rows,
                )
            )
    parts, folder = [], tmp_path
    for number, kind in enumerate([1, 2, 3, 0, 2], start=1):
        with job_at(tmp_path, str(number), kind, folder, parts, number - 1, tables) as shards:
            learn(shards, number, SIGNS)
            assert (
                shards.call(DigestRows(), w.soon()),
                shards.call(CountRows(), w.soon()).tables["default"].num_rows,
            ) == expected[number - 1]
            folder = tmp_path / f"c{number}"
            parts = commit(shards, folder, number)
        assert any(name.endswith("/default.admission.safetensors") for name in parts[0].files)
    path = folder / parts[0].folder / "default.admission.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with w.job(2, live=tmp_path / "live" / "bad", tables=tables) as world:
        with pytest.raises(StoreDamaged, match=r"admission\.safetensors: not what was committed"):
            world.one.call(RestoreCommit(folder, parts, 5), w.soon())


def test_a_commit_of_before_tables_lived_comes_back(kind, tmp_path):
    with job_at(tmp_path, "first", kind) as shards:
        learn(shards, 1, SIGNS)
        parts = commit(shards, tmp_path / "c1", 1)
        digest = shards.call(DigestRows(), w.soon())
    old = [
        ShardCommitPart(
            part.folder,
            part.buckets,
            {name: TableFacts(facts.rows, facts.rows_by_group) for name, facts in part.tables.items()},
            part.files,
        )
        for part in parts
    ]
    for number, other in enumerate((kind, 2)):
        with job_at(tmp_path, f"again-{number}", other, tmp_path / "c1", old, 1) as again:
            assert again.call(DigestRows(), w.soon()) == digest
            learn(again, 2, [1])
            made = commit(again, tmp_path / f"c2-{number}", 2, 1)
            assert sum(part.tables["default"].rows for part in made) == len(SIGNS)
