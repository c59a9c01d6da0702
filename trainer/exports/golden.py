"""Golden predictions: samples as a server receives them, with the predictions the model must make. Imports no torch.

golden.parquet has a row a sample: for each sparse slot its signs (list<uint64>; texts are hashed, padding dropped,
max_len kept) and, where it is weighted, "<slot>.weight" (list<float32>); for each dense slot its values
(list<float32>); for each task "prediction.<task>" (float32). Rank 0 writes it (trainer.train.exporting). The
exporter process predicts the samples again from the rows it exported and the ONNX model. Any server can do so, too:
deploy/examples/serving does it without Headrace.

Shapes: B samples, N signs of one slot, U unique keys of one table, W weights of a row: first-order weight, then vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32, U64, Ragged, Samples
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.key_kernels import keys_of
from headrace.trainer.exports.onnx_model import OnnxModel

PREDICTION = "prediction."
"""Before a task's name."""
TOLERANCE = 1e-5
"""Largest allowed difference of a replay."""

FindRows = Callable[[str, U64], tuple[NDArray[np.bool_], F32]]
"""Table and (U,) keys -> (U,) which keys have a row, (U, W) their weights as they are served."""


@dataclass(frozen=True, slots=True)
class GoldenReplay:
    """The predictions of an export for the golden samples."""

    predictions: Mapping[str, F32]
    """(B,) by task."""
    difference: float
    """Largest difference from the written predictions, relative for those above 1; infinite where one is NaN."""


def table_of(samples: Samples, schema: Schema, predictions: Mapping[str, F32]) -> pa.Table:
    """golden.parquet, as a table."""
    columns: dict[str, pa.Array] = {}
    for slot in schema.sparse:
        column = samples.sparse[slot.name]
        columns[slot.name] = _lists(column, pa.array(column.values_N, pa.uint64()))
        if column.weights_N is not None:
            columns[f"{slot.name}.weight"] = _lists(column, pa.array(column.weights_N, pa.float32()))
    for slot in schema.dense:
        values_BC = samples.dense[slot.name]
        offset_B1 = np.arange(len(samples) + 1, dtype=np.int32) * np.int32(values_BC.shape[1])
        columns[slot.name] = pa.ListArray.from_arrays(offset_B1, pa.array(values_BC.reshape(-1), pa.float32()))
    return with_predictions(pa.table(columns), predictions)


