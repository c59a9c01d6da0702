"""Questions about histories and their answers: routed to shards, and within the largest message.

Shapes: as in pserver.protocol.histories.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.lists import joined_lists
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.histories import I64, Answers, HistoryAnswers, Questions
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


def within_message(answers: Answers, max_bytes: int) -> dict[str, HistoryAnswers]:
    """The answers. Raises InvalidShardCall for more than a message of `max_bytes` can carry."""
    size = sum(each.offset_Q1.nbytes + each.sign_M.nbytes for each in answers.values())
    if size > max_bytes:
        raise InvalidShardCall(
            f"the histories of a pass have {size:,} bytes for one trainer, and a message {max_bytes:,}: lower "
            "passes.max_events or history.last, give counters fewer windows, ask for the statistics of fewer slots, or "
            "use more shards"
        )
    return dict(answers)
