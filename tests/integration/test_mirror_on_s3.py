"""The mirror on a real S3 server, over a connection that breaks."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import uuid

import pytest

from headrace.blob import blob_retry
from headrace.blob import bucket as bucket_module
from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.blob_store import whole
from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import HeadraceError
from headrace.retry import Backoff
from headrace.trainer.checkpoint.mirror import LOCK, Mirror, MirrorEmpty, MirrorUploader
from headrace.trainer.job_status import MirrorStatus
from tests.mirrored_store import fetch, files_below, make_commit, read_catalog, repair
from tests.s3_server import proxy, s3  # noqa: F401

MIB = 1 << 20
SOON = 30.0


def soon():
    return Deadline.after(SOON)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Tries follow each other at once, and a silent connection is given up early."""
    monkeypatch.setattr(blob_retry, "BACKOFF", Backoff((0.02, 0.05)))
    monkeypatch.setattr(bucket_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(bucket_module, "SEND_S", 1.0)
    monkeypatch.setattr(bucket_module, "CLIENT_TRIES", 1)


@pytest.fixture
def prefix():
    return uuid.uuid4().hex


@pytest.fixture
def uri(s3, prefix):  # noqa: F811
    return s3.uri("bucket", prefix)


@pytest.fixture
def shaky(s3, proxy, prefix):  # noqa: F811
    """The same mirror, through the proxy."""
    return s3.uri("bucket", prefix, proxy.port)


def commit(tmp_path, version, files=None):
    own = b"%d" % version
    return make_commit(tmp_path / "store", version, files or {"dense": own * MIB, "shard-0/t/1.sst": b"s" * MIB})


def assert_whole(uri):
    """Every commit that has a manifest has its files, with the right bytes."""
    mirror = Mirror.open(uri, soon())
    for found in mirror.catalog(soon()).commits:
        for file in found.files.values():
            content = mirror.blobs.get(f"files/{file.sha256}", 1 << 30, soon())
            assert content is not None and hashlib.sha256(content).hexdigest() == file.sha256


def versions(uri):
    return [found.version for found in read_catalog(uri, soon()).commits]


def test_a_commit_goes_to_s3_and_comes_back_byte_for_byte(tmp_path, uri):
    made = commit(tmp_path, 1, {"a": os.urandom(21 * MIB), "b/c": b"small", "empty": b""})  # a in several parts
    log = tmp_path / "00000001-0001.log"
    log.write_bytes(b"record\n")
    mirror = Mirror.open(uri, soon())
    mirror.upload(made, [log], soon())
    assert mirror.blobs.sizes("log", soon()) == {log.name: 7}
    assert fetch(uri, tmp_path / "new", "job", soon()).name == made.name
    assert files_below(tmp_path / "new" / "commits" / made.name) == files_below(made.folder)


def test_equal_contents_of_two_machines_are_stored_once(tmp_path, uri):
    here, there = (
        make_commit(tmp_path / name, v, {"a": b"same", "b": name.encode()}) for name, v in (("x", 1), ("y", 2))
    )
    for made in (here, there):
        Mirror.open(uri, soon()).upload(made, [], soon())
    contents = {hashlib.sha256(c).hexdigest() for c in (b"same", b"x", b"y")}
    assert Mirror.open(uri, soon()).blobs.sizes("files", soon()).keys() == contents


def test_pruning_keeps_contents_that_commits_name(tmp_path, uri):
    mirror = Mirror.open(uri, soon())
    for version in (1, 2, 3):
        mirror.upload(commit(tmp_path, version), [], soon())
    assert mirror.prune(1, {"t1-0000000001-g1"}, [], soon()) == ["t1-0000000002-g1"]
    assert versions(uri) == [3, 1] and len(mirror.blobs.sizes("files", soon())) == 3
    assert_whole(uri)


def test_a_missing_bucket_is_reported(s3):  # noqa: F811
    with pytest.raises(BlobUnavailable, match=r"nowhere.*make it first"):
        read_catalog(s3.uri("nowhere", "prefix"), soon())


def test_a_missing_server_is_reported_within_the_deadline(s3):  # noqa: F811
    with pytest.raises(BlobUnavailable, match="looking for the bucket"):
        read_catalog(s3.uri("bucket", "prefix", port=1), Deadline.after(1))


def test_a_request_is_repeated_after_slow_down(tmp_path, proxy, shaky):  # noqa: F811
    mirror = Mirror.open(shaky, soon())
    proxy.refuse(2)
    mirror.upload(commit(tmp_path, 1), [], soon())
    assert proxy.refusals == 0 and versions(shaky) == [1]


@pytest.mark.parametrize("cut_at", [0, 2_000, MIB // 2, MIB + 2_000, 2 * MIB + 20_000, 5 * MIB, 9 * MIB])
def test_an_upload_cut_anywhere_leaves_whole_commits_and_the_next_one_completes(tmp_path, uri, proxy, shaky, cut_at):  # noqa: F811
    Mirror.open(uri, soon()).upload(commit(tmp_path, 1), [], soon())
    second = commit(tmp_path, 2, {"dense": b"2" * MIB, "1.sst": b"s" * MIB, "2.sst": os.urandom(9 * MIB)})
    mirror = Mirror.open(shaky, soon())
    proxy.cut_after(cut_at)
    with pytest.raises(BlobUnavailable):
        mirror.upload(second, [], soon())
    assert versions(uri) == [1]
    assert_whole(uri)
    assert fetch(uri, tmp_path / "meanwhile", "job", soon()).name == "t1-0000000001-g1"
    proxy.heal()
    mirror.upload(second, [], soon())
    assert versions(uri) == [2, 1]
    assert_whole(uri)
    assert fetch(uri, tmp_path / "after", "job", soon()).name == second.name


def test_a_pruning_cut_off_leaves_whole_commits(tmp_path, uri, proxy, shaky):  # noqa: F811
    mirror = Mirror.open(shaky, soon())
    for version in (1, 2, 3, 4):
        mirror.upload(commit(tmp_path, version), [], soon())
    for budget in range(1_000, 30_000, 3_000):
        proxy.cut_after(budget)
        try:
            mirror.prune(1, (), [], soon())
        except BlobUnavailable:
            assert_whole(uri)
            assert versions(uri)[0] == 4
        proxy.heal()
    mirror.prune(1, (), [], soon())
    assert versions(uri) == [4] and len(mirror.blobs.sizes("files", soon())) == 2


def test_an_uploader_killed_in_the_middle_leaves_no_manifest_without_files(tmp_path, uri):
    Mirror.open(uri, soon()).upload(commit(tmp_path, 1), [], soon())
    second = commit(tmp_path, 2)
    program = f"""
from pathlib import Path
from headrace.deadline import Deadline
from headrace.failpoints import ArmedFailpoint, Failpoint, arm
from headrace.trainer.checkpoint.commits import read_commit
from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.blob_store import whole
from headrace.trainer.checkpoint.mirror import Mirror
arm((ArmedFailpoint(point=Failpoint.UPLOADED),))
Mirror.open({uri!r}, Deadline.after(30)).upload(read_commit(Path({str(second.folder)!r})), [], Deadline.after(30))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert versions(uri) == [1]
    assert fetch(uri, tmp_path / "new", "job", soon()).name == "t1-0000000001-g1"
    Mirror.open(uri, soon()).upload(second, [], soon())
    assert versions(uri) == [2, 1]
    assert_whole(uri)


def test_a_silent_server_ends_the_call_soon_after_its_deadline(tmp_path, proxy, shaky):  # noqa: F811
    mirror = Mirror.open(shaky, soon())
    proxy.stall()
    with pytest.raises(BlobUnavailable):
        mirror.upload(commit(tmp_path, 1), [], Deadline.after(0.5))


def test_a_fetch_cut_off_leaves_nothing_and_the_next_one_completes(tmp_path, proxy, shaky):  # noqa: F811
    mirror = Mirror.open(shaky, soon())
    made = commit(tmp_path, 1)
    mirror.upload(made, [], soon())
    for budget in (0, 500, 1_200, 1_900):
        proxy.cut_after(budget)  # requests are what is counted
        with pytest.raises(BlobUnavailable):
            fetch(shaky, tmp_path / "new", "job", Deadline.after(3))
        assert files_below(tmp_path / "new") == {}
        proxy.heal()
    assert fetch(shaky, tmp_path / "new", "job", soon()).name == made.name


def test_damaged_commits_in_the_bucket_are_skipped_until_none_is_left(tmp_path, uri):
    mirror = Mirror.open(uri, soon())
    for version in (1, 2):
        mirror.upload(commit(tmp_path, version), [], soon())
    for version, name in ((2, "t1-0000000001-g1"), (1, None)):
        damaged = hashlib.sha256(b"%d" % version * MIB).hexdigest()
        mirror.blobs.put(f"files/{damaged}", whole(b"x" * MIB), soon())
        if name is not None:
            fetched = fetch(uri, tmp_path / "new", "job", soon())
            assert fetched.name == name and damaged in fetched.passed_over[0]
            shutil.rmtree(tmp_path / "new")
    with pytest.raises(MirrorEmpty, match="no commit in it is whole"):
        fetch(uri, tmp_path / "new", "job", soon())
    assert files_below(tmp_path / "new") == {}


def test_a_damaged_local_file_is_repaired_from_the_bucket(tmp_path, uri):
    made = commit(tmp_path, 1)
    Mirror.open(uri, soon()).upload(made, [], soon())
    good = files_below(made.folder)
    (made.folder / "dense").write_bytes(b"damaged")
    repair(uri, made, ["dense"], soon())
    assert files_below(made.folder) == good


# -- in the background


class RankZero:
    """The functions that rank 0 gives to an uploader."""

    def __init__(self):
        self.pinned, self.asked, self.superseded = set(), threading.Event(), False

    def check(self):
        self.asked.set()
        if self.superseded:
            raise HeadraceError("a newer generation has taken over")


@pytest.fixture
def rank0():
    return RankZero()


@pytest.fixture
def uploader(tmp_path, rank0):
    """Makes uploaders with a store; ends them."""
    made = []
    (tmp_path / "store").mkdir()

    def make(uri, **more):
        made.append(
            MirrorUploader(uri, tmp_path / "store", 2, lambda: rank0.pinned, rank0.check, **{"retry_s": 0.02, **more})
        )
        return made[-1]

    yield make
    for uploader in made:
        uploader.stop(Deadline.after(0))


def test_a_stop_waits_for_the_last_commit(tmp_path, uploader, uri):
    background = uploader(uri)
    made = commit(tmp_path, 1)
    background.offer(made)
    assert background.stop(soon())
    assert versions(uri) == [1]
    assert background.status() == MirrorStatus(version=1, behind_s=0.0)
    assert background.holding() == set()


def test_newer_commits_replace_those_not_begun_and_old_ones_are_pruned(tmp_path, uploader, uri):
    background = uploader(uri)
    with locked(tmp_path / "store" / LOCK, soon()):  # nothing can begin
        for version in (1, 2, 3, 4):
            background.offer(commit(tmp_path, version))
        assert "t1-0000000004-g1" in background.holding() and len(background.holding()) <= 2
    assert background.stop(soon())
    assert versions(uri)[0] == 4 and len(versions(uri)) <= 2


def test_pinned_commits_stay_in_the_mirror(tmp_path, uploader, uri, rank0):
    background = uploader(uri)
    rank0.pinned = {"t1-0000000001-g1"}
    for version in (1, 2, 3, 4):
        background.offer(commit(tmp_path, version))
        wait_for(lambda version=version: background.status().version == version)
    assert background.stop(soon())
    assert versions(uri) == [4, 3, 1]


def test_trouble_is_in_the_status_until_the_server_answers(tmp_path, uploader, proxy, shaky):  # noqa: F811
    background = uploader(shaky, max_behind_s=0.0)
    proxy.cut_after(0)
    background.offer(commit(tmp_path, 1))
    wait_for(lambda: "mirror s3://" in (background.status().trouble or ""))
    assert background.status().version is None and background.status().behind_s > 0
    assert background.holding() == {"t1-0000000001-g1"}
    proxy.heal()
    wait_for(lambda: background.status().version == 1 and background.status().trouble is None)


def test_a_stop_without_a_connection_ends_at_its_deadline_and_says_so(tmp_path, uploader, proxy, shaky):  # noqa: F811
    background = uploader(shaky)
    proxy.cut_after(0)
    background.offer(commit(tmp_path, 1))
    assert not background.stop(Deadline.after(0.3))
    assert background.status().version is None


def test_a_rank_0_that_was_replaced_writes_nothing(tmp_path, uploader, uri, rank0):
    rank0.superseded = True
    background = uploader(uri)
    background.offer(commit(tmp_path, 1))
    wait_for(lambda: background.status().trouble == "a newer generation has taken over")
    assert read_catalog(uri, soon()).commits == []


def wait_for(condition):
    deadline, pause = soon(), threading.Event()
    while not condition():
        deadline.check("waiting for the uploader")
        pause.wait(0.01)
