"""Increments give the keys changed and deleted between any two commits, on any number of shards."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.commit import change_files as module
from headrace.pserver.commit.change_files import FOLDER, ChangedKeys, ChangeFiles, read_changes
from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.store.row_store import sort_order_of

TABLE = "default"
ALL = (0, 4096)


def some(changed=(), gone=(), group=3):
    keys_U, gone_G = np.array(list(changed), np.uint64), np.array(list(gone), np.uint64)
    return ChangedKeys.of(keys_U, gone_G, np.full(len(gone_G), group, np.uint16))


def told(changes):
    """As sets; checks the order."""
    for keys_U in (changes.changed_U, changes.gone_G):
        places_U = sort_order_of(keys_U)
        assert (places_U[1:] > places_U[:-1]).all()
    assert len(changes.gone_G) == len(changes.gone_group_G)
    return set(changes.changed_U.tolist()), set(changes.gone_G.tolist())


class OneShard:
    """The increments of one shard, and the commits made with them."""

    def __init__(self, home, buckets=ALL, number=0, version=0):
        self.home, self.buckets, self.name = home, buckets, f"shard-{number}"
        self.files = ChangeFiles(home / f"live-{self.name}" / FOLDER.format(TABLE), version)

    def write(self, folder, version, changes, since):
        below = f"{self.name}/{FOLDER.format(TABLE)}"
        (folder / self.name).mkdir(parents=True, exist_ok=True)
        made = self.files.write(version, changes.of_buckets(*self.buckets), since, folder / below)
        facts = {TABLE: TableFacts(0, {}, changes=[each.below(below) for each in made])}
        return ShardCommitPart(self.name, self.buckets, facts, {f"{below}/{each.name}": each.stored for each in made})

    def commit(self, folder, version, changes, since):
        part = self.write(folder, version, changes, since)
        self.files.settle(True)
        return part


@pytest.fixture
def shard(tmp_path):
    return OneShard(tmp_path)


def read(folder, part, since, upto):
    changes = read_changes(folder, [part], TABLE, since, upto)
    return None if changes is None else told(changes)


def test_keys_come_once_and_in_the_order_of_stores():
    changes = ChangedKeys.of(
        np.array([4096, 1, 4096, 2], np.uint64), np.array([7, 4099, 7], np.uint64), np.array([5, 6, 9], np.uint16)
    )
    assert changes.changed_U.tolist() == [4096, 1, 2] and changes.gone_G.tolist() == [4099, 7]
    assert changes.gone_group_G.tolist() == [6, 5] and len(changes) == 5
    only = changes.of_buckets(2, 4)
    assert (only.changed_U.tolist(), only.gone_G.tolist(), only.gone_group_G.tolist()) == ([2], [4099], [6])
    assert len(ChangedKeys.joined([])) == 0


def test_a_commit_tells_what_happened_since_any_commit_of_the_oldest_parent_on(shard, tmp_path):
    shard.commit(tmp_path / "c1", 1, some({1, 2}), 0)
    shard.commit(tmp_path / "c3", 3, some({2, 3}, {1}), 0)
    part = shard.commit(tmp_path / "c4", 4, some({1}, {3, 9}), 0)
    folder = tmp_path / "c4"
    assert read(folder, part, 0, 4) == ({1, 2, 3}, {1, 3, 9})
    assert read(folder, part, 1, 4) == ({1, 2, 3}, {1, 3, 9})
    assert read(folder, part, 3, 4) == ({1}, {3, 9})
    assert read(folder, part, 4, 4) == (set(), set())
    assert read(folder, part, 1, 3) == ({2, 3}, {1})
    assert read(folder, part, 2, 4) == ({1, 2, 3}, {1, 3, 9})  # what changed at 2 and at 3 is in one increment
    assert read(folder, part, 4, 5) is None
    assert [m.since for m in part.tables[TABLE].changes] == [0, 1, 3]


def test_increments_older_than_every_parent_are_dropped_and_others_shared(shard, tmp_path):
    shard.commit(tmp_path / "c1", 1, some({1}), 0)
    second = shard.commit(tmp_path / "c2", 2, some({2}), 0)
    third = shard.commit(tmp_path / "c3", 3, some({3}), 1)
    path = "shard-0/default.changes/1-2.safetensors"
    assert sorted(third.files) == [path, "shard-0/default.changes/2-3.safetensors"]
    assert (tmp_path / "c2" / path).samefile(tmp_path / "c3" / path) and third.files[path] == second.files[path]
    assert read(tmp_path / "c3", third, 0, 3) is None and read(tmp_path / "c3", third, 1, 3) == ({2, 3}, set())
    assert read(tmp_path / "c2", second, 0, 2) == ({1, 2}, set())  # stays as it was made
    live = tmp_path / "live-shard-0" / "default.changes"
    assert sorted(p.name for p in live.iterdir()) == ["1-2.safetensors", "2-3.safetensors"]
    at_once = shard.commit(tmp_path / "c4", 4, some({4}), 4)  # the commit of a base: nobody asks for what was before
    assert at_once.files == {} and list(live.iterdir()) == []
    fifth = shard.commit(tmp_path / "c5", 5, some({5}), 4)
    assert read(tmp_path / "c5", fifth, 4, 5) == ({5}, set())


def test_where_nobody_asks_nothing_is_written_and_a_later_request_is_not_covered(shard, tmp_path):
    part = shard.commit(tmp_path / "c1", 1, some({1}), None)
    assert part.files == {} and list((tmp_path / "c1" / "shard-0").iterdir()) == []
    assert not (tmp_path / "live-shard-0").exists()
    assert read(tmp_path / "c1", part, 0, 1) is None
    part = shard.commit(tmp_path / "c2", 2, some({2}), 0)
    assert read(tmp_path / "c2", part, 0, 2) is None and read(tmp_path / "c2", part, 1, 2) == ({2}, set())
    part = shard.commit(tmp_path / "c3", 3, some({3}), None)
    part = shard.commit(tmp_path / "c4", 4, some({4}), 2)
    assert read(tmp_path / "c4", part, 2, 4) is None


def test_a_part_of_a_commit_that_tells_nothing_gives_nothing(tmp_path):
    for facts in ({}, {TABLE: TableFacts(1, {1: 1})}):
        assert read_changes(tmp_path, [ShardCommitPart("shard-0", ALL, facts, {})], TABLE, 3, 3) is None


def test_after_a_failed_commit_the_next_tells_of_all_since_the_last_that_was_made(shard, tmp_path):
    shard.commit(tmp_path / "c1", 1, some({1}), 0)
    shard.write(tmp_path / "c2", 2, some({2}), 0)
    shard.files.settle(False)
    live = tmp_path / "live-shard-0" / "default.changes"
    assert [p.name for p in live.iterdir()] == ["0-1.safetensors"]
    shard.files.settle(False)  # one that failed before it wrote
    part = shard.commit(tmp_path / "c3", 3, some({2, 3}), 0)
    assert [(m.since, m.upto) for m in part.tables[TABLE].changes] == [(0, 1), (1, 3)]
    assert read(tmp_path / "c3", part, 0, 3) == ({1, 2, 3}, set())


def test_a_failed_commit_drops_nothing(shard, tmp_path):
    shard.commit(tmp_path / "c1", 1, some({1}), 0)
    shard.write(tmp_path / "c2", 2, some({2}), None)
    shard.files.settle(False)
    part = shard.commit(tmp_path / "c2-again", 2, some({2}), 0)
    assert read(tmp_path / "c2-again", part, 0, 2) == ({1, 2}, set())


def test_a_write_tried_again_changes_nothing_that_the_first_one_linked(shard, tmp_path):
    first = shard.write(tmp_path / "c1", 1, some({1}), 0)
    second = shard.write(tmp_path / "c1-again", 1, some({1, 2}), 0)
    shard.files.settle(True)
    assert read(tmp_path / "c1", first, 0, 1) == ({1}, set())
    assert read(tmp_path / "c1-again", second, 0, 1) == ({1, 2}, set())


def test_rows_swept_between_two_commits_of_one_version_are_told(shard, tmp_path):
    shard.commit(tmp_path / "a", 1, some({1, 2}), 0)
    for name, gone in {"b": {1}, "c": set(), "d": {2}}.items():
        part = shard.commit(tmp_path / name, 1, some((), gone), 0)
    assert read(tmp_path / "d", part, 0, 1) == ({1, 2}, {1, 2}) and len(part.files) == 3
    part = shard.commit(tmp_path / "e", 2, some({3}), 0)
    assert read(tmp_path / "e", part, 0, 2) == ({1, 2, 3}, {1, 2}) and read(tmp_path / "e", part, 1, 2) == ({3}, set())


def test_beyond_a_number_of_increments_the_smallest_become_one(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_INCREMENTS", 4)
    for version in range(1, 41):
        part = shard.commit(tmp_path / f"c{version}", version, some({version, 100}, {version + 1000}), 0)
        assert len(part.tables[TABLE].changes) == min(version, 4)
        folder = tmp_path / f"c{version}"
        assert read(folder, part, 0, version) == ({*range(1, version + 1), 100}, {*range(1001, version + 1001)})
    changed, _ = read(folder, part, 20, 40)
    assert (
        changed >= {*range(21, 41), 100} and len(list((tmp_path / "live-shard-0" / "default.changes").iterdir())) == 4
    )


@pytest.mark.parametrize("act", ["flip", "remove"])
def test_a_damaged_increment_is_told(shard, tmp_path, act):
    part = shard.commit(tmp_path / "c1", 1, some({1}), 0)
    (name,) = part.files
    path = tmp_path / "c1" / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if act == "flip":
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    with pytest.raises(StoreDamaged, match="0-1"):
        read(tmp_path / "c1", part, 0, 1)


def test_a_disk_that_fails_fails_the_write_and_another_try_succeeds(shard, tmp_path, monkeypatch):
    shard.commit(tmp_path / "c1", 1, some({1}), 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    for place in ("write_whole", "REAL.sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(f"headrace.pserver.commit.change_files.{place}", full)
            with pytest.raises(StoreFailed, match="No space left"):
                shard.write(tmp_path / place, 2, some({2}), 0)
    part = shard.commit(tmp_path / "c2", 2, some({2}), 0)
    assert read(tmp_path / "c2", part, 0, 2) == ({1, 2}, set())


# --- coming back from a commit ---------------------------------------------------------------------------------------


def layout(count):
    edges = [4096 * shard // count for shard in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))


def restored(home, folder, parts, count, version):
    shards = [OneShard(home, buckets, number, version) for number, buckets in enumerate(layout(count))]
    for shard in shards:
        shard.files.restore(folder, parts, TABLE, shard.buckets)
    return shards


def test_increments_of_the_same_buckets_are_linked_and_known(shard, tmp_path):
    part = shard.commit(tmp_path / "c1", 1, some({1}, {2}), 0)
    (again,) = restored(tmp_path / "again", tmp_path / "c1", [part], 1, 1)
    (name,) = part.files
    live = tmp_path / "again" / "live-shard-0" / "default.changes" / Path(name).name
    assert live.samefile(tmp_path / "c1" / name)
    second = again.commit(tmp_path / "c2", 2, some({3}), 0)
    assert second.files[name] == part.files[name] and os.stat(live).st_nlink == 4
    assert read(tmp_path / "c2", second, 0, 2) == ({1, 3}, {2})


def test_a_commit_that_tells_nothing_is_followed_by_one_that_tells(tmp_path):
    for count in (1, 2):
        old = [
            ShardCommitPart(f"shard-{n}", buckets, {TABLE: TableFacts(0, {})}, {})
            for n, buckets in enumerate(layout(2))
        ]
        shards = restored(tmp_path / f"of-{count}", tmp_path, old, count, 5)
        parts = [shard.commit(tmp_path / f"c6-{count}", 6, some({1, 4000}), 5) for shard in shards]
        assert told(read_changes(tmp_path / f"c6-{count}", parts, TABLE, 5, 6)) == ({1, 4000}, set())
        assert read_changes(tmp_path / f"c6-{count}", parts, TABLE, 4, 6) is None


def test_an_unknown_version_begins_to_tell_with_its_first_commit(tmp_path):
    (shard,) = restored(tmp_path, tmp_path, [], 1, None)
    first = shard.commit(tmp_path / "c6", 6, some({1}), 5)
    assert read(tmp_path / "c6", first, 5, 6) is None
    second = shard.commit(tmp_path / "c7", 7, some({2}), 5)
    assert read(tmp_path / "c7", second, 6, 7) == ({2}, set())


def test_increments_of_another_version_than_the_commit_are_refused(shard, tmp_path):
    part = shard.commit(tmp_path / "c1", 1, some({1}), 0)
    with pytest.raises(StoreDamaged, match="up to version 1, not 2"):
        restored(tmp_path / "again", tmp_path / "c1", [part], 1, 2)


KEYS = st.sets(
    st.sampled_from([0, 1, 1000, 1365, 2047, 2048, 3000, 4095, 4096, 5000, 1 << 63, (1 << 64) - 1]), max_size=5
)
COMMITS = st.lists(
    st.tuples(st.integers(0, 2), KEYS, KEYS, st.integers(0, 6), st.booleans(), st.sampled_from([0, 0, 1, 2, 3])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(commits=COMMITS, max_increments=st.sampled_from([3, 64]))
def test_any_history_is_told_whole_over_failures_and_restores(commits, max_increments):
    """Each commit: passes before it, keys changed and gone, how far back a parent lies, whether it succeeds, and then
    onto how many shards it is restored (0: it is not)."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_INCREMENTS", max_increments)
        home, shards = Path(name), restored(Path(name) / "0", Path(name), [], 1, 0)
        version, waiting, happened, since, made = 0, some(), [], 0, [0]
        for number, (passes, changed, gone, back, succeeds, count) in enumerate(commits):
            version += passes
            waiting = ChangedKeys.joined([waiting, some(changed if passes else (), gone)])
            since = max(since, version - back)
            folder = home / f"c{number}"
            parts = [shard.write(folder, version, waiting, since) for shard in shards]
            for shard in shards:
                shard.files.settle(succeeds)
            if not succeeds:
                continue
            happened, waiting = [*happened, (version, waiting)], some()
            made.append(version)
            for parent in (v for v in sorted(set(made)) if v >= since):
                exact = [changes for at, changes in happened if at > parent]
                found = read_changes(folder, parts, TABLE, parent, version)
                if parent == since and max_increments == 64:
                    assert told(found) == told(ChangedKeys.joined(exact))
                changed_U, gone_G = told(found)
                assert changed_U >= told(ChangedKeys.joined(exact))[0] and gone_G >= told(ChangedKeys.joined(exact))[1]
            if count:
                shards = restored(home / f"again-{number}", folder, parts, count, version)