def _lists(column: Ragged, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(column.offset_B1.astype(np.int32), values)


def with_predictions(golden: pa.Table, predictions: Mapping[str, F32]) -> pa.Table:
    """The same samples with other predictions: for exports whose thresholds exclude rows."""
    for task, prediction_B in predictions.items():
        name, column = PREDICTION + task, pa.array(prediction_B, pa.float32())
        index = golden.schema.get_field_index(name)
        golden = golden.append_column(name, column) if index < 0 else golden.set_column(index, name, column)
    return golden


def as_bytes(golden: pa.Table) -> bytes:
    """The content of the file."""
    sink = pa.BufferOutputStream()
    pq.write_table(golden, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_bytes(content: bytes) -> pa.Table:
    """The inverse of `as_bytes`. Raises BadInput."""
    try:
        return pq.read_table(pa.BufferReader(content))
    except pa.ArrowException as error:
        raise BadInput(f"golden.parquet cannot be read: {error}") from error


def replay(golden: pa.Table, onnx: bytes, rows: FindRows, model: Mapping[str, Any]) -> GoldenReplay:
    """Predict the golden samples again; `model` is model.json. Raises BadInput."""
    found = OnnxModel(onnx).run(feeds_of(golden, rows, model))
    difference = 0.0
    for task in model["tasks"]:
        wanted_B = golden.column(PREDICTION + task["name"]).to_numpy()
        differs_B = np.abs(found[task["output"]].astype(np.float64) - wanted_B) / np.maximum(1, np.abs(wanted_B))
        difference = max(difference, float(np.nan_to_num(differs_B, nan=np.inf).max(initial=0.0)))
    return GoldenReplay({task["name"]: found[task["output"]] for task in model["tasks"]}, difference)


def feeds_of(golden: pa.Table, rows: FindRows, model: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Inputs of the ONNX model, by the rules of model.json. Looks each table up once. Raises BadInput."""
    feeds: dict[str, NDArray[Any]] = {}
    sparse = [slot for slot in model["slots"] if slot["kind"] == "sparse"]
    for name, table in model["tables"].items():
        if not table["exported"]:
            raise BadInput(f"table {name!r} is not in this stream of exports: without it nothing can be predicted")
        slots = [slot for slot in sparse if slot["table"] == name]
        columns = {slot["name"]: _ragged(golden, slot["name"]) for slot in slots}
        keys = [_keys(columns[slot["name"]].values_N, slot["group"]) for slot in slots]
        keys_U, inverse_N = np.unique(np.concatenate(keys), return_inverse=True)
        weights_UW = _with_defaults(*rows(name, keys_U), table)
        begin = 0
        for slot, keys_N in zip(slots, keys, strict=True):
            rows_NW = weights_UW[inverse_N[begin : begin + len(keys_N)]]
            feeds |= _fed(slot, columns[slot["name"]], rows_NW)
            begin += len(keys_N)
    for slot in model["slots"]:
        if slot["kind"] == "dense":
            values_N = golden.column(slot["name"]).combine_chunks().flatten().to_numpy()
            feeds[slot["name"]] = values_N.reshape(len(golden), slot["size"])
    return feeds


def _keys(sign_N: U64, group: int) -> U64:
    keys_N = np.empty(len(sign_N), np.uint64)
    keys_of(sign_N, group, keys_N)
    return keys_N


def _with_defaults(found_U: NDArray[np.bool_], weights_UW: F32, table: Mapping[str, Any]) -> F32:
    """Weights, with the table's default row for keys that have none."""
    default: str | Sequence[float] = table["default_row"]
    default_W = np.float32(0) if isinstance(default, str) else np.array(default, np.float32)
    return np.where(found_U[:, None], weights_UW, default_W).astype(np.float32, copy=False)


def _ragged(golden: pa.Table, name: str) -> Ragged:
    lists = golden.column(name).combine_chunks()
    weights = None
    if f"{name}.weight" in golden.schema.names:
        weights = golden.column(f"{name}.weight").combine_chunks().flatten().to_numpy()
    offset_B1 = lists.offsets.to_numpy().astype(np.int64)
    return Ragged(lists.flatten().to_numpy(), offset_B1 - offset_B1[:1], weights)


def _fed(slot: Mapping[str, Any], column: Ragged, rows_NW: F32) -> dict[str, NDArray[Any]]:
    """Inputs of one sparse slot: its pooled rows, or the sequence of its rows with a mask."""
    name, length_B = slot["name"], np.diff(column.offset_B1)
    sample_N = np.repeat(np.arange(len(length_B)), length_B)
    scale_N = np.ones(len(rows_NW), np.float32) if column.weights_N is None else column.weights_N
    if slot["pooling"] == "none":
        place_N = np.arange(len(rows_NW)) - column.offset_B1[sample_N]
        rows_BLW = np.zeros((len(length_B), slot["max_len"], rows_NW.shape[1]), np.float32)
        mask_BL = np.zeros(rows_BLW.shape[:2], np.bool_)
        rows_BLW[sample_N, place_N], mask_BL[sample_N, place_N] = rows_NW * scale_N[:, None], True
        return {name: rows_BLW, f"{name}.mask": mask_BL}
    if slot["pooling"] != "sum":
        count_B = np.maximum(length_B, 1).astype(np.float32)
        divisor_B: F32 = count_B if slot["pooling"] == "mean" else np.sqrt(count_B)
        scale_N = scale_N / divisor_B[sample_N]
    pooled_BW = np.zeros((len(length_B), rows_NW.shape[1]), np.float32)
    np.add.at(pooled_BW, sample_N, rows_NW * scale_N[:, None])
    return {name: pooled_BW}
