"""Rows of a table as JSON text: the same as a plain twin writes, row by row."""

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.sources.row_text import check_columns, line_of_row, lines_of_rows, unreadable_rows
from headrace.errors import BadInput

YEARS = dt.datetime(1930, 1, 1, tzinfo=dt.UTC), dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
MOMENTS = st.datetimes(*(each.replace(tzinfo=None) for each in YEARS))
SCALARS = {
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.int8(): st.integers(-128, 127),
    pa.float64(): st.floats(),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=8),
    pa.large_string(): st.text('a"\\\n\u2028\x01', max_size=8),
    pa.string_view(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=8),
    pa.binary_view(): st.binary(max_size=20),
    pa.timestamp("us"): MOMENTS,
    pa.timestamp("us", "UTC"): MOMENTS.map(lambda each: each.replace(tzinfo=dt.UTC)),
    pa.date32(): st.dates(dt.date(1900, 1, 1), dt.date(2100, 1, 1)),
    pa.time64("us"): st.times(),
    pa.decimal128(12, 3): st.integers(-(10**11), 10**11).map(lambda n: Decimal(n) / 1000),
    pa.null(): st.none(),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["a", "b", 'c"']),
}
"""Values by type."""
KINDS = st.recursive(
    st.sampled_from(list(SCALARS)),
    lambda inner: st.one_of(
        inner.filter(lambda kind: not pa.types.is_dictionary(kind)).map(pa.list_),
        inner.filter(lambda kind: not pa.types.is_dictionary(kind)).map(pa.list_view),
        st.lists(inner.filter(lambda kind: not pa.types.is_dictionary(kind)), min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(f"f{n}", kind) for n, kind in enumerate(kinds)])
        ),
    ),
    max_leaves=4,
)


def values(kind):
    """Values of a type; some are absent."""
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        inner = st.lists(values(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        inner = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    else:
        inner = SCALARS[kind]
    return st.none() | inner


@st.composite
def batches(draw):
    kinds = draw(st.lists(KINDS, min_size=1, max_size=4))
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=len(kinds), max_size=len(kinds), unique=True))
    num = draw(st.integers(0, 5))
    rows = {n: draw(st.lists(values(kind), min_size=num, max_size=num)) for n, kind in zip(names, kinds, strict=True)}
    columns = [pa.array(rows[name], kind) for name, kind in zip(names, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=names), draw(st.integers(0, num))


@settings(deadline=None, max_examples=150)
@given(batches(), st.sampled_from(["s", "ms", "us", "iso"]))
def test_each_row_is_what_json_makes_of_it(drawn, timestamps):
    whole, first = drawn
    batch = whole.slice(first)  # slices share buffers with what is before them
    lines = lines_of_rows(batch, timestamps).to_pylist()
    assert all(line.endswith("}\n") and line.count("\n") == 1 for line in lines)
    plain = [line_of_row(row, timestamps) for row in batch.to_pylist()]
    assert [json.loads(line) for line in lines] == [json.loads(line) for line in plain]
    assert not unreadable_rows(batch, timestamps)


def test_floats_keep_their_bits():
    numbers = [0.1, 1e300, -5e-324, 1 / 3, 123456789.123456789]
    lines = lines_of_rows(pa.RecordBatch.from_pydict({"x": numbers}), "ms").to_pylist()
    assert [json.loads(line)["x"] for line in lines] == numbers


def test_timestamps_of_nanoseconds_are_rounded_down():
    column = pa.array([-1, 1_714_525_323_004_999_999], pa.timestamp("ns"))
    lines = lines_of_rows(pa.RecordBatch.from_arrays([column], names=["t"]), "ms").to_pylist()
    assert [json.loads(line)["t"] for line in lines] == [-1, 1_714_525_323_004]


@pytest.mark.parametrize(
    "kind",
    [
        pa.duration("s"),
        pa.map_(pa.string(), pa.int8()),
        pa.list_(pa.duration("s")),
        pa.struct([("a", pa.duration("s"))]),
    ],
)
def test_a_type_without_text_is_refused_with_its_column(kind):
    with pytest.raises(BadInput, match="column 'odd' has type"):
        check_columns(pa.schema([("fine", pa.int8()), ("odd", kind)]), "file.parquet")


@pytest.mark.parametrize("names", [["n", "n"], ["a", "n"]])
def test_two_fields_of_one_name_are_refused(names):
    inner = pa.struct([pa.field(name, pa.int8()) for name in ("b", "n", names[0].replace("a", "n"))])
    fields = [(name, pa.list_(inner) if name == "a" else pa.int8()) for name in names]
    with pytest.raises(BadInput, match=r"file.parquet: two columns have the name 'n'; rename one"):
        check_columns(pa.schema(fields), "file.parquet")


@pytest.mark.parametrize(
    ("kind", "timestamps", "numbers"),
    [
        (pa.timestamp("us"), "iso", [253_402_300_799_999_999, 253_402_300_800_000_000, -62_135_596_800_000_001]),
        (pa.timestamp("us", "Asia/Tokyo"), "iso", [-62_135_596_800_000_000, (1 << 63) - 1, -(1 << 63)]),
        (pa.timestamp("s"), "iso", [0, 1 << 62, -(1 << 62)]),
        (pa.timestamp("ms"), "us", [(1 << 63) // 1000, (1 << 63) // 1000 + 1, -(1 << 63)]),
        (pa.date32(), "ms", [11_248_737, 11_248_738, -12_687_429]),
    ],
)
def test_a_time_that_its_text_cannot_hold_is_named_by_its_row(kind, timestamps, numbers):
    ints = pa.int32() if kind == pa.date32() else pa.int64()
    flat = pa.array([*numbers, None], ints).cast(kind)
    lists = pa.LargeListArray.from_arrays([0, 1, 2, 4, 4], flat)
    for column in (flat, lists, pa.StructArray.from_arrays([lists], names=["f"])):
        batch = pa.RecordBatch.from_arrays([pa.nulls(4), column], names=["none", "at"])
        found = unreadable_rows(batch, timestamps)
        assert sorted(found) == [1, 2] and "'at'" in found[1]
        lines = lines_of_rows(batch, timestamps).to_pylist()
        assert "null" not in lines[0].partition('"at"')[2] and "null" in lines[1].partition('"at"')[2]
        assert [json.loads(line)["none"] for line in lines] == [None] * 4


@pytest.mark.parametrize("kind", [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")])
def test_a_time_of_day_beyond_the_day_is_unreadable(kind):
    day = 86_400 * {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[kind.unit]
    column = pa.array([0, day - 1, day, -1, None], pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    batch = pa.RecordBatch.from_arrays([column], names=["at"])
    assert sorted(unreadable_rows(batch, "ms")) == [2, 3]
    assert [json.loads(line)["at"] is None for line in lines_of_rows(batch, "ms").to_pylist()] == [False] * 2 + [
        True
    ] * 3


def test_text_that_is_not_utf8_keeps_its_bytes():
    texts = [b"plain \xff", b'quoted " \xff \xc3\xa9', b"fine"]
    column = pa.array(texts, pa.binary()).view(pa.string())
    lines = lines_of_rows(pa.RecordBatch.from_arrays([column], names=["x"]), "ms").cast(pa.large_binary()).to_pylist()
    assert lines == [b'{"x":"plain \xff"}\n', b'{"x":"quoted \\" \xff \xc3\xa9"}\n', b'{"x":"fine"}\n']
