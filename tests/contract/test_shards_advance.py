"""The contract of shards that advance: after a restore and an advance they are as after a restore of the later commit.

The tables admit, extend, age, shrink and forget, so that every kind of state changes in between.
"""

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.commit.change_files import read_changes
from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall, StoreDamaged
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.protocol.table_operations import AdvanceDay, ExportCut, ForgetRow, ShrinkRows
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.server.commands import (
    AdvanceCommit,
    CountRows,
    DigestRows,
    HandOver,
    Operate,
    RestoreCommit,
    SettleSnapshot,
    TakeSnapshot,
    WriteSnapshot,
)
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.tables.sweeping import Sweeper
from headrace.pserver.tables.table import ShardTable
from tests.contract import shards_world as w
from tests.contract.test_shards import some_batches

PATHS = [(2, 3), (3, 1), (1, 0), (0, 2), (2, 2)]
"""Shards of the commits, and those that advance; 0 is embedded."""
MEMORIES = {"all in memory": None, "bounded": 8 << 20}
MEMORY = pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
FIRST, LAST = 3, 7
"""The versions of the first and the last commit."""


def tables_of(memory=None):
    return {
        "default": TableSection(
            dim=4, optimizer=Adagrad(per="element"), extend_at=2.0, decay=0.5, memory=memory,
            admission=(CountEntry(kind="count", n=2, memory=1 << 20), CountEntry(kind="count", n=2, exact=True)),
        ),
        "other": TableSection(dim=3, decay=0.9, delete_below=0.2, memory=memory),
    }  # fmt: skip


