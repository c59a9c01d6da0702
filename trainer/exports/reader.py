"""Opens exports in a folder or an object store, checks them, reads their rows, and replays chains from a base on.

An export without _DONE is never read (headrace.done_markers). Files of an object store are fetched whole, when they are
first read, into a folder of the caller. trainer.exports.exporter writes exports; trainer.exports.row_chunks merges
rows. Imports no torch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headrace import documents
from headrace.done_markers import DONE, MARKERS
from headrace.relative_names import InvalidName, relative_name
from headrace.trainer.checkpoint.commits import hash_of
from headrace.trainer.exports.destination import (
    EXPORT_PATH,
    FILE,
    NAME,
    TIMELINE,
    ExportFolder,
    ExportTooNew,
    ExportUnusable,
    ParentMissing,
)
from headrace.trainer.exports.row_chunks import ChunkStream, RowChunk, replay_chunks
from headrace.trainer.exports.row_values import value_fields
from headrace.trainer.value_types import VALUE_TYPES
from headrace.validation import nearest

FORMAT = 1
"""Format number of the manifest. A reader refuses newer ones."""
MANIFEST, CURRENT, DENSE, MODEL = "manifest.json", "current.json", "dense.safetensors", "model.json"
CHUNK_ROWS = 65_536


@dataclass(frozen=True)
class ReadableExport:
    """One complete export."""

    place: ExportFolder
    manifest: Mapping[str, Any]
    dims: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", {name: int(each["dim"]) for name, each in self.tables.items()})

    @property
    def name(self) -> str:
        """ "0000000012-base"."""
        return str(self.manifest["name"])

    @property
    def kind(self) -> str:
        """ "base" or "delta"."""
        return str(self.manifest["kind"])

    @property
    def version(self) -> int:
        """Version of the state after this export."""
        return int(self.manifest["version"])

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """The manifest's entry of each table."""
        tables: Mapping[str, Mapping[str, Any]] = self.manifest["tables"]
        return tables

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """The manifest's entry of each file."""
        files: Mapping[str, Mapping[str, Any]] = self.manifest["files"]
        return files

    def problems(self) -> dict[str, str]:
        """Read every file -> problem by file; empty where all files are as written."""
        return {path: problem for path in self.files if (problem := self._problem(path))}

    def _problem(self, path: str) -> str:
        wanted = self.files[path]
        try:
            found = hash_of(self.place.file(path))
        except FileNotFoundError:
            return "is missing"
        except ExportUnusable as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        if found.num_bytes != wanted["bytes"]:
            return f"has {found.num_bytes:,} bytes, not {wanted['bytes']:,}"
        return "" if found.sha256 == wanted["sha256"] else "has other bytes than were written"

    def check(self) -> "ReadableExport":
        """Return itself. Raises ExportUnusable where a file is not as written."""
        for path, problem in self.problems().items():
            raise ExportUnusable(f"{self.place.address}: {path} {problem}; fetch it again, or use another export")
        return self

    def file(self, path: str) -> Path:
        """A local copy of one of its files. Raises ExportUnusable."""
        try:
            return self.place.file(path)
        except FileNotFoundError:
            raise ExportUnusable(f"{self.place.address}: {path} is missing; use another export") from None

    def rows(self, table: str) -> Iterator[RowChunk]:
        """The rows of a table in order, CHUNK_ROWS at a time. Raises ExportUnusable."""
        return self._chunks("rows", table)

    def tombstones(self, table: str) -> Iterator[RowChunk]:
        """The tombstones of a table, likewise."""
        return self._chunks("tombstones", table)

    def model(self) -> dict[str, Any]:
        """The content of model.json. Raises ExportUnusable."""
        return object_of(self.file(MODEL).read_bytes(), f"{self.place.address}: {MODEL}")

    def dense(self) -> dict[str, np.ndarray[Any, Any]]:
        """The dense tensors by name. Raises ExportUnusable."""
        if DENSE not in self.files:
            return {}
        try:
            return dict(load_file(self.file(DENSE)))
        except (OSError, SafetensorError) as error:
            raise ExportUnusable(f"{self.place.address}: {DENSE} cannot be read: {error}") from error

    def numbered(self, prefix: str) -> list[str]:
        """Paths of the files `prefix`-<n>.parquet, in order."""
        pattern = re.compile(rf"{re.escape(prefix)}-(\d+)\.parquet")
        numbered = sorted((int(match[1]), path) for path in self.files if (match := pattern.fullmatch(path)))
        return [path for _, path in numbered]

    def _chunks(self, kind: str, table: str) -> Iterator[RowChunk]:
        if table not in self.tables:
            hint = nearest(table, list(self.tables))
            raise ExportUnusable(f"{self.place.address}: has no table {table!r}; {hint}")
        for path in self.numbered(f"{kind}-{table}"):
            try:
                yield from _read(self.file(path), path, self.tables[table] if kind == "rows" else None)
            except (OSError, pa.ArrowException) as error:
                raise ExportUnusable(f"{self.place.address}: {path} cannot be read: {error}") from error


