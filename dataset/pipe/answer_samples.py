"""Turns answers of the Arrow protocol into the samples and rejections of a segment: the same for every kind of pipe."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from headrace.dataset.formats.arrow_columns import AnswerReader, BadRow
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput, slot_times
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.dataset.samples.slot_counters import SlotSum
from headrace.dataset.samples.trim import trim
from headrace.dataset.sources.event_time import event_times
from headrace.dataset.spec.config import EventTime
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.event_values import concat_values, grouped
from headrace.dataset.stream.source import Events

BATCH_BYTES = 8 << 20
"""A batch of events ends with the event that brings it to so many bytes."""


class AnswerSamples:
    """Takes answers; `reason_of` gives the reason for the error text of an event."""

    def __init__(
        self,
        schema: Schema,
        event_time: EventTime,
        masks: Mapping[str, str],
        reason_of: Callable[[str], Reason] = Reason.of_error,
    ) -> None:
        self._schema, self._event_time = schema, event_time
        self._reader = AnswerReader(schema, masks, reason_of)

    def take(self, answer: pa.RecordBatch, work: PipeInput, events: Events, outcome: PipeOutput) -> None:
        """Add the samples and rejections of one answer to `outcome`. Raises BadAnswer."""
        event_time = work.event_time or self._event_time
        times = event_times(event_time, events)
        samples, bad_rows = self._reader.read(answer, events.position_E, times)
        samples = trim(samples, self._schema, outcome.counters)
        samples = Samples(samples.sparse, samples.dense, samples.meta, samples.event_B, slot_times(event_time, samples))
        for bad in bad_rows:
            outcome.rejections.append(_rejection(work, events, bad))
            if bad.slot is not None and bad.reason is Reason.NON_FINITE:
                outcome.counters.add(bad.slot, SlotSum.NON_FINITE, 1)
        outcome.counters.observe(samples)
        outcome.blocks.append(samples)


def _rejection(work: PipeInput, events: Events, bad: BadRow) -> Rejection:
    position = int(events.position_E[bad.event])
    return Rejection(work.segment.partition, position, bad.reason, bad.detail, events.value(bad.event))


def rebatch(blocks: Iterable[Events], num: int, max_bytes: int = BATCH_BYTES) -> Iterator[Events]:
    """Events in batches of `num`, or fewer if these have `max_bytes`, independent of their blocks."""
    for events, _ in grouped(blocks, max_bytes, num):
        yield merge_events(events)


def merge_events(parts: list[Events]) -> Events:
    """Merge the events of several blocks into one block."""
    data = np.concatenate([concat_values(part, -1) for part in parts])
    end_E = np.cumsum(np.concatenate([part.end_E - part.begin_E for part in parts]))
    begin_E = np.concatenate([np.zeros(1, np.int64), end_E[:-1]])
    keys = headers = None
    if any(part.keys is not None for part in parts):
        keys = [key for part in parts for key in (part.keys if part.keys is not None else [None] * len(part))]
    if any(part.headers is not None for part in parts):
        headers = [each for part in parts for each in (part.headers if part.headers is not None else [()] * len(part))]
    position_E = np.concatenate([part.position_E for part in parts])
    timestamp_ms_E = np.concatenate([part.timestamp_ms_E for part in parts])
    return Events(data.data, begin_E, end_E, position_E, timestamp_ms_E, keys, headers)
