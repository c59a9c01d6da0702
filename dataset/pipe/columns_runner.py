"""Runs `pipe.kind = "columns"`: samples by the keys of the slots, in this process, in blocks of events."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.dataset.features.event_rows import LargeBlock
from headrace.dataset.features.feature_plan import FeaturePlan
from headrace.dataset.pipe.answer_samples import AnswerSamples, merge_events, rebatch
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import ColumnsPipe, EventTime
from headrace.dataset.spec.event_format import PATIENCE_S
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.errors import PipeFailed, SourceUnavailable
from headrace.dataset.stream.source import Events
from headrace.errors import BadInput
from headrace.retry import PAUSE_S, Retrier

MAX_BLOCK_BYTES = (1 << 31) - 1
"""Most bytes of the events of one block."""


class ColumnsRunner:
    """A `dataset.pipe.segment_work.PipeRunner` without a process."""

    def __init__(
        self,
        pipe: ColumnsPipe,
        schema: Schema,
        event_time: EventTime,
        masks: Mapping[str, str],
        folder: Path,
        max_outage_s: float = 600.0,
    ) -> None:
        self._schema, self._batch_events = schema, pipe.batch_events
        patience_s = min(PATIENCE_S, max_outage_s / 2)  # over before an outage ends the job, also between two tries
        self._plan = FeaturePlan(pipe, schema, folder, patience_s=patience_s if patience_s > 2 * PAUSE_S else 0.0)
        self._answers = AnswerSamples(schema, event_time, masks, Reason.of_field)
        self._closed = threading.Event()
        self._retrier = Retrier(SourceUnavailable, "waiting for schemas of events", max_outage_s, self._closed)

    def run(self, work: PipeInput) -> PipeOutput:
        """Run one segment. Raises PipeFailed once closed, SourceUnavailable if a schema registry stays away."""
        outcome = PipeOutput(SlotCounters(self._schema), rejections=list(work.rejections))
        outcome.num_judged = work.num_events
        waiting = deque[Events]()
        requests = rebatch(work.blocks, self._batch_events)
        while (events := waiting.popleft() if waiting else next(requests, None)) is not None:
            if self._closed.is_set():
                raise PipeFailed("the pipe was closed while it was in use")
            begin_s = time.monotonic()
            try:
                answer = self._retrier.call(partial(self._plan.apply, binary_array(events)))
            except LargeBlock:
                if len(events) == 1:
                    raise
                middle = len(events) // 2
                halves = events.slice(0, middle), events.slice(middle, len(events))
                waiting.extendleft(merge_events([half]) for half in reversed(halves))
                continue
            except SourceUnavailable as error:
                begin, end = int(events.position_E[0]), int(events.position_E[-1]) + 1
                where = f"positions {begin} to {end} of {work.segment.partition}"
                raise SourceUnavailable(f"{error} (while reading {where})") from None
            outcome.pipe_s += time.monotonic() - begin_s
            self._answers.take(answer, work, events, outcome)
        outcome.rejections.sort(key=lambda rejection: rejection.offset)
        return outcome

    def reset(self) -> None:
        """Nothing is kept between segments."""

    def close(self) -> None:
        """End a `run` in progress at its next block."""
        self._closed.set()


def binary_array(events: Events) -> pa.BinaryArray:
    """The values of a block of `rebatch`, one after another in its buffer. Raises BadInput above 2 GiB."""
    if len(events.data) > MAX_BLOCK_BYTES:
        raise BadInput(f"a block of {len(events)} events has {len(events.data):,} bytes; lower pipe.batch_events")
    offset_E1 = np.concatenate([np.zeros(1, np.int32), events.end_E.astype(np.int32)])
    return pa.Array.from_buffers(pa.binary(), len(events), [None, pa.py_buffer(offset_E1), pa.py_buffer(events.data)])
