"""Finds the exports that contain a key: the newest complete export of each stream, and the exports it builds on.

Files are sorted by key, so a binary search reads the keys of a few row groups of a few files. Files of an object store
are fetched whole, so the bytes fetched have a bound; a stream that needs more is skipped.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.pserver.store.row_store import sort_order_of
from headrace.service.exports.export_list import ExportStream, open_streams
from headrace.service.spec.job import LoadedJob
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.exports.reader import ReadableExport, open_chain

MAX_FETCHED_BYTES = 512 << 20
"""Most bytes of one stream's exports that may be fetched to find one key."""
KINDS = {"rows": "row", "tombstones": "tombstone"}


class FetchLimitExceeded(HeadraceError):
    """The search would fetch too many bytes."""


def exports_with_key(job: LoadedJob, table: str, key: int, deadline: Deadline) -> list[dict[str, Any]]:
    """The exports of each stream that contain the key, as JSON-able data.

    "stream": its name; "newest": None if no export is complete; "chain": number of exports it builds on, plus itself;
    "in": "name", "version" and "as" of those with the key, oldest first; "problem": why the search failed, or None.
    """
    found: list[dict[str, Any]] = []
    for name in job.spec.exports:
        entry: dict[str, Any] = {"stream": name, "newest": None, "chain": 0, "in": [], "problem": None}
        try:
            with (
                open_streams(job, name) as [stream],
                tempfile.TemporaryDirectory(prefix="headrace-explain-") as scratch,
            ):
                entry |= _of_stream(stream, table, key, Path(scratch), deadline)
        except HeadraceError as error:
            entry["problem"] = str(error)
        found.append(entry)
    return found


def _of_stream(stream: ExportStream, table: str, key: int, scratch: Path, deadline: Deadline) -> dict[str, Any]:
    complete = [each.path for each in stream.present() if each.complete]
    if not complete:
        return {}
    chain = open_chain(stream.outlet.url(complete[-1]), scratch)
    search = KeySearch(table, key, deadline)
    places = [{"name": each.name, "version": each.version, "as": kind} for each in chain if (kind := search.kind(each))]
    return {"newest": complete[-1], "chain": len(chain), "in": places}


class KeySearch:
    """Finds one key of one table in exports of one stream. Raises ExportUnusable, FetchLimitExceeded,
    DeadlineExceeded."""

    def __init__(self, table: str, key: int, deadline: Deadline, max_fetched: int = MAX_FETCHED_BYTES) -> None:
        self._table, self._deadline, self._left = table, deadline, max_fetched
        self._place = sort_order_of(np.array([key], np.uint64))[0]

    def kind(self, export: ReadableExport) -> str | None:
        """ "row" or "tombstone", whichever the export contains for the key; None: neither."""
        return next((word for kind, word in KINDS.items() if self._in_files(export, kind)), None)

    def _in_files(self, export: ReadableExport, kind: str) -> bool:
        """Whether a file of `kind` contains the key: only the last file that begins at the key or before it can."""
        pattern = re.compile(rf"{kind}-{re.escape(self._table)}-(\d+)\.parquet")
        numbered = sorted((int(match[1]), path) for path in export.files if (match := pattern.fullmatch(path)))
        paths = [path for _, path in numbered]
        begin, end = 0, len(paths)
        while end - begin > 1:
            middle = (begin + end) // 2
            begin, end = (middle, end) if self._begins_before(export, paths[middle]) else (begin, middle)
        return bool(paths) and self._in_file(export, paths[begin])

    def _begins_before(self, export: ReadableExport, path: str) -> bool:
        with self._opened(export, path) as parquet:
            return bool(self._starts(parquet, 0))

    def _in_file(self, export: ReadableExport, path: str) -> bool:
        """Whether a file contains the key; row groups are searched in the same way."""
        with self._opened(export, path) as parquet:
            begin, end = 0, parquet.num_row_groups
            while end - begin > 1:
                middle = (begin + end) // 2
                begin, end = (middle, end) if self._starts(parquet, middle) else (begin, middle)
            return end > 0 and bool((self._places(parquet, begin) == self._place).any())

    def _starts(self, parquet: "_Parquet", group: int) -> bool:
        places_R = self._places(parquet, group)
        return bool(len(places_R) and places_R[0] <= self._place)

    def _places(self, parquet: "_Parquet", group: int) -> Any:
        self._deadline.check("looking for the key in exports")
        return sort_order_of(parquet.keys(group))

    def _opened(self, export: ReadableExport, path: str) -> "_Parquet":
        if "://" in export.place.address:
            self._left -= int(export.files[path]["bytes"])
            if self._left < 0:
                raise FetchLimitExceeded(f"the search for one key would fetch more than {MAX_FETCHED_BYTES >> 20} MiB")
        return _Parquet(export, path)


class _Parquet:
    """A Parquet file of an export, as a context. Raises ExportUnusable."""

    def __init__(self, export: ReadableExport, path: str) -> None:
        self._what = f"{export.place.address}: {path}"
        local = export.file(path)
        try:
            self._file = pq.ParquetFile(local)
        except (OSError, pa.ArrowException) as error:
            raise ExportUnusable(f"{self._what} cannot be read: {error}") from error

    def __enter__(self) -> "_Parquet":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def num_row_groups(self) -> int:
        """Number of row groups."""
        return int(self._file.num_row_groups)

    def keys(self, group: int) -> Any:
        """The keys of a row group: (R,)."""
        try:
            column = self._file.read_row_group(group, columns=["key"]).column("key")
        except (OSError, KeyError, pa.ArrowException) as error:
            raise ExportUnusable(f"{self._what} cannot be read: {error}") from error
        return column.to_numpy().astype(np.uint64, copy=False)


def format_exports(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The result of `exports_with_key` as lines, one for each stream."""
    for stream in found:
        name = f"exports of {stream['stream']}"
        if stream["problem"]:
            yield f"{name}: cannot be searched: {stream['problem']}"
        elif stream["newest"] is None:
            yield f"{name}: no export is complete yet"
        elif not stream["in"]:
            yield f"{name}: the key is in none of the {stream['chain']} exports that make up {stream['newest']}"
        else:
            places = ", ".join(f"{each['name']} (as a {each['as']})" for each in stream["in"])
            there = "has the key" if stream["in"][-1]["as"] == "row" else "no longer has the key"
            yield f"{name}: in {places}; a server that loads them up to {stream['newest']} {there}"
