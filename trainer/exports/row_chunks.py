"""Rows of exports as arrays, chunk by chunk; merges streams of chunks: a replay, or a comparison of two states.

A stream is an iterator of chunks whose rows ascend by `order_of(key)`, the order of stores and of export files.
trainer.exports.reader reads the chunks. Memory is bounded: one chunk of each stream at a time.

Shapes: R rows of a chunk, D length of the vector, P pairs of one key in two chunks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.pserver.store.row_store import sort_order_of
from headrace.trainer.exports.row_values import F32, decode, decoded_rows

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
OnRows = Callable[[int, int | None], None]
"""Is called with the number of rows that are done, and of how many if that is known."""


class KeysOutOfOrder(BadInput):
    """The keys of a file do not ascend, or a key occurs twice."""


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Some rows, or some tombstones; values have the type of the file."""

    slots: tuple[str, ...]
    """Slot names; `slot_R` holds indices into them."""
    slot_R: I32
    sign_R: U64
    key_R: U64
    weight_R: NDArray[Any] | None = None
    """None without a first-order weight, and for tombstones."""
    vector_RD: NDArray[Any] | None = None
    """None where D is 0, and for tombstones."""
    scale_R: F32 | None = None
    """None for types without scales."""

    def __len__(self) -> int:
        return len(self.key_R)

    @property
    def values(self) -> F32:
        """(R, W) weight, if any, then vector, in float32."""
        return decoded_rows(self, len(self))

    def names(self) -> list[str]:
        """(R,) slot names."""
        return [self.slots[slot] for slot in self.slot_R.tolist()]

    def take(self, rows: Any) -> "RowChunk":
        """The rows that an index array, a mask or a slice selects."""

        def chosen(array: Any) -> Any:
            return None if array is None else array[rows]

        columns = (self.slot_R, self.sign_R, self.key_R, self.weight_R, self.vector_RD, self.scale_R)
        return RowChunk(self.slots, *(chosen(column) for column in columns))

    def decoded(self) -> "RowChunk":
        """The same rows in float32."""
        weight_R, vector_RD = decode(self)
        return replace(self, weight_R=weight_R, vector_RD=vector_RD, scale_R=None)


def concatenate(chunks: Sequence[RowChunk]) -> RowChunk:
    """Chunks of one kind concatenated; there is at least one."""
    if len(chunks) == 1:
        return chunks[0]
    slots = tuple(dict.fromkeys(name for chunk in chunks for name in chunk.slots))
    numbers = {name: number for number, name in enumerate(slots)}

    def column(name: str) -> Any:
        found = [getattr(chunk, name) for chunk in chunks]
        return None if found[0] is None else np.concatenate(found)

    maps = [np.array([numbers[name] for name in chunk.slots] or [0], np.int32) for chunk in chunks]
    slot_R = np.concatenate([of[chunk.slot_R] for of, chunk in zip(maps, chunks, strict=True)])
    return RowChunk(slots, slot_R, *(column(name) for name in ("sign_R", "key_R", "weight_R", "vector_RD", "scale_R")))


