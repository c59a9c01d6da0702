"""Joins impressions with their clicks, between the reading of a pass and its batches.

It stands around the reader of a stream. A rank reads its whole part of a pass, and waits until the pass is open, so
that the shards hold what the version before left waiting. It gives events back that cannot be joined, to be rejected.
Then it sends the others, and gets back the samples that have their labels: those that
its own events release, each in the place of its event, and its share of the impressions whose window ends in the pass,
each where it ends. All of them are in the order in which events count (pserver.rows.join_order), so that batches have
positives and negatives wherever the stream has.

Shapes: Q events of the join in a pass, E samples released, X of them by no click.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.formats.arrow_columns import signs_of_texts
from headrace.dataset.loader.batch_loader import PassTally, RejectingReader
from headrace.dataset.samples.batch import F64, I64, Samples
from headrace.dataset.samples.rejection import Reason, RejectedSample
from headrace.dataset.samples.sample_bytes import decode_samples, encode_samples
from headrace.dataset.samples.slot_counters import SlotCounters, SlotSum
from headrace.dataset.spec.join_section import MAX_SAMPLE_BYTES, JoinSection, LearnAt
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.key_kernels import keys_of
from headrace.lists import offsets_of, pick
from headrace.pserver.protocol.join_clock import TimeSpans
from headrace.pserver.protocol.joins import F32, U8, U64, JoinAnswers, JoinedSamples, JoinEvents, JoinOutcome, PassTimes
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import SendEventTimes
from headrace.seeds import derive
from headrace.trainer.features.neighbours import numbered
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.status.progress import UNMATCHED

# The impressions and clicks of a pass, made from its samples, and the samples that cannot be joined. Pure.
#
# Shapes: B samples of a block, Q those that are events of the join, P impressions among them, N bytes.

SUGGESTED_STEP_BYTES = 256
"""Sizes that are suggested are multiples of it."""


@dataclass(frozen=True, slots=True)
class PassEvents:
    """The events of a rank's part of a pass, with their numbers."""

    events: JoinEvents
    event_Q: I64
    """Number of the event of the stream, from 0; equal for samples of one event."""


def events_of(
    pass_number: int,
    blocks: Sequence[Samples],
    streams: Sequence[str],
    join: JoinSection,
    schema: Schema,
    bound_s: float,
) -> tuple[PassEvents, list[RejectedSample]]:
    """The impressions and clicks of a rank's part of a pass, in the order of the log; and the samples without a time,
    later than `bound_s`, or too long. `streams`: that of each block."""
    parts, rejected, begin = [_no_events()], list[RejectedSample](), 0
    stream_K, length_K = list[int](), list[int]()
    for number, (block, stream) in enumerate(zip(blocks, streams, strict=True)):
        event_B = begin + numbered(block.event_B)
        begin = int(event_B[-1]) + 1 if len(event_B) else begin
        label_B = np.nan_to_num(block.meta[join.label].astype(np.float32), nan=0.0)
        offset_B1, data_N = encode_samples(block, schema)
        length_B = np.where(label_B == 0, np.diff(offset_B1), 0)
        wrong_B = ~np.isfinite(block.time_s_B) | (block.time_s_B > bound_s) | (length_B > join.max_sample_bytes)
        rejected += _rejected(number, block, length_B, np.flatnonzero(wrong_B), join, bound_s)
        at_Q = np.flatnonzero(~wrong_B)
        _, of_impressions_N = pick(offset_B1, data_N, at_Q[label_B[at_Q] == 0])
        key_Q = join_keys(block.meta[join.key][at_Q])
        if not stream_K or stream_K[-1] != derive(0, stream):
            stream_K, length_K = [*stream_K, derive(0, stream)], [*length_K, 0]
        length_K[-1] += len(at_Q)
        parts.append((key_Q, event_B[at_Q], block.time_s_B[at_Q], label_B[at_Q], length_B[at_Q], of_impressions_N))
    key_Q, event_Q, time_Q, label_Q, length_Q, data_N = (np.concatenate(c) for c in zip(*parts, strict=True))
    offset_Q1 = offsets_of(length_Q)
    holds = join.learn is LearnAt.AT_WINDOW_END
    times = PassTimes(time_Q, np.array(stream_K, np.uint64), np.array(length_K, np.int64))
    given = pass_number, times, key_Q, np.arange(len(key_Q)), time_Q, label_Q, holds, offset_Q1, data_N
    return PassEvents(JoinEvents(*given), event_Q), rejected


