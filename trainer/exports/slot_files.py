"""Histories, counters and statistics of rows in exports: one class for each kind, one writer and one reader for all.

    histories-<slot>-<n>.parquet    slot, sign, key: those of the history's key; history: signs, oldest first
    counters-<slot>-<n>.parquet     slot, sign, key: those of the counters'; window_s, begin_s, length_s, shows, clicks
    statistics-<slot>-<n>.parquet   slot, sign, key of each row; show, click: on the day of the export
    tombstones-<table>-<n>.parquet  of a delta: slot, sign, key

A base has all keys as they are at its version. A delta has those that changed since its parent, each whole, and the
deleted ones; no threshold leaves any out.

Shows and clicks fade each day, also those of rows that nothing touches. So a manifest has the day of its export, and
the rate of every day up to it; a reader brings what it has from older exports to the day of the newest, product by
product, as shards do. Then its numbers are those of a base of that version, bit for bit, and a delta has changed rows
alone.

A row of counters is one sub-window: of the window of `window_s` seconds, from the unix time `begin_s` on, `length_s`
long; these three are 0 for the counts of all time. Sub-windows without shows are left out. A half-life of h seconds is
one row, with `window_s` = -h and counts as of its newest sub-window, in 1 / 256.

Shapes: U keys of a chunk, D words of a row, C words of counters, P places of a window, M signs of all histories of a
chunk, N rows of the file.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from headrace.config import Count, Section, SlotGroup, validate
from headrace.dataset.spec.config import DenseSlot, HistorySection, SlotKind, SparseSlot
from headrace.dataset.spec.counters import CountersSection
from headrace.dataset.spec.row_statistics import StatisticsSection
from headrace.dataset.spec.schema import Schema, Slot
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.priority import Pace
from headrace.pserver.config import WindowS
from headrace.pserver.lifecycle.aging import RowStatistics
from headrace.pserver.lifecycle.day_decay import DayDecay, dated
from headrace.pserver.protocol.histories import counters_table_of, statistics_of, table_of
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows import history_kernels
from headrace.pserver.rows.counter_kernels import MAX_COUNT, PARTS, UNIT, packed, unpacked, width_of, words_of
from headrace.pserver.rows.row_format import groups_of
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.exports.parquet_files import (
    KEYED,
    REST_SHARE,
    OpenFile,
    ParquetFiles,
    keyed_columns,
    signs_in_group,
)
from headrace.trainer.exports.reader import CHUNK_ROWS, ReadableExport, chunk_of
from headrace.trainer.exports.row_chunks import ChunkStream, RowChunk, replay_chunks
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, SelectedRows, weights_of

I64 = NDArray[np.int64]

HISTORY = pa.field("history", pa.list_(pa.field("element", pa.uint64(), nullable=False)), nullable=False)
COUNTED = tuple(
    pa.field(name, pa.int64(), nullable=False) for name in ("window_s", "begin_s", "length_s", "shows", "clicks")
)

HISTORIES = (
    "A slot with a history is filled by the job that trains: the last signs of slot `of`, oldest first, of earlier "
    "samples with the same sign in slot `key`, the first, where slot `when` is not 0. Exports of all tables have them "
    "in histories-<slot>-<n>.parquet: a base all, a delta those that changed, each whole; a tombstone of the table "
    "history-<slot> deletes one. Others have none (without_histories in the manifest): then whoever asks for a "
    "prediction sends the signs in the slot."
)
COUNTERS = (
    "A slot with counters is filled by the job that trains: for each window, and in it for each of `what`, a float "
    "of the earlier samples with the same sign, the first, in slot `key`; of a list of slots, in all of them. With "
    "their number n and the number c of those whose slot `click` was neither 0 nor missing: shows is log(1 + n), "
    "clicks is log(1 + c), ctr is log((c + prior * prior_weight) / (n + prior_weight) / prior), or 0 if n is 0. "
    "Logarithms are natural. A window of w seconds has the samples whose unix second s is at most the sample's t, "
    f"with s // p >= t // p - {PARTS}, where p = w / {PARTS}. Zeros without a key. Exports of all tables have the "
    "counts in counters-<slot>-<n>.parquet, by sub-window of p seconds, and by key: of a list, that of the first sign, "
    "then of each other sign ^ the key before; a base all, a delta the keys that changed, each whole; a tombstone "
    "of the table counters-<slot> deletes one. Others have none (without_counters in the manifest): then whoever asks "
    "for a prediction sends the floats in the slot."
)
HALF_LIVES = (
    "A slot with counters that names half_lives has the floats of these after those of its windows. Of a half-life of "
    f"h seconds, n and c are sums over all earlier samples with the weight 2 ** ((s // p - t // p) / {PARTS}), where "
    f"p = h / {PARTS}, in 1 / {UNIT}, rounded down. In the files its window_s is -h, and shows and clicks are in "
    f"1 / {UNIT}, with the weights of the time begin_s."
)
STATISTICS = (
    "A slot with statistics is filled by the job that trains: for each slot in `of`, with the shows s and clicks c of "
    "the rows of the sample's signs there, summed over the signs (0 without a row): log(1 + s), then log(1 + c) - "
    "log(1 + s). Logarithms are natural, and sums have 64 bits. Exports of all tables have show and click of rows in "
    "statistics-<slot>-<n>.parquet, as of the export's day, which is in the manifest: a base all, a delta those that "
    "changed; a tombstone of the table statistics-<slot> deletes one. The manifest has runs of days with one rate in "
    "decay, from day 0 to its day: on the day of the newest export, show and click of an older one are multiplied by "
    "the rate of each day from theirs on, in turn, all of it in 32 bits. Others have none (without_statistics in the "
    "manifest): then whoever asks for a prediction sends the floats in the slot."
)

PAIRS = (
    "A slot with pairs is filled by the job that trains, and by whoever serves: for each pair of slots, in order, it "
    "has an id for each of the first 32 ids of the one with each of the first 32 of the other, in that order. The id "
    'begins as 0; for the hash of the text "one,other" (rule hash), then the id of the one, then that of the other, it '
    "becomes the key (rule key) in slot group 0 of itself ^ this number."
)


class SlotFiles(Section):
    """The files of one slot, of one kind."""

    kind: str
    """Beginning of the files' names, and key of the manifest."""
    slot: str
    table: str
    """The table of the rows on the shards."""
    key: str
    """Slot of the keys; of a cross all, with blanks between."""
    group: SlotGroup
    """Slot group of the keys; of a cross, that of the last slot."""

    fields: ClassVar[tuple[pa.Field, ...]]
    """The columns beside KEYED."""

    @classmethod
    @abstractmethod
    def of_schema(cls, schema: Schema) -> Iterator[Self]:
        """Those of a job with these slots."""
        ...

    @staticmethod
    @abstractmethod
    def rules(schema: Schema) -> dict[str, str]:
        """The sentences of model.json about them, where there are any."""
        ...

    @staticmethod
    @abstractmethod
    def described(slot: Slot) -> dict[str, Any]:
        """The entry of model.json about one slot."""
        ...

    @property
    @abstractmethod
    def width(self) -> int:
        """D."""
        ...

    @property
    def source(self) -> str:
        """The table of a commit that has the rows."""
        return self.table

    def facts(self) -> dict[str, Any]:
        """The entries of the manifest that only this kind has."""
        return {}

    def of_commit(self, source: CommitTableRows) -> Self:
        """The files as of a commit, whose rows `source` has."""
        return self

    def of_export(self, export: ReadableExport) -> Self:
        """The files as of an export, which has them. Raises ExportUnusable."""
        return self

    def taken(self, chunk: SelectedRows) -> tuple[U64, F32]:
        """(U,) keys and (U, D) values of the rows of a commit that belong to the slot."""
        return chunk.keys_U, weights_of(chunk.words_UW, self.width)

    @abstractmethod
    def columns(self, sign_U: U64, keys_U: U64, rows_UD: F32) -> list[pa.Array]:
        """The columns of rows. A key may have several rows of the file."""
        ...

    @abstractmethod
    def rows(self, batch: pa.RecordBatch, keys: RowChunk, what: str) -> RowChunk:
        """The inverse of `columns`: rows as shards hold them. Raises ExportUnusable, which names `what`."""
        ...

    @property
    def parquet_schema(self) -> pa.Schema:
        """The columns of a file."""
        return pa.schema([*KEYED, *self.fields])

    def is_in(self, export: ReadableExport) -> bool:
        """Whether an export has them: a base all, a delta what changed."""
        return self.slot in export.manifest.get(self.kind, {})

    def continues(self, parent: Mapping[str, Any]) -> bool:
        """Whether a delta of the export with this manifest can say what changed."""
        return self.slot in parent.get(self.kind, {})


