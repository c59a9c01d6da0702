"""The impressions and clicks that wait for each other on one shard, and what a pass releases.

During a pass every rank sends the events of its part once. The answers are made when all ranks have sent theirs: from
the rows as the last closed pass left them, and from the events in the order of their times; of equal times in the order
of the log, which is that of ranks, and within a rank's part that of its events. At the end of the pass, impressions
whose window is over are released without a click, and clicks whose window is over are given up; "over" compares with
the greatest event time of the pass. So all answers depend on the log alone. The rows change at the close of the pass: a
pass that is given up leaves nothing.

Shapes: as in pserver.rows.join_kernels; R rows of the table, E samples released by events, X by the end of windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from headrace.keys import unique_keys
from headrace.lists import joined_lists, pick
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.joins import I64, U8, JoinAnswers, JoinedSamples, JoinEvents, JoinOutcome
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.rows import join_kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.join_kernels import (
    CLICKED,
    EARLY,
    HEAD_WORDS,
    NOTHING,
    STORED,
    UNKNOWN,
    WAITING,
    WaitingRows,
    samples_of,
)
from headrace.pserver.tables.rank_answers import RankAnswers
from headrace.pserver.tables.table import ShardTable

NO_JOINS: Mapping[str, float] = MappingProxyType({})
"""No table holds what waits for a join."""
BYTES_OF_WORD = 4
JOIN_GROUP = 0
"""Slot group of the rows: their keys belong to no slot."""


class PassJoins(RankAnswers[JoinEvents, JoinAnswers]):
    """The join of the open pass. One call at a time."""

    def __init__(self, tables: Mapping[str, ShardTable], windows_s: Mapping[str, float]) -> None:
        """`windows_s`: the table that holds what waits, with the seconds of the window; empty without a join."""
        super().__init__()
        assert len(windows_s) <= 1, "a job has one join"
        self._table = next((tables[name] for name in windows_s), None)
        self._window_s = next(iter(windows_s.values()), 0.0)
        self._gone_G: U64 = np.empty(0, np.uint64)
        self._changed: tuple[U64, F32] | None = None
        """Keys and rows, until the close."""
        self._parts: dict[int, dict[int, JoinEvents]] = {}
        """By rank: parts of its events, while some are missing."""

    def open_pass(self) -> None:
        """Begin a pass: no rank has sent its events."""
        super().open_pass()
        self._gone_G, self._changed, self._parts = np.empty(0, np.uint64), None, {}

    def received(self, rank: int, part: JoinEvents, number: int, num_parts: int) -> JoinEvents | None:
        """Add part `number` of a rank's events; all of them once every part is here. A repeat changes nothing."""
        self._check(part)
        if rank in self._sent:
            return self._sent[rank]
        parts = self._parts.setdefault(rank, {})
        parts.setdefault(number, part)
        if len(parts) < num_parts:
            return None
        return JoinEvents.whole([parts[number] for number in sorted(self._parts.pop(rank))])

    def _check(self, sent: JoinEvents) -> None:
        if self._table is None:
            raise InvalidShardCall("events of a join, and this shard joins nothing")
        if (np.diff(sent.offset_Q1) > BYTES_OF_WORD * (self._table.num_weights - HEAD_WORDS)).any():
            raise InvalidShardCall("an event of a join whose sample is longer than a row of this shard")

    def _answers_to(self, sent: Mapping[int, JoinEvents]) -> dict[int, JoinAnswers]:
        assert self._table is not None, "checked with the first events"
        return self._answer(self._table, [sent[rank] for rank in sorted(sent)])

    def _answer(self, table: ShardTable, parts: Sequence[JoinEvents]) -> dict[int, JoinAnswers]:
        made = _JoinOfPass.of(JoinEvents.concat(parts), table, self._window_s)
        over_U, (others, others_R) = made.over(self._window_s), made.others(table, self._window_s)
        joined, joined_E = made.joined()
        waited = (WAITING, CLICKED) if parts[0].holds else (WAITING,)
        expired = JoinedSamples.concat([made.expired(over_U, waited), _expired_others(table, others, others_R, waited)])
        early_U = over_U & (made.rows.state_U == EARLY)
        given_up_G = np.concatenate([made.keys_U[early_U], others_R[others.state_U == EARLY]])
        self._gone_G = np.concatenate([made.keys_U[over_U & (made.before_U != NOTHING)], others_R])
        self._changed = made.changed(over_U, table.num_weights)
        shared, begin = _shares(expired, len(parts)), 0
        answers: dict[int, JoinAnswers] = {}
        given_up = np.bincount((given_up_G % np.uint64(len(parts))).astype(np.int64), minlength=len(parts))
        for rank, part in enumerate(parts):
            end = begin + len(part.key_Q)
            mine_P = np.flatnonzero((joined_E >= begin) & (joined_E < end))
            outcome_Q = made.outcome_Q[begin:end]
            answers[rank] = JoinAnswers(outcome_Q, joined.chosen(mine_P), shared[rank], int(given_up[rank]))
            begin = end
        return answers

    def close_pass(self, version: int) -> None:
        """Write the rows of `version`. Raises InvalidShardCall if only some ranks have sent their events."""
        if self._sent and not self._answers:
            raise InvalidShardCall(f"pass {version} closes, and only ranks {sorted(self._sent)} sent events to join")
        if self._table is not None and self._changed is not None:
            keys_C, rows_CD = self._changed
            self._table.delete(self._gone_G)
            one_C = np.ones(len(keys_C), np.float32)
            self._table.overwrite(keys_C, np.full(len(keys_C), JOIN_GROUP, np.uint16), rows_CD, one_C, version)
        self._changed = None


