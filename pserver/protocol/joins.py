"""Impressions and clicks as ranks send them to the shards, and the samples that shards release.

Samples are bytes here: the trainer makes them, and reads them again. pserver.tables.pass_joins answers.

Shapes: Q events, A events of a rank for all shards, K runs of events of one stream, E samples that are released, X of
them by no click, P chosen ones, N bytes of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from headrace.lists import are_offsets, joined_lists, pick
from headrace.pserver.errors import InvalidShardCall

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

JOIN_TABLE = "join-pending"
"""The table of the impressions and clicks that wait for each other."""


class JoinOutcome(IntEnum):
    """The outcome of one event."""

    HELD = 0
    """It waits for the other one."""
    JOINED = 1
    """Its sample, or that of the click's impression, is released with the click's label, or waits on with it."""
    REPEATED_IMPRESSION = 2
    """Its key has an impression in the window already; it is dropped."""
    REPEATED_CLICK = 3
    """Its impression has a click already; it is dropped."""
    LATE = 4
    """A click that ends the window by being later: it is dropped. Or an impression that waits, and whose click was too
    late."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The event times of a rank's part of a pass, in the order of the log."""

    time_A: F64
    """Unix seconds, finite."""
    stream_K: U64
    """The streams of runs of events."""
    length_K: I64
    """Events of each run."""

    def __len__(self) -> int:
        return len(self.time_A)

    @property
    def stream_A(self) -> U64:
        """The stream of each event."""
        return np.repeat(self.stream_K, self.length_K)

    def between(self, begin: int, end: int) -> "PassTimes":
        """Some of the times, with the streams of all."""
        return PassTimes(self.time_A[begin:end], self.stream_K, self.length_K)


@dataclass(frozen=True, slots=True)
class JoinEvents:
    """The events of one rank in one pass, or those of them that one shard holds the keys of."""

    pass_number: int
    times: PassTimes
    """Those of all events of the rank."""
    key_Q: U64
    place_Q: I64
    """Number of the event among those of its rank, from 0."""
    time_Q: F64
    """Unix seconds, finite."""
    label_Q: F32
    """That of a click; 0: an impression."""
    holds: bool
    """Whether clicked impressions wait for the end of the window, too."""
    offset_Q1: I64
    """Event q has the sample `data_N[offset_Q1[q]:offset_Q1[q + 1]]`; a click has none."""
    data_N: U8

    def check(self, *, whole: bool) -> None:
        """Raise InvalidShardCall for arrays that do not fit each other, or what is no number. `whole`: not a part."""
        times, num = self.times, len(self.key_Q)
        num_events = int(times.length_K.sum())
        fits = num == len(self.time_Q) == len(self.label_Q) == len(self.place_Q)
        fits &= len(times.stream_K) == len(times.length_K) and len(times) <= num_events
        fits &= not whole or len(times) == num_events
        if not fits or ((self.place_Q < 0) | (self.place_Q >= num_events)).any():
            raise InvalidShardCall("events of a join that do not fit each other")
        if not are_offsets(self.offset_Q1, num, len(self.data_N)):
            raise InvalidShardCall("samples of a join that do not fit their lengths")
        if not all(np.isfinite(each).all() for each in (self.time_Q, self.label_Q, times.time_A)):
            raise InvalidShardCall("events of a join with a time or a label that is no number")

    def chosen(self, at_P: I64) -> "JoinEvents":
        """Some of the events."""
        columns = self.key_Q[at_P], self.place_Q[at_P], self.time_Q[at_P], self.label_Q[at_P], self.holds
        return JoinEvents(self.pass_number, self.times, *columns, *pick(self.offset_Q1, self.data_N, at_P))

    @classmethod
    def whole(cls, parts: Sequence["JoinEvents"]) -> "JoinEvents":
        """The events of one rank, from parts of them in order."""
        first = parts[0]
        return cls(
            first.pass_number,
            replace(first.times, time_A=np.concatenate([part.times.time_A for part in parts])),
            np.concatenate([part.key_Q for part in parts]),
            np.concatenate([part.place_Q for part in parts]),
            np.concatenate([part.time_Q for part in parts]),
            np.concatenate([part.label_Q for part in parts]),
            first.holds,
            *joined_lists([(part.offset_Q1, part.data_N) for part in parts]),
        )

    @classmethod
    def concat(cls, parts: Sequence["JoinEvents"]) -> "JoinEvents":
        """The events of several ranks in their order, numbered through."""
        before = np.cumsum([0, *(len(part.times) for part in parts)]).tolist()
        times = [(part.times.time_A, part.times.stream_K, part.times.length_K) for part in parts]
        return cls(
            parts[0].pass_number,
            PassTimes(*(np.concatenate(column) for column in zip(*times, strict=True))),
            np.concatenate([part.key_Q for part in parts]),
            np.concatenate([part.place_Q + begin for part, begin in zip(parts, before[:-1], strict=True)]),
            np.concatenate([part.time_Q for part in parts]),
            np.concatenate([part.label_Q for part in parts]),
            parts[0].holds,
            *joined_lists([(part.offset_Q1, part.data_N) for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class JoinedSamples:
    """Samples that are released, with their labels."""

    key_E: U64
    order_E: U64
    """Place of the impression in the log: the pass in the upper 32 bits, its number in the pass in the others."""
    time_E: F64
    """Event time of the impression."""
    label_E: F32
    offset_E1: I64
    data_N: U8

    def __len__(self) -> int:
        return len(self.key_E)

    def chosen(self, at_P: I64) -> "JoinedSamples":
        """Some of the samples, in this order."""
        columns = self.key_E[at_P], self.order_E[at_P], self.time_E[at_P], self.label_E[at_P]
        return JoinedSamples(*columns, *pick(self.offset_E1, self.data_N, at_P))

    @classmethod
    def concat(cls, parts: Sequence["JoinedSamples"]) -> "JoinedSamples":
        """The samples of all parts."""
        return cls(
            np.concatenate([part.key_E for part in parts]),
            np.concatenate([part.order_E for part in parts]),
            np.concatenate([part.time_E for part in parts]),
            np.concatenate([part.label_E for part in parts]),
            *joined_lists([(part.offset_E1, part.data_N) for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class JoinAnswers:
    """The answer to the events of one rank."""

    outcome_Q: U8
    """A JoinOutcome for each event."""
    joined: JoinedSamples
    """One for each event with JoinOutcome.JOINED, in their order; none where clicked impressions wait on."""
    position_Q: I64
    """Where each event counts, among all events of the pass."""
    expired: JoinedSamples
    """Impressions that still wait and whose window has ended, by their order in the log: this rank's part of them."""
    end_X: I64
    """Position of the event that ends the window of each."""
    num_unmatched: int
    """Clicks without an impression that are given up: this rank's part of them."""


@dataclass(frozen=True, slots=True)
class JoinAnswersPart:
    """One message of an answer: its lists go on in the next one."""

    answers: JoinAnswers
    num_parts: int
    """Of the whole answer."""
