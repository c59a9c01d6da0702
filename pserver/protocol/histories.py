"""Histories and counters as ranks ask for them: what their samples add and want to know, and the answers of a shard.

A question is a sample, or several neighbours of one event with one key. pserver.tables.pass_histories answers. To a
table of counters it has three numbers in place of signs: time in seconds, shows and clicks; the answer has shows and
clicks of each window, of a half-life in 1 / pserver.rows.counter_kernels.UNIT. About the statistics of rows it has two,
shows and clicks, as bits of float64; so has the answer.

Shapes: Q questions in the order of the log, N signs that they add, M signs of answers, P chosen questions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.lists import are_offsets, joined_lists, pick
from headrace.pserver.errors import InvalidShardCall

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class HistoryQuestions:
    """The questions of one rank in one pass to one table of histories."""

    group: int
    """Slot group of the keys."""
    key_Q: U64
    event_Q: I64
    """Number of the event, never falling; equal for the questions of one event."""
    offset_Q1: I64
    """Question q adds `sign_N[offset_Q1[q]:offset_Q1[q + 1]]` to the history of its key, after its event."""
    sign_N: U64

    def check(self, table: str) -> None:
        """Raise InvalidShardCall for arrays that do not fit each other."""
        fits = len(self.key_Q) == len(self.event_Q) and are_offsets(self.offset_Q1, len(self.key_Q), len(self.sign_N))
        if not fits or not 0 <= self.group < 1 << 16 or (np.diff(self.event_Q) < 0).any():
            raise InvalidShardCall(f"questions about histories in table {table!r} that do not fit each other")

    def chosen(self, at_P: I64) -> "HistoryQuestions":
        """Some of the questions, by ascending places."""
        offset_P1, sign_N = pick(self.offset_Q1, self.sign_N, at_P)
        return HistoryQuestions(self.group, self.key_Q[at_P], self.event_Q[at_P], offset_P1, sign_N)

    @classmethod
    def concat(cls, parts: Sequence["HistoryQuestions"]) -> "HistoryQuestions":
        """The questions of several ranks, in their order. No two ranks have the same event."""
        events, num_events = [], 0
        for part in parts:
            events.append(part.event_Q + num_events)
            num_events += int(part.event_Q[-1]) + 1 if len(part.event_Q) else 0
        offset_Q1, sign_N = joined_lists([(part.offset_Q1, part.sign_N) for part in parts])
        key_Q = np.concatenate([part.key_Q for part in parts])
        return cls(parts[0].group, key_Q, np.concatenate(events), offset_Q1, sign_N)


@dataclass(frozen=True, slots=True)
class HistoryAnswers:
    """The histories that belong to questions: question q has `sign_M[offset_Q1[q]:offset_Q1[q + 1]]`, oldest first."""

    offset_Q1: I64
    sign_M: U64

    def chosen(self, at_P: I64) -> "HistoryAnswers":
        """Some of the answers."""
        return HistoryAnswers(*pick(self.offset_Q1, self.sign_M, at_P))

    def between(self, begin: int, end: int) -> "HistoryAnswers":
        """The answers of questions `begin` to `end` (exclusive)."""
        first, last = int(self.offset_Q1[begin]), int(self.offset_Q1[end])
        return HistoryAnswers(self.offset_Q1[begin : end + 1] - first, self.sign_M[first:last])


PREFIX = "history-"
COUNTERS_PREFIX = "counters-"
STATISTICS_PREFIX = "statistics-"

Memory = int | tuple[int, ...]
"""The memory of a table for each key: its last signs, at most so many; or counters, of windows in seconds, 0 for one
without end, below 0 for a half-life."""
Remembered = Memory | str
"""The memory of a table; or, of a table that answers questions about the statistics of rows, the name of the rows'
table."""


def table_of(slot: str) -> str:
    """The table of the histories of a slot."""
    return f"{PREFIX}{slot}"


def counters_table_of(slot: str) -> str:
    """The table of the counters of a slot."""
    return f"{COUNTERS_PREFIX}{slot}"


def statistics_of(slot: str) -> str:
    """The name of the questions about the rows of a sparse slot, in the place of a table's name."""
    return f"{STATISTICS_PREFIX}{slot}"


def slot_of(statistics: str) -> str:
    """The inverse of `statistics_of`."""
    return statistics.removeprefix(STATISTICS_PREFIX)


Questions = Mapping[str, HistoryQuestions]
"""By table."""
Answers = Mapping[str, HistoryAnswers]
"""By table."""


def check_tables(questions: Questions, tables: Iterable[str]) -> None:
    """Raise InvalidShardCall unless there are questions, maybe none, to each of `tables`."""
    if sorted(questions) != sorted(tables):
        raise InvalidShardCall(f"questions about histories in tables {sorted(questions)}, not {sorted(tables)}")