class Histories(SlotFiles):
    """The last signs of each key."""

    kind: Literal["histories"] = "histories"
    of: str
    """Slot whose signs are remembered."""
    last: Count
    """Most signs of a key."""

    fields = (HISTORY,)

    @classmethod
    def of_schema(cls, schema: Schema) -> Iterator[Self]:
        for slot in schema.histories:
            history, group, table = slot.history, schema.by_name[slot.history.key].group, table_of(slot.name)
            yield cls(slot=slot.name, table=table, key=history.key, group=group, of=history.of, last=history.last)

    @staticmethod
    def rules(schema: Schema) -> dict[str, str]:
        return {"histories": HISTORIES} if schema.histories else {}

    @staticmethod
    def described(slot: Slot) -> dict[str, Any]:
        if slot.kind is not SlotKind.SPARSE or (history := slot.sparse.history) is None:
            return {}
        return {"history": history.model_dump(mode="json")}

    @property
    def width(self) -> int:
        return history_kernels.width_of(self.last)

    def facts(self) -> dict[str, Any]:
        return {"key": self.key, "of": self.of}

    def columns(self, sign_U: U64, keys_U: U64, rows_UD: F32) -> list[pa.Array]:
        count_U, sign_UL = history_kernels.unpacked(rows_UD)
        sign_M = sign_UL[np.arange(sign_UL.shape[1]) < count_U[:, None]]
        offset_U1 = np.concatenate([np.zeros(1, np.int32), np.cumsum(count_U, dtype=np.int32)])
        signs = pa.ListArray.from_arrays(pa.array(offset_U1), pa.array(sign_M), type=HISTORY.type)
        return [*keyed_columns(self.key, sign_U, keys_U), signs]

    def rows(self, batch: pa.RecordBatch, keys: RowChunk, what: str) -> RowChunk:
        lists = batch.column(HISTORY.name)
        count_U, sign_M = lists.value_lengths().to_numpy(), lists.flatten().to_numpy()
        if count_U.max(initial=0) > self.last:
            raise ExportUnusable(f"{what}: a history of {count_U.max()} signs, and model.json says {self.last} at most")
        sign_UL = np.zeros((len(count_U), self.last), np.uint64)
        sign_UL[np.arange(self.last) < count_U[:, None]] = sign_M
        return _with_rows(keys, history_kernels.packed(count_U.astype(np.int64), sign_UL))


