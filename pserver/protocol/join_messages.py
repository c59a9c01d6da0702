"""Events of a join and their answers: routed to shards, and as messages of shard.proto.

Both are cut into as many messages as the largest one allows; how they are cut changes nothing.

Shapes: as in pserver.protocol.joins; I items of a list that is cut.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.lists import offsets_of
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol.histories import array_from
from headrace.pserver.protocol.join_clock import TimeSpans
from headrace.pserver.protocol.joins import I64, U8, JoinAnswers, JoinedSamples, JoinEvents, JoinOutcome, PassTimes
from headrace.pserver.protocol.placement import Placement

BYTES_OF_REST = 1 << 10
"""Bytes of a message beside its lists, more or less."""
BYTES_OF_EVENT, BYTES_OF_TIME, BYTES_OF_RELEASED, BYTES_OF_OUTCOME = 28, 8, 40, 9
"""Bytes of one item beside its sample."""


def route(events: JoinEvents, placement: Placement) -> tuple[list[JoinEvents], list[I64]]:
    """The events of each shard, and their places."""
    owner_Q = placement.shard_of(events.key_Q)
    places = [np.flatnonzero(owner_Q == shard) for shard in range(placement.num_shards)]
    return [events.chosen(at_P) for at_P in places], places


def gathered(answers: Sequence[JoinAnswers], places: Sequence[I64]) -> JoinAnswers:
    """The answers of all shards in the order of the events, and what expires by its order in the log."""
    num = sum(map(len, places))
    outcome_Q, position_Q = np.empty(num, np.uint8), np.empty(num, np.int64)
    for each, at_P in zip(answers, places, strict=True):
        outcome_Q[at_P], position_Q[at_P] = each.outcome_Q, each.position_Q
    joined_E = [
        at_P[each.outcome_Q == JoinOutcome.JOINED][: len(each.joined)]  # none where clicked impressions wait on
        for each, at_P in zip(answers, places, strict=True)
    ]
    joined = JoinedSamples.concat([each.joined for each in answers])
    expired = JoinedSamples.concat([each.expired for each in answers])
    by_order_X = np.argsort(expired.order_E, kind="stable")
    return JoinAnswers(
        outcome_Q,
        joined.chosen(np.argsort(np.concatenate(joined_E), kind="stable")),
        position_Q,
        expired.chosen(by_order_X),
        np.concatenate([each.end_X for each in answers])[by_order_X],
        sum(each.num_unmatched for each in answers),
    )


def runs_of(bytes_I: I64, max_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of the parts of a list, each as long as it may be; one at least, of one item at least."""
    until_I, runs, begin, before = np.cumsum(bytes_I), list[tuple[int, int]](), 0, 0
    while begin < len(until_I) or not runs:
        end = int(np.searchsorted(until_I, before + max_bytes - BYTES_OF_REST, side="right"))
        end = min(max(end, begin + 1), len(until_I))
        runs.append((begin, end))
        begin, before = end, int(until_I[end - 1]) if end else 0
    return runs


def cut(events: JoinEvents, max_bytes: int) -> list[JoinEvents]:
    """The events of one rank in parts, one for each message: first the times of all, then those of the shard."""
    num = len(events.times)
    runs = runs_of(
        np.concatenate([np.full(num, BYTES_OF_TIME), BYTES_OF_EVENT + np.diff(events.offset_Q1)]),
        max_bytes - 2 * BYTES_OF_TIME * len(events.times.stream_K),
    )
    if len(runs) == 1:
        return [events]
    parts = []
    for begin, end in runs:
        times = events.times.between(min(begin, num), min(end, num))
        parts.append(replace(events.chosen(np.arange(max(begin - num, 0), max(end - num, 0))), times=times))
    return parts


def request_of(caller: pb.Caller, events: JoinEvents, part: int = 0, num_parts: int = 1) -> pb.JoinRequest:
    """The events of one rank as a message, or a part of them."""
    return pb.JoinRequest(
        part=part,
        num_parts=num_parts,
        caller=caller,
        pass_number=events.pass_number,
        all_times=events.times.time_A.tobytes(),
        streams=events.times.stream_K.tobytes(),
        runs=events.times.length_K.astype(np.uint32).tobytes(),
        keys=events.key_Q.tobytes(),
        places=events.place_Q.astype(np.uint32).tobytes(),
        times=events.time_Q.tobytes(),
        labels=events.label_Q.tobytes(),
        lengths=np.diff(events.offset_Q1).astype(np.uint32).tobytes(),
        samples=events.data_N.tobytes(),
        holds=events.holds,
    )


def events_from(request: pb.JoinRequest) -> JoinEvents:
    """The inverse of `request_of`. Raises InvalidShardCall for arrays that do not fit each other."""
    key_Q, time_Q = array_from(request.keys, np.uint64), array_from(request.times, np.float64)
    label_Q, place_Q = array_from(request.labels, np.float32), array_from(request.places, np.uint32).astype(np.int64)
    offset_Q1, data_N = _lists(request.lengths, request.samples)
    times = PassTimes(
        array_from(request.all_times, np.float64),
        array_from(request.streams, np.uint64),
        array_from(request.runs, np.uint32).astype(np.int64),
    )
    num_events = int(times.length_K.sum())
    fits = len(key_Q) == len(time_Q) == len(label_Q) == len(place_Q) == len(offset_Q1) - 1
    fits &= len(times.stream_K) == len(times.length_K) and len(times) <= num_events
    fits &= request.num_parts > 1 or len(times) == num_events
    if not fits or (place_Q >= num_events).any() or request.part >= request.num_parts:
        raise InvalidShardCall("events of a join that do not fit each other")
    if not all(np.isfinite(each).all() for each in (time_Q, label_Q, times.time_A)):
        raise InvalidShardCall("events of a join with a time or a label that is no number")
    return JoinEvents(request.pass_number, times, key_Q, place_Q, time_Q, label_Q, request.holds, offset_Q1, data_N)


