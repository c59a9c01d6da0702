"""Fills the slots with histories, counters and statistics of rows, between the reading of a pass and its batches.

It stands around the reader of a stream. A rank reads its whole part of a pass, and waits until the pass is open, so
that the shards hold the histories of the version before. Then it asks them about all samples at once.

Shapes: B samples of a block, Q questions of a pass: neighbours of one event with one key are one question.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.loader.batch_loader import PassReader, PassTally
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.key_kernels import keys_of
from headrace.lists import offsets_of, pick
from headrace.pserver.protocol.histories import HistoryAnswers, HistoryQuestions, counters_table_of, table_of
from headrace.pserver.protocol.shards import Shards
from headrace.trainer.features.counter_columns import F32, counter_column
from headrace.trainer.features.deduplication import EmbeddingTable
from headrace.trainer.features.neighbours import differs, numbered
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.features.row_statistics import RowQuestions, StatisticColumns

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
NO_QUESTION = -1
NO_TIME = 1 << 32
"""The time of a sample without event time, and the first second that counters do not know."""


@dataclass(frozen=True, slots=True)
class BlockQuestions:
    """The questions of the samples of one block to one table of histories or counters."""

    question_B: I64
    """The question of each sample, from 0; NO_QUESTION: it has no key."""
    questions: HistoryQuestions


class HistoryReader(GatedReader):
    """A PassReader whose samples have their histories, counters and statistics of rows."""

    def __init__(
        self,
        reader: PassReader,
        schema: Schema,
        shards: Shards,
        wait_s: float,
        tables: Sequence[EmbeddingTable] = (),
    ) -> None:
        """`reader` gives the slots of `schema.emitted`. `wait_s`: longest wait for the questions of other ranks.
        `tables`: those of the job, for statistics of rows."""
        super().__init__(reader)
        self._schema, self._shards, self._wait_s = schema, shards, wait_s
        self._statistics = StatisticColumns(schema, tables)

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """The samples of this rank's part are in memory while it waits (passes.max_events)."""
        blocks = list(self._reader.read(pass_number, segments, tally))
        if not self.await_open(pass_number):
            return
        counters = None if tally.slots is None else tally.slots.widened(self._schema)
        asked = {slot.name: list(questions_of(blocks, slot, self._schema)) for slot in self._schema.histories}
        asked |= {slot.name: list(counter_questions(blocks, slot, self._schema)) for slot in self._schema.counters}
        about_rows = self._statistics.asked(blocks)
        with self.asking():
            answers = self._recall(pass_number, asked, about_rows)
        of_rows = self._statistics.columns(blocks, about_rows, answers)
        begin = dict.fromkeys(asked, 0)
        for place, block in enumerate(blocks):
            sparse, dense = {}, dict(of_rows[place])
            for name, of_blocks in asked.items():
                end = begin[name] + len(of_blocks[place].questions.key_Q)
                found, slot = answers[name].between(begin[name], end), self._schema.by_name[name]
                if slot.kind is SlotKind.SPARSE:
                    sparse[name] = answered(of_blocks[place].question_B, found)
                else:
                    dense[name] = counter_column(of_blocks[place].question_B, found, slot.counters)
                begin[name] = end
            if counters is not None:
                for name in (*sparse, *dense):
                    counters.observe_filled(name, len(block), sparse.get(name))
            yield with_filled(block, self._schema, sparse, dense)
        tally.slots = counters

    def _recall(
        self,
        pass_number: int,
        asked: Mapping[str, Sequence[BlockQuestions]],
        about_rows: Mapping[str, Sequence[RowQuestions]],
    ) -> dict[str, HistoryAnswers]:
        """The answers to the questions of all blocks, by slot; about rows by the questions' name. A rank without
        samples asks, too: others wait for it."""
        tables, questions = {}, {}
        for name, of_blocks in asked.items():
            slot = self._schema.by_name[name]
            sparse = slot.kind is SlotKind.SPARSE
            tables[name] = table_of(name) if sparse else counters_table_of(name)
            group = self._schema.by_name[slot.history.key if sparse else slot.counters.keys[-1]].group
            parts = [no_questions(group), *(each.questions for each in of_blocks)]
            questions[tables[name]] = HistoryQuestions.concat(parts)
        for name, group in self._statistics.groups.items():
            parts = [no_questions(group), *(each.questions for each in about_rows[name])]
            tables[name], questions[name] = name, HistoryQuestions.concat(parts)
        answers = self._shards.recall(pass_number, questions, Deadline.after(self._wait_s))
        return {name: answers[table] for name, table in tables.items()}


def with_filled(block: Samples, schema: Schema, sparse: Mapping[str, Ragged], dense: Mapping[str, F32]) -> Samples:
    """The samples with the slots that the job fills, in the order of `schema`."""
    signs, values = {**block.sparse, **sparse}, {**block.dense, **dense}
    return replace(
        block,
        sparse={slot.name: signs[slot.name] for slot in schema.sparse},
        dense={slot.name: values[slot.name] for slot in schema.dense},
    )


