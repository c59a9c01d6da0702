"""What every blob store promises: a folder of this machine, and buckets of S3, Google Cloud Storage and Azure."""

import hashlib
import itertools
import os
import threading
import uuid

import pytest

from headrace.blob.blob_errors import BlobUnavailable, SourceDamaged
from headrace.blob.blob_store import CHUNK_BYTES, UNFINISHED, checked_file, head_of, open_blobs, whole
from headrace.blob.store_address import StoreKind, parse
from headrace.deadline import Deadline
from headrace.errors import Unwritable
from tests.object_servers import azure, gcs  # noqa: F401
from tests.s3_server import s3  # noqa: F401

SOON = 30.0
LARGE = 2 * CHUNK_BYTES + 12_345
"""Sent in more than one piece."""


def soon():
    return Deadline.after(SOON)


@pytest.fixture(params=["folder", "s3", "s3 whole", "gcs", "azure"])
def address(request, tmp_path):
    """Of the object stores a prefix in a bucket, and once a whole bucket."""
    if request.param == "folder":
        return parse(f"file://{tmp_path}/blobs")
    kind, _, whole_bucket = request.param.partition(" ")
    server, name = request.getfixturevalue(kind), uuid.uuid4().hex
    if not whole_bucket:
        return parse(server.uri("bucket", name))
    server.make_bucket(name)
    return parse(server.uri(name, ""))


@pytest.fixture
def blobs(address):
    return open_blobs(address, "mirror", soon())


def put(blobs, key, content):
    blobs.put(key, whole(content), soon())


def get(blobs, key, max_bytes=1 << 30):
    return blobs.get(key, max_bytes, soon())


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# -- content


@pytest.mark.parametrize("key", ["a", "a/b/c.json", "a b/~x%20y#z", "ü/é", "x+y=z&w@v,u;t'(s)!$", 'p[q]{r}^`|"<>\\'])
@pytest.mark.parametrize("content", [b"", b"content"])
def test_a_blob_is_read_as_it_was_put(blobs, key, content):
    if blobs.address.kind is StoreKind.AZURE:
        key = key.replace("\\", "")  # which it takes for a slash
    put(blobs, key, b"before it was replaced")
    put(blobs, key, content)
    assert get(blobs, key) == content
    assert blobs.tail(key, 1 << 20, soon()) == content
    folder, _, name = key.rpartition("/")
    assert blobs.sizes(folder, soon()) == {name: len(content)}


def test_a_large_blob_comes_back_byte_for_byte(blobs, tmp_path):
    content = os.urandom(LARGE)
    (tmp_path / "source").write_bytes(content)
    blobs.put("a/large", checked_file(tmp_path / "source", sha256(content), LARGE), soon())
    assert blobs.download("a/large", tmp_path / "copy", soon()) == (sha256(content), LARGE)
    assert (tmp_path / "copy").read_bytes() == content
    assert get(blobs, "a/large", max_bytes=10) == content[:10]
    assert get(blobs, "a/large", max_bytes=CHUNK_BYTES + 1) == content[: CHUNK_BYTES + 1]


def test_a_blob_that_is_not_there_is_no_failure(blobs, tmp_path):
    put(blobs, "folder/a", b"1")
    assert get(blobs, "none") is None and get(blobs, "folder/none") is None and get(blobs, "folder/a/below") is None
    assert blobs.tail("none", 10, soon()) == b""
    for read, key in itertools.product((blobs.download, blobs.local), ("none", "folder/a/below")):
        with pytest.raises(FileNotFoundError):
            read(key, tmp_path / "copy", soon())
    assert not (tmp_path / "copy").is_file()
    blobs.remove("none", soon())
    blobs.remove_folder("none", soon())
    assert get(blobs, "folder/a") == b"1"


def test_a_local_file_has_the_content_and_is_fetched_once(blobs, tmp_path):
    put(blobs, "t1/x", b"content")
    path = blobs.local("t1/x", tmp_path / "scratch", soon())
    assert path.read_bytes() == b"content"
    before = path.stat().st_mtime_ns
    assert blobs.local("t1/x", tmp_path / "scratch", soon()) == path and path.stat().st_mtime_ns == before


def test_the_head_of_a_growing_file_is_put(blobs, tmp_path):
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    with (tmp_path / "log").open("rb") as file:
        blobs.put("log", head_of(file, 4), soon())
    assert get(blobs, "log") == b"one\n"


# -- folders


def test_folders_list_what_is_directly_in_them(blobs):
    for key in ("a/1", "a/2", "a/b/3", "a/b/c/4", "ab/5", "6"):
        put(blobs, key, key.encode())
    assert blobs.sizes("a", soon()) == {"1": 3, "2": 3} and blobs.folders("a", soon()) == ["b"]
    assert blobs.sizes("", soon()) == {"6": 1} and blobs.folders("", soon()) == ["a", "ab"]
    assert blobs.sizes("none", soon()) == {} and blobs.folders("none", soon()) == []
    blobs.remove_folder("a/b/c", soon())
    assert blobs.folders("a/b", soon()) == [] and blobs.sizes("a/b", soon()) == {"3": 5}
    blobs.remove("a/1", soon())
    assert blobs.sizes("a", soon()) == {"2": 3}


def test_an_address_leads_to_the_blob(blobs, address):
    put(blobs, "a/b", b"1")
    inner = open_blobs(parse(blobs.url("a")), "mirror", soon())
    assert get(inner, "b") == b"1" and inner.address.options == address.options


# -- whole or not there


