"""Rows of Parquet files as a stream, read from any row, on a disk."""

import json
import random
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import validate
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.sources.parquet_file import BATCH_ROWS
from headrace.dataset.spec.config import Opening
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError

NUM = 2 * BATCH_ROWS + 100


def soon():
    return Deadline.after(20)


def write(path, num=NUM, first=0, group=3_000):
    rows = range(first, first + num)
    table = pa.table({"n": list(rows), "text": [f"r{n}" for n in rows], "at": pa.array(rows, pa.timestamp("s"))})
    pq.write_table(table, path, row_group_size=group)


def opened(folder, **keys):
    config = FilesSource(kind="files", paths=("*.parquet",), format="parquet", **keys)
    return open_source(config, Opening(folder=folder, job="job", seed=1, deadline=soon()))


def read(source, begin, end, name="a.parquet"):
    blocks = list(source.read(Segment(name, 0, begin, end), soon()))
    return [(int(block.position_E[i]), json.loads(block.value(i))) for block in blocks for i in range(len(block))]


def test_rows_are_events_from_any_row_on(tmp_path):
    write(tmp_path / "a.parquet")
    source = opened(tmp_path)
    (partition,) = source.partitions(soon())
    assert (partition.end, partition.final) == (NUM, True)
    whole = [(n, {"n": n, "text": f"r{n}", "at": 1000 * n}) for n in range(NUM)]
    assert read(source, 0, NUM) == whole
    choose = random.Random(4)
    for _ in range(40):
        begin = choose.randrange(NUM)
        end = choose.randint(begin, NUM)
        assert read(source, begin, end) == whole[begin:end]
    with pytest.raises(SourceGap, match="the file ends after"):
        read(source, NUM - 1, NUM + 1)


@pytest.mark.parametrize("timestamps", ["s", "ms", "us", "iso"])
def test_int96_is_read_as_microseconds_are(tmp_path, timestamps):
    """Nanoseconds in 64 bits hold 1677 to 2262 alone: 9999 was 1816 once."""
    years = [1, 1582, 1677, 1969, 2024, 2262, 2263, 9999]
    at = pa.array([datetime(year, 3, 4, 5, 6, 7, 89, UTC).replace(tzinfo=None) for year in years], pa.timestamp("us"))
    pq.write_table(pa.table({"at": at}), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(pa.table({"at": at}), tmp_path / "b.parquet")
    source = opened(tmp_path, timestamps=timestamps)
    assert read(source, 0, len(years)) == read(source, 0, len(years), "b.parquet")


def test_events_are_lines_one_after_another(tmp_path):
    write(tmp_path / "a.parquet", 10)
    (block,) = opened(tmp_path).read(Segment("a.parquet", 0, 3, 10), soon())
    assert bytes(block.data[block.begin_E[0] : block.end_E[-1] + 1]).count(b"\n") == len(block) == 7


def test_only_the_named_columns_are_read(tmp_path):
    write(tmp_path / "a.parquet", 3)
    assert read(opened(tmp_path, columns=("n",)), 0, 2) == [(0, {"n": 0}), (1, {"n": 1})]
    with pytest.raises(BadInput, match=r"has no column 'm' \(sources.\*.columns\); it has n, text, at"):
        opened(tmp_path, columns=("m",)).partitions(soon())


def test_a_replaced_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write(path)
    source = opened(tmp_path)
    (partition,) = source.partitions(soon())
    path.unlink()
    write(path, first=7)
    with pytest.raises(SourceGap, match="was replaced"):
        read(source, 0, 5)
    with pytest.raises(SourceGap, match="is not what it was"):
        list(opened(tmp_path).read(Segment("a.parquet", 0, 0, 5, partition.identity), soon()))


def test_a_file_that_is_not_parquet_is_refused_and_a_followed_one_waits_for_its_footer(tmp_path):
    path = tmp_path / "a.parquet"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:5_000])
    with pytest.raises(BadInput, match="not a whole Parquet file"):
        opened(tmp_path).partitions(soon())
    source = opened(tmp_path, follow=True, poll=0.0)
    assert source.partitions(soon())[0].end == 0
    with path.open("ab") as file:
        file.write(whole[5_000:])
    assert source.partitions(soon())[0].end == NUM
    assert len(read(source, 10, 20)) == 10


def claimed(path, num, rows_of_file, rows_of_group):
    """A file of `num` rows whose footer claims others: the number of the file, and of its row group."""
    pq.write_table(pa.table({"n": list(range(num))}), path)
    data = path.read_bytes()
    body, footer = (
        data[: -8 - int.from_bytes(data[-8:-4], "little")],
        data[-8 - int.from_bytes(data[-8:-4], "little") :],
    )
    places = footer.split(varint(num))
    assert len(places) == 5  # the file's, two of the column, the group's
    numbers = (rows_of_file, num, num, rows_of_group)
    path.write_bytes(body + b"".join(p + varint(n) for p, n in zip(places, numbers, strict=False)) + places[-1])


def varint(number: int) -> bytes:
    """A number of two bytes as Thrift's compact protocol has it."""
    return bytes([(2 * number & 127) | 128, 2 * number >> 7])