class Counters(SlotFiles):
    """Shows and clicks of each key, by window."""

    kind: Literal["counters"] = "counters"
    windows_s: tuple[WindowS, ...]
    """In seconds; 0: all time; below 0: half-lives."""

    fields = COUNTED

    @classmethod
    def of_schema(cls, schema: Schema) -> Iterator[Self]:
        for slot in schema.counters:
            keys, windows_s, table = slot.counters.keys, slot.counters.windows_s, counters_table_of(slot.name)
            group = schema.by_name[keys[-1]].group
            yield cls(slot=slot.name, table=table, key=" ".join(keys), group=group, windows_s=windows_s)

    @staticmethod
    def rules(schema: Schema) -> dict[str, str]:
        half_lives = any(slot.counters.half_lives for slot in schema.counters)
        return ({"counters": COUNTERS} if schema.counters else {}) | ({"half_lives": HALF_LIVES} if half_lives else {})

    @staticmethod
    def described(slot: Slot) -> dict[str, Any]:
        if not isinstance(slot.entry, DenseSlot) or (counters := slot.entry.counters) is None:
            return {}
        return {"counters": counters.model_dump(mode="json")}

    @property
    def width(self) -> int:
        return width_of(self.windows_s)

    def facts(self) -> dict[str, Any]:
        return {"key": self.key, "windows_s": list(self.windows_s)}

    def columns(self, sign_U: U64, keys_U: U64, rows_UD: F32) -> list[pa.Array]:
        row_N, counts = sub_windows(rows_UD, self.windows_s)
        return [*keyed_columns(self.key, sign_U[row_N], keys_U[row_N]), *(pa.array(each) for each in counts)]

    def rows(self, batch: pa.RecordBatch, keys: RowChunk, what: str) -> RowChunk:
        counts = [batch.column(field.name).to_numpy() for field in COUNTED]
        first_U = np.flatnonzero(np.r_[True, keys.key_R[1:] != keys.key_R[:-1]])
        number_N = np.repeat(np.arange(len(first_U)), np.diff(np.r_[first_U, len(keys)]))
        try:
            rows_UD = rows_of_sub_windows(number_N, counts, self.windows_s)
        except ValueError as error:
            raise ExportUnusable(f"{what}: {error}") from error
        return _with_rows(keys.take(first_U), rows_UD)


