"""The impressions and clicks that wait for each other on one shard, and what a pass releases.

During a pass every rank sends the events of its part once, with the times of those that other shards get. The answers
are made when all ranks have sent theirs: from the rows as the last closed pass left them, and from the events in the
order of pserver.rows.join_order; the order of the log is that of ranks, and within a rank's part that of its events. A
window ends at the first event that is later than its end: an impression is then released without a click, and a click
given up. So all answers depend on the log alone. The rows change at the close of the pass: a pass that is given up
leaves nothing.

Shapes: as in pserver.rows.join_kernels; R rows of the table, E samples released by events, X by the end of windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.keys import unique_keys
from headrace.lists import joined_lists, pick
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.joins import F64, I64, U8, JoinAnswers, JoinedSamples, JoinEvents, JoinOutcome
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.rows import join_kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.join_kernels import (
    CLICKED,
    CLOCK,
    EARLY,
    HEAD_WORDS,
    NOTHING,
    STORED,
    UNKNOWN,
    WAITING,
    WaitingRows,
    samples_of,
)
from headrace.pserver.rows.join_order import ends_of_waiting, merged_order, write_ends
from headrace.pserver.tables.rank_answers import RankAnswers
from headrace.pserver.tables.table import ShardTable

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
        del self._parts[rank]
        whole = part if num_parts == 1 else JoinEvents.whole([parts[number] for number in sorted(parts)])
        if len(whole.times) != whole.times.length_K.sum():
            raise InvalidShardCall("parts of events of a join that do not fit each other")
        return whole

    def _check(self, sent: JoinEvents) -> None:
        if self._table is None:
            raise InvalidShardCall("events of a join, and this shard joins nothing")
        if (np.diff(sent.offset_Q1) > BYTES_OF_WORD * (self._table.rows.num_weights - HEAD_WORDS)).any():
            raise InvalidShardCall("an event of a join whose sample is longer than a row of this shard")

    def _answers_to(self, sent: Mapping[int, JoinEvents]) -> dict[int, JoinAnswers]:
        assert self._table is not None, "checked with the first events"
        return self._answer(self._table, [sent[rank] for rank in sorted(sent)])

    def _answer(self, table: ShardTable, parts: Sequence[JoinEvents]) -> dict[int, JoinAnswers]:
        made = _JoinOfPass.of(JoinEvents.concat(parts), table, self._window_s)
        ended, others_R = made.ended(table, self._window_s)
        joined, joined_E = made.joined()
        waited = (WAITING, CLICKED) if parts[0].holds else (WAITING,)
        expired = ended.chosen(np.flatnonzero(np.isin(ended.state_X, waited)))
        given_up_G = ended.samples.key_E[ended.state_X == EARLY]
        self._gone_G = np.concatenate([made.gone(), others_R])
        self._changed = made.changed(table.rows.num_weights)
        shared, begin = _shares(expired, len(parts)), 0
        answers: dict[int, JoinAnswers] = {}
        given_up = np.bincount((given_up_G % np.uint64(len(parts))).astype(np.int64), minlength=len(parts))
        for rank, part in enumerate(parts):
            end = begin + len(part.key_Q)
            mine_P = np.flatnonzero((joined_E >= begin) & (joined_E < end))
            of_events = made.outcome_Q[begin:end], joined.chosen(mine_P), made.position_Q[begin:end]
            answers[rank] = JoinAnswers(*of_events, shared[rank].samples, shared[rank].end_X, int(given_up[rank]))
            begin = end
        return answers

    def close_pass(self, version: int) -> None:
        """Write the rows of `version`. Raises InvalidShardCall if only some ranks have sent their events."""
        if self._sent and not self._answers:
            raise InvalidShardCall(f"pass {version} closes, and only ranks {sorted(self._sent)} sent events to join")
        if self._table is not None and self._changed is not None:
            keys_C, rows_CD = self._changed
            self._table.deletions.forget(self._gone_G)
            one_C = np.ones(len(keys_C), np.float32)
            self._table.overwrite(keys_C, np.full(len(keys_C), JOIN_GROUP, np.uint16), rows_CD, one_C, version)
        self._changed = None


@dataclass(frozen=True, slots=True)
class _Ended:
    """The rows of windows that end in a pass, with their samples."""

    samples: JoinedSamples
    state_X: U8
    end_X: I64

    def chosen(self, at_P: I64) -> "_Ended":
        return _Ended(self.samples.chosen(at_P), self.state_X[at_P], self.end_X[at_P])


@dataclass(frozen=True, slots=True)
class _JoinOfPass:
    """The keys of a pass after its events."""

    events: JoinEvents
    time_A: F64
    """Times of the events of all shards, in the order in which they count."""
    position_Q: I64
    """Where each event is among them."""
    keys_U: U64
    before_U: U8
    """States before the pass."""
    rows: WaitingRows
    holder_U: I64
    number_Q: I64
    """The key of each event, by its place in `keys_U`."""
    outcome_Q: U8
    source_Q: I64
    released: tuple[U64, F64, F32]
    """(Q,) order, event time and label of the samples that events release."""
    windows: tuple[I64, U8, U64, F64, F32, I64, I64]
    """(X,) key, state, order, event time, label, end and holder of each window that ends."""
    samples: tuple[I64, U8]
    """Those of the rows before, then those of the events, then an empty one."""

    @classmethod
    def of(cls, events: JoinEvents, table: ShardTable, window_s: float) -> "_JoinOfPass":
        keys_U = unique_keys(events.key_Q)
        number_Q, num = np.searchsorted(keys_U, events.key_Q), len(events.key_Q)
        turn_A = merged_order(events.times.time_A, events.times.stream_A)
        time_A, num_all = events.times.time_A[turn_A], len(turn_A)
        position_A, end_A = np.empty(num_all, np.int64), np.empty(num_all, np.int64)
        position_A[turn_A] = np.arange(num_all)
        write_ends(time_A, window_s, end_A)
        position_Q = position_A[events.place_Q]
        stored_UD = table.rows_of(keys_U)
        rows = WaitingRows.of_words(stored_UD.view(np.uint32))
        before_U, holder_U = rows.state_U.copy(), np.full(len(keys_U), STORED, np.int64)
        order_Q = np.uint64(events.pass_number) << np.uint64(32) | events.place_Q.astype(np.uint64)
        released = np.zeros(num, np.uint64), np.zeros(num), np.zeros(num, np.float32)
        outcome_Q, source_Q = np.empty(num, np.uint8), np.empty(num, np.int64)
        end_U = np.where(before_U == CLOCK, num_all, ends_of_waiting(time_A, window_s, rows.time_U))
        columns = rows.state_U, rows.order_U, rows.time_U, rows.label_U, end_U, holder_U
        of_events = frozen(events.time_Q), frozen(events.label_Q), end_A[position_Q]
        given = np.argsort(position_Q), number_Q, order_Q, position_Q, *of_events, num_all, window_s, events.holds
        most = num + len(keys_U)
        number_X, end_X, holder_X = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
        state_X, order_X = np.empty(most, np.uint8), np.empty(most, np.uint64)
        time_X, label_X = np.empty(most), np.empty(most, np.float32)
        ended = number_X, state_X, order_X, time_X, label_X, end_X, holder_X
        cut = slice(join_kernels.decide(*given, *columns, outcome_Q, source_Q, *released, *ended))
        windows = number_X[cut], state_X[cut], order_X[cut], time_X[cut], label_X[cut], end_X[cut], holder_X[cut]
        empty = np.zeros(2, np.int64), np.empty(0, np.uint8)
        samples = joined_lists([samples_of(stored_UD), (events.offset_Q1, events.data_N), empty])
        of_keys = keys_U, before_U, rows, holder_U, number_Q
        return cls(events, time_A, position_Q, *of_keys, outcome_Q, source_Q, released, windows, samples)

    def joined(self) -> tuple[JoinedSamples, I64]:
        """The samples that events release, and the events."""
        at_E = np.flatnonzero((self.outcome_Q == JoinOutcome.JOINED) & (not self.events.holds))
        order_Q, time_Q, label_Q = self.released
        columns = self.events.key_Q[at_E], order_Q[at_E], time_Q[at_E], label_Q[at_E]
        return JoinedSamples(*columns, *self._samples(self.source_Q[at_E], self.number_Q[at_E])), at_E

    def ended(self, table: ShardTable, window_s: float) -> tuple[_Ended, U64]:
        """The windows that end; and the keys among them that the pass has no events of."""
        number_X, state_X, order_X, time_X, label_X, end_X, holder_X = self.windows
        mine = JoinedSamples(self.keys_U[number_X], order_X, time_X, label_X, *self._samples(holder_X, number_X))
        keys_R, words_RW = table.first_words(HEAD_WORDS)
        rows = WaitingRows.of_words(words_RW)
        end_R = ends_of_waiting(self.time_A, window_s, rows.time_U)
        is_over_R = (end_R < len(self.time_A)) & (rows.state_U != CLOCK)
        at_X = np.flatnonzero(is_over_R)
        at_X = at_X[~np.isin(keys_R[at_X], self.keys_U)]
        columns = keys_R[at_X], rows.order_U[at_X], rows.time_U[at_X], rows.label_U[at_X]
        others = JoinedSamples(*columns, *samples_of(table.rows_of(keys_R[at_X])))
        states_X = np.concatenate([state_X, rows.state_U[at_X]])
        ends_X = np.concatenate([end_X, end_R[at_X]])
        return _Ended(JoinedSamples.concat([mine, others]), states_X, ends_X), keys_R[at_X]

    def gone(self) -> U64:
        """The keys of events whose rows are no longer there."""
        gone_G: U64 = self.keys_U[(self.before_U != NOTHING) & (self.rows.state_U == NOTHING)]
        return gone_G

    def changed(self, width: int) -> tuple[U64, F32]:
        """Keys and new rows."""
        is_new_U = np.isin(np.arange(len(self.keys_U)), self.windows[0])
        at_C = np.flatnonzero((self.rows.state_U != NOTHING) & ((self.rows.state_U != self.before_U) | is_new_U))
        return self.keys_U[at_C], self.rows.packed(at_C, *self._samples(self.holder_U[at_C], at_C), width)

    def _samples(self, holder_P: I64, number_P: I64) -> tuple[I64, U8]:
        """The samples of some holders, under the keys of these numbers."""
        num_U, num_Q = len(self.keys_U), len(self.events.key_Q)
        at_P = np.where(holder_P == STORED, number_P, num_U + np.where(holder_P == UNKNOWN, num_Q, holder_P))
        return pick(*self.samples, at_P)


def _shares(expired: _Ended, num_ranks: int) -> list[_Ended]:
    """The samples of each rank, by their order: the key deals them, so that no number of shards matters."""
    rank_X = (expired.samples.key_E % np.uint64(num_ranks)).astype(np.int64)
    by_order_X = np.argsort(expired.samples.order_E, kind="stable")
    return [expired.chosen(by_order_X[rank_X[by_order_X] == rank]) for rank in range(num_ranks)]