def _read(file: Path, path: str, table: Mapping[str, Any] | None) -> Iterator[RowChunk]:
    """Chunks of a file: rows of a `table`, or tombstones where it is None."""
    with pq.ParquetFile(file) as parquet:
        there = set(parquet.schema_arrow.names)
        columns = ["slot", "sign", "key"]
        if table is not None:
            if table["dtype"] not in VALUE_TYPES.names():
                raise ExportUnusable(f"{path}: has values of the unknown type {table['dtype']!r:.100}")
            columns += [each.name for each in value_fields(table["first_order"], table["dim"], table["dtype"])]
        if missing := [name for name in columns if name not in there]:
            raise ExportUnusable(f"{path}: lacks the columns {', '.join(missing)} that its manifest names")
        for batch in parquet.iter_batches(CHUNK_ROWS, columns=columns):
            if nulls := [name for name in columns if batch.column(name).null_count]:
                raise ExportUnusable(f"{path}: column {nulls[0]!r} has nulls")
            yield chunk_of(batch, path, 0 if table is None else int(table["dim"]))


def chunk_of(batch: pa.RecordBatch, what: str, dim: int) -> RowChunk:
    """A batch of an export's columns as a chunk. Raises ExportUnusable where vectors have another length."""

    def column(name: str) -> Any:
        return batch.column(name).to_numpy(zero_copy_only=False) if name in batch.schema.names else None

    slots = batch.column("slot")
    slots = slots if pa.types.is_dictionary(slots.type) else slots.dictionary_encode()
    vector_RD = None
    if "vector" in batch.schema.names:
        vectors = batch.column("vector")
        length = vectors.type.list_size if pa.types.is_fixed_size_list(vectors.type) else None
        if length != dim:
            raise ExportUnusable(f"{what}: vectors are {vectors.type}, not of {dim} numbers as its manifest says")
        vector_RD = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
    codes_R = slots.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    sign_R, key_R = (column(name).astype(np.uint64, copy=False) for name in ("sign", "key"))
    return RowChunk(
        tuple(slots.dictionary.to_pylist()), codes_R, sign_R, key_R, column("weight"), vector_RD, column("scale")
    )


def open_export(address: str, scratch: Path) -> ReadableExport:
    """The complete export at `address`; for a job's folder, its current export. Raises ExportUnusable."""
    place = ExportFolder(address, scratch)
    if place.small(MANIFEST) is None and (current := place.small(CURRENT)) is not None:
        what = f"{place.address}/{CURRENT}"
        place = place.below(checked_name(object_of(current, what).get("path"), EXPORT_PATH, what))
    return open_folder(place)


def is_export(address: str, scratch: Path) -> bool:
    """Whether an export, complete or not, is at `address`."""
    place = ExportFolder(address, scratch)
    return any(place.small(name) is not None for name in (MANIFEST, CURRENT))


def open_folder(place: ExportFolder) -> ReadableExport:
    """The complete export in `place`. Raises ExportUnusable."""
    text = place.small(MANIFEST)
    if text is None:
        raise ExportUnusable(f"{place.address}: is not an export: it has no {MANIFEST}")
    manifest = object_of(text, f"{place.address}/{MANIFEST}")
    try:
        if int(manifest["format"]) > FORMAT:
            raise ExportTooNew(
                f"{place.address}: is of format {manifest['format']}; this Headrace reads format {FORMAT}; "
                "use a newer one"
            )
        if all(place.small(marker) is None for marker in MARKERS):
            raise ExportUnusable(f"{place.address}: has no {DONE}: it is not complete and must not be read")
        export = ReadableExport(place, manifest)
        read = export.name, export.kind, export.version, manifest["parent"]
        for path in export.files:
            checked_name(path, FILE, f"{place.address}: its manifest")
    except (KeyError, TypeError, ValueError) as error:
        raise ExportUnusable(f"{place.address}: its manifest cannot be read: {error!r}") from error
    assert read
    return export


