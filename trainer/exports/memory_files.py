"""Histories and counters in exports: their Parquet columns from rows as shards hold them, and back, bit for bit.

    histories-<slot>-<n>.parquet    slot, sign, key: those of the history's key; history: signs, oldest first
    counters-<slot>-<n>.parquet     slot, sign, key: those of the counters'; window_s, begin_s, length_s, shows, clicks
    tombstones-<table>-<n>.parquet  of a delta: slot, sign, key

A base has all keys as they are at its version, a delta those that changed since its parent, each whole: what it says of
a key replaces what was known of it. trainer.exports.history_files writes the files of a commit.

Shapes: U keys of a chunk, D words of a row, M signs of all its histories, N rows of a file of counters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config import validate
from headrace.dataset.spec.config import DenseSlot, HistorySection, SlotKind, SparseSlot
from headrace.dataset.spec.counters import CountersSection
from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import SpecError
from headrace.pserver.protocol.histories import Memory, counters_table_of, table_of
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.rows import counter_kernels, history_kernels
from headrace.trainer.exports.counter_files import COUNTED, rows_of_sub_windows, sub_windows
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.exports.parquet_files import KEYED, keyed_columns
from headrace.trainer.exports.reader import CHUNK_ROWS, Export, chunk_of
from headrace.trainer.exports.row_chunks import ChunkStream, RowChunk, replay_chunks

HISTORY = pa.field("history", pa.list_(pa.field("element", pa.uint64(), nullable=False)), nullable=False)
KINDS = ("histories", "counters")
"""Beginnings of the files' names, and keys of the manifest."""
TOLD = (*KINDS, *(f"without_{kind}" for kind in KINDS))
"""Keys of a manifest, one of which is there where the job fills slots."""


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """A slot that the job fills, as model.json tells of it."""

    slot: Slot
    table: str
    """The table of its rows on the shards."""
    remembered: Memory

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return KINDS[not isinstance(self.remembered, int)]

    @property
    def width(self) -> int:
        """D."""
        if isinstance(self.remembered, int):
            return history_kernels.width_of(self.remembered)
        return counter_kernels.width_of(self.remembered)


def served_schema(model: Mapping[str, Any]) -> Schema:
    """The sparse and dense slots of model.json, as far as histories and counters need them. Raises ExportUnusable."""
    try:
        schema = Schema(tuple(_slot(slot) for slot in model["slots"]))
    except (KeyError, TypeError, ValueError, SpecError) as error:
        raise ExportUnusable(f"model.json: its slots cannot be read: {error}") from error
    keys = [slot.history.key for slot in schema.histories]
    keys += [key for slot in schema.counters for key in slot.counters.keys]
    known = {slot.name for slot in schema.emitted.sparse}
    if unknown := [key for key in keys if key not in known]:
        raise ExportUnusable(f"model.json: {unknown[0]!r} is the key of a slot that the job fills, and no sparse slot")
    return schema


def _slot(slot: Mapping[str, Any]) -> Slot:
    if slot["kind"] == "dense":
        counters = validate(CountersSection, slot["counters"]) if "counters" in slot else None
        dense = DenseSlot(name=slot["name"], kind="dense", size=slot["size"], counters=counters)
        return Slot(slot["name"], SlotKind.DENSE, dense)
    if "history" in slot:
        sparse = SparseSlot(name=slot["name"], history=validate(HistorySection, slot["history"]))
    else:
        padding = None if slot["padding"] is None else int(slot["padding"])
        sparse = SparseSlot(name=slot["name"], padding=padding, max_len=slot["max_len"], keep=slot["keep"])
    return Slot(slot["name"], SlotKind.SPARSE, sparse, slot["group"])


def memories_at(export: Export) -> tuple[ServedMemory, ...]:
    """The slots that the job of an export fills; empty where there are none. Raises ExportUnusable."""
    return memories_of(served_schema(export.model())) if any(map(export.manifest.get, TOLD)) else ()


def memories_of(schema: Schema) -> tuple[ServedMemory, ...]:
    """The slots that the job of a schema fills, histories first."""
    histories = (ServedMemory(slot, table_of(slot.name), slot.history.last) for slot in schema.histories)
    counters = (ServedMemory(s, counters_table_of(s.name), s.counters.windows_s) for s in schema.counters)
    return (*histories, *counters)


def has_memory(export: Export, memory: ServedMemory) -> bool:
    """Whether an export has this memory: a base all of it, a delta what changed."""
    return memory.slot.name in export.manifest.get(memory.kind, {})


def schema_of(remembered: Memory) -> pa.Schema:
    """The columns of a file."""
    return pa.schema([*KEYED, HISTORY] if isinstance(remembered, int) else [*KEYED, *COUNTED])


