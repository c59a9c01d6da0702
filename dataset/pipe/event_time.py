"""The time of an event in unix seconds: from a field of its JSON, a slot, or the record. NaN if there is none.

Shapes: E events, B samples.
"""

import math

import numpy as np
import pyarrow as pa
import pyarrow.json

from headrace import documents
from headrace.dataset.samples.batch import F64, Samples
from headrace.dataset.spec.config import EventTime
from headrace.dataset.stream.event_values import LINE_FEED, concat_values
from headrace.dataset.stream.source import Events

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def slot_times(config: EventTime, samples: Samples) -> F64:
    """(B,) times from a slot; NaN if `config` names another source of time."""
    if config.slot is None:
        return samples.time_s_B
    return samples.meta[config.slot].astype(np.float64) * SECONDS[config.unit]


def event_times(config: EventTime, events: Events) -> F64:
    """(E,) times from a field or the record; NaN if `config` names a slot or none."""
    scale = SECONDS["ms" if config.kind == "record" else config.unit]
    return unscaled_times(config, events) * scale


def unscaled_times(config: EventTime, events: Events) -> F64:
    """(E,) times as `event_times`, in the unit of the field, or in milliseconds of the record."""
    if config.kind == "record":
        return np.where(events.timestamp_ms_E >= 0, events.timestamp_ms_E.astype(np.float64), np.nan)
    if config.field is None:
        return np.full(len(events), np.nan)
    found = _fields(events, config.field)
    if found is None:
        values = [events.value(index) or b"" for index in range(len(events))]
        found = np.array([_field(value, config.field) for value in values], np.float64)
    return found


def _fields(events: Events, name: str) -> F64 | None:
    """The field of each JSON value, parsed all at once; None if one of them is not as expected."""
    if not len(events) or bool((events.begin_E < 0).any()):
        return None
    text = concat_values(events, LINE_FEED)
    if np.count_nonzero(text == LINE_FEED) != len(events):
        return None
    try:
        table = pa.json.read_json(
            pa.BufferReader(pa.py_buffer(text)),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pa.json.ParseOptions(
                explicit_schema=pa.schema([(name, pa.float64())]), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        return None
    if len(table) != len(events):
        return None
    numbers = table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _field(value: bytes, name: str) -> float:
    try:
        found = documents.parse(value, "an event")
    except documents.InvalidDocument:
        return math.nan
    number = found.get(name) if isinstance(found, dict) else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return math.nan
    try:
        return float(number) if math.isfinite(number) else math.nan
    except OverflowError:
        return math.nan
