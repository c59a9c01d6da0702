"""An export with its chain, as a source of an import. Exports are read by trainer.exports.reader."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.exports.reader import Export, chain_of, state_at
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.exports.row_values import decode
from headrace.trainer.importing.source import SourceRows


class ExportSource:
    """Raises ExportUnusable, ParentMissing."""

    def __init__(self, export: Export) -> None:
        """Checks every file of the chain first."""
        self._export = export
        self._chain = [each.check() for each in chain_of(export)]

    def batches(self) -> Iterator[SourceRows]:
        """The state after the last export of the chain, table by table."""
        for table in self._export.tables:
            for chunk in state_at(self._chain, table):
                yield self._brought(table, chunk)

    def _brought(self, table: str, chunk: RowChunk) -> SourceRows:
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
            statistics={},
            where=lambda row: f"{where}, slot {chunk.slots[int(chunk.slot_R[row])]}, sign {int(chunk.sign_R[row])}",
        )

    def dense(self) -> Mapping[str, NDArray[Any]]:
        return self._export.dense()

    def facts(self) -> Mapping[str, Any]:
        of = {name: self._export.manifest[name] for name in ("job", "timeline", "name")}
        return {"kind": "export", "path": self._export.place.address, **of}
