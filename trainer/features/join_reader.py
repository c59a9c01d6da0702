"""Joins impressions with their clicks, between the reading of a pass and its batches.

It stands around the reader of a stream. A rank reads its whole part of a pass, and waits until the pass is open, so
that the shards hold what the version before left waiting. It gives events back that cannot be joined, to be rejected
(trainer.features.join_events). Then it sends the others, and gets back the samples that have their labels: those that
its own events release, each in the place of its event, and its share of the impressions whose window ends in the pass,
each where it ends. All of them are in the order in which events count (pserver.rows.join_order), so that batches have
positives and negatives wherever the stream has.

Shapes: Q events of the join in a pass, E samples released, X of them by no click.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.loader.batch_loader import PassTally, RejectingReader
from headrace.dataset.samples.batch import I64, Samples
from headrace.dataset.samples.sample_bytes import decode_samples
from headrace.dataset.samples.slot_counters import SlotCounters, SlotSum
from headrace.dataset.spec.join_section import JoinSection, LearnAt
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.key_kernels import keys_of
from headrace.lists import pick
from headrace.pserver.protocol.join_clock import TimeSpans
from headrace.pserver.protocol.joins import U8, U64, JoinAnswers, JoinedSamples, JoinEvents, JoinOutcome
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import SendEventTimes
from headrace.seeds import derive
from headrace.trainer.features.join_events import PassEvents, events_of
from headrace.trainer.features.neighbours import numbered
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.status.progress import UNMATCHED

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
        """See PassReader. The samples of this rank's part are in memory while it waits (passes.max_events)."""
        blocks = list(self._reader.read(pass_number, segments, tally))
        if not self.await_open(pass_number):
            return
        bound_s = self._bound_s(pass_number, blocks)
        streams = [self._sources.stream_of(each) for each in self._rejecting.partitions()]
        mine, rejected = events_of(pass_number, blocks, streams, self._join, self._schema, bound_s)
        self._rejecting.reject(pass_number, rejected, tally)
        tally.num_clicks = int(np.count_nonzero(mine.events.label_Q))
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
