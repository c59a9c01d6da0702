"""Turns exports into updates: polls current.json in a folder or an object store, and reads the exports it names.

The first update is the state after the whole chain. When the chain grows, the next update holds all of its new
deltas, since only the end of a chain has passed the gates. Every file is checked against its sha256 before it is used.
The state checks the predictions of the model with `Update.golden`.

Shapes: U unique keys of one table.
"""

import logging
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.trainer.exports.destination import EXPORT_PATH, TIMELINE, ExportFolder, ExportUnusable
from headrace.trainer.exports.item_file import fields_in
from headrace.trainer.exports.reader import (
    CURRENT,
    FORMAT,
    ReadableExport,
    check_fields,
    checked_name,
    object_of,
    open_folder,
    state_at,
)
from headrace.trainer.exports.row_chunks import ChunkStream, KeysOutOfOrder, RowChunk, replay_chunks
from headrace.trainer.exports.slot_files import SlotFiles, Statistics, replay, slot_files_at
from headrace.trainer.replica.replica_state import ServedVersion
from headrace.trainer.replica.updates import U16, U64, ReplicaRows, ReplicaUpdate, TableUpdate

ONNX, GOLDEN = "dense.onnx", "golden.parquet"
FIELDS = {"format": int, "timeline": str, "version": int, "chain": list}
"""Fields that are read from current.json."""
MAX_CHAIN = 100_000
"""Longest chain that is accepted."""
AGAIN_S = 60.0
"""Pause before an unusable export is read again though current.json has not changed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CurrentExport:
    """Content of current.json."""

    timeline: str
    version: int
    chain: tuple[str, ...]
    """Paths from the base to the export itself."""
    goes_back: bool = False
    """Whether the job went back to it (docs/guards.md): it may be older than the version served."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The exports of a chain to read."""

    whole: bool
    paths: tuple[str, ...]


def parsed(text: bytes, what: str) -> CurrentExport:
    """Parse current.json. Raises ExportUnusable."""
    content = object_of(text, what)
    number = content.get("format")
    if type(number) is int and number > FORMAT:
        raise ExportUnusable(f"{what} is of format {number}; this replica reads {FORMAT}: use a newer one")
    check_fields(content, FIELDS, what)
    goes_back = isinstance(content.get("rollback"), dict)
    chain = tuple(content["chain"])
    if not chain or len(chain) > MAX_CHAIN:
        raise ExportUnusable(f"{what} names a chain of {len(chain)} exports: 1 to {MAX_CHAIN} are read")
    for path in chain:
        checked_name(path, EXPORT_PATH, what)
    return CurrentExport(checked_name(content["timeline"], TIMELINE, what), content["version"], chain, goes_back)


def plan(current: CurrentExport, served: ServedVersion | None, loaded: str | None) -> ChainPlan | None:
    """The exports to read, where `served` came from the chain that ends with the path `loaded`; None: nothing is new.

    An older version is read, too: the state refuses it, unless the job went back to it.
    """
    if served is not None and (served.timeline, served.number) == (current.timeline, current.version):
        return None
    if served is not None and loaded in current.chain and served.timeline == current.timeline:
        return ChainPlan(whole=False, paths=current.chain[current.chain.index(loaded) + 1 :])
    return ChainPlan(whole=True, paths=current.chain)


class ExportUpdates:
    """Exports of one stream of one job."""

    def __init__(self, address: str, scratch: Path, poll_s: float = 1.0) -> None:
        """`address`: the folder with current.json; `scratch` takes files fetched from object stores."""
        self.address = address.rstrip("/")
        self._scratch, self._poll_s = scratch, poll_s
        self.newer_than: ServedVersion | None = None
        """A version that the caller has from elsewhere: exports of its timeline up to it are passed over."""
        self._served: ServedVersion | None = None
        self._paths: dict[ServedVersion, str] = {}
        self._closed = threading.Event()
        self._place: ExportFolder | None = None
        self._seen: bytes | None = None
        self._again = Deadline.after(AGAIN_S)

    def resume(self, served: ServedVersion | None) -> None:
        """Continue from `served`: the update returned last was refused. It is tried again after a while."""
        if served != self._served:
            self._served = served if served in self._paths else None

    def next(self, deadline: Deadline) -> ReplicaUpdate | None:
        """Also raises ExportUnusable; the export is tried again after a while."""
        while not self._closed.is_set():
            text = self._current()
            if text is not None and (text != self._seen or self._again.passed()):
                self._seen, self._again = text, Deadline.after(AGAIN_S)
                update = self._update(parsed(text, f"{self.address}/{CURRENT}"))
                if update is not None:
                    return update
            left_s = deadline.left_s()
            if not left_s and text is None:
                raise Unavailable(
                    f"{self.address} has no {CURRENT}: nothing is exported there yet, or the folder is wrong"
                )
            if not left_s:
                return None
            self._closed.wait(min(self._poll_s, left_s))
        raise Unavailable("closed")

    def close(self) -> None:
        self._closed.set()

    def _current(self) -> bytes | None:
        try:
            self._place = self._place or ExportFolder(self.address, self._scratch)
            return self._place.small(CURRENT)
        except OSError as error:
            raise Unavailable(f"{self.address}: {CURRENT} cannot be read now: {error.strerror or error}") from error

    def _update(self, current: CurrentExport) -> ReplicaUpdate | None:
        newer = self.newer_than
        if newer is not None and newer.timeline == current.timeline and current.version <= newer.number:
            return None
        found = plan(current, self._served, None if self._served is None else self._paths.get(self._served))
        if found is None:
            return None
        shutil.rmtree(self._scratch, ignore_errors=True)  # copies of earlier exports
        begin_s = time.monotonic()
        place = ExportFolder(self.address, self._scratch)
        chain = [open_folder(place.below(path)).check() for path in found.paths]
        update = read(chain, current, whole=found.whole)
        version = ServedVersion(update.job, update.timeline, update.version)
        kept = {old: path for old, path in self._paths.items() if old == self._served}
        self._served, self._paths = version, kept | {version: current.chain[-1]}
        log.info("read %s of %d exports in %.1f s", current.chain[-1], len(chain), time.monotonic() - begin_s)
        return update


