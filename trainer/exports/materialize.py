"""Merges a base and its deltas into a base, equal bit for bit to one exported at that version.

trainer.exports.reader gives the state. Tensors, model and golden predictions come from the newest export of the chain.
Files are written in the order of an export: rows, model, manifest, _DONE.
"""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace import documents
from headrace.blob.blob_writer import BlobWriter
from headrace.done_markers import DONE
from headrace.durable import REAL, unfinished_name, writing
from headrace.errors import SpecError
from headrace.relative_names import relative_name
from headrace.trainer.exports import manifest
from headrace.trainer.exports.destination import EXPORT_PATH, ExportDestination, ExportUnusable, folder_destination
from headrace.trainer.exports.parquet_files import ParquetFiles, row_schema
from headrace.trainer.exports.reader import (
    CHUNK_ROWS,
    MANIFEST,
    ReadableExport,
    chain_of,
    one_dtype,
    open_folder,
    state_at,
)
from headrace.trainer.exports.row_chunks import OnRows, RowChunk
from headrace.trainer.exports.row_values import value_columns
from headrace.trainer.exports.slot_files import REPLAYED, replay, slot_files_at

ROWS = re.compile(rf"({'|'.join(('rows', 'tombstones', *REPLAYED))})-.*\.parquet")
DONEFILE = "donefile.txt"


def siblings(export: ReadableExport) -> list[ReadableExport]:
    """The complete exports of the same stream and timeline that can be opened, by version."""
    folder, timeline = export.place.above(), str(export.manifest["timeline"])
    names = folder.names() or _told_names(folder.above().small(DONEFILE) or b"", timeline)
    found = []
    for name in names:
        try:
            each = open_folder(folder.below(name))
        except ExportUnusable:
            continue
        if each.manifest.get("stream") == export.manifest.get("stream"):
            found.append(each)
    return sorted(found, key=lambda each: each.version)


def _told_names(donefile: bytes, timeline: str) -> list[str]:
    """Names of exports in a donefile, for a destination that cannot be listed."""
    names = []
    for line in donefile.splitlines():
        try:
            names.append(relative_name(documents.parse_object(line, timeline)["path"], EXPORT_PATH))
        except (ValueError, KeyError, TypeError):
            continue
    return [name.rpartition("/")[2] for name in dict.fromkeys(names) if name.startswith(f"{timeline}/")]


def at_version(export: ReadableExport, version: int) -> ReadableExport:
    """The newest export of the same stream up to `version`. Raises SpecError."""
    return _newest(export, [each for each in siblings(export) if each.version <= version], f"version {version}")


def at_time(export: ReadableExport, time_s: float) -> ReadableExport:
    """The newest export that covers no event later than `time_s` (unix). Raises SpecError."""
    if export.manifest.get("event_time") is None:
        raise SpecError(f"{export.name} has no event time; name a version with --to", "--at")
    early = [each for each in siblings(export) if (each.manifest.get("event_time") or [0, np.inf])[1] <= time_s]
    return _newest(export, early, datetime.fromtimestamp(time_s, UTC).isoformat())


def _newest(export: ReadableExport, found: Sequence[ReadableExport], what: str) -> ReadableExport:
    if not found:
        oldest = siblings(export)[0].name if siblings(export) else export.name
        raise SpecError(f"no export is as old as {what}; the oldest is {oldest}")
    return found[-1]