def test_a_footer_that_claims_more_rows_than_there_are_is_damage_of_that_file(tmp_path):
    claimed(tmp_path / "a.parquet", 5_000, 5_003, 5_003)
    source = opened(tmp_path)
    assert source.partitions(soon())[0].end == 5_003
    for begin in (0, 5_001):
        with pytest.raises(BadInput, match=r"a.parquet is damaged: .* it has 5003 rows, but there are 5000"):
            read(source, begin, 5_003)
    claimed(tmp_path / "a.parquet", 5_000, 5_003, 5_000)
    with pytest.raises(BadInput, match=r"a.parquet is damaged: .* it has 5003 rows, but there are 5000"):
        opened(tmp_path).partitions(soon())


def test_a_name_of_a_column_that_is_not_utf8_is_damage_of_that_file(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, 3)
    path.write_bytes(path.read_bytes().replace(b"text", b"te\xfft"))
    with pytest.raises(BadInput, match=r"a.parquet: not a whole Parquet file: 'utf-8' codec"):
        opened(tmp_path).partitions(soon())


def test_two_columns_of_one_name_are_refused_unless_others_are_chosen(tmp_path):
    table = pa.Table.from_arrays([pa.array([n]) for n in range(3)], names=["n", "twice", "twice"])
    pq.write_table(table, tmp_path / "a.parquet")
    for keys in ({}, {"columns": ("n", "twice")}):
        with pytest.raises(BadInput, match=r"a.parquet: two columns have the name 'twice'"):
            opened(tmp_path, **keys).partitions(soon())
    assert read(opened(tmp_path, columns=("n",)), 0, 1) == [(0, {"n": 0})]


def test_a_row_whose_time_has_no_iso_text_is_marked(tmp_path):
    times = pa.array([0, 253_402_300_800, 1], pa.int64()).cast(pa.timestamp("s"))
    pq.write_table(pa.table({"at": times}), tmp_path / "a.parquet")
    (block,) = opened(tmp_path, timestamps="iso").read(Segment("a.parquet", 0, 0, 3), soon())
    assert [fault is None for fault in block.faults] == [True, False, True]
    (block,) = opened(tmp_path).read(Segment("a.parquet", 0, 0, 3), soon())
    assert block.faults is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"columns": ["a"]}, "columns has no effect on lines"),
        ({"timestamps": "iso"}, "timestamps has no effect on lines"),
        ({"root": "folder"}, "is not the address of an object store, one of .* write folders in paths"),
        ({"root": "file:///folder"}, "is not the address of an object store, one of .* write folders in paths"),
        ({"root": "ftp://bucket"}, "ftp:// is not the address of an object store; write one of "),
        ({"root": "hdfs://name/clicks"}, "hdfs:// .* copy the files to an object store .*, or mount it"),
        ({"root": "az://clicks/day"}, "names no storage account; write "),
        (
            {"paths": ["hdfs://name/*.gz"]},
            "is an address, not a path: Hadoop's file system is not read .* copy the files",
        ),
        ({"paths": ["gs://bucket/*.gz"]}, "is an address, not a path: write its beginning as root"),
        ({"paths": ["file:///a/*.gz"]}, "is an address, not a path: write the path alone"),
        ({"root": "s3://bucket", "paths": ["/a/*"]}, "begins with a slash"),
    ],
)
def test_settings_of_files_that_do_not_fit_are_refused(keys, words):
    with pytest.raises(SpecError, match=words):
        validate(FilesSource, {"kind": "files", "paths": ["*"], **keys})


@pytest.mark.parametrize("beside", [True, False])
def test_long_texts_that_are_packed_into_few_bytes_are_read_in_parts(tmp_path, beside):
    text = "x" * 100_000
    one = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_500, np.int32)), pa.array([text]))
    inside = pa.ListArray.from_arrays(np.arange(1_501, dtype=np.int32), one)
    table = pa.table({"n": pa.array(range(1_500)), "l": inside} | ({"t": one} if beside else {}))
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    source = opened(tmp_path)
    source.partitions(soon())
    largest, seen = 0, 0
    for events in source.read(Segment("a.parquet", 0, 0, 1_500), soon()):
        assert json.loads(events.value(0)) == {"n": seen, "l": [text]} | ({"t": text} if beside else {})
        largest, seen = max(largest, int(events.length_E.sum())), seen + len(events)
    assert seen == 1_500 and largest < 64 << 20


def test_a_list_that_no_event_may_have_is_refused_before_it_is_read(tmp_path):
    zeros = pa.ListArray.from_arrays(pa.array([0, 600_000], pa.int32()), pa.array(np.zeros(600_000, np.int8)))
    pq.write_table(pa.table({"n": [1], "l": zeros}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 4_000
    with pytest.raises(BadInput, match=r"row group 0 has 600,000 values of column 'l.list.element' in 1 rows"):
        opened(tmp_path).partitions(soon())
    source = opened(tmp_path, columns=("n",))
    source.partitions(soon())
    assert read(source, 0, 1) == [(0, {"n": 1})]
    long = opened(tmp_path, max_event_bytes=1 << 21)
    long.partitions(soon())
    assert len(read(long, 0, 1)[0][1]["l"]) == 600_000
