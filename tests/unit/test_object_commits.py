"""Commits in an object store: which count, what a disk is completed to, and what may be removed."""

import hashlib
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.blob.blob_store import whole
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.pserver.commit.commit_files import PartObjects, key_of
from headrace.pserver.errors import PartsUnavailable, StoreDamaged
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import FORMAT, MANIFEST, Commits, hash_of, name_of, write_manifest
from headrace.trainer.checkpoint.object_store import (
    ObjectCommits,
    ObjectStore,
    RetiredCommit,
    complete_commit,
    removable,
)
from headrace.trainer.job_status import ObjectStatus
from headrace.trainer.journal.fence import FenceClaim, LogMode
from headrace.trainer.journal.log import Superseded
from tests.fakes.manifests import manifest_of

SOON = Deadline.after(3600.0)  # from the import of this module on, so longer than all tests


@pytest.fixture
def store(tmp_path):
    return ObjectStore.open(str(tmp_path / "objects"), SOON)


class Head:
    """A head that makes commits without a trainer: each file on its disk, then in the object store."""

    def __init__(self, store, disk, generation, gc_grace_s=0.0, parent=None):
        self.store, self.disk, self.generation = store, disk, generation
        self.sequence = store.sequence(generation)
        self.sequence.catch_up(SOON)
        log_id = f"log-{generation}"
        self.sequence.claim(FenceClaim(log_id=log_id, timeline="t1", mode=LogMode.ASYNC), SOON)
        self.objects = ObjectCommits(disk, store, self.sequence, parent, gc_grace_s)

    def upload(self, version, files):
        name = name_of("t1", version, self.generation)
        folder = self.disk / "commits" / name
        stored = {}
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
            stored[path] = hash_of(folder / path)
        own = self.objects.upload(folder, stored, SOON)
        uploaded = {"format": FORMAT, "objects": own, "objects_at": self.objects.address}
        manifest = manifest_of(name, files=stored, **uploaded)
        return name, manifest, folder

    def commit(self, version, files):
        name, manifest, folder = self.upload(version, files)
        self.objects.publish(manifest, [], SOON)
        write_manifest(folder, manifest)
        return Commits(self.disk).read(name)


def parts_in(store):
    folders = store.blobs.folders("parts", SOON)
    return {(int(each), sha256) for each in folders for sha256 in store.blobs.sizes(f"parts/{each}", SOON)}


def sha(content):
    return hashlib.sha256(content).hexdigest()


def test_readers_fetch_from_the_store_of_the_job_file_and_not_from_where_a_manifest_says(store, tmp_path):
    """Whoever writes to the object store could have them open any address, with the credentials of the job."""
    commit = Head(store, tmp_path / "one", 1).commit(3, {"dense": b"weights"})
    store.prepare(tmp_path / "one", "job", store.sequence().catch_up(SOON), SOON)
    write_manifest(commit.folder, replace(commit.manifest, objects_at=str(tmp_path / "elsewhere")))
    (commit.folder / "dense").unlink()
    complete_commit(Commits(tmp_path / "one").read(commit.name), SOON)
    assert (commit.folder / "dense").read_bytes() == b"weights" and not (tmp_path / "elsewhere").exists()


def test_an_empty_disk_is_completed_with_the_commits_that_count(store, tmp_path):
    head = Head(store, tmp_path / "one", 1)
    commit = head.commit(3, {"dense": b"weights", "a/b": b"rows"})
    head.upload(4, {"dense": b"never counted"})
    found = store.prepare(tmp_path / "two", "job", store.sequence().catch_up(SOON), SOON)
    assert (found.newest, found.log_lost) == (commit.name, True)
    there = Commits(tmp_path / "two").read(commit.name)
    assert there.manifest == commit.manifest and list(there.folder.iterdir()) == [there.folder / MANIFEST]
    assert store.problems_of(there, SOON) == {}
    assert (there.folder / "dense").read_bytes() == b"weights" and (there.folder / "a/b").read_bytes() == b"rows"