@dataclass(frozen=True, slots=True)
class _JoinOfPass:
    """The keys of a pass after its events."""

    events: JoinEvents
    keys_U: U64
    before_U: U8
    """States before the pass."""
    rows: WaitingRows
    holder_U: I64
    number_Q: I64
    """The key of each event, by its place in `keys_U`."""
    outcome_Q: U8
    source_Q: I64
    released: tuple[U64, NDArray[np.float64], F32]
    """(Q,) order, event time and label of the samples that events release."""
    samples: tuple[I64, U8]
    """Those of the rows before, then those of the events, then an empty one."""

    @classmethod
    def of(cls, events: JoinEvents, table: ShardTable, window_s: float) -> "_JoinOfPass":
        keys_U = unique_keys(events.key_Q)
        number_Q, num = np.searchsorted(keys_U, events.key_Q), len(events.key_Q)
        stored_UD = table.rows_of(keys_U)
        rows = WaitingRows.of_words(stored_UD.view(np.uint32))
        before_U, holder_U = rows.state_U.copy(), np.full(len(keys_U), STORED, np.int64)
        order_Q = np.uint64(events.pass_number) << np.uint64(32) | events.place_Q.astype(np.uint64)
        released = np.zeros(num, np.uint64), np.zeros(num), np.zeros(num, np.float32)
        outcome_Q, source_Q = np.empty(num, np.uint8), np.empty(num, np.int64)
        columns = rows.state_U, rows.order_U, rows.time_U, rows.label_U, holder_U
        turn_Q = np.lexsort((events.place_Q, events.time_Q))
        given = turn_Q, number_Q, order_Q, frozen(events.time_Q), frozen(events.label_Q), window_s, events.holds
        join_kernels.decide(*given, *columns, outcome_Q, source_Q, *released)
        empty = np.zeros(2, np.int64), np.empty(0, np.uint8)
        samples = joined_lists([samples_of(stored_UD), (events.offset_Q1, events.data_N), empty])
        return cls(events, keys_U, before_U, rows, holder_U, number_Q, outcome_Q, source_Q, released, samples)

    def joined(self) -> tuple[JoinedSamples, I64]:
        """The samples that events release, and the events."""
        at_E = np.flatnonzero((self.outcome_Q == JoinOutcome.JOINED) & (not self.events.holds))
        order_Q, time_Q, label_Q = self.released
        columns = self.events.key_Q[at_E], order_Q[at_E], time_Q[at_E], label_Q[at_E]
        return JoinedSamples(*columns, *self._samples(self.source_Q[at_E], self.number_Q[at_E])), at_E

    def over(self, window_s: float) -> NDArray[np.bool_]:
        """(U,) whether the window of a key ends with the pass."""
        over_U: NDArray[np.bool_] = (self.rows.state_U != NOTHING) & self.rows.over(window_s, self.events.last_s)
        return over_U

    def expired(self, over_U: NDArray[np.bool_], waited: Sequence[int]) -> JoinedSamples:
        """The impressions among them that wait, in states of `waited`."""
        at_X = np.flatnonzero(over_U & np.isin(self.rows.state_U, waited))
        columns = self.keys_U[at_X], self.rows.order_U[at_X], self.rows.time_U[at_X], self.rows.label_U[at_X]
        return JoinedSamples(*columns, *self._samples(self.holder_U[at_X], at_X))

    def others(self, table: ShardTable, window_s: float) -> tuple[WaitingRows, U64]:
        """The rows of other keys whose window ends with the pass."""
        keys_R, words_RW = table.first_words(HEAD_WORDS)
        over_X = np.flatnonzero(WaitingRows.of_words(words_RW).over(window_s, self.events.last_s))
        other_X = over_X[~np.isin(keys_R[over_X], self.keys_U)]
        return WaitingRows.of_words(words_RW[other_X]), keys_R[other_X]

    def changed(self, over_U: NDArray[np.bool_], width: int) -> tuple[U64, F32]:
        """Keys and new rows. A key never comes back to a state that it had."""
        at_C = np.flatnonzero((self.rows.state_U != self.before_U) & ~over_U)
        return self.keys_U[at_C], self.rows.packed(at_C, *self._samples(self.holder_U[at_C], at_C), width)

    def _samples(self, holder_P: I64, number_P: I64) -> tuple[I64, U8]:
        """The samples of some holders, under the keys of these numbers."""
        num_U, num_Q = len(self.keys_U), len(self.events.key_Q)
        at_P = np.where(holder_P == STORED, number_P, num_U + np.where(holder_P == UNKNOWN, num_Q, holder_P))
        return pick(*self.samples, at_P)


def _expired_others(table: ShardTable, others: WaitingRows, keys_R: U64, waited: Sequence[int]) -> JoinedSamples:
    at_X = np.flatnonzero(np.isin(others.state_U, waited))
    columns = keys_R[at_X], others.order_U[at_X], others.time_U[at_X], others.label_U[at_X]
    return JoinedSamples(*columns, *samples_of(table.rows_of(keys_R[at_X])))


def _shares(expired: JoinedSamples, num_ranks: int) -> list[JoinedSamples]:
    """The samples of each rank, by their order: the key deals them, so that no number of shards matters."""
    rank_X = (expired.key_E % np.uint64(num_ranks)).astype(np.int64)
    by_order_X = np.argsort(expired.order_E, kind="stable")
    return [expired.chosen(by_order_X[rank_X[by_order_X] == rank]) for rank in range(num_ranks)]