def no_questions(group: int) -> HistoryQuestions:
    """Zero questions about keys of a slot group."""
    no_keys, no_events = np.empty(0, np.uint64), np.empty(0, np.int64)
    return HistoryQuestions(group, no_keys, no_events, np.zeros(1, np.int64), no_keys)


def questions_of(blocks: Sequence[Samples], slot: Slot, schema: Schema) -> Iterator[BlockQuestions]:
    """The questions of each block to histories. A block never splits an event."""
    history = slot.history
    key = schema.by_name[history.key]
    for block in blocks:
        of, kept_B = block.sparse[history.of], _kept(block, history.when)
        keyed_K, key_K, event_K = keyed(block, [key])
        new_K = differs(event_K) | differs(key_K)
        question_K = np.cumsum(new_K) - 1
        kept_K = kept_B[keyed_K]
        length_P = np.diff(of.offset_B1)[keyed_K[kept_K]]
        num_Q = np.bincount(question_K[kept_K], length_P, int(new_K.sum())).astype(np.int64)
        _, sign_N = pick(of.offset_B1, of.values_N, keyed_K[kept_K])
        offset_Q1 = offsets_of(num_Q)
        questions = HistoryQuestions(key.group, key_K[new_K], event_K[new_K], offset_Q1, sign_N)
        yield BlockQuestions(question_column(len(block), keyed_K, question_K), questions)


def counter_questions(blocks: Sequence[Samples], slot: Slot, schema: Schema) -> Iterator[BlockQuestions]:
    """The questions of each block to counters: of neighbours of one event with one key and time."""
    keys, click = [schema.by_name[name] for name in slot.counters.keys], slot.counters.click
    for block in blocks:
        keyed_K, key_K, event_K = keyed(block, keys)
        time_K = times_of(block, keyed_K)
        new_K = differs(event_K) | differs(key_K) | differs(time_K)
        question_K = np.cumsum(new_K) - 1
        clicked_K = _kept(block, click)[keyed_K] & (click is not None)
        num_Q = [np.bincount(each, minlength=int(new_K.sum())) for each in (question_K, question_K[clicked_K])]
        sign_N = np.stack([time_K[new_K], *num_Q], 1).reshape(-1).astype(np.uint64)
        offset_Q1 = np.arange(len(num_Q[0]) + 1) * (len(num_Q) + 1)
        questions = HistoryQuestions(keys[-1].group, key_K[new_K], event_K[new_K], offset_Q1, sign_N)
        yield BlockQuestions(question_column(len(block), keyed_K, question_K), questions)


def keyed(block: Samples, keys: Sequence[Slot]) -> tuple[I64, U64, I64]:
    """The samples that have a key: their places, keys and events.

    The key of several signs: that of the first, then for each other the key of its sign ^ the key before.
    """
    columns = [block.sparse[slot.name] for slot in keys]
    keyed_K = np.flatnonzero(np.logical_and.reduce([np.diff(column.offset_B1) > 0 for column in columns]))
    key_K = np.zeros(len(keyed_K), np.uint64)
    for slot, column in zip(keys, columns, strict=True):
        sign_K = column.values_N[column.offset_B1[keyed_K]] ^ key_K
        keys_of(sign_K, slot.group, key_K)
    return keyed_K, key_K, numbered(block.event_B)[keyed_K]


def times_of(block: Samples, keyed_K: I64) -> I64:
    """(K,) event times of some samples in whole seconds; NO_TIME for one that counters do not know."""
    time_s_K = block.time_s_B[keyed_K]
    known_K = (time_s_K >= 0) & (time_s_K < NO_TIME)
    return np.where(known_K, np.nan_to_num(time_s_K, posinf=0.0, neginf=0.0), NO_TIME).astype(np.int64)


def question_column(num_samples: int, keyed_K: I64, question_K: I64) -> I64:
    """(B,) the question of each sample; NO_QUESTION for one without a key."""
    question_B = np.full(num_samples, NO_QUESTION, np.int64)
    question_B[keyed_K] = question_K
    return question_B


def answered(question_B: I64, answers: HistoryAnswers) -> Ragged:
    """The histories of samples; empty where a sample has no question."""
    asked_B = question_B != NO_QUESTION
    length_B = np.zeros(len(question_B), np.int64)
    length_B[asked_B] = np.diff(answers.offset_Q1)[question_B[asked_B]]
    _, sign_N = pick(answers.offset_Q1, answers.sign_M, question_B[asked_B])
    return Ragged(sign_N, offsets_of(length_B))


def _kept(block: Samples, when: str | None) -> NDArray[np.bool_]:
    """(B,) whether the meta slot `when` of a sample is neither 0 nor missing. Unset: of every sample."""
    if when is None:
        return np.ones(len(block), np.bool_)
    kept_B: NDArray[np.bool_] = np.nan_to_num(block.meta[when].astype(np.float64), nan=0.0) != 0
    return kept_B