def read(chain: Sequence[ReadableExport], current: CurrentExport, *, whole: bool) -> ReplicaUpdate:
    """An update with the state after a whole chain, or with the changes of some deltas. Raises ExportUnusable."""
    newest = chain[-1]
    for export in chain:
        if export.manifest["timeline"] != current.timeline or export.manifest["job"] != newest.manifest["job"]:
            raise ExportUnusable(f"{export.place.address} is not of the job and timeline in {CURRENT}")
    if newest.version != current.version:
        raise ExportUnusable(
            f"{newest.place.address} is version {newest.version}, not {current.version} as in {CURRENT}"
        )
    if whole and chain[0].kind != "base":
        raise ExportUnusable(f"{chain[0].place.address} is a delta; the chain in {CURRENT} does not begin with a base")
    for parent, export in zip(chain, chain[1:], strict=False):
        if export.kind == "base" or (export.manifest["parent"] or {}).get("name") != parent.name:
            raise ExportUnusable(f"{export.place.address} does not build on {parent.name}, as {CURRENT} says")
    tables = {name: _table(list(chain), name, whole=whole) for name in newest.tables}
    memories = [each for each in slot_files_at(newest) if all(map(each.is_in, chain))]
    tables |= {each.table: _memory(chain, each, whole=whole) for each in memories}
    times = newest.manifest.get("event_time")
    return ReplicaUpdate(
        str(newest.manifest["job"]),
        current.timeline,
        current.version,
        whole,
        tables,
        newest.dense(),
        float(times[1]) if times else None,
        newest.model(),
        _bytes(newest, ONNX),
        golden=_bytes(newest, GOLDEN),
        items=fields_in(newest),
        exact=all(_is_exact(export) for export in chain),
        goes_back=current.goes_back,
        memories=frozenset(each.table for each in memories),
        decays={each.table: each.of_export(newest).version for each in memories if isinstance(each, Statistics)},
    )


def _is_exact(export: ReadableExport) -> bool:
    """Whether an export has every row, or every changed one, with all its bits."""
    thresholds, tables = export.manifest.get("thresholds"), export.manifest["tables"].values()
    plain = isinstance(thresholds, dict) and not any(thresholds.values())
    return plain and all(table.get("dtype") == "float32" for table in tables)


def _bytes(export: ReadableExport, path: str) -> bytes | None:
    return export.file(path).read_bytes() if path in export.files else None


def _table(chain: list[ReadableExport], table: str, *, whole: bool) -> TableUpdate:
    try:
        if whole:
            return TableUpdate([_rows(chunk) for chunk in state_at(chain, table)], np.empty(0, np.uint64))
        rows = [_rows(chunk) for chunk in _newest(chain, table, gone=False)]
        gone = [chunk.key_R for chunk in _newest(chain, table, gone=True)]
    except KeysOutOfOrder as error:
        raise ExportUnusable(str(error)) from error
    return TableUpdate(rows, np.concatenate([np.empty(0, np.uint64), *gone]))


def _memory(chain: Sequence[ReadableExport], memory: SlotFiles, *, whole: bool) -> TableUpdate:
    """As `_table`, of what the job remembers."""
    try:
        rows = [_rows(chunk) for chunk in replay(chain, memory)]
        gone = [] if whole else [chunk.key_R for chunk in replay(chain, memory, gone=True)]
    except KeysOutOfOrder as error:
        raise ExportUnusable(str(error)) from error
    return TableUpdate(rows, np.concatenate([np.empty(0, np.uint64), *gone]))


def _newest(chain: list[ReadableExport], table: str, *, gone: bool) -> Iterator[RowChunk]:
    """The keys of some deltas whose newest entry is a row or, if `gone`, a tombstone."""
    streams = []
    for export in chain:
        if table in export.tables:
            rows: Iterable[RowChunk] = (chunk.decoded() for chunk in export.rows(table))
            streams.append(ChunkStream(export.tombstones(table), f"tombstones of {export.name}", gone=not gone))
            streams.append(ChunkStream(iter(rows), f"{export.name}, table {table}", gone=gone))
    return replay_chunks(streams)


def _rows(chunk: RowChunk) -> ReplicaRows:
    """Rows of a chunk. Exports have no slot groups, and a replica needs none: keys identify rows."""
    keys_U: U64 = chunk.key_R
    group_U: U16 = np.zeros(len(keys_U), np.uint16)
    return ReplicaRows(keys_U, group_U, chunk.values)