def test_a_damaged_cache_is_mended_and_damaged_objects_are_found(store, tmp_path):
    commit = Head(store, tmp_path, 1).commit(1, {"dense": b"weights"})
    (commit.folder / "dense").write_bytes(b"wEights")
    complete_commit(commit, SOON)
    assert (commit.folder / "dense").read_bytes() == b"weights"
    store.blobs.put(key_of(1, sha(b"weights")), whole(b"wrong"), SOON)
    (commit.folder / "dense").unlink()
    assert "other bytes under this name" in store.problems_of(commit, SOON)["rank 0"]
    store.blobs.remove(key_of(1, sha(b"weights")), SOON)
    assert "is not in the object store" in store.problems_of(commit, SOON)["rank 0"]


def test_a_commit_of_a_shard_that_misses_an_object_is_damaged(store, tmp_path):
    head = Head(store, tmp_path, 1)
    name, manifest, _ = head.upload(1, {"dense": b"d"})
    part = ShardCommitPart("shard-0", (0, 4096), {}, {"shard-0/x": StoredFile(sha(b"x"), 1)}, {sha(b"x"): 1})
    files = {**manifest.files, "shard-0/x": StoredFile(sha(b"x"), 1)}
    head.objects.publish(replace(manifest, shards=[part], files=files), [], SOON)
    store.prepare(tmp_path, "job", head.sequence.history, SOON)
    assert list(store.problems_of(Commits(tmp_path).read(name), SOON)) == ["shard-0/x"]


def test_a_head_that_wakes_late_uploads_what_it_likes_and_is_never_read(store, tmp_path):
    late = Head(store, tmp_path / "late", 1)
    late.commit(1, {"dense": b"one"})
    name, manifest, folder = late.upload(2, {"dense": b"late"})
    new = Head(store, tmp_path / "new", 2)
    for _ in range(2):
        with pytest.raises(Superseded):
            late.objects.publish(manifest, [], SOON)
    with pytest.raises(Superseded):
        late.objects.retire(["t1-0000000001-g1"])
    commit = new.commit(2, {"dense": b"new"})
    write_manifest(folder, manifest)
    found = store.prepare(tmp_path / "late", "job", store.sequence().catch_up(SOON), SOON)
    assert found.newest == commit.name and Commits(tmp_path / "late").names() == ["t1-0000000001-g1", commit.name]


def test_another_jobs_prefix_is_refused(store, tmp_path):
    head = Head(store, tmp_path / "one", 1)
    head.commit(1, {"dense": b"one"})
    with pytest.raises(SpecError, match="holds commits of the job 'job'; give 'mine' a prefix of its own"):
        store.prepare(tmp_path / "two", "mine", head.sequence.history, SOON)


def test_only_what_the_parent_names_is_not_uploaded_again(store, tmp_path):
    head = Head(store, tmp_path, 1)
    first = head.commit(1, {"dense": b"one", "same": b"same"})
    second = head.commit(2, {"dense": b"two", "same": b"same"})
    head.commit(3, {"dense": b"one", "same": b"same"})
    assert head.objects.status() == ObjectStatus(fence=4, uploads=0, bytes=7 + 3 + 3)
    again = Head(store, tmp_path, 2, parent=second)
    third = again.commit(4, {"dense": b"one", "same": b"same"})
    assert first.objects[sha(b"same")] == third.objects[sha(b"same")] == 1
    assert third.objects[sha(b"one")] == 2, "the parent does not name it, whatever is there"


def test_a_commit_made_in_a_shared_folder_is_uploaded_for_all(store, tmp_path):
    head = Head(store, tmp_path, 1)
    commit = head.commit(1, {"dense": b"one"})
    write_manifest(commit.folder, replace(commit.manifest, objects=None, objects_at=None))
    adopted = store.adopt(Commits(tmp_path).read(commit.name), 7, SOON)
    assert adopted.objects == {sha(b"one"): 7} and (7, sha(b"one")) in parts_in(store)


def test_a_store_that_does_not_answer_is_told_as_such(tmp_path):
    parts = PartObjects("s3://bucket/x?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1", 1)
    with pytest.raises(PartsUnavailable, match="parts in s3://bucket/x"):
        parts.complete(tmp_path, {"a": StoredFile(sha(b"a"), 1)}, {sha(b"a"): 1}, Deadline.after(0.0))
    with pytest.raises(StoreDamaged, match="the object store does not have it"):
        parts.complete(tmp_path, {"a": StoredFile(sha(b"a"), 1)}, {}, Deadline.after(0.0))


