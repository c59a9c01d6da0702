"""Samples in columns, from the pipe to the trainer, and cutting them into batches.

Shapes: B samples, N signs of one slot.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.lists import joined_lists, places_of_values

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
BYTES_OF_TEXT = 64
"""Bytes of a text of a meta slot, beside its characters, more or less."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """The signs of one sparse slot: sample b has `values_N[offset_B1[b]:offset_B1[b + 1]]`."""

    values_N: U64
    offset_B1: I64
    """B + 1 offsets, from 0."""
    weights_N: F32 | None = None

    def slice(self, begin: int, end: int) -> "Ragged":
        """Samples `begin` to `end` (exclusive)."""
        first, last = int(self.offset_B1[begin]), int(self.offset_B1[end])
        weights_N = None if self.weights_N is None else self.weights_N[first:last]
        return Ragged(self.values_N[first:last], self.offset_B1[begin : end + 1] - first, weights_N)

    def take(self, order_B: I64) -> "Ragged":
        """The signs of the samples `order_B`, in that order."""
        offset_B1, place_N = places_of_values(self.offset_B1, order_B)
        weights_N = None if self.weights_N is None else self.weights_N[place_N]
        return Ragged(self.values_N[place_N], offset_B1, weights_N)

    def first_B(self) -> U64:
        """(B,) the first sign of each sample, 0 where it has none."""
        begin_B, end_B = self.offset_B1[:-1], self.offset_B1[1:]
        signs = np.append(self.values_N, np.uint64(0))
        return np.where(end_B > begin_B, signs[np.minimum(begin_B, len(self.values_N))], np.uint64(0))

    @classmethod
    def concat(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """Concatenate the parts."""
        offset_B1, values_N = joined_lists([(part.offset_B1, part.values_N) for part in parts])
        weights = [part.weights_N for part in parts if part.weights_N is not None]
        return cls(values_N, offset_B1, np.concatenate(weights) if weights else None)


def _have_the_same_offsets(column: Ragged, before: Ragged) -> bool:
    """Whether two columns share one array of offsets, and have no weights: what is made of it is made once."""
    return column.offset_B1 is before.offset_B1 and column.weights_N is None


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one segment, in pipe order. The mappings are in the order of the schema."""

    sparse: Mapping[str, Ragged]
    dense: Mapping[str, F32]
    """(B, size) each."""
    meta: Mapping[str, NDArray[Any]]
    """(B,) each: float32, uint64, int64, or object for strings."""
    event_B: I64
    """Position of the sample's event in its partition, never decreasing; a running number if it is unknown."""
    time_s_B: F64
    """Event time in unix seconds; NaN if there is none."""
    num_samples: int = field(default=-1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", len(self.event_B))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, more or less."""
        num = self.event_B.nbytes + self.time_s_B.nbytes
        for column in self.sparse.values():
            weights = 0 if column.weights_N is None else column.weights_N.nbytes
            num += column.values_N.nbytes + column.offset_B1.nbytes + weights
        for values in (*self.dense.values(), *self.meta.values()):
            num += values.nbytes
            if values.dtype == np.object_:
                num += sum(BYTES_OF_TEXT + len(text or "") for text in values)
        return num

    def slice(self, begin: int, end: int) -> "Samples":
        """Samples `begin` to `end` (exclusive), without copying values."""
        sparse: dict[str, Ragged] = {}
        before = part = Ragged(np.empty(0, np.uint64), np.zeros(1, np.int64))
        for name, column in self.sparse.items():
            if _have_the_same_offsets(column, before):
                first, last = int(column.offset_B1[begin]), int(column.offset_B1[end])
                part = Ragged(column.values_N[first:last], part.offset_B1)
            else:
                part = column.slice(begin, end)
            sparse[name], before = part, column
        return Samples(
            sparse,
            {name: column[begin:end] for name, column in self.dense.items()},
            {name: column[begin:end] for name, column in self.meta.items()},
            self.event_B[begin:end],
            self.time_s_B[begin:end],
        )

    def take(self, order_B: I64) -> "Samples":
        """The samples `order_B`, in that order."""
        return Samples(
            {name: column.take(order_B) for name, column in self.sparse.items()},
            {name: column[order_B] for name, column in self.dense.items()},
            {name: column[order_B] for name, column in self.meta.items()},
            self.event_B[order_B],
            self.time_s_B[order_B],
        )

    @classmethod
    def concat(cls, parts: Sequence["Samples"]) -> "Samples":
        """Concatenate the parts, at least one, all of one schema."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        sparse: dict[str, Ragged] = {}
        before: Sequence[Ragged] = ()
        offset_B1: I64 | None = None
        for name in first.sparse:
            columns = [part.sparse[name] for part in parts]
            if offset_B1 is not None and all(map(_have_the_same_offsets, columns, before)):
                sparse[name] = Ragged(np.concatenate([column.values_N for column in columns]), offset_B1)
            else:
                sparse[name] = Ragged.concat(columns)
            before, offset_B1 = columns, sparse[name].offset_B1
        return cls(
            sparse,
            {name: np.concatenate([p.dense[name] for p in parts]) for name in first.dense},
            {name: np.concatenate([p.meta[name] for p in parts]) for name in first.meta},
            np.concatenate([p.event_B for p in parts]),
            np.concatenate([p.time_s_B for p in parts]),
        )


def cut_batches(blocks: Iterator[Samples], batch_size: int) -> Iterator[Samples]:
    """Cut blocks of any size into batches of `batch_size` samples; the last may be smaller.

    The samples of one event stay together: a batch ends at the first event boundary at or after `batch_size`.
    Neighbouring samples with equal `event_B` are one event; blocks never split an event.
    """
    held: list[Samples] = []
    num_held = 0
    for block in blocks:
        begin = 0
        while (end := _boundary(block.event_B, begin + batch_size - num_held)) <= len(block):
            yield Samples.concat([*held, block.slice(begin, end)])
            begin, held, num_held = end, [], 0
        if begin < len(block):
            held.append(block.slice(begin, len(block)))
            num_held += len(block) - begin
    if num_held:
        yield Samples.concat(held)


def merge_batches(batches: Iterator[Samples], num_merged: int) -> Iterator[Samples]:
    """Put `num_merged` batches together; the last ones may be fewer. `batch_ends` finds them again."""
    while merged := list(islice(batches, num_merged)):
        yield Samples.concat(merged)


def batch_ends(event_B: I64, batch_size: int) -> tuple[int, ...]:
    """One past the last sample of each batch that `cut_batches` would make of these samples."""
    ends: list[int] = []
    while not ends or ends[-1] < len(event_B):
        ends.append(min(_boundary(event_B, (ends[-1] if ends else 0) + batch_size), len(event_B)))
    return tuple(ends)


def _boundary(event_B: I64, at: int) -> int:
    """The first index from `at` on where an event ends; len + 1 if `at` is beyond the end."""
    if at > len(event_B):
        return len(event_B) + 1
    while at < len(event_B) and event_B[at] == event_B[at - 1]:
        at += 1
    return at
