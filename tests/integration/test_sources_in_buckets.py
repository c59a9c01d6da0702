"""Sources in a real object store: the same stream as the files on a disk, over a connection that breaks."""

import gzip
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.blob import blob_retry
from headrace.blob import bucket as bucket_module
from headrace.blob.blob_store import open_blobs, whole
from headrace.blob.store_address import parse
from headrace.dataset.sources import bucket_files
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import Opening
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.retry import Backoff
from tests.object_servers import azure, gcs  # noqa: F401
from tests.s3_server import proxy, s3  # noqa: F401


def soon():
    return Deadline.after(20)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Tries follow each other at once, and a silent connection is given up early."""
    monkeypatch.setattr(blob_retry, "BACKOFF", Backoff((0.02, 0.05)))
    monkeypatch.setattr(bucket_files, "AGAIN_S", 0.05)
    monkeypatch.setattr(bucket_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(bucket_module, "CLIENT_TRIES", 1)


class Bucket:
    """A folder, and a prefix with the same files."""

    def __init__(self, server, folder):
        self.server, self.folder, self.prefix = server, folder, f"made/{uuid.uuid4().hex}"
        self.blobs = open_blobs(parse(server.uri("bucket", self.prefix)), "test", soon())

    def add(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.blobs.put(name, whole(content), soon())

    def remove(self, name):
        self.blobs.remove(name, soon())

    def open(self, *, port=None, deadline=None, **keys):
        root = self.server.uri("bucket", self.prefix, port)
        return self._opened(FilesSource(kind="files", root=root, **keys), deadline)

    def open_folder(self, **keys):
        return self._opened(FilesSource(kind="files", **keys), None)

    def _opened(self, config, deadline):
        return open_source(config, Opening(folder=self.folder, job="job", seed=1, deadline=deadline or soon()))


@pytest.fixture
def bucket(s3, tmp_path):  # noqa: F811
    return Bucket(s3, tmp_path)


@pytest.fixture(params=["s3", "gcs", "azure"])
def any_bucket(request, tmp_path):
    return Bucket(request.getfixturevalue(request.param), tmp_path)


def everything(source):
    """Of each partition: what the planner knows, and its events."""
    return [
        (
            *(part.name, part.number, part.end, part.identity, part.period, part.final),
            [
                block.value(i)
                for block in source.read(Segment(part.name, part.number, 0, part.end, part.identity), soon())
                for i in range(len(block))
            ],
        )
        for part in source.partitions(soon())
    ]


def parquet_bytes(num, first=0):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": list(range(first, first + num)), "s": ["x" * 20] * num}), sink, row_group_size=500)
    return sink.getvalue().to_pybytes()


def test_objects_are_the_same_stream_as_files(any_bucket):
    for hour in (9, 10, 2):
        any_bucket.add(f"logs/2024/{hour}/a.jsonl", b"".join(b'{"n":%d}\n' % n for n in range(hour * 400)))
    any_bucket.add("logs/2024/9/b.jsonl.gz", gzip.compress(b"one\ntwo"))
    any_bucket.add("logs/2024/9/.hidden.jsonl", b"no\n")
    any_bucket.add("logs/2024/9/other.txt", b"no\n")
    paths = ("logs/{year}/{hour}/*.jsonl", "logs/{year}/{hour}/*.gz")
    found = everything(any_bucket.open(paths=paths))
    assert found == everything(any_bucket.open_folder(paths=paths))
    assert [name for name, *_ in found][:3] == [f"logs/2024/{hour}/a.jsonl" for hour in (2, 9, 10)]


def test_rows_of_objects_are_read_from_any_row(any_bucket):
    any_bucket.add("a/1.parquet", parquet_bytes(2_000))
    any_bucket.add("b/2.parquet", parquet_bytes(30, first=5_000))
    keys = {"paths": ("**/*.parquet",), "format": "parquet", "columns": ("n",)}
    source = any_bucket.open(**keys)
    assert everything(source) == everything(any_bucket.open_folder(**keys))
    (block,) = source.read(Segment("a/1.parquet", 0, 1_234, 1_240), soon())
    assert [block.value(i) for i in range(6)] == [b'{"n":%d}' % n for n in range(1_234, 1_240)]


def test_a_bounded_source_keeps_its_objects_and_a_followed_one_finds_more_behind_their_marker(any_bucket):
    any_bucket.add("d/1/a.jsonl", b"a\n")
    any_bucket.add("d/1/_SUCCESS", b"")
    keys = {"paths": ("d/{day}/*.jsonl",), "ready": "_SUCCESS"}
    bounded, followed = any_bucket.open(**keys), any_bucket.open(**keys, follow=True, poll=0.0)
    assert [len(source.partitions(soon())) for source in (bounded, followed)] == [1, 1]
    any_bucket.add("d/2/b.jsonl", b"b\nc\n")
    assert [len(source.partitions(soon())) for source in (bounded, followed)] == [1, 1]
    any_bucket.add("d/2/_SUCCESS", b"")
    assert [part.end for part in followed.partitions(soon())] == [1, 2]
    assert len(bounded.partitions(soon())) == 1
    bounded.look_again(soon())
    assert len(bounded.partitions(soon())) == 2
    any_bucket.remove("d/1/a.jsonl")
    bounded.look_again(soon())
    assert [part.name for part in bounded.partitions(soon())] == ["d/2/b.jsonl"]
    assert [part.final for part in followed.partitions(soon())] == [True, False], "it is gone, so nothing is added"


def test_a_replaced_object_and_one_that_is_gone_are_named(any_bucket):
    any_bucket.add("a.jsonl", b"1\n2\n")
    source = any_bucket.open(paths=("*.jsonl",))
    (part,) = source.partitions(soon())
    segment = Segment(part.name, 0, 0, 2, part.identity)
    any_bucket.add("a.jsonl", b"3\n4\n")
    with pytest.raises(SourceGap, match="was replaced"):
        list(source.read(segment, soon()))
    with pytest.raises(SourceGap, match="is not what it was"):
        list(any_bucket.open(paths=("*.jsonl",)).read(segment, soon()))
    any_bucket.remove("a.jsonl")
    with pytest.raises(SourceGap, match="is gone"):
        list(source.read(segment, soon()))
    with pytest.raises(SpecError, match=r"no file matches '\*.jsonl' in (s3|gs|az)://bucket/made"):
        any_bucket.open(paths=("*.jsonl",))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_read_goes_on_after_a_connection_that_broke(bucket, proxy, suffix):  # noqa: F811
    rows = 40_000
    content = b"".join(b"%d %s\n" % (n, b"x" * 30) for n in range(rows))
    bucket.add(f"a.{suffix}", content if suffix == "jsonl" else parquet_bytes(rows))
    keys = {"paths": ("a.*",), "format": "lines" if suffix == "jsonl" else "parquet"}
    source = bucket.open(port=proxy.port, **keys)
    whole = everything(bucket.open_folder(**keys))[0][-1]
    proxy.refuse(2)
    (part,) = source.partitions(soon())
    values, position = [], 0
    proxy.cut_after(600)  # a request or two
    while position < part.end:
        try:
            for block in source.read(Segment(part.name, 0, position, part.end, part.identity), Deadline.after(1)):
                values += [block.value(i) for i in range(len(block))]
                position = int(block.position_E[-1]) + 1
        except SourceUnavailable as error:
            assert "s3://bucket/made" in str(error)
            proxy.heal()
    assert values == whole


def test_a_store_that_is_away_is_unavailable_not_broken(bucket, proxy):  # noqa: F811
    bucket.add("a.jsonl", b"1\n")
    source = bucket.open(port=proxy.port, paths=("*.jsonl",))
    proxy.stall()
    with pytest.raises(SourceUnavailable):
        source.partitions(Deadline.after(1))
    proxy.heal()
    assert source.partitions(soon())[0].end == 1


def test_a_bucket_that_does_not_exist_is_named(s3, tmp_path):  # noqa: F811
    config = FilesSource(kind="files", root=s3.uri("nowhere", "x"), paths=("*",))
    with pytest.raises(SourceUnavailable, match="there is none of this name"):
        open_source(config, Opening(folder=Path(tmp_path), job="job", seed=1, deadline=Deadline.after(1)))