def reply_of(answers: JoinAnswers, max_bytes: int, number: int = 0) -> pb.JoinReply:
    """Part `number` of answers as a message. Raises InvalidShardCall beyond the last part."""
    ends = np.cumsum([len(answers.outcome_Q), len(answers.joined), len(answers.expired)]).tolist()
    of_samples = np.concatenate([np.diff(each.offset_E1) for each in (answers.joined, answers.expired)])
    of_outcomes = np.full(ends[0], BYTES_OF_OUTCOME, np.int64)
    runs = runs_of(np.concatenate([of_outcomes, BYTES_OF_RELEASED + of_samples]), max_bytes)
    if number >= len(runs):
        raise InvalidShardCall(f"part {number} of an answer that has {len(runs)}")
    begin, end = runs[number]
    of_joined, of_expired = (
        np.arange(max(begin - start, 0), max(min(end, stop) - start, 0)) for start, stop in (ends[:2], ends[1:])
    )
    of_events = slice(begin, min(end, ends[0]))
    return pb.JoinReply(
        outcomes=answers.outcome_Q[of_events].tobytes(),
        positions=answers.position_Q[of_events].tobytes(),
        joined=_released(answers.joined.chosen(of_joined) if len(runs) > 1 else answers.joined),
        expired=_released(answers.expired.chosen(of_expired) if len(runs) > 1 else answers.expired),
        ends=answers.end_X[of_expired].tobytes(),
        num_unmatched=answers.num_unmatched,
        num_answers=len(runs),
    )


def answers_from(replies: Sequence[pb.JoinReply]) -> JoinAnswers:
    """The inverse of `reply_of`, from all parts in order."""
    outcome_Q = np.concatenate([array_from(reply.outcomes, np.uint8) for reply in replies])
    joined = JoinedSamples.concat([_samples_from(reply.joined) for reply in replies])
    expired = JoinedSamples.concat([_samples_from(reply.expired) for reply in replies])
    position_Q, end_X = (
        np.concatenate([array_from(each, np.int64) for each in column])
        for column in zip(*((reply.positions, reply.ends) for reply in replies), strict=True)
    )
    return JoinAnswers(outcome_Q, joined, position_Q, expired, end_X, replies[0].num_unmatched)


def clock_request_of(caller: pb.Caller, pass_number: int, spans: TimeSpans, max_ahead_s: float) -> pb.JoinClockRequest:
    """The event times of one rank as a message."""
    return pb.JoinClockRequest(
        caller=caller,
        pass_number=pass_number,
        max_ahead_s=max_ahead_s,
        firsts=spans.first_X.tobytes(),
        lasts=spans.last_X.tobytes(),
        counts=spans.count_X.astype(np.uint64).tobytes(),
    )


def spans_from(request: pb.JoinClockRequest) -> TimeSpans:
    """The inverse of `clock_request_of`. Raises InvalidShardCall for what are no spans."""
    first_X, last_X = array_from(request.firsts, np.float64), array_from(request.lasts, np.float64)
    count_X = array_from(request.counts, np.uint64).astype(np.int64)
    fits = len(first_X) == len(last_X) == len(count_X)
    if not fits or not (np.isfinite(first_X) & np.isfinite(last_X) & (first_X <= last_X) & (count_X > 0)).all():
        raise InvalidShardCall("event times of a join that are no spans")
    return TimeSpans(first_X, last_X, count_X)


def _released(samples: JoinedSamples) -> pb.ReleasedSamples:
    return pb.ReleasedSamples(
        keys=samples.key_E.tobytes(),
        orders=samples.order_E.tobytes(),
        times=samples.time_E.tobytes(),
        labels=samples.label_E.tobytes(),
        lengths=np.diff(samples.offset_E1).astype(np.uint32).tobytes(),
        samples=samples.data_N.tobytes(),
    )


def _samples_from(part: pb.ReleasedSamples) -> JoinedSamples:
    key_E, order_E = array_from(part.keys, np.uint64), array_from(part.orders, np.uint64)
    time_E, label_E = array_from(part.times, np.float64), array_from(part.labels, np.float32)
    return JoinedSamples(key_E, order_E, time_E, label_E, *_lists(part.lengths, part.samples))


def _lists(lengths: bytes, data: bytes) -> tuple[I64, U8]:
    """Offsets and bytes of samples. Raises InvalidShardCall for lengths that are not those of the bytes."""
    length_Q = array_from(lengths, np.uint32).astype(np.int64)
    offset_Q1: I64 = offsets_of(length_Q)
    if int(offset_Q1[-1]) != len(data):
        raise InvalidShardCall("samples of a join that do not fit their lengths")
    return offset_Q1, np.frombuffer(data, np.uint8)
