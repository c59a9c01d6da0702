"""Excerpts of a stream for those who read beside its job: its first or its newest events, cut as the job cuts them.

Nothing is logged.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Partition, Source
from headrace.deadline import Deadline
from headrace.errors import BadInput
from headrace.trainer.config import TrainerJob
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import PassRules, Planner, StreamEnded

PLAN_S = 60.0
"""Longest wait for an answer of a source, and for the plan of a pass, of events that are there."""

WAIT_S, POLL_S = 60.0, 0.1
"""Longest wait for a stream with too few events, and the pause between two looks."""

OpenSource = Callable[[], Source]


def await_events(source: Source, events: int) -> Sequence[Partition]:
    """The partitions, once they have so many positions, or will have no more, or WAIT_S have passed."""
    deadline = Deadline.after(WAIT_S)
    while True:
        partitions = source.partitions(Deadline.after(PLAN_S))
        if _positions(partitions) >= events or all(each.final for each in partitions) or deadline.passed():
            return partitions
        time.sleep(POLL_S)


def _positions(partitions: Sequence[Partition]) -> int:
    return sum(each.end - max(each.start, each.begin) for each in partitions)


def planned(
    open_source: OpenSource,
    job: TrainerJob,
    events: int,
    passes: int,
    positions: Mapping[str, int],
    learn_until: int | None = None,
) -> list[PassPlan]:
    """The next passes of so many events each, as a job of one trainer plans them; fewer of a short stream.

    Its sources have Kafka groups of their own: their positions move.
    """
    rules = PassRules(
        job.passes.model_copy(update={"max_events": events, "cut": "count"}),
        1,
        learn_until=learn_until,
        ends_after=events * passes,
        sources=SourceSet(job.sources),
        merged=job.join is not None,
    )
    found: list[PassPlan] = []
    with closing(Planner(open_source(), rules)) as planner:
        for number in range(1, passes + 1):
            planner.request(number, positions, sum(each.num_positions for each in found))
            answer = planner.take(PLAN_S)
            if answer is None:
                raise BadInput(f"the stream gave no plan of {events:,} events within {PLAN_S:g} s")
            if isinstance(answer, StreamEnded):
                break
            found.append(answer)
            positions = {**positions, **answer.positions()}
    return found


def newest_plans(
    open_source: OpenSource, job: TrainerJob, events: int, passes: int, learn_until: int | None = None
) -> list[PassPlan]:
    """So many passes of one length of the newest `events` positions of the stream, or of all where it has no more."""
    with closing(open_source()) as source:
        total = _positions(await_events(source, events))
    length = max(1, min(events, total) // passes)
    skipped = _after(open_source, job, total - length * passes)
    return planned(open_source, job, length, passes, skipped, learn_until)


def _after(open_source: OpenSource, job: TrainerJob, left: int) -> dict[str, int]:
    """The positions, by partition, behind the first `left` ones of the stream."""
    positions = dict[str, int]()
    while left > 0:  # a pass ends where another source has its turn
        plans = planned(open_source, job, left, 1, positions)
        skipped = sum(each.num_positions for each in plans)
        if not skipped:
            break
        left -= skipped
        positions |= plans[0].positions()
    return positions
