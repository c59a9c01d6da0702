"""The tables of histories and counters on one shard: the last signs of each key, or its counts, as bits of rows; and
questions about the statistics of rows, which any table answers.

During a pass every rank asks once about the samples of its part. The answers are computed when all ranks have asked:
from the rows as the last closed pass left them, and from the questions of the pass in the order of the log, which is
that of ranks, and within a rank's part that of its questions. So they depend on the log alone. The rows change at the
close of the pass, so that a pass that is given up leaves nothing. No step of the pass is applied before all ranks have
their answers, since each of them needs its own for its first batch.

Shapes: as in pserver.rows.history_kernels and pserver.rows.counter_kernels.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.keys import unique_keys
from headrace.lists import offsets_of
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.histories import (
    I64,
    Answers,
    HistoryAnswers,
    HistoryQuestions,
    Questions,
    Remembered,
    check_tables,
)
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.rows import counter_kernels, history_kernels, statistic_kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.tables.rank_answers import RankAnswers
from headrace.pserver.tables.table import ShardTable

NUM_ADDED = 3
"""Numbers of a question to counters: time in seconds, shows, clicks. A time of 2**32 or more is none."""


class PassHistories(RankAnswers[Questions, Answers]):
    """The histories of the open pass. One call at a time."""

    def __init__(self, tables: Mapping[str, ShardTable], remembered: Mapping[str, Remembered]) -> None:
        """`remembered`: the tables that hold histories or counters, and which."""
        super().__init__()
        self._tables = {name: tables[kept if isinstance(kept, str) else name] for name, kept in remembered.items()}
        self._remembered = dict(remembered)
        self._changed: dict[str, tuple[int, U64, F32, F32]] = {}
        """By table: slot group, keys, rows and numbers of new signs, until the close."""

    def open_pass(self) -> None:
        """Begin a pass: no rank has asked."""
        super().open_pass()
        self._changed = {}

    def _check(self, sent: Questions) -> None:
        check_tables(sent, self._tables)

    def _answers_to(self, sent: Mapping[int, Questions]) -> dict[int, Answers]:
        found = {name: self._answer(name) for name in self._tables}
        return {rank: {name: found[name][rank] for name in found} for rank in sent}

    def _answer(self, name: str) -> dict[int, HistoryAnswers]:
        """The answers of one table, by rank; its rows change at the close."""
        table, ranks = self._tables[name], sorted(self._sent)
        parts = [self._sent[rank][name] for rank in ranks]
        asked = HistoryQuestions.concat(parts)
        keys_U = unique_keys(asked.key_Q)
        number_Q = np.searchsorted(keys_U, asked.key_Q)
        match self._remembered[name]:
            case str():
                answers = summed(asked, number_Q, *table.overview.statistics_of(keys_U), all_count=not table.selective)
            case int() as last:
                answers, *grown = extended(asked, number_Q, table.rows_of(keys_U), last)
                self._change(name, asked.group, keys_U, *grown)
            case windows_s:
                answers, *grown = counted(asked, number_Q, table.rows_of(keys_U), windows_s)
                self._change(name, asked.group, keys_U, *grown)
        end_R = np.cumsum([0, *(len(part.key_Q) for part in parts)]).tolist()
        return {rank: answers.between(*ends) for rank, ends in zip(ranks, pairwise(end_R), strict=True)}

    def _change(self, name: str, group: int, keys_U: U64, rows_UD: F32, new_U: F32) -> None:
        """Note the rows after the questions, of which those with new signs are written at the close."""
        grown_U = new_U > 0
        self._changed[name] = group, keys_U[grown_U], rows_UD[grown_U], new_U[grown_U]

    def close_pass(self, version: int) -> None:
        """Write the rows of `version`. Raises InvalidShardCall if only some ranks have asked."""
        if self._sent and not self._answers:
            raise InvalidShardCall(f"pass {version} closes, and only ranks {sorted(self._sent)} asked for histories")
        for name, (group, keys_U, rows_UD, new_U) in self._changed.items():
            self._tables[name].overwrite(keys_U, np.full(len(keys_U), group, np.uint16), rows_UD, new_U, version)
        self._changed = {}


def extended(asked: HistoryQuestions, number_Q: I64, rows_UD: F32, last: int) -> tuple[HistoryAnswers, F32, F32]:
    """Answers from histories of `last` signs in rows; the rows after the questions, and (U,) numbers of new signs.

    `number_Q`: the row of the key of each question.
    """
    count_U, sign_UL = history_kernels.unpacked(rows_UD)
    order = number_Q, asked.event_Q, asked.offset_Q1
    length_Q = np.empty(len(number_Q), np.int64)
    history_kernels.answer_lengths(*order, count_U.copy(), last, length_Q)
    answer_Q1 = offsets_of(length_Q)
    answer_M = np.empty(answer_Q1[-1], np.uint64)
    history_kernels.answer(*order, frozen(asked.sign_N), count_U, sign_UL, answer_Q1, answer_M)
    new_U = np.bincount(number_Q, np.diff(asked.offset_Q1), len(rows_UD)).astype(np.float32)
    return HistoryAnswers(answer_Q1, answer_M), history_kernels.packed(count_U, sign_UL), new_U


def counted(
    asked: HistoryQuestions, number_Q: I64, rows_UD: F32, windows_s: tuple[int, ...]
) -> tuple[HistoryAnswers, F32, F32]:
    """As `extended`, from counters: an answer has shows and clicks in each window; (U,) numbers of new shows.

    Raises InvalidShardCall for questions that are not three numbers each: time, shows, clicks.
    """
    is_number_N = asked.sign_N <= counter_kernels.MAX_COUNT
    if (np.diff(asked.offset_Q1) != NUM_ADDED).any() or not is_number_N.reshape(-1, NUM_ADDED)[:, 1:].all():
        raise InvalidShardCall("a question to counters that has not a time, shows and clicks")
    time_Q, show_Q, click_Q = np.where(is_number_N, asked.sign_N, 0).astype(np.int64).reshape(-1, NUM_ADDED).T.copy()
    if (click_Q > show_Q).any():
        raise InvalidShardCall("a question to counters with more clicks than shows")
    time_Q[~is_number_N[::NUM_ADDED]] = counter_kernels.NO_TIME
    word_UC, answer_QV = counter_kernels.unpacked(rows_UD), np.empty((len(number_Q), 2 * len(windows_s)), np.int64)
    window_s_W = np.array(windows_s, np.int64)
    counter_kernels.count(number_Q, asked.event_Q, time_Q, show_Q, click_Q, window_s_W, word_UC, answer_QV)
    offset_Q1 = np.arange(len(number_Q) + 1) * answer_QV.shape[1]
    new_U = np.bincount(number_Q, show_Q, len(rows_UD)).astype(np.float32)
    return HistoryAnswers(offset_Q1, answer_QV.reshape(-1).astype(np.uint64)), counter_kernels.packed(word_UC), new_U


def summed(
    asked: HistoryQuestions, number_Q: I64, found_U: NDArray[np.bool_], value_U2: F32, *, all_count: bool
) -> HistoryAnswers:
    """Shows and clicks of the row of each question's key, with those of earlier questions.

    `found_U`: which keys have a row, and `value_U2` its shows and clicks. Without `all_count` keys without a row stay
    at 0: they may lack admission. Raises InvalidShardCall for questions that are not two finite numbers each.
    """
    added_N = asked.sign_N.view(np.float64)
    if (np.diff(asked.offset_Q1) != 2).any() or not np.isfinite(added_N).all():
        raise InvalidShardCall("a question about statistics of rows that has not shows and clicks")
    answer_Q2, counts_U = np.empty((len(number_Q), 2)), found_U | all_count
    total_U2, added_Q2 = value_U2.astype(np.float64), frozen(added_N.reshape(-1, 2))
    statistic_kernels.accumulate(number_Q, frozen(asked.event_Q), added_Q2, counts_U, total_U2, answer_Q2)
    return HistoryAnswers(2 * np.arange(len(number_Q) + 1), answer_Q2.reshape(-1).view(np.uint64))