def _rejected(
    number: int, block: Samples, length_B: I64, wrong: I64, join: JoinSection, bound_s: float
) -> Iterator[RejectedSample]:
    """The reason of each wrong sample of a block."""
    for b in wrong.tolist():
        event, at_s = int(block.event_B[b]), float(block.time_s_B[b])
        if not np.isfinite(at_s):
            yield RejectedSample(number, event, Reason.NO_TIME)
        elif at_s > bound_s:
            detail = f"its time is {at_s:.3f}, and the latest possible one in this pass {bound_s:.3f}"
            yield RejectedSample(number, event, Reason.TOO_FAR_AHEAD, detail)
        else:
            detail = too_long_text(int(length_B[b]), int(length_B.max()), join.max_sample_bytes)
            yield RejectedSample(number, event, Reason.SAMPLE_TOO_LONG, detail)


def too_long_text(num_bytes: int, longest: int, most: int) -> str:
    """The words for a sample that is too long, with the size that would hold the `longest` one of its block."""
    wanted = -(-longest // SUGGESTED_STEP_BYTES) * SUGGESTED_STEP_BYTES
    remedy = f"set join.max_sample_bytes = {wanted}"
    if wanted > MAX_SAMPLE_BYTES:
        remedy = f"at most {MAX_SAMPLE_BYTES} may be set: emit fewer or shorter values (max_len of a slot)"
    return f"its sample has {num_bytes} bytes, and {most} are set; {remedy}"


def join_keys(value_Q: NDArray[np.generic]) -> U64:
    """(Q,) keys of rows of whole numbers or texts."""
    if value_Q.dtype == object:
        sign_Q = signs_of_texts(pa.array([str(value) for value in value_Q], pa.utf8()))
    else:
        sign_Q = np.ascontiguousarray(value_Q.astype(np.uint64))
    key_Q = np.empty(len(sign_Q), np.uint64)
    keys_of(sign_Q, 0, key_Q)
    return key_Q


def _no_events() -> tuple[U64, I64, F64, F32, I64, U8]:
    no_numbers = np.empty(0, np.int64)
    return np.empty(0, np.uint64), no_numbers, np.empty(0), np.empty(0, np.float32), no_numbers, np.empty(0, np.uint8)


COUNTED: Mapping[JoinOutcome, str] = {
    JoinOutcome.REPEATED_IMPRESSION: "repeated impression",
    JoinOutcome.REPEATED_CLICK: "repeated click",
    JoinOutcome.LATE: "click after the window",
}
"""Outcomes that drop an event, as they are counted among what is left out."""


class JoinReader(GatedReader):
    """A PassReader whose samples have their labels."""

    def __init__(
        self,
        reader: RejectingReader,
        join: JoinSection,
        schema: Schema,
        shards: Shards,
        wait_s: float,
        seed: int,
        weight: str | None,
        sources: SourceSet,
    ) -> None:
        """`wait_s`: longest wait for the events of other ranks. `weight`: the meta slot with the sample's weight."""
        super().__init__(reader)
        self._rejecting, self._sources = reader, sources
        self._join, self._schema, self._shards, self._wait_s = join, schema, shards, wait_s
        self._salt, self._weight = np.uint64(derive(seed, "keep_negatives")), weight

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """The samples of this rank's part are in memory while it waits (passes.max_events)."""
        blocks = list(self._reader.read(pass_number, segments, tally))
        if not self.await_open(pass_number):
            return
        with self.asking():
            bound_s = self._bound_s(pass_number, blocks)
        streams = [self._sources.stream_of(each) for each in self._rejecting.partitions()]
        mine, rejected = events_of(pass_number, blocks, streams, self._join, self._schema, bound_s)
        self._rejecting.reject(pass_number, rejected, tally)
        tally.num_clicks = int(np.count_nonzero(mine.events.label_Q))
        with self.asking():
            answers = self._shards.join(mine.events, Deadline.after(self._wait_s))
        for outcome, reason in COUNTED.items():
            _leave_out(tally, reason, int(np.count_nonzero(answers.outcome_Q == outcome)))
        _leave_out(tally, UNMATCHED, answers.num_unmatched)
        counters = SlotCounters(self._schema)
        if tally.slots is not None:
            counters.sums_SK[:, SlotSum.PADDING :] = tally.slots.sums_SK[:, SlotSum.PADDING :]
        samples = self._released(*in_order(mine, answers))
        counters.observe(samples)
        tally.num_samples, tally.slots = len(samples), counters
        if len(samples):
            yield samples

    def _bound_s(self, pass_number: int, blocks: Sequence[Samples]) -> float:
        """The latest event time that is not too far ahead."""
        max_ahead_s = self._join.max_ahead
        if max_ahead_s is None:
            return np.inf
        time_Q = np.concatenate([np.empty(0), *(block.time_s_B for block in blocks)])
        spans = TimeSpans.of_times(time_Q[np.isfinite(time_Q)], max_ahead_s)
        return self._shards.call(SendEventTimes(pass_number, spans, max_ahead_s), Deadline.after(self._wait_s))

    def _released(self, mine: PassEvents, answers: JoinAnswers) -> Samples:
        """The samples that events release, and the others: negatives learnt at once, or each sample before the event
        that ends its window."""
        events = mine.events
        at_E = np.flatnonzero((answers.outcome_Q == JoinOutcome.JOINED) & (not events.holds))
        if self._join.learn is LearnAt.AT_ONCE:
            at_X = np.flatnonzero(at_once(events, answers.outcome_Q))
            at_X = at_X[self._kept(events.key_Q[at_X])]
            others, event_X = impressions(events, at_X), mine.event_Q[at_X]
        else:
            kept_X = self._kept(answers.expired.key_E) | (answers.expired.label_E != 0)
            others = answers.expired.chosen(np.flatnonzero(kept_X))
            at_X = np.searchsorted(answers.position_Q, answers.end_X[kept_X])
            event_X = -1 - np.arange(len(others))  # each is an event of its own
        order_E = np.argsort(np.concatenate([2 * at_E + 1, 2 * at_X]), kind="stable")
        event_E = np.concatenate([mine.event_Q[at_E], event_X])[order_E]
        return self._samples(JoinedSamples.concat([answers.joined, others]).chosen(order_E), numbered(event_E))

    def _kept(self, key_E: U64) -> NDArray[np.bool_]:
        """(E,) which negatives are learnt: drawn by key, so that the numbers of trainers and shards do not matter."""
        if self._join.keep_negatives == 1:
            return np.ones(len(key_E), np.bool_)
        drawn_E = np.empty(len(key_E), np.uint64)
        keys_of(np.ascontiguousarray(key_E) ^ self._salt, 0, drawn_E)
        kept_E: NDArray[np.bool_] = (drawn_E >> np.uint64(11)).astype(np.float64) / 2.0**53 < self._join.keep_negatives
        return kept_E

    def _samples(self, released: JoinedSamples, event_E: I64) -> Samples:
        """The samples with their labels; the weight of a negative is divided by the share that is kept."""
        join = self._join
        samples = decode_samples(released.offset_E1, released.data_N, self._schema, event_E, released.time_E)
        meta = dict(samples.meta)
        meta[join.label] = released.label_E.astype(meta[join.label].dtype)
        if join.keep_negatives < 1:
            assert self._weight is not None, "the spec was checked"
            share_E = np.where(released.label_E == 0, np.float32(join.keep_negatives), np.float32(1))
            meta[self._weight] = (meta[self._weight] / share_E).astype(np.float32)
        return replace(samples, meta=meta)


def in_order(mine: PassEvents, answers: JoinAnswers) -> tuple[PassEvents, JoinAnswers]:
    """The events of a rank and what they release, in the order in which events count."""
    turn_Q = np.argsort(answers.position_Q, kind="stable")
    joined_E = np.flatnonzero(answers.outcome_Q == JoinOutcome.JOINED)[: len(answers.joined)]
    of_events = answers.outcome_Q[turn_Q], answers.joined.chosen(np.argsort(answers.position_Q[joined_E]))
    answers = JoinAnswers(*of_events, answers.position_Q[turn_Q], answers.expired, answers.end_X, answers.num_unmatched)
    return PassEvents(mine.events.chosen(turn_Q), mine.event_Q[turn_Q]), answers


def at_once(events: JoinEvents, outcome_Q: U8) -> NDArray[np.bool_]:
    """(Q,) the impressions that wait, and are learnt as negatives at once."""
    waits_Q = (outcome_Q == JoinOutcome.HELD) | (outcome_Q == JoinOutcome.LATE)
    found_Q: NDArray[np.bool_] = (events.label_Q == 0) & waits_Q
    return found_Q


def impressions(events: JoinEvents, at_P: I64) -> JoinedSamples:
    """The samples of some impressions, without a click."""
    order_P = events.place_Q[at_P].astype(np.uint64)
    columns = events.key_Q[at_P], order_P, events.time_Q[at_P], events.label_Q[at_P]
    return JoinedSamples(*columns, *pick(events.offset_Q1, events.data_N, at_P))


def _leave_out(tally: PassTally, reason: str, number: int) -> None:
    if number:
        tally.left_out[reason] = tally.left_out.get(reason, 0) + number