class Statistics(SlotFiles):
    """Show and click of each row of a sparse slot that a dense slot tells of.

    D = 3: show and click, and the day of which they are.
    """

    kind: Literal["statistics"] = "statistics"
    of_table: str
    """The table of the slot."""
    version: DayDecay = DayDecay()
    """The day of the commit or export, and the rates up to it."""

    fields = tuple(pa.field(name, pa.float32(), nullable=False) for name in ("show", "click"))

    @classmethod
    def of_schema(cls, schema: Schema) -> Iterator[Self]:
        for name in sorted({name for slot in schema.statistics for name in slot.statistics.slots}):
            slot = schema.by_name[name]
            yield cls(slot=name, table=statistics_of(name), key=name, group=slot.group, of_table=slot.sparse.table)

    @staticmethod
    def rules(schema: Schema) -> dict[str, str]:
        return {"statistics": STATISTICS} if schema.statistics else {}

    @staticmethod
    def described(slot: Slot) -> dict[str, Any]:
        if not isinstance(slot.entry, DenseSlot) or (statistics := slot.entry.statistics) is None:
            return {}
        return {"statistics": {"of": list(statistics.slots)}}

    @property
    def width(self) -> int:
        return 1 + len(self.fields)

    @property
    def source(self) -> str:
        return self.of_table

    def facts(self) -> dict[str, Any]:
        return self.version.message()

    def of_commit(self, source: CommitTableRows) -> Self:
        return self.model_copy(update={"version": source.decay_of(self.group)})

    def of_export(self, export: ReadableExport) -> Self:
        told = export.manifest[self.kind][self.slot]
        try:
            return self.model_copy(update={"version": DayDecay.told(told)})
        except (TypeError, ValueError) as error:
            why = f"{export.place.address}: manifest.json: statistics of slot {self.slot!r}: {error}"
            raise ExportUnusable(why) from error

    def taken(self, chunk: SelectedRows) -> tuple[U64, F32]:
        own_U = groups_of(chunk.words_UW) == self.group
        return chunk.keys_U[own_U], dated(RowStatistics.of_words(chunk.words_UW[own_U]))

    def columns(self, sign_U: U64, keys_U: U64, rows_UD: F32) -> list[pa.Array]:
        value_2U = self.version.present(rows_UD).T.copy()
        return [*keyed_columns(self.key, sign_U, keys_U), *(pa.array(each) for each in value_2U)]

    def rows(self, batch: pa.RecordBatch, keys: RowChunk, what: str) -> RowChunk:
        columns = [batch.column(field.name).to_numpy() for field in self.fields]
        columns.append(np.full(len(batch), self.version.day, np.float32))
        return _with_rows(keys, np.stack(columns, axis=1))

    def continues(self, parent: Mapping[str, Any]) -> bool:
        return "day" in parent.get(self.kind, {}).get(self.slot, {})  # exports of an older Headrace have no day


KINDS = (Histories, Counters, Statistics)
"""In the order in which they are written."""
AnySlotFiles = Annotated[Histories | Counters | Statistics, Field(discriminator="kind")]
REPLAYED = tuple(str(kind.model_fields["kind"].default) for kind in KINDS)
"""Their names in manifests and files."""
TOLD = (*REPLAYED, *(f"without_{kind}" for kind in REPLAYED))
"""Keys of a manifest, one of which is there where the job fills slots."""


def slot_files_of(schema: Schema) -> tuple[AnySlotFiles, ...]:
    """Those of a job."""
    return (*Histories.of_schema(schema), *Counters.of_schema(schema), *Statistics.of_schema(schema))


def filling(slot: Slot, found: Iterable[AnySlotFiles]) -> tuple[AnySlotFiles, ...]:
    """Those among `found` from which a server fills a slot that the job fills."""
    entry = slot.entry
    if isinstance(entry, DenseSlot) and entry.statistics is not None:
        of = entry.statistics.slots
        return tuple(each for each in found if isinstance(each, Statistics) and each.slot in of)
    return tuple(each for each in found if not isinstance(each, Statistics) and each.slot == slot.name)


