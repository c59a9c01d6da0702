"""Event time: a number in JSON, the record's, or none; never an error."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.pipe.event_time import event_times
from headrace.dataset.spec.config import EventTime, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import check_event_time
from headrace.dataset.stream.source import Events
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
    [b"", b"not json", b"{}", b"[]", b'{"ts": null}', b'{"ts": "2024-01-01"}', b'{"ts": true}', b'{"ts": [1]}',
     b'{"ts": 1}{"ts": 2}', b"\xff", b'{"ts": 1e999}', b'{"ts": NaN}', b"[" * 100_000],
)  # fmt: skip
def test_an_event_that_does_not_say_has_no_time_and_the_others_have_theirs(odd):
    first, middle, last = times([b'{"ts": 1}', odd, b'{"ts": 3}'])
    assert (first, last) == (1.0, 3.0) and math.isnan(middle)


def test_an_event_of_several_lines_has_its_time():
    assert times([b'{\n"ts": 1}', b'{"ts": 2}']) == [1.0, 2.0]


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.none(), st.booleans(), st.text(max_size=3))


@given(st.lists(NUMBERS, max_size=5))
def test_a_block_is_read_as_its_events_alone(numbers):
    values = [json.dumps({"a": 1, "ts": number}).encode() for number in numbers]
    assert same(times(values), [time for value in values for time in times([value])])


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
