"""The time of an event in unix seconds: from a field of its JSON, or the record. NaN if there is none.

Shapes: E events.
"""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from headrace import documents
from headrace.dataset.spec.config import EventTime
from headrace.dataset.spec.feature_keys import FIELD_SEPARATOR
from headrace.dataset.stream.event_values import LINE_FEED, bytes_of, concat_values, find_single_objects
from headrace.dataset.stream.source import Events
from headrace.validation import nearest

F64 = NDArray[np.float64]
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MAX_TIME_S = float(1 << 53)
"""Times further from 1970 are none: sums of them, and whole milliseconds, would overflow."""
DIGITS = re.compile(r"\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*", re.ASCII)
"""A number as text, in the unit of the field. Other text is an ISO time."""


def event_times(config: EventTime, events: Events) -> F64:
    """(E,) times from a field or the record; NaN if `config` names a slot or none."""
    return possible_times(unscaled_times(config, events) * SECONDS["ms" if config.kind == "record" else config.unit])


def possible_times(time_s: F64) -> F64:
    """Times of events as they are, and NaN for those beyond MAX_TIME_S."""
    return np.where(np.abs(time_s) <= MAX_TIME_S, time_s, np.nan)


def unscaled_times(config: EventTime, events: Events) -> F64:
    """(E,) times as `event_times`, in the unit of the field, or in milliseconds of the record."""
    if config.kind == "record":
        return np.where(events.timestamp_ms_E >= 0, events.timestamp_ms_E.astype(np.float64), np.nan)
    if config.field is None:
        return np.full(len(events), np.nan)
    per_unit_us = SECONDS[config.unit] / SECONDS["us"]
    found = _fields(events, config.field, per_unit_us)
    if found is None:
        values = [events.value(index) or b"" for index in range(len(events))]
        found = np.array([_field(value, config.field, per_unit_us) for value in values], np.float64)
    return found


def _fields(events: Events, name: str, per_unit_us: float) -> F64 | None:
    """The field of each JSON value, parsed all at once; None if one of them is not as expected. Arrow must see objects
    alone: of other values it counts rows in another way, or crashes (null)."""
    if not len(events) or bool((events.begin_E < 0).any()):
        return None
    fit_E = np.zeros(len(events), np.bool_)
    find_single_objects(bytes_of(events.data), events.begin_E, events.end_E, documents.MAX_DEPTH, fit_E)
    if not fit_E.all():
        return None
    text = concat_values(events, LINE_FEED)
    if not _is_text(text):
        return None
    for kind in (pa.float64(), pa.utf8()):
        columns = _columns(text, name, kind)
        if columns is not None and len(columns) == len(events):
            found = columns.to_pylist() if kind == pa.utf8() else columns.to_numpy(zero_copy_only=False)
            if kind == pa.utf8():
                found = np.array([_number(each, per_unit_us) for each in found], np.float64)
            return np.where(np.isfinite(found), found, np.nan)
    return None


def _is_text(text: NDArray[np.uint8]) -> bool:
    offsets = pa.py_buffer(np.array([0, len(text)], np.int64))
    try:
        pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(text)]).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _columns(text: NDArray[np.uint8], name: str, kind: pa.DataType) -> pa.Array | None:
    """The field under its own name, or where there is none under its path; None if one value is of another kind."""
    outer, *inner = name.split(FIELD_SEPARATOR)
    nested = kind
    for each in reversed(inner):
        nested = pa.struct([(each, nested)])
    wanted = [(name, kind)] + ([(outer, nested)] if inner else [])
    try:
        table = pa.json.read_json(
            pa.BufferReader(pa.py_buffer(text)),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=pa.schema(wanted), unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None
    found = table.column(name).combine_chunks()
    if not inner:
        return found
    below = table.column(outer).combine_chunks()
    for each in inner:
        below = pc.struct_field(below, each)
    return pc.coalesce(found, below)


def _field(value: bytes, name: str, per_unit_us: float) -> float:
    try:
        event = documents.parse(value, "an event")
    except documents.InvalidDocument:
        return math.nan
    found = event.get(name) if isinstance(event, dict) else None
    if found is None:
        found = event
        for each in name.split(FIELD_SEPARATOR):
            found = found.get(each) if isinstance(found, dict) else None
    return _number(found, per_unit_us)


def _number(value: object, per_unit_us: float) -> float:
    """A time as it is in an event, in the unit of the field; NaN for what is none."""
    try:
        match value:
            case bool():
                return math.nan
            case str() if DIGITS.fullmatch(value):
                number = float(value)
            case str():
                return _iso_us(value) / per_unit_us
            case int() | float():
                number = float(value)
            case _:
                return math.nan
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _iso_us(text: str) -> int:
    """Microseconds since 1970 of an ISO time, which is in UTC if it names no offset. Raises ValueError."""
    when = datetime.fromisoformat(text)
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return (when - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def untimed_words(config: EventTime, events: Sequence[Events]) -> str:
    """The reason why events have no time, in words."""
    if config.field is None:
        return "their records have no time stamp"
    text = f"field {config.field!r} is missing, or no number and no ISO time"
    value = next((block.value(0) for block in events if len(block)), None)
    try:
        event = documents.parse(value or b"", "an event")
    except documents.InvalidDocument:
        return f"{text}; events are not JSON: name a meta slot with event_time.slot"
    known = list(event) if isinstance(event, dict) else []
    return text if config.field.split(FIELD_SEPARATOR)[0] in known else f"{text}; {nearest(config.field, known)}"
