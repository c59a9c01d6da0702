"""Questions about histories and their answers: routed to shards, and as messages of shard.proto.

Shapes: as in pserver.protocol.histories.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.lists import joined_lists, offsets_of
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.proto import shard_pb2 as pb
from headrace.pserver.protocol.histories import I64, Answers, HistoryAnswers, HistoryQuestions, Questions, array_from
from headrace.pserver.protocol.placement import Placement


def route(questions: Questions, placement: Placement) -> tuple[list[Questions], list[dict[str, I64]]]:
    """The questions of each shard, and their places, by table."""
    owners = {name: placement.shard_of(each.key_Q) for name, each in questions.items()}
    places = [
        {name: np.flatnonzero(owner_Q == shard) for name, owner_Q in owners.items()}
        for shard in range(placement.num_shards)
    ]
    return [{name: questions[name].chosen(at_P) for name, at_P in of.items()} for of in places], places


def gathered(answers: Sequence[Answers], places: Sequence[Mapping[str, I64]]) -> dict[str, HistoryAnswers]:
    """The answers of all shards in the order of the questions."""
    found = {}
    for name in places[0]:
        order_Q = np.argsort(np.concatenate([of[name] for of in places]), kind="stable")
        together = HistoryAnswers(*joined_lists([(each[name].offset_Q1, each[name].sign_M) for each in answers]))
        found[name] = together.chosen(order_Q)
    return found


def request_of(caller: pb.Caller, pass_number: int, questions: Questions) -> pb.RecallRequest:
    """The questions of one rank as a message."""
    request = pb.RecallRequest(caller=caller, pass_number=pass_number)
    for name, each in questions.items():
        part = request.questions[name]
        part.group, part.keys, part.signs = each.group, each.key_Q.tobytes(), each.sign_N.tobytes()
        part.events = each.event_Q.astype(np.uint32).tobytes()
        part.lengths = np.diff(each.offset_Q1).astype(np.uint32).tobytes()
    return request


def questions_from(request: pb.RecallRequest) -> dict[str, HistoryQuestions]:
    """The inverse of `request_of`. Raises InvalidShardCall for arrays that do not fit each other."""
    found = {}
    for name, part in request.questions.items():
        key_Q, sign_N = (array_from(data, np.uint64) for data in (part.keys, part.signs))
        event_Q, length_Q = (array_from(data, np.uint32).astype(np.int64) for data in (part.events, part.lengths))
        offset_Q1 = offsets_of(length_Q)
        fits = len(key_Q) == len(event_Q) == len(length_Q) and int(offset_Q1[-1]) == len(sign_N)
        if not fits or part.group >= 1 << 16 or (np.diff(event_Q) < 0).any():
            raise InvalidShardCall(f"questions about histories in table {name!r} that do not fit each other")
        found[name] = HistoryQuestions(part.group, key_Q, event_Q, offset_Q1, sign_N)
    return found


def reply_of(answers: Answers, max_bytes: int) -> pb.RecallReply:
    """Answers as a message. Raises InvalidShardCall for more than `max_bytes`."""
    reply = pb.RecallReply()
    for name, each in answers.items():
        part = reply.answers[name]
        part.lengths, part.signs = np.diff(each.offset_Q1).astype(np.uint32).tobytes(), each.sign_M.tobytes()
    if (size := reply.ByteSize()) > max_bytes:
        raise InvalidShardCall(
            f"the histories of a pass have {size:,} bytes for one trainer, and a message {max_bytes:,}: lower "
            "passes.max_events or history.last, give counters fewer windows, ask for the statistics of fewer slots, or "
            "use more shards"
        )
    return reply


def answers_from(reply: pb.RecallReply) -> dict[str, HistoryAnswers]:
    """The inverse of `reply_of`."""
    found = {}
    for name, part in reply.answers.items():
        length_Q = array_from(part.lengths, np.uint32).astype(np.int64)
        offset_Q1 = offsets_of(length_Q)
        found[name] = HistoryAnswers(offset_Q1, array_from(part.signs, np.uint64))
    return found
