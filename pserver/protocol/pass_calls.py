"""The calls of one rank at the beginning of a pass, whose answers need all ranks.

They are about histories, counters, statistics of rows, and joins.
"""

from typing import Protocol

from headrace.deadline import Deadline
from headrace.pserver.protocol.histories import Answers, Questions
from headrace.pserver.protocol.join_clock import TimeSpans
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents


class PassCalls(Protocol):
    """A part of pserver.protocol.shards.Shards. One thread makes these calls."""

    def recall(self, pass_number: int, questions: Questions, deadline: Deadline) -> Answers:
        """Every rank, once in each pass that is open, from any one thread: what the samples of its part ask of the
        tables of histories, and add to them.

        Returns the histories, by table, once all ranks have asked: as of the last closed pass, and the questions of
        this pass before, by rank. A job without such tables does not call it. A repeat adds nothing.
        """
        ...

    def join_clock(self, pass_number: int, spans: TimeSpans, max_ahead_s: float, deadline: Deadline) -> float:
        """Every rank, once in each pass that is open, before `join` and on its thread: the event times of its part, as
        spans without a gap above `max_ahead_s`. A job whose join has no such bound does not call it.

        Returns the latest event time that is not too far ahead, the same for every rank, once all have sent theirs. A
        repeat adds nothing.
        """
        ...

    def join(self, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        """Every rank, once in each pass that is open, on the thread of `recall` and before it: the impressions and
        clicks of its part.

        Returns what they release once all ranks have sent theirs: as of the last closed pass, and the events of this
        pass before, by rank; and this rank's part of the impressions whose window ends with the pass. A job without a
        join does not call it. A repeat adds nothing.
        """
        ...
