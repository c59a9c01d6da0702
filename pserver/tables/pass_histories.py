"""The tables of histories on one shard: the last signs of each key, as rows whose bits are signs.

During a pass every rank asks once about the samples of its part. The answers are computed when all ranks have asked:
from the rows as the last closed pass left them, and from the questions of the pass in the order of the log, which is
that of ranks, and within a rank's part that of its questions. So they depend on the log alone. The rows change at the
close of the pass, so that a pass that is given up leaves nothing.

Shapes: as in pserver.rows.history_kernels.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from millrace.keys import unique_keys
from pserver.errors import InvalidShardCall
from pserver.protocol.histories import Answers, HistoryAnswers, HistoryQuestions, Questions, check_tables
from pserver.protocol.shards import F32, U64
from pserver.rows import history_kernels
from pserver.rows.arrays import frozen
from pserver.rows.history_kernels import packed, unpacked
from pserver.tables.table import ShardTable

NO_HISTORIES: Mapping[str, int] = MappingProxyType({})
"""No table holds histories."""


class PassHistories:
    """The histories of the open pass. One call at a time."""

    def __init__(self, tables: Mapping[str, ShardTable], lengths: Mapping[str, int]) -> None:
        """`lengths`: the tables that hold histories, with the most signs of a key."""
        self._tables = {name: tables[name] for name in lengths}
        self._lengths = dict(lengths)
        self._asked: dict[int, Questions] = {}
        self._answers: dict[int, dict[str, HistoryAnswers]] = {}
        self._changed: dict[str, tuple[int, U64, F32, F32]] = {}
        """By table: slot group, keys, rows and numbers of new signs, until the close."""

    def open_pass(self) -> None:
        """Begin a pass: no rank has asked."""
        self._asked, self._answers, self._changed = {}, {}, {}

    def ask(self, rank: int, questions: Questions, num_ranks: int) -> bool:
        """Add the questions of a rank; True once all ranks have asked, and answers are there.

        A repeat changes nothing. Raises InvalidShardCall for questions to other tables.
        """
        check_tables(questions, self._tables)
        self._asked.setdefault(rank, questions)
        if len(self._asked) == num_ranks and not self._answers:
            self._answers = {rank: {} for rank in self._asked}
            for name in self._tables:
                self._answer(name)
        return bool(self._answers)

    def answers(self, rank: int) -> Answers | None:
        """The answers to a rank's questions; None before all ranks have asked."""
        return self._answers.get(rank)

    def missing(self, num_ranks: int) -> list[int]:
        """The ranks that have not asked."""
        return [rank for rank in range(num_ranks) if rank not in self._asked]

    def _answer(self, name: str) -> None:
        table, last, ranks = self._tables[name], self._lengths[name], sorted(self._asked)
        parts = [self._asked[rank][name] for rank in ranks]
        asked = HistoryQuestions.concat(parts)
        keys_U = unique_keys(asked.key_Q)
        number_Q = np.searchsorted(keys_U, asked.key_Q)
        count_U, sign_UL = unpacked(table.rows_of(keys_U))
        order = number_Q, asked.event_Q, asked.offset_Q1
        length_Q = np.empty(len(number_Q), np.int64)
        history_kernels.answer_lengths(*order, count_U.copy(), last, length_Q)
        answer_Q1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(length_Q)])
        answer_M = np.empty(answer_Q1[-1], np.uint64)
        history_kernels.answer(*order, frozen(asked.sign_N), count_U, sign_UL, answer_Q1, answer_M)
        answers, begin = HistoryAnswers(answer_Q1, answer_M), 0
        for rank, part in zip(ranks, parts, strict=True):
            self._answers[rank][name] = answers.between(begin, begin + len(part.key_Q))
            begin += len(part.key_Q)
        new_U = np.bincount(number_Q, np.diff(asked.offset_Q1), len(keys_U)).astype(np.float32)
        grown_U = new_U > 0
        rows_UD = packed(count_U[grown_U], sign_UL[grown_U])
        self._changed[name] = asked.group, keys_U[grown_U], rows_UD, new_U[grown_U]

    def close_pass(self, version: int) -> None:
        """Write the rows of `version`. Raises InvalidShardCall if only some ranks have asked."""
        if self._asked and not self._answers:
            raise InvalidShardCall(f"pass {version} closes, and only ranks {sorted(self._asked)} asked for histories")
        for name, (group, keys_U, rows_UD, new_U) in self._changed.items():
            self._tables[name].overwrite(keys_U, np.full(len(keys_U), group, np.uint16), rows_UD, new_U, version)
        self._changed = {}
