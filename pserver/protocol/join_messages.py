"""Events of a join and their answers: routed to shards, and as messages of shard.proto.

Shapes: as in pserver.protocol.joins.
"""

from collections.abc import Sequence

import numpy as np

from millrace.lists import offsets_of
from pserver.errors import InvalidShardCall
from pserver.proto import shard_pb2 as pb
from pserver.protocol.histories import array_from
from pserver.protocol.joins import I64, U8, JoinAnswers, JoinedSamples, JoinEvents, JoinOutcome
from pserver.protocol.placement import Placement


def route(events: JoinEvents, placement: Placement) -> tuple[list[JoinEvents], list[I64]]:
    """The events of each shard, and their places."""
    owner_Q = placement.shard_of(events.key_Q)
    places = [np.flatnonzero(owner_Q == shard) for shard in range(placement.num_shards)]
    return [events.chosen(at_P) for at_P in places], places


def gathered(answers: Sequence[JoinAnswers], places: Sequence[I64]) -> JoinAnswers:
    """The answers of all shards in the order of the events, and what expires by its order in the log."""
    outcome_Q = np.empty(sum(map(len, places)), np.uint8)
    for each, at_P in zip(answers, places, strict=True):
        outcome_Q[at_P] = each.outcome_Q
    joined_E = [
        at_P[each.outcome_Q == JoinOutcome.JOINED][: len(each.joined)]  # none where clicked impressions wait on
        for each, at_P in zip(answers, places, strict=True)
    ]
    joined = JoinedSamples.concat([each.joined for each in answers])
    expired = JoinedSamples.concat([each.expired for each in answers])
    return JoinAnswers(
        outcome_Q,
        joined.chosen(np.argsort(np.concatenate(joined_E), kind="stable")),
        expired.chosen(np.argsort(expired.order_E, kind="stable")),
        sum(each.num_unmatched for each in answers),
    )


def request_of(caller: pb.Caller, events: JoinEvents) -> pb.JoinRequest:
    """The events of one rank as a message."""
    return pb.JoinRequest(
        caller=caller,
        pass_number=events.pass_number,
        num_events=events.num_events,
        last_s=events.last_s,
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
    fits = len(key_Q) == len(time_Q) == len(label_Q) == len(place_Q) == len(offset_Q1) - 1
    if not fits or (place_Q >= request.num_events).any():
        raise InvalidShardCall("events of a join that do not fit each other")
    if not (np.isfinite(time_Q).all() and np.isfinite(label_Q).all() and request.last_s < np.inf):  # no NaN either
        raise InvalidShardCall("events of a join with a time or a label that is no number")
    given = request.pass_number, request.num_events, request.last_s
    return JoinEvents(*given, key_Q, place_Q, time_Q, label_Q, request.holds, offset_Q1, data_N)


def reply_of(answers: JoinAnswers, max_bytes: int) -> pb.JoinReply:
    """Answers as a message. Raises InvalidShardCall for more than `max_bytes`."""
    reply = pb.JoinReply(
        outcomes=answers.outcome_Q.tobytes(),
        joined=_released(answers.joined),
        expired=_released(answers.expired),
        num_unmatched=answers.num_unmatched,
    )
    if (size := reply.ByteSize()) > max_bytes:
        raise InvalidShardCall(
            f"the samples that a join releases in a pass have {size:,} bytes for one trainer, and a message "
            f"{max_bytes:,}: raise cluster.max_message, or use more trainers or shards"
        )
    return reply


def answers_from(reply: pb.JoinReply) -> JoinAnswers:
    """The inverse of `reply_of`."""
    joined, expired = _samples_from(reply.joined), _samples_from(reply.expired)
    return JoinAnswers(array_from(reply.outcomes, np.uint8), joined, expired, reply.num_unmatched)


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