def live(shards, number):
    """One pass, and operations at its close."""
    w.train(shards, number, some_batches(0, 3, seed=number), seed=number, steps=3, day=number // 2)
    key = int(some_batches(0, 1, seed=number)[0]["default"].keys_U[0])
    cut = ExportCut(tables=("default",), since=0, base_threshold=0.0, delta_threshold=0.0, delta_keep_days=None)
    operations = [ForgetRow(table="default", group=1, key=key), cut, AdvanceDay(to=number)]
    shards.call(Operate(number, [*operations, ShrinkRows(table="other")]), w.soon())


def commit(shards, folder: Path, version: int, since: int | None):
    shards.call(TakeSnapshot(version, since), w.soon())
    folder.mkdir(parents=True)
    parts = shards.call(WriteSnapshot(folder), w.soon())
    shards.call(SettleSnapshot(True), w.soon())
    return parts


@dataclass
class Commits:
    """The commits of one job, by version."""

    folder: Path
    parts: dict

    def at(self, version):
        return self.folder / str(version), self.parts[version], version


def swept(shards):
    """Wait until no rows that a shrink deleted are left."""
    deadline = w.soon()
    while any(stats.sweeping for stats in shards.call(CountRows(), deadline).tables.values()):
        deadline.check("waiting for sweeps")
        time.sleep(0.005)


def committed(folder, kind, *, swept_first: bool) -> Commits:
    """A job of `kind` shards that commits after every pass from FIRST on; `swept_first`: nothing is left to sweep."""
    with pytest.MonkeyPatch.context() as patch, w.job(kind, tables=tables_of(), live=folder / "old") as world:
        if not swept_first:
            patch.setattr(Sweeper, "sweep", lambda self, table: None)
        world.one.call(RestoreCommit(folder, [], 0), w.soon())
        made = Commits(folder / "commits", {})
        for number in range(1, LAST + 1):
            live(world.one, number)
            if swept_first:
                swept(world.one)
            if number >= FIRST:
                made.parts[number] = commit(world.one, made.folder / str(number), number, FIRST)
        return made


@pytest.fixture(scope="module")
def commits_of(tmp_path_factory):
    """`committed`, made once for all tests that read them."""
    return cache(lambda kind, swept: committed(tmp_path_factory.mktemp("commits"), kind, swept_first=swept))


@contextmanager
def job_at(folder, name, kind, tables, commit_at):
    with w.job(kind, tables=tables, live=folder / name) as world:
        world.one.call(RestoreCommit(*commit_at), w.soon())
        yield world.one


def rows_in(commit_at):
    """All rows of a commit's stores by table and key, as bytes; and what its parts say of counts and of admission."""
    folder, parts, _ = commit_at
    rows, said, changed = {}, [], {}
    for part in parts:
        for name, facts in part.tables.items():
            header = json.loads((folder / part.folder / name / "rows.json").read_text())
            live = folder / f"opened-{part.folder}-{name}"
            store = RocksRowStore.open(live, folder / part.folder / name, num_words=header["words"])
            for keys_U, words_UW in store.scan():
                rows |= {(name, key): row.tobytes() for key, row in zip(keys_U.tolist(), words_UW, strict=True)}
            store.close()
            said.append((part.folder, name, facts.rows_by_group, facts.life))
        said += [
            (path, (folder / path).read_bytes())
            for path in sorted(part.files)
            if path.endswith("admission.safetensors")
        ]
    for name in parts[0].tables:
        found = read_changes(folder, parts, name, FIRST, commit_at[2])
        changed[name] = (found.changed_U.tolist(), found.gone_G.tolist(), found.gone_group_G.tolist())
    return rows, said, changed


@pytest.mark.parametrize(
    ("old", "new", "memory", "swept_first"),
    [
        pytest.param(*path, memory, (number + place) % 2 == 0, id=f"{path[0]}-{path[1]}-{name}")
        for number, path in enumerate(PATHS)
        for place, (name, memory) in enumerate(MEMORIES.items())
    ],
)
def test_an_advance_is_a_restore_of_the_later_commit(tmp_path, commits_of, old, new, memory, swept_first):
    """The same rows, counts and digest; and the same of everything that is trained and committed afterwards."""
    tables, commits = tables_of(memory), commits_of(old, swept_first)
    ends = []
    for name, first, later in (("restored", LAST, ()), ("advanced", FIRST, (FIRST, 5, 6, LAST))):
        with job_at(tmp_path, name, new, tables, commits.at(first)) as shards:
            for version in later:
                if version % 2:
                    swept(shards)  # rows that this shard removed by itself come back where the commit has them
                shards.call(AdvanceCommit(*commits.at(version)), w.soon())
            digests = [shards.call(DigestRows(), w.soon())]
            swept(shards)
            stats = {
                n: (each.num_rows, each.rows_by_group) for n, each in shards.call(CountRows(), w.soon()).tables.items()
            }
            for number in (LAST + 1, LAST + 2):
                live(shards, number)
                swept(shards)
                digests.append(shards.call(DigestRows(), w.soon()))
            folder = tmp_path / f"commit-{name}"
            parts = commit(shards, folder, LAST + 2, FIRST)
            ends.append((digests, stats, rows_in((folder, parts, LAST + 2))))
    assert ends[0] == ends[1]
    assert all(ends[0][0][0].values()) and all(count for count, _ in ends[0][1].values())


@dataclass
class HandedOver:
    """A job that commits and trains on, to the state that it hands over."""

    folder: Path
    committed: tuple
    handed: tuple
    digest: dict
    stats: dict


def handed_over(folder, kind, monkeypatch, *, swept_first: bool) -> HandedOver:
    """`swept_first`: nothing is left to sweep at the commit and at the handover."""
    with monkeypatch.context() as patch, w.job(kind, tables=tables_of(), live=folder / "old") as world:
        if not swept_first:
            patch.setattr(Sweeper, "sweep", lambda self, table: None)
        shards = world.one
        shards.call(RestoreCommit(folder, [], 0), w.soon())
        for number in range(1, LAST + 1):
            live(shards, number)
            if swept_first:
                swept(shards)
            if number == FIRST:
                parts = commit(shards, folder / "commit", number, FIRST)
        shards.call(TakeSnapshot(LAST, FIRST), w.soon())
        (folder / "handed").mkdir()
        handed = shards.call(HandOver(folder / "handed"), w.soon())
        shards.call(SettleSnapshot(False), w.soon())
        stats = {
            n: (each.num_rows, each.rows_by_group, each.dirty_rows)
            for n, each in shards.call(CountRows(), w.soon()).tables.items()
        }
        ends = (folder / "commit", parts, FIRST), (folder / "handed", handed, LAST)
        return HandedOver(folder, *ends, shards.call(DigestRows(), w.soon()), stats)


@pytest.mark.parametrize(("old", "new", "swept_first"), [(*path, n % 2 == 0) for n, path in enumerate(PATHS)])
def test_what_is_handed_over_is_as_if_it_was_trained_here(tmp_path, monkeypatch, old, new, swept_first):
    """The same rows and digest as of those before; and the same is trained, and committed with all changes."""
    made = handed_over(tmp_path, old, monkeypatch, swept_first=swept_first)
    ends = []
    for name in ("trained", "handed"):
        with job_at(tmp_path, name, new, tables_of(), made.committed) as shards:
            if name == "handed":
                swept(shards)  # rows that this shard removed by itself
                shards.call(AdvanceCommit(*made.handed), w.soon())
                assert shards.call(DigestRows(), w.soon()) == made.digest
            for number in range(FIRST + 1, LAST + 1) if name == "trained" else ():
                live(shards, number)
            swept(shards)
            stats = {
                n: (each.num_rows, each.rows_by_group) for n, each in shards.call(CountRows(), w.soon()).tables.items()
            }
            digests = [shards.call(DigestRows(), w.soon())]
            for number in (LAST + 1, LAST + 2):
                live(shards, number)
                swept(shards)
                digests.append(shards.call(DigestRows(), w.soon()))
            folder = tmp_path / f"commit-{name}"
            parts = commit(shards, folder, LAST + 2, FIRST)
            ends.append((digests, stats, rows_in((folder, parts, LAST + 2))))
    assert ends[0] == ends[1]
    assert all(made.digest.values()) and all(dirty for _, _, dirty in made.stats.values())


def test_what_is_handed_over_since_another_commit_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    made = handed_over(tmp_path, 2, monkeypatch, swept_first=True)
    with w.job(3, tables=tables_of(), live=tmp_path / "new") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        before = world.one.call(DigestRows(), w.soon())
        with pytest.raises(InvalidShardCall, match=f"has the rows of table 'default' since version {FIRST}, not 0"):
            world.one.call(AdvanceCommit(*made.handed), w.soon())
        assert world.one.call(DigestRows(), w.soon()) == before


def test_a_part_that_is_handed_over_and_damaged_is_refused(tmp_path, monkeypatch):
    made = handed_over(tmp_path, 0, monkeypatch, swept_first=True)
    path = next((tmp_path / "handed").glob("*/default.rows.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    with job_at(tmp_path, "new", 0, tables_of(), made.committed) as shards:
        with pytest.raises(StoreDamaged, match="default.rows.safetensors: cannot be read"):
            shards.call(AdvanceCommit(*made.handed), w.soon())


def test_an_advance_reads_only_what_changed(tmp_path, monkeypatch):
    tables = {"default": TableSection(dim=4)}
    with w.job(2, tables=tables, live=tmp_path / "old") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        w.train(world.one, 1, [{"default": w.keys(*range(500))}], seed=1, steps=1)
        first = commit(world.one, tmp_path / "c1", 1, 1)
        w.train(world.one, 2, [{"default": w.keys(3, 4, 900)}], seed=2, steps=1)
        second = commit(world.one, tmp_path / "c2", 2, 1)
    read = []
    real = RocksRowStore.get
    with job_at(tmp_path, "new", 3, tables, (tmp_path / "c1", first, 1)) as shards:
        monkeypatch.setattr(
            RocksRowStore, "get", lambda self, keys_U: read.extend(keys_U.tolist()) or real(self, keys_U)
        )
        shards.call(AdvanceCommit(tmp_path / "c2", second, 2), w.soon())
        assert sorted(read) == sorted(w.keys(3, 4, 900).keys_U.tolist())


@pytest.mark.parametrize("new", [0, 2])
def test_an_advance_that_cannot_be_is_refused_and_changes_nothing(tmp_path, new):
    tables = {"default": TableSection(dim=4)}
    parts = {}
    with w.job(2, tables=tables, live=tmp_path / "old") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        for number in (1, 2, 3):
            w.train(world.one, number, [{"default": w.keys(*range(number, 50))}], seed=number, steps=1)
            parts[number] = commit(world.one, tmp_path / f"c{number}", number, 2 if number == 3 else None)
    commits = {number: (tmp_path / f"c{number}", parts[number], number) for number in parts}
    with job_at(tmp_path, "new", new, tables, commits[1]) as shards:
        before = shards.call(DigestRows(), w.soon())
        with pytest.raises(InvalidShardCall, match="does not record the changes of table 'default' since version 1"):
            shards.call(AdvanceCommit(*commits[3]), w.soon())
        assert shards.call(DigestRows(), w.soon()) == before
        shards.call(AdvanceCommit(*commits[1]), w.soon())  # a repeat
        with pytest.raises(InvalidShardCall, match="version 0 is older than version 1"):
            shards.call(AdvanceCommit(tmp_path, [], 0), w.soon())
        w.train(shards, 2, [{"default": w.keys(1)}], seed=2, steps=1)
        with pytest.raises(InvalidShardCall, match="version 3 cannot follow a restore now"):
            shards.call(AdvanceCommit(*commits[3]), w.soon())


# -- one table, with stores in memory: any order of changes

SECTION = TableSection(dim=2, optimizer=Adagrad(per="row"))
SIGNS = st.lists(st.integers(0, 30), unique=True, max_size=12)
CHANGES = st.lists(st.tuples(SIGNS, SIGNS), min_size=1, max_size=4)
"""Passes: signs that learn, and signs that are forgotten at the close."""


def learn(table, number, signs, forgotten):
    some = w.keys(*signs) if signs else Keys(np.empty(0, np.uint64), np.empty(0, np.uint16))
    table.open_pass()
    if signs:
        rows_U = frozen(table.rows.reserve(some.keys_U, some.group_U))
        push = w.push_of(some, 3, number)
        table.apply(rows_U, Gradients(*map(frozen, (push.grads_UD, push.show_U, push.click_U))), 1, number)
        table.rows.release(rows_U)
    table.close_pass(number)
    for sign in forgotten:
        table.operate(ForgetRow(table="t", group=1, key=int(w.keys(sign).keys_U[0])), number)


def written(table, store):
    """Commit the changes of a table; returns their keys, and what a manifest has of the table."""
    taken = table.snapshots.take()
    store.write(taken.keys_U, taken.words_UW, taken.gone()[0])
    table.snapshots.settle(True)
    return np.union1d(taken.keys_U, taken.deleted_keys_U), dict(taken.rows_by_group), taken.life


def attached(store, facts, memory):
    table = ShardTable("t", SECTION.model_copy(update={"memory": memory}), 1)
    table.snapshots.attach(store, facts[1], [facts[2]])
    return table


def copy_of(store):
    copy = MemoryRowStore(store.num_words)
    for keys_U, words_UW in store.scan():
        copy.write(keys_U, words_UW)
    return copy


@MEMORY
@settings(max_examples=40, deadline=None)
@given(before=CHANGES, between=CHANGES)
def test_any_changes_of_a_table_are_taken_over(memory, before, between):
    table, store = ShardTable("t", SECTION, 1), MemoryRowStore(ShardTable("t", SECTION, 1).snapshots.num_words)
    for number, (signs, forgotten) in enumerate(before, start=1):
        learn(table, number, signs, forgotten)
    facts = written(table, store)
    own = copy_of(store)
    advanced = attached(own, facts, memory)
    for number, (signs, forgotten) in enumerate(between, start=len(before) + 1):
        learn(table, number, signs, forgotten)
    changed_U, *facts = written(table, store)
    swept_U = advanced.snapshots.begin_advance([facts[1]], [])
    assert not len(swept_U)
    advanced.snapshots.take_over(own, changed_U, np.zeros(len(changed_U), np.bool_), *store.get(changed_U))
    restored = attached(copy_of(store), (changed_U, *facts), memory)
    for each in (advanced, restored):
        assert (each.overview.digest(), each.deletions.rows_by_group, each.dirty.num_dirty) == (
            table.overview.digest(),
            table.deletions.rows_by_group,
            0,
        )
    (kept, kept_words), (there, there_words) = (next(each.scan(), (np.empty(0), np.empty(0))) for each in (own, store))
    assert kept.tolist() == there.tolist() and (kept_words == there_words).all()
    for each in (advanced, restored):
        learn(each, 99, [1, 2, 40], [2])
    assert advanced.overview.digest() == restored.overview.digest()