def columns_of(key: str, remembered: Memory, sign_U: U64, keys_U: U64, rows_UD: F32) -> list[pa.Array]:
    """The columns of rows; `key`: the slot of the key. Counters have several rows of a file for a key."""
    if not isinstance(remembered, int):
        row_N, counts = sub_windows(rows_UD, remembered)
        return [*keyed_columns(key, sign_U[row_N], keys_U[row_N]), *(pa.array(each) for each in counts)]
    count_U, sign_UL = history_kernels.unpacked(rows_UD)
    sign_M = sign_UL[np.arange(sign_UL.shape[1]) < count_U[:, None]]
    offset_U1 = np.concatenate([np.zeros(1, np.int32), np.cumsum(count_U, dtype=np.int32)])
    signs = pa.ListArray.from_arrays(pa.array(offset_U1), pa.array(sign_M), type=HISTORY.type)
    return [*keyed_columns(key, sign_U, keys_U), signs]


def replay(chain: Sequence[Export], memory: ServedMemory, *, gone: bool = False) -> Iterator[RowChunk]:
    """The rows after a chain as `vector_RD`, or of some deltas what changed; `gone`: the keys deleted last instead.

    Raises ExportUnusable, KeysOutOfOrder.
    """
    streams = []
    for export in chain:
        what = f"{export.name}, {memory.kind} of slot {memory.slot.name!r}"
        streams.append(ChunkStream(_tombstones(export, memory), f"tombstones of {what}", gone=not gone))
        streams.append(ChunkStream(_rows(export, memory), what, gone=gone))
    return replay_chunks(streams)


def _rows(export: Export, memory: ServedMemory) -> Iterator[RowChunk]:
    """Rows as shards hold them."""
    for path, batch in _batches(export, f"{memory.kind}-{memory.slot.name}", schema_of(memory.remembered)):
        chunk = chunk_of(batch, path, 0)
        if isinstance(memory.remembered, int):
            rows_UD = _history_rows(batch.column("history"), memory.remembered, f"{export.place.address}: {path}")
            yield RowChunk(chunk.slots, chunk.slot_R, chunk.sign_R, chunk.key_R, None, rows_UD)
            continue
        counts = [batch.column(field.name).to_numpy() for field in COUNTED]
        first_U = np.flatnonzero(np.r_[True, chunk.key_R[1:] != chunk.key_R[:-1]])
        number_N = np.repeat(np.arange(len(first_U)), np.diff(np.r_[first_U, len(chunk)]))
        try:
            rows_UD = rows_of_sub_windows(number_N, counts, memory.remembered)
        except ValueError as error:
            raise ExportUnusable(f"{export.place.address}: {path}: {error}") from error
        keys = chunk.take(first_U)
        yield RowChunk(keys.slots, keys.slot_R, keys.sign_R, keys.key_R, None, rows_UD)


def _history_rows(lists: pa.ListArray, last: int, what: str) -> F32:
    count_U, sign_M = lists.value_lengths().to_numpy(), lists.flatten().to_numpy()
    if count_U.max(initial=0) > last:
        raise ExportUnusable(f"{what}: a history of {count_U.max()} signs, and model.json says {last} at most")
    sign_UL = np.zeros((len(count_U), last), np.uint64)
    sign_UL[np.arange(last) < count_U[:, None]] = sign_M
    return history_kernels.packed(count_U.astype(np.int64), sign_UL)


def _tombstones(export: Export, memory: ServedMemory) -> Iterator[RowChunk]:
    for path, batch in _batches(export, f"tombstones-{memory.table}", pa.schema(KEYED)):
        yield chunk_of(batch, path, 0)


def _batches(export: Export, prefix: str, schema: pa.Schema) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Batches of the files `prefix`-<n>.parquet in order, none of which ends inside the rows of a key."""
    for path in export.numbered(prefix):
        try:
            with pq.ParquetFile(export.file(path)) as parquet:
                if missing := [name for name in schema.names if name not in parquet.schema_arrow.names]:
                    raise ExportUnusable(f"{export.place.address}: {path} lacks the column {missing[0]}")
                for batch in whole_keys(parquet.iter_batches(CHUNK_ROWS, columns=schema.names)):
                    yield path, _typed(batch, schema)
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError where the schema knows no nulls
            raise ExportUnusable(f"{export.place.address}: {path} cannot be read: {error}") from error


def _typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with the types of `schema`. Raises ValueError for nulls, and for values that would change."""
    typed = batch.select(schema.names).cast(schema)
    if HISTORY.name in schema.names and typed.column(HISTORY.name).flatten().null_count:
        raise ValueError("a history has nulls")
    return typed


def whole_keys(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, in batches that hold all rows of each of their keys."""
    held: pa.RecordBatch | None = None
    for batch in batches:
        joined = batch if held is None else pa.concat_batches([held, batch])
        keys_N = joined.column("key").to_numpy()
        other_N = np.flatnonzero(keys_N != keys_N[-1])
        end = int(other_N[-1]) + 1 if len(other_N) else 0
        if end:
            yield joined.slice(0, end)
        held = joined.slice(end)
    if held is not None:
        yield held
