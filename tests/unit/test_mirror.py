"""The mirror in a folder: commits come back whole or not at all."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest

from headrace.blob.blob_errors import BlobUnavailable, BlobUnwritable
from headrace.blob.store_address import StoreKind, is_object_store, other_scheme, parse
from headrace.codec import plain
from headrace.config import validate
from headrace.dataset.sources.files import FilesSource
from headrace.deadline import Deadline
from headrace.errors import SpecError, Unwritable
from headrace.trainer.checkpoint.commits import FORMAT, CommitDamaged, NewerFormat, read_commit
from headrace.trainer.checkpoint.mirror import CommitPresent, Mirror, MirrorEmpty, MirrorSuperseded, read_manifest
from headrace.trainer.config import StoreSection
from tests.fakes.manifests import manifest_of
from tests.mirrored_store import LocalCommit, fetch, files_below, kept_in_mirror, make_commit, read_catalog, repair

SOON = 30.0


def soon():
    return Deadline.after(SOON)


@pytest.fixture
def uri(tmp_path):
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def mirror(uri):
    return Mirror.open(uri, soon())


def commit(tmp_path, version, files=None, **more) -> LocalCommit:
    return make_commit(
        tmp_path / "store", version, files or {"dense": b"d%d" % version, "shard-0/t/1.sst": b"s"}, **more
    )


def test_the_mirror_needs_no_torch():
    modules = "headrace.trainer.checkpoint.mirror, headrace.trainer.checkpoint.object_store"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# -- addresses


def test_an_address_is_a_buckets_a_file_uri_or_a_folder(tmp_path):
    s3 = parse("s3://bucket/a/b/?region=eu-west-1&endpoint_override=localhost:9000")
    assert (s3.kind, s3.root, s3.bucket) == (StoreKind.S3, "bucket/a/b", "bucket")
    assert s3.options == {"region": "eu-west-1", "endpoint_override": "localhost:9000"}
    google = parse("gs://bucket/a?endpoint_override=localhost:4443&scheme=http")
    assert (google.kind, google.root, google.place) == (StoreKind.GCS, "bucket/a", "gs://bucket/a")
    azure = parse("az://container/a?account=name")
    assert (azure.kind, azure.root, azure.place) == (StoreKind.AZURE, "container/a", "az://name/container/a")
    for hadoop in ("abfss://container@name.dfs.core.windows.net/a", "abfs://container@name.blob.core.windows.net/a/"):
        same = parse(hadoop)
        assert (same.kind, same.place, same.options) == (azure.kind, azure.place, azure.options)
    assert parse("file:///a%20b").root == "/a b"
    assert parse("mirror", tmp_path).root == str(tmp_path / "mirror")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "is empty"),
        ("ftp://bucket", "ftp:// is not supported"),
        ("hdfs://name/a", "hadoop distcp"),
        ("gs:///prefix", "names no bucket"),
        ("gs://bucket?region=x", "unknown options ['region']"),
        ("az://container/p", "names no storage account"),
        ("az://container/p?account=evil.com", "names no storage account"),
        ("az://?account=name", "names no container"),
        ("abfss://container/p", "names no storage account"),
        ("abfss://container@name.evil.com/p", "is no host of Azure's storage"),
        ("abfss://c@one.dfs.core.windows.net/p?account=two", "names the account 'one' as its host, and another one"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket?acl=x", "unknown options ['acl']"),
        ("s3://evil.com\\/prefix", "is no name of a bucket"),
        ("s3://evil.com:80/prefix", "is no name of a bucket"),
        ("s3://bucket/p?region=evil.com/", "is no name of a region"),
        ("s3://bucket/p?scheme=ftp", "the scheme is http or https"),
        ("s3://bucket/jobs#1", "has a '#', from which on it would be left out: write %23 before '1'"),
        ("file:///jobs#1", "has a '#', from which on"),
        ("gs://bucket/p?endpoint_override=", "the endpoint_override is none"),
        ("gs://bucket/p?endpoint_override=ftp://host", "the endpoint_override is none"),
        ("gs://bucket/p?endpoint_override=me:hunter2@host", "the endpoint_override is none"),
        ("s3://bucket/a//b", "has a part that is empty"),
        ("file://host/a", "no folder of this machine"),
    ],
)
def test_another_address_is_refused_with_a_hint(text, hint):
    with pytest.raises(SpecError) as caught:
        StoreSection(path="store", mirror=text)
    assert hint in str(caught.value) and caught.value.path == "store.mirror"
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("at", ["bucket/prefix", "name.dfs.core.windows.net/prefix"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "abfss", "ftp"])
def test_a_password_in_an_address_is_refused_and_not_shown(scheme, at):
    address = f"{scheme}://someone:hunter2@{at}"
    with pytest.raises(SpecError) as caught:
        StoreSection(path="store", mirror=address)
    assert "environment" in str(caught.value) and "hunter2" not in str(caught.value)
    with pytest.raises(SpecError) as caught:
        validate(FilesSource, {"kind": "files", "paths": ["*"], "root": address})
    assert "hunter2" not in str(caught.value)


def test_a_scheme_may_be_in_capitals():
    assert parse("GS://bucket/p").kind is StoreKind.GCS and is_object_store("GS://bucket/p")
    assert not is_object_store("gs") and not is_object_store("FILE:///a") and not other_scheme("S3://bucket/a")


# -- upload and fetch


def test_a_commit_comes_back_byte_for_byte(tmp_path, uri, mirror):
    made = commit(tmp_path, 7, {"dense": b"d" * 100, "shard-0/t/1.sst": b"s", "empty": b""})
    mirror.upload(made, [], soon())
    fetched = fetch(uri, tmp_path / "new", "job", soon())
    assert (fetched.name, fetched.passed_over) == (made.name, ())
    assert files_below(tmp_path / "new") == {f"commits/{made.name}/{p}": b for p, b in files_below(made.folder).items()}
    assert read_commit(tmp_path / "new" / "commits" / made.name).manifest == made.manifest


def test_equal_contents_are_stored_once(tmp_path, mirror):
    mirror.upload(commit(tmp_path, 1, {"a": b"same", "b": b"same"}), [], soon())
    mirror.upload(commit(tmp_path, 2, {"c": b"same", "d": b"other"}), [], soon())
    there = [key for key in files_below(tmp_path / "mirror") if key.startswith("files/")]
    assert sorted(there) == sorted(f"files/{hashlib.sha256(c).hexdigest()}" for c in (b"same", b"other"))


def test_existing_contents_are_not_uploaded_again(tmp_path, mirror):
    mirror.upload(commit(tmp_path, 1, {"a": b"same"}), [], soon())
    second = commit(tmp_path, 2, {"a": b"same"})
    (second.folder / "a").unlink()  # it could not even be read
    mirror.upload(second, [], soon())
    assert [c.version for c in mirror.catalog(soon()).commits] == [2, 1]


def test_an_object_of_the_wrong_size_is_uploaded_again(tmp_path, uri, mirror):
    made = commit(tmp_path, 1)
    mirror.upload(made, [], soon())
    for path in (tmp_path / "mirror" / "files").iterdir():
        path.write_bytes(b"")
    mirror.upload(made, [], soon())
    assert fetch(uri, tmp_path / "new", "job", soon()).name == made.name


@pytest.mark.parametrize("damaged", [b"D1", b"d", b"d1 and more", None])
def test_a_damaged_local_file_is_not_uploaded(tmp_path, uri, mirror, damaged):
    made = commit(tmp_path, 1)
    (made.folder / "dense").unlink()
    if damaged is not None:
        (made.folder / "dense").write_bytes(damaged)
    with pytest.raises(CommitDamaged, match="dense"):
        mirror.upload(made, [], soon())
    assert mirror.catalog(soon()).commits == []
    assert hashlib.sha256(b"d1").hexdigest() not in mirror.blobs.sizes("files", soon())


def test_the_log_is_uploaded_as_it_grows(tmp_path, mirror):
    log = tmp_path / "00000001-0001.log"
    for text in (b"one\n", b"one\ntwo\n"):
        log.write_bytes(text)
        mirror.upload(commit(tmp_path, 1), [log, tmp_path / "pruned.log"], soon())
        assert files_below(tmp_path / "mirror" / "log") == {log.name: text}


def test_a_mirror_of_another_job_is_left_alone(tmp_path, uri, mirror):
    mirror.upload(commit(tmp_path, 1, job="mine"), [], soon())
    before = files_below(tmp_path / "mirror")
    with pytest.raises(SpecError, match="'mine'.*'yours'"):
        mirror.upload(commit(tmp_path, 2, job="yours"), [], soon())
    with pytest.raises(SpecError, match="'mine'.*'yours'"):
        fetch(uri, tmp_path / "new", "yours", soon())
    assert files_below(tmp_path / "mirror") == before and files_below(tmp_path / "new") == {}


# -- damage in the mirror


def test_a_damaged_newer_commit_is_skipped_and_reported(tmp_path, uri, mirror):
    for version in (1, 2, 3, 4, 5):
        mirror.upload(commit(tmp_path, version), [], soon())
    objects = tmp_path / "mirror" / "files"
    (objects / hashlib.sha256(b"d5").hexdigest()).write_bytes(b"D5")  # another byte
    (objects / hashlib.sha256(b"d4").hexdigest()).write_bytes(b"d")  # too short
    (objects / hashlib.sha256(b"d3").hexdigest()).unlink()
    newest = commit(tmp_path, 6)
    mirror.upload(newest, [], soon())
    (tmp_path / "mirror" / "commits" / f"{newest.name}.json").write_bytes(newest.text[:-40])
    fetched = fetch(uri, tmp_path / "new", "job", soon())
    assert fetched.name == "t1-0000000002-g1"
    assert [text.split(":")[0] for text in fetched.passed_over] == [
        "t1-0000000006-g1",
        "dense",
        "t1-0000000004-g1",
        "t1-0000000003-g1",
    ]
    assert [path.name for path in (tmp_path / "new" / "commits").iterdir()] == [fetched.name]


def test_no_whole_commit_is_an_error_that_names_the_damage(tmp_path, uri, mirror):
    with pytest.raises(MirrorEmpty, match="there is no commit in it"):
        fetch(uri, tmp_path / "new", "job", soon())
    mirror.upload(commit(tmp_path, 1), [], soon())
    shutil.rmtree(tmp_path / "mirror" / "files")
    with pytest.raises(MirrorEmpty, match=r"t1-0000000001-g1: 2 of its files are not in the mirror"):
        fetch(uri, tmp_path / "new", "job", soon())
    assert files_below(tmp_path / "new") == {}


def test_a_local_commit_is_not_replaced(tmp_path, uri, mirror):
    made = commit(tmp_path, 1)
    mirror.upload(made, [], soon())
    with pytest.raises(CommitPresent, match="there already"):
        fetch(uri, tmp_path / "store", "job", soon())
    assert read_commit(made.folder).manifest == made.manifest


def test_leftovers_of_a_killed_fetch_are_removed(tmp_path, uri, mirror):
    made = commit(tmp_path, 1)
    mirror.upload(made, [], soon())
    left = tmp_path / "new" / "commits" / f"{made.name}.unfinished"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"h")
    fetch(uri, tmp_path / "new", "job", soon())
    assert sorted(files_below(tmp_path / "new" / "commits" / made.name)) == [
        "dense",
        "manifest.json",
        "shard-0/t/1.sst",
    ]
    assert not left.exists()


def test_a_local_disk_that_cannot_be_written_has_its_own_error(tmp_path, uri, mirror):
    mirror.upload(commit(tmp_path, 1), [], soon())
    (tmp_path / "new").write_text("a file")
    with pytest.raises(Unwritable, match="new"):
        fetch(uri, tmp_path / "new", "job", soon())


@pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside", ""])
def test_a_manifest_cannot_write_outside_its_commit(path):
    manifest = plain(manifest_of("t1-0000000001-g1")) | {"files": {path: {"sha256": "0" * 64, "bytes": 1}}}
    sha256 = hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    with pytest.raises(CommitDamaged, match="is not a relative path"):
        read_manifest("t1-0000000001-g1", json.dumps({"sha256": sha256, "manifest": manifest}).encode())


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"manifest": [], "sha256": ""}', b"\xff", b'{"manifest": {"format": 1}}']
)
def test_a_malformed_manifest_is_damage(text):
    with pytest.raises(CommitDamaged):
        read_manifest("t1-0000000001-g1", text)


def test_single_files_are_repaired_and_others_stay(tmp_path, uri, mirror):
    made = commit(tmp_path, 1)
    mirror.upload(made, [], soon())
    good = files_below(made.folder)
    (made.folder / "dense").write_bytes(b"DAMAGED")
    shutil.rmtree(made.folder / "shard-0")
    repair(uri, made, ["dense", "shard-0/t/1.sst"], soon())
    assert files_below(made.folder) == good


def test_a_failed_repair_keeps_the_old_file(tmp_path, uri, mirror):
    made = commit(tmp_path, 1)
    mirror.upload(made, [], soon())
    (tmp_path / "mirror" / "files" / hashlib.sha256(b"d1").hexdigest()).write_bytes(b"xx")
    (made.folder / "dense").write_bytes(b"DAMAGED")
    with pytest.raises(CommitDamaged, match="other bytes"):
        repair(uri, made, ["dense"], soon())
    assert (made.folder / "dense").read_bytes() == b"DAMAGED"
    assert len(files_below(made.folder)) == 3


def test_a_mirror_knows_the_highest_timeline_and_generation(tmp_path, uri, mirror):
    log = tmp_path / "00000006-0001.log"
    log.write_bytes(b"record\n")
    mirror.upload(commit(tmp_path, 1, timeline="t2", generation=4), [log], soon())
    (tmp_path / "mirror" / "commits" / "t3-0000000009-g5.json").write_bytes(b"{half")
    assert max(timeline for timeline, _, _ in mirror.catalog(soon()).orders) == 3
    assert mirror.newest_generation(soon()) == 6


# -- pruning


def test_pruning_keeps_the_newest_and_the_pinned_and_what_they_name(tmp_path, mirror):
    for version in (1, 2, 3, 4):
        mirror.upload(commit(tmp_path, version), [], soon())
    assert mirror.prune(2, {"t1-0000000001-g1"}, [], soon()) == ["t1-0000000002-g1"]
    assert kept_in_mirror(tmp_path / "mirror") == {"t1-0000000001-g1", "t1-0000000003-g1", "t1-0000000004-g1"}
    contents = {hashlib.sha256(c).hexdigest() for c in (b"d1", b"d3", b"d4", b"s")}
    assert set(mirror.blobs.sizes("files", soon())) == contents


def test_the_newest_is_that_of_the_newest_timeline(tmp_path, uri, mirror):
    mirror.upload(commit(tmp_path, 9, timeline="t1"), [], soon())
    rewound = commit(tmp_path, 5, timeline="t2")
    mirror.upload(rewound, [], soon())
    assert fetch(uri, tmp_path / "new", "job", soon()).name == rewound.name
    assert mirror.prune(1, (), [], soon()) == ["t1-0000000009-g1"]


def test_unneeded_log_files_are_pruned(tmp_path, mirror):
    names = ["00000001-0001.log", "00000002-0001.log", "00000002-0002.log", "00000003-0001.log"]
    logs = [tmp_path / name for name in names]
    for path in logs:
        path.write_bytes(b"record\n")
    mirror.upload(commit(tmp_path, 1, generation=1), logs, soon())
    mirror.upload(commit(tmp_path, 2, generation=2), logs, soon())
    mirror.prune(2, (), logs[3:], soon())
    assert sorted(mirror.blobs.sizes("log", soon())) == names[1:]  # the commit of generation 1 stays
    mirror.prune(1, (), logs[2:], soon())
    assert sorted(mirror.blobs.sizes("log", soon())) == names[2:]


def test_leftovers_of_killed_writers_are_pruned(tmp_path, mirror):
    mirror.upload(commit(tmp_path, 1), [], soon())
    before = files_below(tmp_path / "mirror")
    for folder in ("files", "commits", "log"):
        (tmp_path / "mirror" / folder).mkdir(exist_ok=True)
        (tmp_path / "mirror" / folder / "x.0123.unfinished").write_bytes(b"half")
    (tmp_path / "mirror" / "files" / ("0" * 64)).write_bytes(b"of an upload that died")
    (tmp_path / "mirror" / "commits" / "t1-0000000009-g1.json").write_bytes(b"{half")
    mirror.prune(3, (), [], soon())
    assert files_below(tmp_path / "mirror") == before


def test_commits_of_a_newer_headrace_are_neither_removed_nor_ignored(tmp_path, uri, mirror):
    mirror.upload(commit(tmp_path, 1), [], soon())
    mirror.upload(commit(tmp_path, 2), [], soon())
    (tmp_path / "mirror" / "commits" / "t1-0000000003-g1.json").write_bytes(
        b'{"sha256": "", "manifest": {"format": %d, "other": []}}' % (FORMAT + 1)
    )
    before = files_below(tmp_path / "mirror")
    with pytest.raises(NewerFormat, match=f"format {FORMAT + 1}"):
        mirror.prune(1, (), [], soon())
    with pytest.raises(NewerFormat, match=f"format {FORMAT + 1}"):
        fetch(uri, tmp_path / "new", "job", soon())
    assert files_below(tmp_path / "mirror") == before and files_below(tmp_path / "new") == {}


# -- limits


def test_a_passed_deadline_is_reported_and_nothing_is_written(tmp_path, mirror):
    with pytest.raises(BlobUnavailable, match="out of time") as caught:
        mirror.upload(commit(tmp_path, 1), [], Deadline.after(0))
    assert caught.value.exit_code == 75
    assert files_below(tmp_path / "mirror") == {}


def test_a_mirror_that_cannot_be_written_says_why(tmp_path, mirror):
    (tmp_path / "mirror").write_text("a file where the folder should be")
    with pytest.raises(BlobUnwritable, match=r"mirror file://.*files"):
        mirror.upload(commit(tmp_path, 1), [], Deadline.after(0.5))


def test_lookup_lists_commits_and_damage(tmp_path, uri, mirror):
    mirror.upload(commit(tmp_path, 3), [], soon())
    mirror.upload(commit(tmp_path, 5), [], soon())
    (tmp_path / "mirror" / "commits" / "t1-0000000009-g1.json").write_bytes(b"{half")
    found = read_catalog(uri, soon())
    assert [(c.name, c.version, c.timeline, c.manifest.job) for c in found.commits] == [
        ("t1-0000000005-g1", 5, "t1", "job"),
        ("t1-0000000003-g1", 3, "t1", "job"),
    ]
    assert list(found.damaged) == ["t1-0000000009-g1"]


def test_a_machine_that_returns_cannot_harm_its_successor(tmp_path, mirror):
    mirror.upload(commit(tmp_path, 3), [], soon())
    mirror.upload(commit(tmp_path / "other", 4, timeline="t2", generation=7), [], soon())
    with pytest.raises(MirrorSuperseded, match="timeline t2, this job is on t1.*a prefix of its own"):
        mirror.upload(commit(tmp_path, 5), [], soon())
    assert [each.name for each in mirror.catalog(soon()).commits] == ["t2-0000000004-g7", "t1-0000000003-g1"]
