"""Events of a join and their answers: routed to shards, and cut into messages.

Both are cut into as many messages as the largest one allows; how they are cut changes nothing.

Shapes: as in pserver.protocol.joins; I items of a list that is cut.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.joins import I64, JoinAnswers, JoinAnswersPart, JoinedSamples, JoinEvents, JoinOutcome
from headrace.pserver.protocol.placement import Placement

BYTES_OF_REST = 1 << 10
"""Bytes of a message beside its lists, more or less."""
BYTES_OF_EVENT, BYTES_OF_TIME, BYTES_OF_RELEASED, BYTES_OF_OUTCOME = 36, 8, 44, 9
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


def part_of(answers: JoinAnswers, max_bytes: int, number: int = 0) -> JoinAnswersPart:
    """Part `number` of answers, within a message. Raises InvalidShardCall beyond the last part."""
    ends = np.cumsum([len(answers.outcome_Q), len(answers.joined), len(answers.expired)]).tolist()
    of_samples = np.concatenate([np.diff(each.offset_E1) for each in (answers.joined, answers.expired)])
    of_outcomes = np.full(ends[0], BYTES_OF_OUTCOME, np.int64)
    runs = runs_of(np.concatenate([of_outcomes, BYTES_OF_RELEASED + of_samples]), max_bytes)
    if number >= len(runs):
        raise InvalidShardCall(f"part {number} of an answer that has {len(runs)}")
    if len(runs) == 1:
        return JoinAnswersPart(answers, 1)
    begin, end = runs[number]
    of_joined, of_expired = (
        np.arange(max(begin - start, 0), max(min(end, stop) - start, 0)) for start, stop in (ends[:2], ends[1:])
    )
    of_events = slice(begin, min(end, ends[0]))
    part = JoinAnswers(
        answers.outcome_Q[of_events],
        answers.joined.chosen(of_joined),
        answers.position_Q[of_events],
        answers.expired.chosen(of_expired),
        answers.end_X[of_expired],
        answers.num_unmatched,
    )
    return JoinAnswersPart(part, len(runs))


def whole_of(parts: Sequence[JoinAnswersPart]) -> JoinAnswers:
    """The inverse of `part_of`, from all parts in order."""
    answers = [part.answers for part in parts]
    if len(answers) == 1:
        return answers[0]
    return JoinAnswers(
        np.concatenate([each.outcome_Q for each in answers]),
        JoinedSamples.concat([each.joined for each in answers]),
        np.concatenate([each.position_Q for each in answers]),
        JoinedSamples.concat([each.expired for each in answers]),
        np.concatenate([each.end_X for each in answers]),
        answers[0].num_unmatched,
    )
