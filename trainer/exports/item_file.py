"""items.parquet of an export: the items of a job with `[retrieval]`, and their vectors by the version of the export.

    item     the value of the slot that tells items apart
    found    whether the item can be found: it has a row, or the job finds items without one, too
    vector   its vector; zeros where it is not found
    fields   all fields of the catalogue

The rows are those of the catalogue, in its order. Vectors are computed from all rows of the version, as the export's
type rounds them: after a delta with thresholds, a reader may have older rows.

Shapes: I items, V length of a vector, U unique keys.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.errors import BadInput
from headrace.pserver.protocol.shards import U64
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.exports.golden import FindRows
from headrace.trainer.exports.item_tower import ItemTower, weights_of
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.exports.parquet_files import OpenFile
from headrace.trainer.exports.reader import MODEL, ReadableExport
from headrace.trainer.serving.item_catalogue import catalogue_of, read_catalogue
from headrace.trainer.serving.item_index import ItemIndex
from headrace.trainer.serving.slot_layout import F32, TableView, view_of

ITEMS = "items.parquet"
GROUP_ROWS = 1 << 16
"""Items of a row group."""

log = logging.getLogger(__name__)


def write_items(
    files: Sequence[str],
    described: Mapping[str, Any],
    template: bytes,
    tensors: Mapping[str, NDArray[Any]],
    find: FindRows,
    open_file: OpenFile,
    deadline: Deadline,
) -> dict[str, Any]:
    """Write the file -> the manifest's entry about it; where there can be none, it says why.

    `files`: the catalogue's; `described`: model.json; `template`: the graph of the model.
    """
    try:
        index = _index(files, described, template, tensors, find, deadline)
    except BadInput as error:
        log.warning("the export has no items: %s", error)
        return {"ok": False, "why": str(error)}
    with open_file(ITEMS) as sink:
        schema = _table(index, 0, 0).schema
        with pq.ParquetWriter(sink, schema, write_statistics=False, use_dictionary=False) as writer:
            for begin in range(0, len(index.catalogue), GROUP_ROWS):
                deadline.check("writing items")
                writer.write_table(_table(index, begin, begin + GROUP_ROWS))
        sink.rows = len(index.catalogue)
    dim = index.vectors_IV.shape[1]
    return {"ok": True, "why": "", "items": len(index.catalogue), "found": index.num_items, "dim": dim}


def _index(
    files: Sequence[str],
    described: Mapping[str, Any],
    template: bytes,
    tensors: Mapping[str, NDArray[Any]],
    find: FindRows,
    deadline: Deadline,
) -> ItemIndex:
    """Raises BadInput."""
    told, graph = described["retrieval"], DenseGraph(template)
    catalogue = read_catalogue(files, told["slot"], told["item_slots"], described["slots"])
    tower = ItemTower(described, graph.content, catalogue)
    tables = {}
    for name, keys_U in tower.keys().items():
        deadline.check("finding the rows of items")
        if not described["tables"][name]["exported"]:
            raise BadInput(f"table {name!r} is not exported, and items have slots in it")
        tables[name] = _view(find, name, keys_U)
    return tower.index(
        tables, weights_of(described, graph, tensors), lambda: deadline.check("computing the vectors of items")
    )


def _view(find: FindRows, table: str, keys_U: U64) -> TableView:
    found_U, rows_UW = find(table, keys_U)
    return view_of(keys_U[found_U], np.ascontiguousarray(rows_UW[found_U]))


def _table(index: ItemIndex, begin: int, end: int) -> pa.Table:
    fields = index.catalogue.fields.slice(begin, end - begin).combine_chunks()
    vectors_BV: F32 = index.vectors_IV[begin:end]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(vectors_BV.reshape(-1)), vectors_BV.shape[1])
    chunks = fields.to_struct_array().chunks
    struct = chunks[0] if chunks else pa.array([], pa.struct(list(fields.schema)))
    columns = {
        "item": index.catalogue.id_I.slice(begin, end - begin),
        "found": pa.array(index.there_I[begin:end]),
        "vector": vectors,
        "fields": struct,
    }
    return pa.table(columns)


def fields_in(export: ReadableExport) -> pa.Table | None:
    """The fields of the items of an export; None where it has no items. Raises ExportUnusable."""
    if ITEMS not in export.files:
        return None
    return pa.Table.from_batches(pa.RecordBatch.from_struct_array(each) for each in _read(export)["fields"].chunks)


def index_in(export: ReadableExport) -> ItemIndex:
    """The index of the items of an export. Raises ExportUnusable where it has none."""
    if ITEMS not in export.files:
        told = export.manifest.get("items", {})
        why = told.get("why") or "its job file has no section [retrieval], or an older Headrace made it"
        raise ExportUnusable(f"{export.place.address}: has no items: {why}")
    model, fields, table = export.model(), fields_in(export), _read(export)
    assert fields is not None
    try:
        told = model["retrieval"]
        catalogue = catalogue_of(fields, told["slot"], told["item_slots"], model["slots"])
        vectors = table["vector"].combine_chunks()
        vectors_IV = vectors.flatten().to_numpy().reshape(len(catalogue), -1)
        there_I = table["found"].to_numpy()
        if not np.isfinite(vectors_IV).all():
            raise ValueError("a vector is not finite")  # noqa: TRY301  # as those of NumPy above
    except (KeyError, TypeError, ValueError, BadInput) as error:  # ValueError: also pyarrow's
        raise ExportUnusable(f"{export.place.address}: {ITEMS} does not fit {MODEL}: {error}") from error
    return ItemIndex.of(catalogue, vectors_IV, there_I)


def _read(export: ReadableExport) -> pa.Table:
    try:
        return pq.read_table(export.file(ITEMS))
    except (OSError, pa.ArrowException) as error:
        raise ExportUnusable(f"{export.place.address}: {ITEMS} cannot be read: {error}") from error
