"""From the samples of a pass to questions about the rows of their ids, and from shows and clicks to floats of a slot.

A sample gets what the row of each of its ids had when the pass began, and what earlier samples of the pass have added.
trainer.features.history_reader asks; pserver.tables.pass_histories answers. trainer.features.kept_state fills slots by
the same sums and logarithms, from the rows of one version.

Shapes: B samples of a block, N ids of a slot, Q questions: neighbours of one event with one key are one question.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema, Slot
from headrace.kernel_cache import njit
from headrace.key_kernels import keys_of
from headrace.lists import offsets_of
from headrace.pserver.protocol.histories import HistoryAnswers, HistoryQuestions, statistics_of
from headrace.trainer.features.deduplication import EmbeddingTable
from headrace.trainer.features.neighbours import differs, numbered

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowQuestions:
    """The questions about the ids of one slot in one block."""

    sample_N: I64
    """Sample of each id."""
    question_N: I64
    """Question of each id, from 0."""
    questions: HistoryQuestions


class StatisticColumns:
    """The dense slots with statistics, and the sparse slots whose rows they tell of."""

    def __init__(self, schema: Schema, tables: Sequence[EmbeddingTable]) -> None:
        """`tables` say which columns count as shows and clicks."""
        names = dict.fromkeys(name for slot in schema.statistics for name in slot.statistics.slots)
        self._of = [schema.by_name[name] for name in names]
        self._filled, self._tables = schema.statistics, {table.name: table for table in tables}

    def asked(self, blocks: Sequence[Samples]) -> dict[str, list[RowQuestions]]:
        """The questions of each block, by their name."""
        return {
            statistics_of(slot.name): [row_questions(block, slot, *self._counted(slot)) for block in blocks]
            for slot in self._of
        }

    def _counted(self, slot: Slot) -> tuple[str | None, str | None]:
        table = self._tables[slot.sparse.table]
        return table.show, table.click

    @property
    def groups(self) -> dict[str, int]:
        """Slot group of the keys of questions, by their name."""
        return {statistics_of(slot.name): slot.group for slot in self._of}

    def columns(
        self,
        blocks: Sequence[Samples],
        asked: Mapping[str, Sequence[RowQuestions]],
        answers: Mapping[str, HistoryAnswers],
    ) -> list[dict[str, F32]]:
        """The (B, C) values of each dense slot, block by block."""
        found = {name: list(_sums(blocks, asked[name], answers[name])) for name in asked}
        columns = []
        for place in range(len(blocks)):
            of_block: dict[str, F32] = {}
            for slot in self._filled:
                sums = [found[statistics_of(name)][place] for name in slot.statistics.slots]
                of_block[slot.name] = statistic_column(sums)
            columns.append(of_block)
        return columns


def row_questions(block: Samples, slot: Slot, show: str | None, click: str | None) -> RowQuestions:
    """The questions of one block about the ids of a sparse slot. A block never splits an event.

    `show`, `click`: meta slots with the shows and clicks of a sample. Without: 1, and none; a missing value is 0.
    """
    sample_N, key_N = ids_of(block, slot)
    event_N = numbered(block.event_B)[sample_N]
    new_N = differs(event_N) | differs(key_N)
    question_N = np.cumsum(new_N) - 1
    counted_B2 = np.stack([_counted_B(block, show, 1.0), _counted_B(block, click, 0.0)], 1)
    num_Q = int(np.count_nonzero(new_N))
    added_Q2 = np.stack([np.bincount(question_N, counted_B2[sample_N, k], num_Q) for k in range(2)], 1)
    sign_N = np.ascontiguousarray(added_Q2, np.float64).reshape(-1).view(np.uint64)
    offset_Q1 = 2 * np.arange(num_Q + 1)
    return RowQuestions(
        sample_N, question_N, HistoryQuestions(slot.group, key_N[new_N], event_N[new_N], offset_Q1, sign_N)
    )


def ids_of(block: Samples, slot: Slot) -> tuple[I64, U64]:
    """(N,) the sample and the key of each id of a sparse slot, sample by sample."""
    column = block.sparse[slot.name]
    key_N = np.empty(len(column.values_N), np.uint64)
    keys_of(column.values_N, slot.group, key_N)
    return np.repeat(np.arange(len(block)), np.diff(column.offset_B1)), key_N


def _counted_B(block: Samples, slot: str | None, otherwise: float) -> F64:
    """(B,) the values of a meta slot."""
    if slot is None:
        return np.full(len(block), otherwise)
    return np.nan_to_num(block.meta[slot].astype(np.float32), nan=0.0).astype(np.float64)


def _sums(blocks: Sequence[Samples], asked: Sequence[RowQuestions], answers: HistoryAnswers) -> Iterator[F64]:
    """(B, 2) shows and clicks of each block, summed over the ids of a sample."""
    answer_Q2 = answers.sign_M.view(np.float64).reshape(-1, 2)
    bounds = pairwise(offsets_of(np.array([len(each.questions.key_Q) for each in asked], np.int64)).tolist())
    for block, each, (begin, end) in zip(blocks, asked, bounds, strict=True):
        yield summed_over(each.sample_N, answer_Q2[begin:end][each.question_N], len(block))


def summed_over(sample_N: I64, value_N2: F64, num_samples: int) -> F64:
    """(B, 2) shows and clicks of samples, summed over their ids in order."""
    return np.stack([np.bincount(sample_N, value_N2[:, k], num_samples) for k in range(2)], 1)


def statistic_column(sums: Sequence[F64]) -> F32:
    """(B, C) the values of a dense slot, from the (B, 2) sums of each sparse slot that it tells of."""
    sums_BS = np.concatenate(sums, 1)
    value_BC = np.empty(sums_BS.shape, np.float32)
    fill_values(sums_BS, value_BC)
    return value_BC


@njit(nogil=True, cache=True)
def fill_values(sums_BS, value_BC):  # type: ignore[no-untyped-def]
    """Write log(1 + shows) and log(1 + clicks) - log(1 + shows) of each pair; sums below 0 count as 0."""
    for b in range(len(sums_BS)):
        for s in range(sums_BS.shape[1] // 2):
            shows = math.log1p(max(sums_BS[b, 2 * s], 0.0))
            value_BC[b, 2 * s] = shows
            value_BC[b, 2 * s + 1] = math.log1p(max(sums_BS[b, 2 * s + 1], 0.0)) - shows


def value_reference(shows: float, clicks: float) -> tuple[float, float]:
    """The twin: the two floats of one slot; source: `use_cvm` of Paddle's fused_seqpool_cvm."""
    log_shows = math.log1p(max(shows, 0.0))
    return log_shows, math.log1p(max(clicks, 0.0)) - log_shows