def test_a_source_that_is_damaged_leaves_the_store_as_it_was(blobs, tmp_path):
    put(blobs, "a", b"before")
    for content in (b"damaged", b"d" * LARGE):
        (tmp_path / "source").write_bytes(content)
        with pytest.raises(SourceDamaged, match="source: has other bytes"):
            blobs.put("a", checked_file(tmp_path / "source", sha256(b"right"), len(content)), soon())
    with pytest.raises(SourceDamaged, match="cannot be read"):
        blobs.put("a", checked_file(tmp_path / "none", sha256(b"right"), 5), soon())
    assert get(blobs, "a") == b"before" and blobs.sizes("", soon()) == {"a": 6}


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_source_that_fails_in_the_middle_leaves_the_store_as_it_was(blobs, num_chunks):
    class Broken(Exception):
        pass

    def chunks():
        for _ in range(num_chunks):
            yield b"x" * CHUNK_BYTES
        raise Broken

    put(blobs, "a", b"before")
    with pytest.raises(Broken):
        blobs.put("a", chunks, soon())
    assert get(blobs, "a") == b"before" and blobs.sizes("", soon()) == {"a": 6}


def test_a_reader_sees_one_whole_blob_or_the_other(blobs):
    contents, stop, seen = [b"%d" % n * 50_000 for n in range(2)], threading.Event(), set()
    put(blobs, "a", contents[0])

    def read():
        while not stop.is_set():
            seen.add(get(blobs, "a"))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(20):
        put(blobs, "a", contents[n % 2])
    stop.set()
    reader.join()
    assert seen <= set(contents)
    assert not [name for name in blobs.sizes("", soon()) if name.endswith(UNFINISHED)]


# -- written piece by piece


def test_a_blob_written_in_pieces_is_hashed_and_whole(blobs, tmp_path):
    with blobs.create("t1/base/rows", tmp_path / "scratch", soon()) as writer:
        for number in range(5):
            writer.write(b"%d" % number)
        writer.rows = 5
    assert (writer.sha256, writer.num_bytes, writer.tell()) == (sha256(b"01234"), 5, 5)
    assert get(blobs, "t1/base/rows") == b"01234"
    assert not list((tmp_path / "scratch").rglob("*")), "nothing collected is left"


def test_a_writer_that_fails_leaves_no_scratch(blobs, tmp_path):
    with pytest.raises(ZeroDivisionError), blobs.create("a", tmp_path / "scratch", soon()) as writer:
        writer.write(b"half")
        raise ZeroDivisionError
    assert not list((tmp_path / "scratch").rglob("*"))


# -- lines


def test_lines_are_appended_and_an_incomplete_one_is_dropped(blobs):
    for line in (b"one\n", b"two\n"):
        blobs.append("folder/lines", line, soon())
    assert get(blobs, "folder/lines") == b"one\ntwo\n"
    put(blobs, "folder/lines", b"one\ntwo\nthr")
    blobs.append("folder/lines", b"four\n", soon())
    assert get(blobs, "folder/lines") == b"one\ntwo\nfour\n"
    assert blobs.tail("folder/lines", 5, soon()) == b"four\n"


# -- limits


def test_no_time_left_is_reported_and_nothing_changes(blobs, tmp_path):
    put(blobs, "a", b"1")
    over = Deadline.after(0)
    for call in (
        lambda: blobs.put("b", whole(b"1"), over),
        lambda: blobs.append("b", b"1\n", over),
        lambda: blobs.get("a", 10, over),
        lambda: blobs.sizes("", over),
        lambda: blobs.folders("", over),
        lambda: blobs.remove("a", over),
        lambda: blobs.download("a", tmp_path / "copy", over),
    ):
        with pytest.raises(BlobUnavailable, match=r"^mirror .*: out of time$") as caught:
            call()
        assert caught.value.exit_code == 75 and caught.value.out_of_time
    assert blobs.sizes("", soon()) == {"a": 1} and not (tmp_path / "copy").exists()


def test_a_store_that_is_given_up_ends_every_call(blobs):
    blobs.give_up()
    with pytest.raises(BlobUnavailable, match="given up, as the process ends") as caught:
        put(blobs, "a", b"1")
    assert not caught.value.out_of_time


def test_a_copy_that_cannot_be_written_is_the_local_disks_failure(blobs, tmp_path):
    put(blobs, "a", b"1")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unwritable, match="file/copy cannot be written"):
        blobs.download("a", tmp_path / "file" / "copy", soon())


# -- conditional puts


def test_a_new_blob_is_put_only_where_there_is_none(blobs):
    assert blobs.put_new("fence/1", b"first", soon())
    assert not blobs.put_new("fence/1", b"second", soon())
    assert get(blobs, "fence/1") == b"first" and blobs.sizes("fence", soon()) == {"1": 5}
    blobs.remove("fence/1", soon())
    assert blobs.put_new("fence/1", b"", soon()) and get(blobs, "fence/1") == b""


def test_a_blob_is_replaced_only_as_it_was_read(blobs):
    assert blobs.get_tagged("x/current", 100, soon()) is None
    put(blobs, "other", b"of another blob")
    _, other = blobs.get_tagged("other", 100, soon())
    assert not blobs.replace("x/current", b"new", other, soon()) and get(blobs, "x/current") is None
    assert blobs.replace("x/current", b"first", None, soon())
    assert not blobs.replace("x/current", b"second", None, soon())
    content, tag = blobs.get_tagged("x/current", 100, soon())
    assert content == b"first" and blobs.replace("x/current", b"second", tag, soon())
    assert not blobs.replace("x/current", b"third", tag, soon())
    assert blobs.get_tagged("x/current", 100, soon())[0] == b"second" and blobs.sizes("x", soon()) == {"current": 6}


def test_of_many_writers_of_a_new_blob_one_succeeds(blobs):
    contents = [f"writer {number}".encode() for number in range(8)]
    won = []

    def write(content):
        if blobs.put_new("one", content, soon()):
            won.append(content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [get(blobs, "one")]