def slot_files_at(export: ReadableExport) -> tuple[AnySlotFiles, ...]:
    """Those of the job of an export; empty where there are none. Raises ExportUnusable."""
    return slot_files_of(served_schema(export.model())) if any(map(export.manifest.get, TOLD)) else ()


# The writer


def write_slot_files(
    each: AnySlotFiles,
    source: CommitTableRows,
    version: int,
    since: int | None,
    open_file: OpenFile,
    deadline: Deadline,
) -> dict[str, Any]:
    """Write the files at `version`, or what changed after `since`; the manifest's entry. Raises DeltaImpossible."""
    each, rows, pace = each.of_commit(source), 0, Pace(REST_SHARE)
    selection = RowSelection(ExportCut(since=since or 0), version, is_base=since is None)
    changes = None if since is None else source.changes(since)
    chunks = source.all(selection, deadline) if changes is None else source.among(changes, selection, deadline)
    with closing(chunks), ParquetFiles(open_file, f"{each.kind}-{each.slot}", each.parquet_schema) as files:
        for chunk in chunks:
            keys_U, rows_UD = each.taken(chunk)
            files.write(each.columns(signs_in_group(keys_U, each.group), keys_U, rows_UD))
            rows += len(keys_U)
            pace.rest()
    entry = {**each.facts(), "table": each.source, "rows": rows}
    if changes is None:
        return entry
    tombstones = 0
    with ParquetFiles(open_file, f"tombstones-{each.table}", pa.schema(KEYED)) as files:
        for gone_U, group_U in source.gone(changes, selection, deadline):
            keys_U = gone_U[group_U == each.group]
            files.write(keyed_columns(each.key, signs_in_group(keys_U, each.group), keys_U))
            tombstones += len(keys_U)
    return {**entry, "tombstones": tombstones}


# The reader


def replay(chain: Sequence[ReadableExport], files: SlotFiles, *, gone: bool = False) -> Iterator[RowChunk]:
    """The rows after a chain as `vector_RD`, or of some deltas what changed; `gone`: the keys deleted last instead.

    Raises ExportUnusable, KeysOutOfOrder.
    """
    streams = []
    for export in chain:
        what = f"{export.name}, {files.kind} of slot {files.slot!r}"
        streams.append(ChunkStream(_tombstones(export, files), f"tombstones of {what}", gone=not gone))
        streams.append(ChunkStream(_rows(export, files.of_export(export)), what, gone=gone))
    return replay_chunks(streams)


def _rows(export: ReadableExport, files: SlotFiles) -> Iterator[RowChunk]:
    """Rows as shards hold them."""
    for path, batch in _batches(export, f"{files.kind}-{files.slot}", files.parquet_schema):
        yield files.rows(batch, chunk_of(batch, path, 0), f"{export.place.address}: {path}")


def _with_rows(keys: RowChunk, rows_UD: F32) -> RowChunk:
    return RowChunk(keys.slots, keys.slot_R, keys.sign_R, keys.key_R, None, rows_UD)


def _tombstones(export: ReadableExport, files: SlotFiles) -> Iterator[RowChunk]:
    for path, batch in _batches(export, f"tombstones-{files.table}", pa.schema(KEYED)):
        yield chunk_of(batch, path, 0)


def _batches(export: ReadableExport, prefix: str, schema: pa.Schema) -> Iterator[tuple[str, pa.RecordBatch]]:
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


def served_schema(model: Mapping[str, Any]) -> Schema:
    """The sparse and dense slots of model.json, as far as slots that the job fills need them. Raises ExportUnusable."""
    try:
        schema = Schema(tuple(_slot(slot) for slot in model["slots"]))
    except (KeyError, TypeError, ValueError, SpecError) as error:
        raise ExportUnusable(f"model.json: its slots cannot be read: {error}") from error
    keys = [slot.history.key for slot in schema.histories]
    keys += [key for slot in schema.counters for key in slot.counters.keys]
    keys += [name for slot in schema.statistics for name in slot.statistics.slots]
    keys += [name for slot in schema.crossed for pair in slot.sparse.pairs for name in pair]
    known = {slot.name for slot in schema.emitted.sparse}
    if unknown := [key for key in keys if key not in known]:
        raise ExportUnusable(f"model.json: {unknown[0]!r} is the key of a slot that the job fills, and no sparse slot")
    return schema


