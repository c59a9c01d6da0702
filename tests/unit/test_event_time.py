"""Event time: a number in JSON, the record's, or none; never an error."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.segment_work import slot_times
from headrace.dataset.samples.batch import Samples
from headrace.dataset.sources.event_time import event_times, untimed_words
from headrace.dataset.spec.config import ColumnsPipe, EventTime, MetaSlot, SourceSection, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import check_event_time
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.stream.source import Events, Segment
from headrace.errors import SpecError

FIELD = EventTime(field="ts")


def times(values: list[bytes], config: EventTime = FIELD) -> list[float]:
    return event_times(config, Events.of(values, range(len(values)), range(len(values)))).tolist()


def same(one: list[float], two: list[float]) -> bool:
    return np.array_equal(one, two, equal_nan=True)


def test_a_field_is_read_in_its_unit():
    values = [b'{"ts": 1684393203, "x": "y"}', b'{"x": {"ts": 3}, "ts": 0.5}']
    assert times(values) == [1684393203.0, 0.5]
    assert times(values, EventTime(field="ts", unit="ms")) == [1684393.203, 0.0005]


@pytest.mark.parametrize(
    "odd",
    [b"", b"not json", b"{}", b"[]", b'{"ts": null}', b'{"ts": "soon"}', b'{"ts": true}', b'{"ts": [1]}',
     b'{"ts": 1}{"ts": 2}', b"\xff", b'{"ts": 1e999}', b'{"ts": NaN}', b"[" * 100_000, b"null", b"5", b" ",
     b'{"ts": 1, "x": "\xff"}', b'{"ts": 1, "x": ' + b"9" * 5000 + b"}",
     b'{"ts": 1, "x": ' + b"[" * 101 + b"]" * 101 + b"}"],
)  # fmt: skip
def test_an_event_that_does_not_say_has_no_time_and_the_others_have_theirs(odd):
    first, middle, last = times([b'{"ts": 1}', odd, b'{"ts": 3}'])
    assert (first, last) == (1.0, 3.0) and math.isnan(middle)
    assert math.isnan(times([odd, b'{"ts": 3}'])[0])  # a block that begins with null crashes Arrow's reader


def test_an_event_does_not_have_the_time_of_another():
    """Two objects in one event, and none in another, are as many as there are events."""
    first, middle, last = times([b'{"ts": 1}{"ts": 2}', b'{"ts": 3}', b" "])
    assert middle == 3.0 and math.isnan(first) and math.isnan(last)


@pytest.mark.parametrize("far", [b"1e308", b"-1e308", b"9223372036854775807", b'"1e300"'])
def test_a_time_whose_sums_overflow_is_none(far):
    first, middle, last = times([b'{"ts": 1}', b'{"ts": ' + far + b"}", b'{"ts": 9007199254740992}'])
    assert (first, last) == (1.0, 2.0**53) and math.isnan(middle)


def test_a_slot_has_no_time_whose_sums_overflow():
    meta = {"at": np.array([1, 1 << 62], np.int64)}
    samples = Samples({}, {}, meta, np.arange(2), np.full(2, np.nan))
    assert same(slot_times(EventTime(slot="at"), samples).tolist(), [1.0, math.nan])


def test_an_event_of_several_lines_has_its_time():
    assert times([b'{\n"ts": 1}', b'{"ts": 2}']) == [1.0, 2.0]


ISO = ["2024-05-01T08:00:00Z", "2024-05-01T10:00:00.5+02:00", "2024-05-01 08:00:00", "2024-05-01", "0001-01-01"]
TEXTS = st.one_of(st.text(max_size=3), st.sampled_from(ISO), st.integers(-5, 2**40).map(str), st.floats().map(str))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.none(), st.booleans(), TEXTS)
LISTS = st.one_of(st.lists(NUMBERS, max_size=5), st.lists(TEXTS, max_size=5))


@given(LISTS, st.sampled_from([None, {}, {"ts": 7}, {"ts": "8"}, {"x": 1}, 5]))
def test_a_block_is_read_as_its_events_alone(numbers, meta):
    values = [json.dumps({"a": 1, "ts": number}).encode() for number in numbers]
    assert same(times(values), [time for value in values for time in times([value])])
    values = [json.dumps({"meta": {"ts": number}}).encode() for number in numbers]
    values += [json.dumps({"meta": meta, "meta.ts": number}).encode() for number in numbers]
    nested = EventTime(field="meta.ts")
    assert same(times(values, nested), [time for value in values for time in times([value], nested)])


@pytest.mark.parametrize(("unit", "factor"), [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)])
def test_text_is_a_number_in_the_unit_or_an_iso_time(unit, factor):
    config = EventTime(field="ts", unit=unit)
    values = [json.dumps({"ts": text}).encode() for text in ("1714550400", " 12.5 ", *ISO[:4], "x", "1714550400Z", "")]
    told = times(values, config)
    assert told[:2] == pytest.approx([1714550400 * factor, 12.5 * factor])
    assert told[2:6] == pytest.approx([1714550400.0, 1714550400.5, 1714550400.0, 1714521600.0], rel=1e-12)
    assert all(math.isnan(each) for each in told[6:])


def test_a_field_with_dots_is_a_path_unless_an_event_has_that_name():
    values = [b'{"meta": {"ts": 5}}', b'{"meta.ts": 6, "meta": {"ts": 5}}', b'{"meta": {}}', b'{"meta": 3}']
    assert same(times(values, EventTime(field="meta.ts")), [5.0, 6.0, math.nan, math.nan])
    assert times(values[:2], EventTime(field="meta.ts")) == [5.0, 6.0]


def test_words_say_why_events_have_no_time():
    def words(value, field="ts"):
        return untimed_words(EventTime(field=field), [Events.of([value], [0])])

    missing = "field 'ts' is missing, or no number and no ISO time"
    assert words(b'{"tss": 1, "user": 2}').startswith(f"{missing}; ") and "did you mean 'tss'" in words(
        b'{"tss": 1, "user": 2}'
    )
    assert words(b'{"ts": "soon"}') == missing
    assert "events are not JSON" in words(b"1 2 3")
    assert untimed_words(EventTime(kind="record"), []) == "their records have no time stamp"


def test_the_record_has_a_time_where_it_has_one():
    events = Events.of([b"x", b"y"], [0, 1], [1500, -1])
    assert same(event_times(EventTime(kind="record"), events).tolist(), [1.5, math.nan])
    assert same(event_times(EventTime(kind="none"), events).tolist(), [math.nan, math.nan])


def test_a_slot_must_be_one_that_holds_whole_numbers():
    schema = Schema.of([SparseSlot(name="s"), MetaSlot(name="t", kind="meta", type="int64"),
                        MetaSlot(name="x", kind="meta", type="string"), MetaSlot(name="f", kind="meta")])  # fmt: skip
    check_event_time(EventTime(slot="t"), True, schema, "sources.a.event_time")
    for name in ("s", "x", "f", "nobody"):
        with pytest.raises(SpecError, match="sources.a.event_time.slot"):
            check_event_time(EventTime(slot=name), True, schema, "sources.a.event_time")


def test_samples_without_a_time_are_counted_in_a_warning(tmp_path, caplog):
    events = [b'{"a": 1, "ts": 5}', *[b'{"a": 1, "time": 5}'] * 25]
    schema, section = Schema.of([SparseSlot(name="a")]), SourceSection(event_time=FIELD)
    pipe = ColumnsPipe(kind="columns")
    reader = SegmentReader(MemorySource([events]), pipe, schema, section, None, tmp_path)
    for begin in range(26):
        list(reader.read(begin, [Segment("memory/0", 0, begin, begin + 1)], PassTally()))
    reader.close()
    words = "field 'ts' is missing, or no number and no ISO time; known: a, time."
    told = [record.getMessage() for record in caplog.records if "have no event time" in record.getMessage()]
    assert [message.split(" Windows")[0] for message in told] == [
        f"{number} samples have no event time, of {number + 1} so far: {words}" for number in (1, 10)
    ]
