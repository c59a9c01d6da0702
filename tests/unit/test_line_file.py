import bz2
import gzip
import lzma
import os
import zipfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.sources import line_file
from headrace.dataset.sources.byte_stream import open_bytes
from headrace.dataset.sources.line_file import LineFile
from headrace.dataset.stream.errors import SourceGap
from headrace.errors import BadInput

MAX_LINE = 1 << 20


def opened(path, *, growing=False, max_line_bytes=MAX_LINE) -> LineFile:
    return LineFile(path, growing=growing, max_line_bytes=max_line_bytes)


def lines_reference(data: bytes) -> list[bytes]:
    """Lines as a person would count them."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    lines[:1] = [line.removeprefix(b"\xef\xbb\xbf") for line in lines[:1]]
    whole = len(lines) if not data.endswith(b"\n") else None
    return [line.removesuffix(b"\r") if n != whole else line for n, line in enumerate(lines)]


def values(file: LineFile, begin: int, end: int) -> list[bytes | None]:
    return [block.value(i) for block in file.read(begin, end) for i in range(len(block))]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few bytes, so that every boundary is met."""
    monkeypatch.setattr(line_file, "CHUNK_BYTES", 7)


pieces = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"\r\n", b"\r", b"0123456789"]), max_size=40)
texts = st.tuples(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]), pieces.map(b"".join)).map(b"".join)
"""Some begin with a byte order mark."""


@given(texts, st.booleans(), st.data())
def test_any_segment_of_any_file_is_what_splitting_gives(tmp_path_factory, data, packed, draw):
    path = tmp_path_factory.mktemp("lines") / ("file.gz" if packed else "file")
    path.write_bytes(gzip.compress(data) if packed else data)
    expected = lines_reference(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_file, "CHUNK_BYTES", 7)
        file = opened(path)
        assert file.count() == len(expected)
        for _ in range(3):
            begin = draw.draw(st.integers(0, len(expected)))
            end = draw.draw(st.integers(begin, len(expected)))
            assert values(file, begin, end) == expected[begin:end]
        file.close()


def test_reading_needs_no_count_first(tmp_path, small_chunks):
    path = tmp_path / "file"
    path.write_bytes(b"".join(b"%d\n" % n for n in range(100)))
    assert values(opened(path), 90, 93) == [b"90", b"91", b"92"]


def test_a_seek_reads_one_chunk_not_the_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"".join(b"%099d\n" % n for n in range(50_000)))
    monkeypatch.setattr(line_file, "CHUNK_BYTES", 10_000)
    file = opened(path)
    file.count()
    reads = []
    monkeypatch.setattr(os, "pread", lambda *a, real=os.pread: reads.append(a[1]) or real(*a))
    assert values(file, 40_000, 40_002) == [b"%099d" % 40_000, b"%099d" % 40_001]
    assert sum(reads) <= 2 * 10_000 + 10  # the first bytes tell the format


def test_gzip_goes_on_where_it_stands(tmp_path, monkeypatch):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(10_000))))
    opens = []
    monkeypatch.setattr(line_file, "open_bytes", lambda p, real=open_bytes: opens.append(p) or real(p))
    monkeypatch.setattr(line_file, "CHUNK_BYTES", 1000)
    unpackers = []
    monkeypatch.setattr(
        zlib, "decompressobj", lambda *a, real=zlib.decompressobj, **k: unpackers.append(1) or real(*a, **k)
    )
    file = opened(path)
    for begin in range(0, 10_000, 100):
        assert values(file, begin, begin + 100)[0] == b"%d" % begin
    started = len(unpackers)
    assert len(opens) == 1
    assert values(file, 0, 1) == [b"0"]
    assert len(unpackers) == started + 1


def test_gzip_of_several_members_with_padding_is_one_file(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"") + gzip.compress(b"c\nd\n") + b"\0" * 20)
    file = opened(path)
    assert file.count() == 3
    assert values(file, 0, 3) == [b"a", b"bc", b"d"]


