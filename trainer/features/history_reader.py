"""Fills the slots with histories, between the reading of a pass and its batches.

It stands around the reader of a stream. A rank reads its whole part of a pass, and waits until the pass is open, so
that the shards hold the histories of the version before. Then it asks them about all samples at once.

Shapes: B samples of a block, Q questions of a pass: neighbours of one event with one key are one question.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.loader.batch_loader import PassReader, PassTally
from dataset.samples.batch import Ragged, Samples
from dataset.samples.slot_counters import SlotCounters
from dataset.spec.schema import Schema, Slot
from dataset.stream.source import Segment
from millrace.deadline import Deadline
from millrace.keys import keys_of
from pserver.protocol.histories import HistoryAnswers, HistoryQuestions, pick, table_of
from pserver.protocol.shards import Shards

I64 = NDArray[np.int64]
POLL_S = 0.2
"""Pause between two checks of a waiting thread whether to stop."""
NO_QUESTION = -1


@dataclass(frozen=True, slots=True)
class BlockQuestions:
    """The questions of the samples of one block to one table of histories."""

    question_B: I64
    """The question of each sample, from 0; NO_QUESTION: it has no key."""
    questions: HistoryQuestions


class HistoryReader:
    """A PassReader whose samples have their histories. `read` is called on one thread, the others on any."""

    def __init__(self, reader: PassReader, schema: Schema, shards: Shards, wait_s: float) -> None:
        """`reader` gives the slots of `schema.emitted`. `wait_s`: longest wait for the questions of other ranks."""
        self._reader, self._schema, self._shards, self._wait_s = reader, schema, shards, wait_s
        self._open, self._stopping = 0, False
        self._changed = threading.Condition()

    def opened(self, pass_number: int) -> None:
        """The shards have opened a pass."""
        with self._changed:
            self._open = pass_number
            self._changed.notify_all()

    def close(self) -> None:
        """See PassReader."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._reader.close()

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """See PassReader. The samples of this rank's part are in memory while it waits (passes.max_events)."""
        blocks = list(self._reader.read(pass_number, segments, tally))
        with self._changed:
            while self._open < pass_number and not self._stopping:
                self._changed.wait(POLL_S)
            if self._stopping:
                return
        counters = None if tally.slots is None else tally.slots.widened(self._schema)
        asked = {slot.name: list(questions_of(blocks, slot, self._schema)) for slot in self._schema.histories}
        answers = self._recall(pass_number, asked)
        begin = dict.fromkeys(asked, 0)
        for place, block in enumerate(blocks):
            columns = {}
            for name, of_blocks in asked.items():
                end = begin[name] + len(of_blocks[place].questions.key_Q)
                columns[name] = answered(of_blocks[place].question_B, answers[name].between(begin[name], end))
                begin[name] = end
            yield self._with(block, columns, counters)
        tally.slots = counters

    def _recall(self, pass_number: int, asked: Mapping[str, Sequence[BlockQuestions]]) -> dict[str, HistoryAnswers]:
        """The answers to the questions of all blocks, by slot. A rank without samples asks, too: others wait for it."""
        questions = {
            table_of(slot.name): HistoryQuestions.concat(
                [no_questions(self._group(slot)), *(each.questions for each in asked[slot.name])]
            )
            for slot in self._schema.histories
        }
        answers = self._shards.recall(pass_number, questions, Deadline.after(self._wait_s))
        return {name: answers[table_of(name)] for name in asked}

    def _group(self, slot: Slot) -> int:
        return self._schema.by_name[slot.history.key].group

    def _with(self, block: Samples, columns: Mapping[str, Ragged], counters: SlotCounters | None) -> Samples:
        for name, column in columns.items():
            if counters is not None:
                counters.observe_filled(name, column)
        known = {**block.sparse, **columns}
        return replace(block, sparse={slot.name: known[slot.name] for slot in self._schema.sparse})


def no_questions(group: int) -> HistoryQuestions:
    """Zero questions about keys of a slot group."""
    no_keys, no_events = np.empty(0, np.uint64), np.empty(0, np.int64)
    return HistoryQuestions(group, no_keys, no_events, np.zeros(1, np.int64), no_keys)


def questions_of(blocks: Sequence[Samples], slot: Slot, schema: Schema) -> Iterator[BlockQuestions]:
    """The questions of each block. A block never splits an event."""
    history = slot.history
    group = schema.by_name[history.key].group
    for block in blocks:
        key, of = block.sparse[history.key], block.sparse[history.of]
        keyed_K = np.flatnonzero(np.diff(key.offset_B1))
        key_K = np.empty(len(keyed_K), np.uint64)
        keys_of(key.values_N[key.offset_B1[keyed_K]], group, key_K)
        event_K = np.cumsum(_differs(block.event_B))[keyed_K] - 1
        new_K = _differs(event_K) | _differs(key_K)
        question_K = np.cumsum(new_K) - 1
        question_B = np.full(len(block), NO_QUESTION, np.int64)
        question_B[keyed_K] = question_K
        kept_K = _kept(block, history.when)[keyed_K]
        length_P = np.diff(of.offset_B1)[keyed_K[kept_K]]
        num_Q = np.bincount(question_K[kept_K], length_P, int(new_K.sum())).astype(np.int64)
        _, sign_N = pick(of.offset_B1, of.values_N, keyed_K[kept_K])
        offset_Q1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_Q)])
        yield BlockQuestions(question_B, HistoryQuestions(group, key_K[new_K], event_K[new_K], offset_Q1, sign_N))


def answered(question_B: I64, answers: HistoryAnswers) -> Ragged:
    """The histories of samples; empty where a sample has no question."""
    asked_B = question_B != NO_QUESTION
    length_B = np.zeros(len(question_B), np.int64)
    length_B[asked_B] = np.diff(answers.offset_Q1)[question_B[asked_B]]
    _, sign_N = pick(answers.offset_Q1, answers.sign_M, question_B[asked_B])
    return Ragged(sign_N, np.concatenate([np.zeros(1, np.int64), np.cumsum(length_B)]))


def _differs(value_K: NDArray[Any]) -> NDArray[np.bool_]:
    """(K,) whether each value differs from the one before; the first does."""
    differs_K = np.ones(len(value_K), np.bool_)
    np.not_equal(value_K[1:], value_K[:-1], out=differs_K[1:])
    return differs_K


def _kept(block: Samples, when: str | None) -> NDArray[np.bool_]:
    """(B,) whether a sample is remembered: its meta slot `when` is neither 0 nor missing."""
    if when is None:
        return np.ones(len(block), np.bool_)
    kept_B: NDArray[np.bool_] = np.nan_to_num(block.meta[when].astype(np.float64), nan=0.0) != 0
    return kept_B
