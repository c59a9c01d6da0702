"""Samples as bytes, one string each, and back: for samples that wait on the shards.

A string has, in the order of the schema: for each sparse slot its number of signs (uint32), the signs (uint64), and
their weights (float32) where the slot has weights; the floats of each dense slot; the value of each meta slot, text as
its number of bytes (uint32) and UTF-8. Numbers are little-endian. Event number and time are left to the caller.

Shapes: B samples, C cells of a column, N bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32, F64, I64, Ragged, Samples
from headrace.dataset.spec.config import DenseSlot, MetaSlot
from headrace.dataset.spec.schema import Schema, Slot
from headrace.kernel_cache import njit
from headrace.lists import offsets_of

U8 = NDArray[np.uint8]
META_TYPES: dict[str, type[np.generic]] = {"float": np.float32, "uint64": np.uint64, "int64": np.int64}
SIGN_BYTES, WEIGHT_BYTES, COUNT_BYTES = 8, 4, 4


class InvalidSampleBytes(ValueError):
    """Bytes that are no samples of the schema."""


@njit(nogil=True, cache=True)
def scatter_bytes(data_N, offset_B1, at_B, out_N):  # type: ignore[no-untyped-def]
    """Write the bytes of each cell to `out_N`, from `at_B` on, which advances."""
    for b in range(len(at_B)):
        for n in range(offset_B1[b], offset_B1[b + 1]):
            out_N[at_B[b]] = data_N[n]
            at_B[b] += 1


@njit(nogil=True, cache=True)
def gather_bytes(data_N, at_B, offset_B1, out_N):  # type: ignore[no-untyped-def]
    """The inverse of `scatter_bytes`: read each cell into `out_N`."""
    for b in range(len(at_B)):
        for n in range(offset_B1[b], offset_B1[b + 1]):
            out_N[n] = data_N[at_B[b]]
            at_B[b] += 1


def encode_samples(samples: Samples, schema: Schema) -> tuple[I64, U8]:
    """(B + 1,) offsets and (N,) bytes of samples."""
    cells = [cell for slot in schema.slots for cell in _cells_of(samples, slot)]
    length_B = np.zeros(len(samples), np.int64)
    for offset_B1, _ in cells:
        length_B += np.diff(offset_B1)
    offset_B1 = offsets_of(length_B)
    out_N, at_B = np.empty(int(offset_B1[-1]), np.uint8), offset_B1[:-1].copy()
    for of_cells_B1, data_N in cells:
        scatter_bytes(data_N, of_cells_B1, at_B, out_N)
    return offset_B1, out_N


def decode_samples(offset_B1: I64, data_N: U8, schema: Schema, event_B: I64, time_s_B: F64) -> Samples:
    """The inverse of `encode_samples`. Raises InvalidSampleBytes."""
    reader = _Cells(np.ascontiguousarray(data_N), offset_B1)
    sparse, dense, meta = dict[str, Ragged](), dict[str, F32](), dict[str, NDArray[Any]]()
    for slot in schema.slots:
        if slot in schema.sparse:
            sparse[slot.name] = reader.ragged(weighted=slot.sparse.weighted)
        elif slot in schema.dense:
            dense[slot.name] = reader.numbers(np.float32, _size_of(slot))
        else:
            meta[slot.name] = reader.meta(slot)
    reader.end()
    return Samples(sparse, dense, meta, event_B, time_s_B)


def _cells_of(samples: Samples, slot: Slot) -> Sequence[tuple[I64, U8]]:
    """The cells of a slot, as offsets and bytes: one list for each part of it."""
    if slot.name in samples.sparse:
        column = samples.sparse[slot.name]
        parts = [_even(np.diff(column.offset_B1).astype(np.uint32), COUNT_BYTES)]
        parts.append((column.offset_B1 * SIGN_BYTES, _bytes(column.values_N)))
        if slot.sparse.weighted:
            assert column.weights_N is not None, "a slot with weights"
            parts.append((column.offset_B1 * WEIGHT_BYTES, _bytes(column.weights_N)))
        return parts
    if slot.name in samples.dense:
        column_BS = samples.dense[slot.name].astype(np.float32)
        return [_even(column_BS, 4 * column_BS.shape[1])]
    values_B = samples.meta[slot.name]
    if _type_of(slot) != "string":
        fixed_B = values_B.astype(META_TYPES[_type_of(slot)])
        return [_even(fixed_B, fixed_B.itemsize)]
    texts = [str(value).encode() for value in values_B]
    lengths_B = np.array([len(text) for text in texts], np.uint32)
    offset_B1 = offsets_of(lengths_B.astype(np.int64))
    return [_even(lengths_B, COUNT_BYTES), (offset_B1, np.frombuffer(b"".join(texts), np.uint8))]


class _Cells:
    """Reads one column of cells after the other."""

    def __init__(self, data_N: U8, offset_B1: I64) -> None:
        self._data_N, self._at_B, self._end_B = data_N, offset_B1[:-1].copy(), offset_B1[1:]

    def _read(self, length_B: I64) -> U8:
        if (self._at_B + length_B > self._end_B).any():
            raise InvalidSampleBytes("a sample ends in the middle of a slot")
        offset_B1 = offsets_of(length_B)
        out_N = np.empty(int(offset_B1[-1]), np.uint8)
        gather_bytes(self._data_N, self._at_B, offset_B1, out_N)
        return out_N

    def _counts(self) -> I64:
        return self._read(np.full(len(self._at_B), COUNT_BYTES)).view(np.uint32).astype(np.int64)

    def ragged(self, *, weighted: bool) -> Ragged:
        """A sparse slot."""
        count_B = self._counts()
        values_N = self._read(count_B * SIGN_BYTES).view(np.uint64)
        weights_N = self._read(count_B * WEIGHT_BYTES).view(np.float32) if weighted else None
        return Ragged(values_N, offsets_of(count_B), weights_N)

    def numbers(self, kind: type[np.generic], size: int) -> NDArray[Any]:
        """(B, size) numbers."""
        bytes_each = np.dtype(kind).itemsize * size
        return self._read(np.full(len(self._at_B), bytes_each)).view(kind).reshape(-1, size)

    def meta(self, slot: Slot) -> NDArray[Any]:
        """(B,) values of a meta slot."""
        if _type_of(slot) != "string":
            return self.numbers(META_TYPES[_type_of(slot)], 1)[:, 0]
        length_B = self._counts()
        text, offset_B1 = self._read(length_B).tobytes(), offsets_of(length_B).tolist()
        found_B = np.empty(len(length_B), object)
        for b in range(len(length_B)):
            found_B[b] = text[offset_B1[b] : offset_B1[b + 1]].decode()
        return found_B

    def end(self) -> None:
        """Raise InvalidSampleBytes unless every sample was read to its end."""
        if (self._at_B != self._end_B).any():
            raise InvalidSampleBytes("a sample is longer than its slots")


def _type_of(slot: Slot) -> str:
    assert isinstance(slot.entry, MetaSlot)
    return slot.entry.type


def _size_of(slot: Slot) -> int:
    assert isinstance(slot.entry, DenseSlot)
    return slot.entry.size


def _even(values: NDArray[Any], bytes_each: int) -> tuple[I64, U8]:
    return np.arange(len(values) + 1, dtype=np.int64) * bytes_each, _bytes(values)


def _bytes(values: NDArray[Any]) -> U8:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