def test_gzip_is_known_by_its_first_bytes_too(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    assert values(opened(path), 0, 2) == [b"a", b"b"]


def test_gzip_that_is_broken_off_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(10_000)), 0)[:-5000])
    with pytest.raises(BadInput, match=r"file\.gz: .*ends too early, after \d+ lines"):
        opened(path).count()


def test_a_name_that_lies_about_gzip_is_refused(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(b"plain text\n")
    with pytest.raises(BadInput, match=r"file\.gz: invalid gzip"):
        opened(path).count()


def test_an_empty_file_has_no_lines(tmp_path):
    for name in ("file", "file.gz"):
        (tmp_path / name).write_bytes(b"")
        assert opened(tmp_path / name).count() == 0


def test_a_line_longer_than_allowed_is_kept_short_but_too_long(tmp_path, small_chunks):
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"x" * 10_000 + b"\nb\n")
    long = values(opened(path, max_line_bytes=50), 0, 3)
    assert (long[0], long[2]) == (b"a", b"b")
    assert 50 < len(long[1]) < 100


def test_a_last_line_counts_only_once_no_more_can_come(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a\nb")
    growing = opened(path, growing=True)
    assert (opened(path).count(), growing.count()) == (2, 1)
    with pytest.raises(SourceGap):
        values(growing, 0, 2)
    with path.open("ab") as file:
        file.write(b"c\nd")
    assert growing.count() == 2
    assert values(growing, 0, 2) == [b"a", b"bc"]


def test_a_file_grows_while_it_is_read(tmp_path, small_chunks):
    path = tmp_path / "file"
    file = None
    written = []
    for n in range(50):
        with path.open("ab") as out:
            out.write(b"line %d\n" % n)
        file = file or opened(path, growing=True)
        assert file.count() == n + 1
        written += values(file, n, n + 1)
    assert written == [b"line %d" % n for n in range(50)]
    assert values(file, 10, 12) == [b"line 10", b"line 11"]


def test_a_file_that_shrinks_or_is_replaced_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\n")
    file = opened(path, growing=True)
    file.count()
    path.write_bytes(b"a\n")
    with pytest.raises(SourceGap, match=r"file: .*became shorter"):
        file.count()
    path.write_bytes(b"a\nb\n")
    file = opened(path, growing=True)
    file.count()
    other = tmp_path / "other"
    other.write_bytes(b"x\ny\nz\n")
    other.replace(path)
    with pytest.raises(SourceGap, match="replaced"):
        file.count()


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(SourceGap, match=r"nothing: the file is gone"):
        values(opened(tmp_path / "nothing"), 0, 1)


def write_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "a\nb\n")


OTHERS = {
    "zstd": lambda path: path.write_bytes(pa.Codec("zstd").compress(b"a\nb\n", asbytes=True)),
    "bzip2": lambda path: path.write_bytes(bz2.compress(b"a\nb\n")),
    "bzip2 of nothing": lambda path: path.write_bytes(bz2.compress(b"")),
    "xz": lambda path: path.write_bytes(lzma.compress(b"a\nb\n")),
    "zip": write_zip,
    "Parquet": lambda path: pq.write_table(pa.table({"a": [1]}), path),
    "Parquet without rows": lambda path: pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path),
    "Arrow": lambda path: pa.ipc.new_file(str(path), pa.schema([("a", pa.int64())])).close(),
    "Avro": lambda path: path.write_bytes(b"Obj\x01\x04\x14avro.codec\x08null"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_format_is_refused_by_its_first_bytes(tmp_path, name):
    path = tmp_path / "events.jsonl"
    OTHERS[name](path)
    with pytest.raises(BadInput, match=rf"events\.jsonl has no lines: it is (a |an )?{name.split()[0]}"):
        opened(path).count()


@pytest.mark.parametrize("text", [b"BZh9 is a text\n", b"PAR1,2\n", b"PK,3\n", b"Obj,1\n", b"ARROW1,5\n", b"", b"x"])
def test_a_text_that_begins_like_another_format_is_read(tmp_path, text):
    path = tmp_path / "events.txt"
    path.write_bytes(text)
    assert opened(path).count() == bool(text)