@dataclass(slots=True)
class ChunkStream:
    """A stream of chunks and the position in it."""

    chunks: Iterator[RowChunk]
    what: str
    """Name of the stream, for errors."""
    gone: bool = False
    """Whether these are tombstones."""
    _held: RowChunk | None = None
    _order_R: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    _last: int = -1

    def fill(self) -> bool:
        """Read the next chunk if the current one is used up -> whether rows are left. Raises KeysOutOfOrder."""
        while self._held is None or not len(self._held):
            self._held = next(self.chunks, None)
            if self._held is None:
                return False
            self._order_R = sort_order_of(self._held.key_R)
            self._check()
        return True

    def _check(self) -> None:
        order_R = self._order_R
        if not len(order_R):
            return
        assert self._held is not None
        falls_R = np.flatnonzero(order_R[1:] <= order_R[:-1]) + 1
        at = 0 if int(order_R[0]) <= self._last else int(falls_R[0]) if len(falls_R) else -1
        if at >= 0:
            raise KeysOutOfOrder(
                f"{self.what}: key {int(self._held.key_R[at])} (sign {int(self._held.sign_R[at])} of slot "
                f"{self._held.slots[int(self._held.slot_R[at])]!r}) occurs twice or out of order; export it again"
            )
        self._last = int(order_R[-1])

    @property
    def end(self) -> int:
        """Order of the last row of the current chunk."""
        return int(self._order_R[-1])

    def upto(self, end: int) -> RowChunk:
        """Take the rows of the current chunk up to the order `end`."""
        assert self._held is not None
        count = int(np.searchsorted(self._order_R, np.uint64(end), side="right"))
        taken, self._held = self._held.take(slice(count)), self._held.take(slice(count, None))
        self._order_R = self._order_R[count:]
        return taken


def replay_chunks(streams: Sequence[ChunkStream]) -> Iterator[RowChunk]:
    """The state after all streams, which are given oldest first: the newest row of each key, unless it is deleted."""
    while live := [stream for stream in streams if stream.fill()]:
        end = min(stream.end for stream in live)
        rows = [stream.upto(end) for stream in live]
        left = _newest([len(chunk) for chunk in rows], np.concatenate([sort_order_of(chunk.key_R) for chunk in rows]))
        gone = np.repeat([stream.gone for stream in live], [len(chunk) for chunk in rows])
        kept = left[~gone[left]]
        place = np.cumsum(~gone) - 1  # among the rows that are not tombstones
        if len(kept):
            yield concatenate([chunk for chunk, stream in zip(rows, live, strict=True) if not stream.gone]).take(
                place[kept]
            )


def _newest(lengths: Sequence[int], order_N: U64) -> NDArray[np.int64]:
    """Indices of the rows, in concatenated chunks, that are the newest of their key; ascending by order."""
    age_N = np.repeat(np.arange(len(lengths)), lengths)
    sorted_N = np.lexsort((age_N, order_N))
    ordered_N = order_N[sorted_N]
    last_N = np.ones(len(sorted_N), bool)
    last_N[:-1] = ordered_N[1:] != ordered_N[:-1]
    newest: NDArray[np.int64] = sorted_N[last_N]
    return newest


Row = tuple[str, int, float | None, tuple[float, ...]]
"""Slot, sign, weight, vector."""


def replayed_reference(streams: Sequence[tuple[bool, Mapping[int, Row]]]) -> dict[int, Row]:
    """Reference for `replay_chunks`: takes (whether tombstones, rows by key) oldest first, returns the state by key."""
    state: dict[int, Row] = {}
    for gone, rows in streams:
        for key, row in rows.items():
            if gone:
                state.pop(key, None)
            else:
                state[key] = row
    return state


@dataclass(frozen=True, slots=True)
class ComparedChunk:
    """A range of keys in two states: P pairs of rows for keys in both, single rows for keys in only one."""

    old: RowChunk
    new: RowChunk
    gone: RowChunk
    made: RowChunk


def compare_states(old: Iterator[RowChunk], new: Iterator[RowChunk]) -> Iterator[ComparedChunk]:
    """Two states compared, in order of keys."""
    first, second = ChunkStream(old, "the old state"), ChunkStream(new, "the new state")
    while True:
        live = [stream for stream in (first, second) if stream.fill()]
        if not live:
            return
        end = min(stream.end for stream in live)
        a, b = (stream.upto(end) if stream in live else _none() for stream in (first, second))
        in_b, in_a = np.isin(a.key_R, b.key_R), np.isin(b.key_R, a.key_R)
        yield ComparedChunk(a.take(in_b), b.take(in_a), a.take(~in_b), b.take(~in_a))


def _none() -> RowChunk:
    return RowChunk((), np.empty(0, np.int32), np.empty(0, np.uint64), np.empty(0, np.uint64))
