"""Where a job finds the commits from which it continues: on its disk, in a mirror, in an object store."""

import shutil

import pytest

from headrace.blob.blob_errors import BlobUnavailable
from headrace.deadline import Deadline
from headrace.trainer.checkpoint import commit_source
from headrace.trainer.checkpoint.commit_source import open_source
from headrace.trainer.checkpoint.commits import problems_of
from headrace.trainer.checkpoint.mirror import Mirror
from headrace.trainer.checkpoint.rewind import Lineage
from headrace.trainer.config import StoreSection
from headrace.trainer.journal.log import Log
from tests.mirrored_store import make_commit

ANY = Lineage("", {})
SOON = Deadline.after(3600.0)  # from the import of this module on, so longer than all tests


@pytest.fixture
def disk(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def uri(tmp_path):
    return str(tmp_path / "mirror")


def source(disk, generation=0, **section):
    return open_source(StoreSection(path=str(disk), **section), disk, "job", disk.parent, SOON, generation=generation)


def commit(disk, version, **more):
    return make_commit(disk, version, {"dense": b"d%d" % version, "shard-0/rows": b"r%d" % version}, **more)


def upload(uri, *commits):
    for each in commits:
        Mirror.open(uri, SOON).upload(each, [], SOON)


def damage(made):
    (made.folder / "dense").write_bytes(b"xx")


def test_of_a_disk_alone_the_newest_sound_commit_is_used(disk):
    old, new = commit(disk, 1), commit(disk, 2)
    assert source(disk).newest_sound(ANY)[0].name == new.name
    damage(new)
    found, passed_over = source(disk).newest_sound(ANY)
    assert found.name == old.name and passed_over == {new.name: "dense has other bytes than were written"}
    source(disk).discard(list(passed_over))
    assert source(disk).newest_sound(ANY) == (found, {})


def test_damaged_files_come_back_from_the_mirror(disk, uri):
    made = commit(disk, 1)
    upload(uri, made)
    damage(made)
    found, passed_over = source(disk, mirror=uri).newest_sound(ANY)
    assert (found.name, passed_over, problems_of(found)) == (made.name, {}, {})


def test_a_mirror_that_does_not_answer_is_needed_only_where_no_commit_is_sound(disk, uri, monkeypatch):
    def down(*_):
        raise BlobUnavailable("mirror", "reading", "down")

    old, new = commit(disk, 1), commit(disk, 2)
    damage(new)
    monkeypatch.setattr(commit_source.Mirror, "open", down)
    found, passed_over = source(disk, mirror=uri).newest_sound(ANY)
    assert found.name == old.name and passed_over.keys() == {new.name}
    damage(old)
    with pytest.raises(BlobUnavailable, match="down"):
        source(disk, mirror=uri).newest_sound(ANY)


def test_a_mirror_fills_an_empty_store_and_no_other(disk, uri):
    said = []
    assert source(disk, mirror=uri).fetch(said.append, SOON, fill=True) == 0, "the mirror is empty"
    made = commit(disk, 3, timeline="t2", generation=4)
    upload(uri, made)
    shutil.rmtree(disk)
    assert source(disk, mirror=uri).fetch(said.append, SOON, fill=False) == 0 and not disk.exists()
    assert source(disk, mirror=uri).fetch(said.append, SOON, fill=True) == 4
    assert said == [f"continuing from the mirror, at commit {made.name}, on a new timeline"]
    assert source(disk, mirror=uri).fetch(said.append, SOON, fill=True) == 4, "killed before its first claim"
    assert source(disk, mirror=uri).new_timeline(0) == ("t3", made.name)
    Log.claim(disk / "log", 5, SOON, timeline="t3", base=made.name).close()
    assert source(disk, mirror=uri).fetch(said.append, SOON, fill=True) == 0 and len(said) == 1


def test_a_commit_from_before_the_object_store_is_uploaded_before_others_restore_it(disk, uri):
    made = commit(disk, 1)
    head = source(disk, 1, mirror=uri, parts="object")

    def claim(facts, _, fence):
        return Log.claim(disk / "log", 1, SOON, timeline="t1", facts=facts, fence=fence)

    head.claim({}, claim).close()
    found, _ = head.newest_sound(ANY)
    uploaded = head.restorable(found)
    assert found.name == made.name and uploaded.objects.keys() == {file.sha256 for file in made.files.values()}
    assert source(disk, mirror=uri, parts="object").newest_claim(SOON) == 1
    assert source(disk, mirror=uri).newest_claim(SOON) == 0