def object_of(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `what` holds. Raises ExportUnusable."""
    try:
        return documents.parse_object(text, what)
    except documents.InvalidDocument as error:
        raise ExportUnusable(str(error)) from error


def checked_name(name: object, form: re.Pattern[str], what: str) -> str:
    """`name`, which `what` gives. Raises ExportUnusable unless it is a relative name of this form."""
    try:
        return relative_name(name, form)
    except InvalidName as error:
        raise ExportUnusable(f"{what} names what is not of an export: {error}") from error


def check_fields(content: Mapping[str, Any], fields: Mapping[str, type], what: str) -> None:
    """Raise ExportUnusable for the first of `fields` that is missing or has another type."""
    for name, kind in fields.items():
        if type(content.get(name)) is not kind:
            raise ExportUnusable(f"{what} is damaged: its {name!r} is {json.dumps(content.get(name))[:100]}")


def parent_of(export: ReadableExport) -> ReadableExport | None:
    """The export that a delta builds on; None for a base. Raises ParentMissing."""
    parent = export.manifest["parent"]
    if export.kind == "base" or parent is None:
        return None
    what, folder = f"{export.place.address}: its parent", export.place.above()
    if not isinstance(parent, dict):
        raise ExportUnusable(f"{what} is not an export")
    if timeline := parent.get("timeline"):
        folder = folder.above().below(checked_name(timeline, TIMELINE, what))
    place = folder.below(checked_name(parent.get("name"), NAME, what))
    try:
        return open_folder(place)
    except ExportTooNew:
        raise
    except ExportUnusable as error:
        raise ParentMissing(
            f"{export.place.address}: builds on {parent['name']}, which cannot be used any more ({error}); "
            "start from an export whose chain is complete: the newest base, or a delta after it"
        ) from error


def chain_of(export: ReadableExport) -> list[ReadableExport]:
    """The exports from its base to `export`. Raises ParentMissing, and ExportUnusable where they do not fit."""
    chain = [export]
    while (parent := parent_of(chain[0])) is not None:
        if parent.version >= chain[0].version:
            raise ExportUnusable(f"{chain[0].place.address}: its parent {parent.name} is not older than itself")
        chain.insert(0, parent)
    if chain[0].kind != "base":
        raise ParentMissing(f"{chain[0].place.address}: is a delta without a parent; start from a base")
    for table, facts in export.tables.items():
        for older in chain[:-1]:
            was = older.tables.get(table, facts)
            if (was["dim"], was["first_order"]) != (facts["dim"], facts["first_order"]):
                raise ExportUnusable(
                    f"{export.place.address}: table {table!r} has dim {facts['dim']}, in {older.name} dim {was['dim']}"
                )
    return chain


def one_dtype(chain: list[ReadableExport], table: str) -> bool:
    """Whether a table's values have one type in all exports of a chain."""
    return len({export.tables[table]["dtype"] for export in chain if table in export.tables}) == 1


def state_at(chain: list[ReadableExport], table: str) -> Iterator[RowChunk]:
    """All rows of a table after the last export of a chain, in order: replay(base, deltas).

    Values have the type of the files where that is one type, else float32.
    """
    decode = not one_dtype(chain, table)
    streams: list[ChunkStream] = []
    for export in chain:
        if table in export.tables:
            rows = export.rows(table)
            streams.append(
                ChunkStream(export.tombstones(table), f"tombstones of {export.name}, table {table}", gone=True)
            )
            streams.append(
                ChunkStream((chunk.decoded() for chunk in rows) if decode else rows, f"{export.name}, table {table}")
            )
    return replay_chunks(streams)


def open_chain(url: str, scratch: Path) -> list[ReadableExport]:
    """The complete export at `url` and those before it, from its base on. Raises ExportUnusable."""
    return chain_of(open_folder(ExportFolder(url, scratch)))