@dataclass
class _Table:
    """Counts of one written table."""

    rows: int = 0
    by_slot: Counter[str] = field(default_factory=Counter)
    weights: int = 0
    squares: float = 0.0
    not_finite: int = 0

    def take(self, chunk: RowChunk) -> None:
        self.rows += len(chunk)
        for code, rows in zip(*np.unique(chunk.slot_R, return_counts=True), strict=True):
            self.by_slot[chunk.slots[int(code)]] += int(rows)
        values = chunk.values
        self.weights += values.size
        self.squares += float(np.square(values, dtype=np.float64).sum())
        self.not_finite += values.size - int(np.count_nonzero(np.isfinite(values)))

    def message(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        order = [slot for slot in facts["by_slot"] if slot in self.by_slot]
        slots = dict.fromkeys([*order, *sorted(self.by_slot)])
        return {
            **facts,
            "rows": self.rows,
            "tombstones": 0,
            "pending": 0,
            "pending_by": {},
            "by_slot": {slot: {"rows": self.by_slot[slot], "tombstones": 0} for slot in slots},
            "norm": (self.squares / self.weights) ** 0.5 if self.weights else 0.0,
            "clamped": 0,
            "not_finite": self.not_finite,
        }


def materialize(export: ReadableExport, out: Path, on_rows: OnRows = lambda done, most: None) -> dict[str, Any]:
    """Write the state after `export` as one base into the new folder `out` -> its manifest. An error leaves nothing.

    `on_rows`: called with the rows of tables that are written, and the most that there can be.

    1. Check all files. 2. Rows. 3. The model's files. 4. Manifest. 5. _DONE. 6. The folder gets its name.
    Raises ExportUnusable, ParentMissing, and SpecError where `out` exists.
    """
    if out.exists():
        raise SpecError(f"{out} exists already; name a new folder", "--out")
    chain = [each.check() for each in chain_of(export)]  # 1
    unfinished = unfinished_name(out)
    shutil.rmtree(unfinished, ignore_errors=True)
    outlet = folder_destination(unfinished)
    try:
        files: dict[str, dict[str, Any]] = {}
        tables = _write_tables(chain, outlet, files, on_rows)  # 2
        slots = _write_slot_files(chain, outlet, files)
        _copy_model(export, outlet, files)  # 3
        content = _manifest(chain, tables, files) | slots
        outlet.put(MANIFEST, manifest.as_bytes(content))  # 4
        outlet.put(DONE, b"")  # 5
        with writing(out):
            REAL.rename(unfinished, out)  # 6
            REAL.sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return content


def _write_tables(
    chain: Sequence[ReadableExport], outlet: ExportDestination, files: dict[str, dict[str, Any]], on_rows: OnRows
) -> dict[str, dict[str, Any]]:
    """Write the rows of all tables -> their entries of the manifest."""
    names = chain[-1].tables
    most = sum(int(each.tables[name]["rows"]) for each in chain for name in names if name in each.tables)
    tables: dict[str, dict[str, Any]] = {}
    done = 0

    def on_chunk(num_rows: int) -> None:
        nonlocal done
        done += num_rows
        on_rows(done, most)

    for name in names:
        tables[name] = _write_table(chain, name, outlet, files, on_chunk)
    return tables


def _write_table(
    chain: Sequence[ReadableExport],
    table: str,
    outlet: ExportDestination,
    files: dict[str, dict[str, Any]],
    on_chunk: Callable[[int], None],
) -> dict[str, Any]:
    export = chain[-1]
    if not one_dtype(list(chain), table):
        raise ExportUnusable(
            f"{export.name}: the chain of table {table!r} holds values of two types, which no base can hold; "
            "wait for the next base"
        )
    written = _Table()
    facts = export.tables[table]
    schema = row_schema(facts["first_order"], facts["dim"], facts["dtype"])
    with ParquetFiles(lambda name: _file(outlet, files, name), f"rows-{table}", schema) as parquet:
        for chunk in state_at(list(chain), table):
            for begin in range(0, len(chunk), CHUNK_ROWS):
                rows = chunk.take(slice(begin, begin + CHUNK_ROWS))
                parquet.write([*_keyed(rows), *value_columns(rows)])
                written.take(rows)
            on_chunk(len(chunk))
    return written.message(facts)


def _keyed(chunk: RowChunk) -> list[pa.Array]:
    names = pa.DictionaryArray.from_arrays(pa.array(chunk.slot_R), pa.array(chunk.slots, pa.string()))
    return [names, pa.array(chunk.sign_R), pa.array(chunk.key_R)]


def _write_slot_files(
    chain: Sequence[ReadableExport], outlet: ExportDestination, files: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Histories and counters after the chain; the manifest's entries about them, as in a base."""
    told: dict[str, Any] = {}
    for each in slot_files_at(chain[-1]):
        if not all(map(each.is_in, chain)):
            told.pop(each.kind, None)
            told[f"without_{each.kind}"] = sorted([*told.get(f"without_{each.kind}", ()), each.slot])
            continue
        facts, rows = dict(chain[-1].manifest[each.kind][each.slot]), 0
        newest = each.of_export(chain[-1])
        with ParquetFiles(
            lambda path: _file(outlet, files, path), f"{each.kind}-{each.slot}", each.parquet_schema
        ) as parquet:
            for chunk in replay(chain, each):
                assert chunk.vector_RD is not None
                parquet.write(newest.columns(chunk.sign_R, chunk.key_R, chunk.vector_RD))
                rows += len(chunk)
        facts.pop("tombstones", None)
        told.setdefault(each.kind, {})[each.slot] = {**facts, "rows": rows}
    return told


@contextmanager
def _file(outlet: ExportDestination, files: dict[str, dict[str, Any]], name: str) -> Iterator[BlobWriter]:
    with outlet.file(name) as sink:
        yield sink
    rows = {} if sink.rows is None else {"rows": sink.rows}
    files[name] = {"sha256": sink.sha256, "bytes": sink.num_bytes, **rows}


def _copy_model(export: ReadableExport, outlet: ExportDestination, files: dict[str, dict[str, Any]]) -> None:
    for path in export.files:
        if ROWS.fullmatch(path):
            continue
        with export.file(path).open("rb") as source, _file(outlet, files, path) as sink:
            while data := source.read(1 << 20):
                sink.write(data)


def _manifest(
    chain: Sequence[ReadableExport], tables: Mapping[str, Mapping[str, Any]], files: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    last, first = chain[-1].manifest, chain[0].manifest
    times = [last.get("event_time"), first.get("event_time")]
    deltas = f" and {len(chain) - 1} deltas, up to {last['name']}" if len(chain) > 1 else ""
    return {
        **last,
        "kind": "base",
        "name": f"{int(last['version']):010d}-base",
        "parent": None,
        "event_time": [times[1][0], times[0][1]] if times[0] and times[1] else times[0],
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "why": f"materialized from {first['name']}{deltas}",
        "tables": {name: dict(facts) for name, facts in tables.items()},
        "files": {name: dict(file) for name, file in sorted(files.items())},
    }