def _slot(slot: Mapping[str, Any]) -> Slot:
    if slot["kind"] == "dense":
        counters = validate(CountersSection, slot["counters"]) if "counters" in slot else None
        known = validate(StatisticsSection, slot["statistics"]) if "statistics" in slot else None
        dense = DenseSlot(name=slot["name"], kind="dense", size=slot["size"], counters=counters, statistics=known)
        return Slot(slot["name"], SlotKind.DENSE, dense)
    if "history" in slot:
        sparse = SparseSlot(name=slot["name"], history=validate(HistorySection, slot["history"]))
    elif "pairs" in slot:
        sparse = SparseSlot(name=slot["name"], pairs=slot["pairs"])
    else:
        padding = None if slot["padding"] is None else int(slot["padding"])
        sparse = SparseSlot(name=slot["name"], padding=padding, max_len=slot["max_len"], keep=slot["keep"])
    return Slot(slot["name"], SlotKind.SPARSE, sparse, slot["group"])


# Counters in a file


def sub_windows(rows_UD: F32, windows_s: Sequence[int]) -> tuple[I64, list[I64]]:
    """(N,) the place of each sub-window's row in `rows_UD`, ascending; and the columns COUNTED, (N,) each."""
    word_UC, place, found = unpacked(rows_UD), 0, []
    for window_s in windows_s:
        found += list(_of_window(word_UC[:, place : place + words_of(window_s)], window_s))
        place += words_of(window_s)
    row_N, *columns = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order_N = np.argsort(row_N, kind="stable")
    return row_N[order_N], [column_N[order_N] for column_N in columns]


def _of_window(word_UC: I64, window_s: int) -> Iterator[tuple[I64, I64, I64, I64, I64, I64]]:
    """Row, window, begin, length, shows and clicks of the sub-windows that have shows, from the oldest on."""
    part_s, newest_U = abs(window_s) // PARTS, word_UC[:, 0]
    for back in range(PARTS, -1, -1) if window_s > 0 else (0,):
        number_U = newest_U - back
        place_U = np.full(len(word_UC), int(window_s < 0), np.int64)
        if window_s > 0:
            place_U = 1 + 2 * (number_U % (PARTS + 1))
        show_U, click_U = (np.take_along_axis(word_UC, (place_U + more)[:, None], 1)[:, 0] for more in (0, 1))
        row_N = np.flatnonzero(show_U)
        same_N = np.ones(len(row_N), np.int64)
        begin_N = number_U[row_N] * part_s
        yield row_N, same_N * window_s, begin_N, same_N * part_s, show_U[row_N], click_U[row_N]


def rows_of_sub_windows(number_N: I64, counts: Sequence[I64], windows_s: Sequence[int]) -> F32:
    """The inverse of `sub_windows`: (U, C) rows of their sub-windows; `number_N`: the row of each, every one there.

    Raises ValueError for a sub-window that is of no window, not where one is, or with numbers that no row holds.
    """
    window_s_N, begin_s_N, length_s_N, show_N, click_N = counts
    num_rows = int(number_N[-1]) + 1 if len(number_N) else 0
    word_UC, place, num_taken = np.zeros((num_rows, width_of(windows_s)), np.int64), 0, 0
    for window_s in windows_s:
        of_W = np.flatnonzero(window_s_N == window_s)
        part_s, row_W, back = abs(window_s) // PARTS, number_N[of_W], PARTS if window_s > 0 else 0
        place_W = np.full(len(of_W), place)
        if window_s:
            at_W = begin_s_N[of_W] // part_s
            newest_U = np.zeros(num_rows, np.int64)
            np.maximum.at(newest_U, row_W, at_W)
            if (begin_s_N[of_W] % part_s).any() or (length_s_N[of_W] != part_s).any():
                raise ValueError(f"a window of {window_s} s has sub-windows of another length")
            if (at_W < newest_U[row_W] - back).any():
                raise ValueError(f"a window of {window_s} s has sub-windows from before it")
            word_UC[:, place], place_W = newest_U, place + 1 + 2 * (at_W % (back + 1))
        word_UC[row_W, place_W], word_UC[row_W, place_W + 1] = show_N[of_W], click_N[of_W]
        place, num_taken = place + words_of(window_s), num_taken + len(of_W)
    if num_taken < len(number_N):
        raise ValueError("a sub-window is of no window that model.json names")
    if (word_UC < 0).any() or (word_UC > MAX_COUNT).any():
        raise ValueError("a sub-window has a count or a time below 0, or above what a row holds")
    return packed(word_UC)