# --- garbage ----------------------------------------------------------------------------------------------------------


def test_parts_go_after_the_grace_and_never_those_that_a_live_commit_names(store, tmp_path):
    head = Head(store, tmp_path, 1, gc_grace_s=3600.0)
    first = head.commit(1, {"dense": b"one", "same": b"same"})
    head.commit(2, {"dense": b"two", "same": b"same"})
    head.objects.retire([first.name])
    assert head.objects.collect() == [] and (1, sha(b"one")) in parts_in(store)
    eager = Head(store, tmp_path, 2, gc_grace_s=0.0)
    gone = eager.objects.collect()
    assert gone == [key_of(1, sha(b"one")), *(key for key in gone if key.startswith(f"manifests/{first.name}-"))]
    assert len(gone) == 2 and parts_in(store) == {(1, sha(b"two")), (1, sha(b"same"))}
    assert eager.sequence.history.retired == {}


def test_uploads_of_an_older_generation_that_no_commit_names_go_and_our_own_stay(store, tmp_path):
    old = Head(store, tmp_path, 1)
    old.upload(1, {"dense": b"dead"})
    head = Head(store, tmp_path, 2)
    head.upload(2, {"dense": b"in flight"})
    assert head.objects.collect() == [key_of(1, sha(b"dead"))]
    assert parts_in(store) == {(2, sha(b"in flight"))}


def test_a_head_that_pauses_between_listing_and_deleting_removes_nothing_that_counts(store, tmp_path, monkeypatch):
    """The new head makes a commit with the content that the old one is about to delete, and retires its parent."""
    old = Head(store, tmp_path / "old", 1)
    first = old.commit(1, {"dense": b"one", "same": b"same"})
    parent = old.commit(2, {"dense": b"two", "same": b"same"})
    old.objects.retire([first.name])
    made = []

    def pause(_deadline):  # it has checked before it stopped, so that nothing but the rules holds it back
        new = Head(store, tmp_path / "new", 2, parent=parent)
        made.append(new.commit(3, {"dense": b"one", "same": b"same"}))
        new.objects.retire([parent.name])
        made.append(new.commit(4, {"dense": b"four", "same": b"same"}))

    monkeypatch.setattr(old.sequence, "check_newest", pause)
    assert key_of(1, sha(b"one")) in old.objects.collect()
    for commit in made:
        shutil.rmtree(commit.folder)
    found = store.prepare(tmp_path / "third", "job", store.sequence().catch_up(SOON), SOON)
    commits = Commits(tmp_path / "third")
    assert commits.names() == [commit.name for commit in made] and found.newest == made[-1].name
    assert [store.problems_of(commit, SOON) for commit in commits.whole()] == [{}, {}]


def test_a_head_that_was_replaced_deletes_nothing(store, tmp_path):
    old = Head(store, tmp_path, 1)
    first = old.commit(1, {"dense": b"one"})
    old.commit(2, {"dense": b"two"})
    old.objects.retire([first.name])
    Head(store, tmp_path, 2)
    with pytest.raises(Superseded):
        old.objects.collect()
    assert (1, sha(b"one")) in parts_in(store)


KEYS = st.frozensets(st.tuples(st.integers(1, 3), st.sampled_from("abc")))


@given(KEYS, KEYS, st.dictionaries(st.sampled_from("xyz"), st.tuples(st.integers(0, 9), KEYS)), st.integers(1, 3))
def test_what_may_go_is_what_the_rules_say(present, live, retired, generation):
    commits = {name: RetiredCommit(float(at_s), parts) for name, (at_s, parts) in retired.items()}
    gone = set(removable(present, live, commits, generation, now_s=9.0, grace_s=4.0))
    for key in present:
        waits = any(at_s + 4 > 9 and key in parts for at_s, parts in retired.values())
        ended = any(at_s + 4 <= 9 and key in parts for at_s, parts in retired.values())
        assert (key in gone) == (key not in live and not waits and (ended or key[0] < generation))
    assert gone <= present
