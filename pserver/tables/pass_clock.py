"""The clock of a join, on the one shard that has its row: how late event times of the open pass may be.

During a pass every rank sends the spans of its event times. The answer is the same for all: made when all ranks have
sent theirs, from the clock as the last closed pass left it. The row changes at the close of the pass: a pass that is
given up leaves nothing. pserver.protocol.join_clock decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.join_clock import CLOCK_KEY, JoinClock, TimeSpans
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.rows.join_kernels import CLOCK, WaitingRows
from headrace.pserver.tables.rank_answers import RankAnswers
from headrace.pserver.tables.table import ShardTable

KEYS: U64 = np.array([CLOCK_KEY], np.uint64)


@dataclass(frozen=True, slots=True)
class ClockQuestion:
    """The event times of one rank."""

    max_ahead_s: float
    spans: TimeSpans


class PassClock(RankAnswers[ClockQuestion, float]):
    """The clock of the open pass. An answer is the latest sound event time. One call at a time."""

    def __init__(self, tables: Mapping[str, ShardTable], windows_s: Mapping[str, float]) -> None:
        """`windows_s`: as in PassJoins."""
        super().__init__()
        self._table = next((tables[name] for name in windows_s), None)
        self._changed: F32 | None = None
        """The row, until the close."""

    def open_pass(self) -> None:
        """Begin a pass: no rank has asked."""
        super().open_pass()
        self._changed = None

    def _check(self, sent: ClockQuestion) -> None:
        if self._table is None:
            raise InvalidShardCall("event times of a join, and this shard joins nothing")

    def _answers_to(self, sent: Mapping[int, ClockQuestion]) -> dict[int, float]:
        assert self._table is not None, "checked with the first question"
        max_ahead_s = sent[0].max_ahead_s
        spans = TimeSpans.merged([sent[rank].spans for rank in sorted(sent)], max_ahead_s)
        row = WaitingRows.of_words(self._table.rows_of(KEYS).view(np.uint32))
        known = row.state_U[0] == CLOCK
        votes = divmod(int(row.order_U[0]), 1 << 32)
        before = JoinClock(float(row.time_U[0]), *votes) if known else JoinClock()
        after = before.after(spans, max_ahead_s)
        if after != before:
            self._changed = _row_of(after, self._table.rows.num_weights)
        bound_s = np.inf if after.newest_s is None else after.newest_s + max_ahead_s
        return dict.fromkeys(sent, bound_s)

    def close_pass(self, version: int) -> None:
        """Write the row of `version`. Raises InvalidShardCall if only some ranks have asked."""
        if self._sent and not self._answers:
            raise InvalidShardCall(f"pass {version} closes, and only ranks {sorted(self._sent)} sent event times")
        if self._table is not None and self._changed is not None:
            one = np.ones(1, np.float32)
            self._table.overwrite(KEYS, np.zeros(1, np.uint16), self._changed, one, version)
        self._changed = None


def _row_of(clock: JoinClock, width: int) -> F32:
    votes = np.array([clock.num_ahead << 32 | clock.num_behind], np.uint64)
    newest_s = np.array([clock.newest_s], np.float64)
    row = WaitingRows(np.array([CLOCK], np.uint8), votes, newest_s, np.zeros(1, np.float32))
    return row.packed(np.zeros(1, np.int64), np.zeros(2, np.int64), np.empty(0, np.uint8), width)
