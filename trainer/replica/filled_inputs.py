"""Fills slots with histories and counters of the served version, where a request leaves them out.

Shapes: B samples, U unique keys, D floats of a row; as in trainer.replica.serving_model.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.samples.trim import trim
from headrace.dataset.spec.config import SlotKind
from headrace.errors import BadInput
from headrace.pserver.rows.kernels import EMPTY, find
from headrace.trainer.features.kept_state import RowsOf, counted_column, history_column
from headrace.trainer.replica.replica_table import TableView
from headrace.trainer.replica.serving_model import NO_WEIGHTS, InferenceInputs, ServingModel, SlotLayout, TableSigns
from headrace.trainer.replica.updates import F32, U64


class MemoryMissing(BadInput):
    """A request leaves out a slot, and the served version has no histories or counters for it."""


def filled(
    model: ServingModel, views: Mapping[str, TableView], inputs: InferenceInputs, memories: frozenset[str]
) -> InferenceInputs:
    """The inputs with all slots; `memories`: the tables of histories and counters in `views`. Raises MemoryMissing."""
    if not inputs.left_out:
        return inputs
    samples, rows_of = _keyed_samples(model, inputs), _rows_from(views)
    columns, dense = dict[str, Ragged](), dict(inputs.dense)
    for name in inputs.left_out:
        memory = model.memories[name]
        if memory.table not in memories:
            what = "signs" if memory.slot.kind is SlotKind.SPARSE else "values"
            raise MemoryMissing(
                f"input {name!r} is missing, and this version came without {memory.kind}: send its {what}"
            )
        if memory.slot.kind is SlotKind.SPARSE:
            columns[name] = history_column(samples, memory.slot, model.schema, rows_of)
        else:
            dense[name] = counted_column(samples, memory.slot, model.schema, rows_of)
    pairs = zip(model.tables, inputs.signs, strict=True)
    return replace(inputs, signs=[_with(table, signs, columns) for table, signs in pairs], dense=dense, left_out=())


def _keyed_samples(model: ServingModel, inputs: InferenceInputs) -> Samples:
    """The sparse slots of a request. Without times, windows end now."""
    sparse = {}
    for table, signs in zip(model.tables, inputs.signs, strict=True):
        for place, slot in enumerate(table.slots):
            sparse[slot["name"]] = Ragged(*_of_slot(signs, place)[:2])
    time_s_B = inputs.time_s_B
    if time_s_B is None:
        time_s_B = np.full(inputs.num_samples, time.time())
    samples = Samples(sparse, {}, {}, np.arange(inputs.num_samples), time_s_B)
    return trim(samples, model.schema, SlotCounters(model.schema))  # a key is the first sign that training keeps


def _of_slot(signs: TableSigns, place: int) -> tuple[U64, np.ndarray, F32]:
    """Signs, offsets from 0, and weights of one slot."""
    offset_B1 = signs.offset_SB1[place]
    begin, end = int(offset_B1[0]), int(offset_B1[-1])
    return signs.sign_N[begin:end], offset_B1 - begin, signs.weight_N[begin:end]


def _with(table: SlotLayout, signs: TableSigns, columns: Mapping[str, Ragged]) -> TableSigns:
    """The signs of a table's slots, those of `columns` in their places."""
    if not any(slot["name"] in columns for slot in table.slots):
        return signs
    parts, offsets, weights, begin = [np.empty(0, np.uint64)], [], [NO_WEIGHTS], 0
    for place, slot in enumerate(table.slots):
        sign_N, offset_B1, weight_N = _of_slot(signs, place)
        if (column := columns.get(slot["name"])) is not None:
            sign_N, offset_B1 = column.values_N, column.offset_B1
            weight_N = np.ones(len(sign_N), np.float32) if len(signs.weight_N) else NO_WEIGHTS
        parts.append(sign_N)
        weights.append(weight_N)
        offsets.append(offset_B1 + begin)
        begin += len(sign_N)
    return TableSigns(np.concatenate(parts), np.array(offsets, np.int64), np.concatenate(weights))


def _rows_from(views: Mapping[str, TableView]) -> RowsOf:
    def rows_of(table: str, _group: int, keys_U: U64) -> F32:
        view, row_U = views[table], np.empty(len(keys_U), np.int32)
        find(view.index_I, view.keys_R, keys_U, row_U)
        rows_UD = np.zeros((len(keys_U), view.rows_RW.shape[1]), np.float32)
        rows_UD[row_U != EMPTY] = view.rows_RW[row_U[row_U != EMPTY]]
        return rows_UD

    return rows_of
