"""An export with its chain, as a source of an import. Exports are read by trainer.exports.reader.

Shows and clicks come from the files of statistics, for the slots of which every export of the chain has them. They are
read beside the rows, in the same order, so memory is bounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.store.row_store import sort_order_of
from headrace.trainer.exports.reader import ReadableExport, chain_of, state_at
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.exports.row_values import decode
from headrace.trainer.exports.slot_files import Statistics, replay, served_schema, slot_files_at
from headrace.trainer.importing.source import F32, U64, SourceRows


class ExportSource:
    """Raises ExportUnusable, ParentMissing."""

    def __init__(self, export: ReadableExport, *, statistics: bool = False) -> None:
        """Checks every file of the chain first. `statistics`: rows come with their shows and clicks."""
        self._export = export
        self._chain = [each.check() for each in chain_of(export)]
        self._statistics: list[Statistics] = []
        self._group_of: dict[str, int] = {}
        found = slot_files_at(export) if statistics else ()
        for each in found:
            if isinstance(each, Statistics) and all(map(each.is_in, self._chain)):
                self._statistics.append(each)
        if self._statistics:
            self._group_of = {slot.name: slot.group for slot in served_schema(export.model()).sparse}

    def batches(self) -> Iterator[SourceRows]:
        """The state after the last export of the chain, table by table."""
        known = {each.group: KnownStatistics(self._chain, each) for each in self._statistics}
        for table in self._export.tables:
            for chunk in state_at(self._chain, table):
                yield self._brought(table, chunk, known)

    def _brought(self, table: str, chunk: RowChunk, known: Mapping[int, "KnownStatistics"]) -> SourceRows:
        where = f"{self._export.name}, table {table}"
        weight_R, vector_RD = decode(chunk)
        return SourceRows(
            slots=chunk.slots,
            slot_R=chunk.slot_R,
            sign_R=chunk.sign_R,
            key_R=None,
            weight_R=weight_R,
            vector_RD=np.empty((len(chunk), 0), np.float32) if vector_RD is None else vector_RD,
            whole_R=None,
            statistics=self._statistics_of(chunk, known),
            where=lambda row: f"{where}, slot {chunk.slots[int(chunk.slot_R[row])]}, sign {int(chunk.sign_R[row])}",
        )

    def _statistics_of(self, chunk: RowChunk, known: Mapping[int, "KnownStatistics"]) -> dict[str, F32]:
        if not known:
            return {}
        group_S = np.array([self._group_of.get(slot, -1) for slot in chunk.slots])
        group_R, value_R2 = group_S[chunk.slot_R], np.zeros((len(chunk), 2), np.float32)
        order_R = sort_order_of(chunk.key_R)
        for group, each in known.items():
            value_R2[group_R == group] = each.of(order_R[group_R == group])
        return {"show": value_R2[:, 0], "click": value_R2[:, 1]}

    def dense(self) -> Mapping[str, NDArray[Any]]:
        return self._export.dense()

    def facts(self) -> Mapping[str, Any]:
        of = {name: self._export.manifest[name] for name in ("job", "timeline", "name")}
        return {"kind": "export", "path": self._export.place.address, **of}


class KnownStatistics:
    """Shows and clicks of the rows of one slot group, on the day of the chain's last export. It holds one chunk."""

    def __init__(self, chain: Sequence[ReadableExport], files: Statistics) -> None:
        self._version = files.of_export(chain[-1]).version
        self._chunks = replay(chain, files)
        self._order_U, self._value_U2 = np.empty(0, np.uint64), np.empty((0, 2), np.float32)

    def of(self, order_R: U64) -> F32:
        """(R, 2) of rows in ascending order, which come after those of the last call; 0 for one without."""
        value_R2 = np.zeros((len(order_R), 2), np.float32)
        while len(order_R):
            if len(self._order_U):
                at_R = np.minimum(np.searchsorted(self._order_U, order_R), len(self._order_U) - 1)
                found_R = self._order_U[at_R] == order_R
                value_R2[found_R] = self._value_U2[at_R[found_R]]
                if self._order_U[-1] >= order_R[-1]:
                    break
            if (chunk := next(self._chunks, None)) is None:
                break
            assert chunk.vector_RD is not None, "of slot files"
            self._order_U, self._value_U2 = sort_order_of(chunk.key_R), self._version.present(chunk.vector_RD)
        return value_R2
