"""Computes predictions from signs and numbers of samples, by the rules of model.json and the rows of one version.

trainer.replica.inference_messages parses requests; trainer.replica.replica_state chooses the version.

Shapes: B samples, S slots of a table, N signs of a table in the order slot, sample, place; W floats of a row.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.features.pair_columns import pair_column
from headrace.dataset.features.served_events import ServedFeatures
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.samples.trim import trim
from headrace.dataset.spec.config import SlotKind
from headrace.errors import BadInput
from headrace.pserver.lifecycle.day_decay import DayDecay
from headrace.pserver.rows.kernels import EMPTY, find
from headrace.trainer.exports import golden as goldens
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.exports.slot_files import (
    AnySlotFiles,
    Counters,
    Histories,
    Statistics,
    filling,
    served_schema,
    slot_files_of,
)
from headrace.trainer.features.kept_state import RowsOf, counted_column, history_column, known_column
from headrace.trainer.replica.updates import F32, U64
from headrace.trainer.serving.slot_layout import NO_WEIGHTS, InferenceInputs, SlotLayout, TableSigns, TableView

Tensors = Mapping[str, NDArray[Any]]
FORMAT = 1
"""Newest format of model.json that this module reads."""


class ServingModel:
    """A model as defined by model.json and its graph, without rows and weights."""

    def __init__(self, described: Mapping[str, Any], graph: DenseGraph) -> None:
        """Raises BadInput."""
        try:
            if int(described["format"]) > FORMAT:
                raise BadInput(f"model.json is of format {described['format']}; this replica reads {FORMAT}")
            sparse = [slot for slot in described["slots"] if slot["kind"] == "sparse"]
            self.slots: tuple[Mapping[str, Any], ...] = tuple(described["slots"])
            self.tables = tuple(
                SlotLayout(name, table, [slot for slot in sparse if slot["table"] == name])
                for name, table in described["tables"].items()
            )
            self.dense = {slot["name"]: int(slot["size"]) for slot in described["slots"] if slot["kind"] == "dense"}
            self.outputs = tuple(str(task["output"]) for task in described["tasks"])
            left_out = [name for name, table in described["tables"].items() if not table["exported"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"model.json cannot be read: {error!r}") from error
        if left_out:
            raise BadInput(f"table {left_out[0]!r} is not in these exports: without it nothing can be answered")
        self.described, self.graph, self.schema = described, graph, served_schema(described)
        found = slot_files_of(self.schema)
        self.memories = {slot.name: filling(slot, found) for slot in self.schema.filled}
        """By slot that the job fills: what it needs of that which the job remembers."""
        self.features = ServedFeatures(described["features"]) if described.get("features") else None
        if missing := [name for name in self.outputs if name not in graph.outputs]:
            raise BadInput(f"dense.onnx does not say {missing[0]!r}, which model.json names as an output")
        self._check_inputs()

    def widths(self, memories: frozenset[str] | None = None) -> dict[str, int]:
        """Floats of a row by table, of `memories` too: tables of what the job remembers; None: of all these."""
        of_memories = {each.table: each.width for needed in self.memories.values() for each in needed}
        chosen = {name: width for name, width in of_memories.items() if memories is None or name in memories}
        return {**{each.name: each.width for each in self.tables}, **chosen}

    def _check_inputs(self) -> None:
        known = {each["name"] for each in self.described["inputs"]}
        if unknown := sorted(self.graph.inputs - known):
            raise BadInput(f"dense.onnx reads {unknown[0]!r}, which model.json does not tell of")

    def feeds(self, views: Mapping[str, TableView], inputs: InferenceInputs) -> dict[str, NDArray[Any]]:
        """The inputs of the graph from the rows of one version, still without weights."""
        feeds: dict[str, NDArray[Any]] = dict(inputs.dense)
        for table, signs in zip(self.tables, inputs.signs, strict=True):
            feeds |= table.inputs_of(views[table.name], signs, inputs.num_samples)
        return feeds

    def empty(self) -> InferenceInputs:
        """One sample without signs, all numbers 0."""
        signs = [
            TableSigns(np.empty(0, np.uint64), np.zeros((len(each.slots), 2), np.int64), NO_WEIGHTS)
            for each in self.tables
        ]
        return InferenceInputs(1, signs, {name: np.zeros((1, size), np.float32) for name, size in self.dense.items()})


class BoundModel:
    """A model with the weights of one version and arrays for B samples, which are filled again for each request.

    One thread at a time.
    """

    def __init__(self, model: ServingModel, weights: Tensors, num_samples: int) -> None:
        """Raises BadInput."""
        self.num_samples = num_samples
        self._pooled = [(table, *table.buffers(num_samples)) for table in model.tables]
        self._dense = {name: np.zeros((num_samples, size), np.float32) for name, size in model.dense.items()}
        feeds: dict[str, NDArray[Any]] = {**weights, **self._dense}
        for table, out, mask in self._pooled:
            feeds.update(table.named(out, mask, num_samples))
        self._run = model.graph.bound(feeds)

    def fill(self, views: Mapping[str, TableView], inputs: InferenceInputs) -> None:
        """Take the inputs from the rows of one version."""
        for (table, out, mask), signs in zip(self._pooled, inputs.signs, strict=True):
            out.fill(0)
            mask.fill(False)
            table.pool(views[table.name], signs, out, mask)
        for name, array in self._dense.items():
            array[...] = inputs.dense[name]

    def run(self) -> dict[str, F32]:
        """(B,) predictions by task, bit by bit those of `DenseGraph.run`. Raises BadInput."""
        return self._run.run()


def golden_difference(model: ServingModel, views: Mapping[str, TableView], weights: Tensors, golden: bytes) -> float:
    """The largest difference from the predictions of golden.parquet, relative for those above 1. Raises BadInput."""
    samples = goldens.from_bytes(golden)
    found = model.graph.run(model.feeds(views, golden_inputs(model, samples)) | dict(weights))
    worst = 0.0
    for task in model.described["tasks"]:
        wanted_B = samples.column(goldens.PREDICTION + task["name"]).to_numpy()
        differs_B = np.abs(found[task["output"]].astype(np.float64) - wanted_B) / np.maximum(1, np.abs(wanted_B))
        worst = max(worst, float(np.nan_to_num(differs_B, nan=np.inf).max(initial=0.0)))
    return worst


def golden_inputs(model: ServingModel, samples: pa.Table) -> InferenceInputs:
    """The samples of golden.parquet, or of raw events, which lack the slots that the job fills. Raises BadInput."""
    left_out = tuple(name for name in model.memories if name not in samples.schema.names)
    try:
        signs = [_golden_signs(table, samples, left_out) for table in model.tables]
        dense = {
            name: samples.column(name).combine_chunks().flatten().to_numpy().reshape(len(samples), size)
            for name, size in model.dense.items()
            if name not in left_out
        }
    except (KeyError, ValueError) as error:
        raise BadInput(f"golden.parquet does not fit model.json: {error}") from error
    return InferenceInputs(len(samples), signs, dense, left_out=left_out)


def _golden_signs(table: SlotLayout, samples: pa.Table, left_out: Sequence[str]) -> TableSigns:
    signs, weights, offsets, begin = [np.empty(0, np.uint64)], [NO_WEIGHTS], [], 0
    for slot in table.slots:
        if slot["name"] in left_out:
            offsets.append(np.full(len(samples) + 1, begin))
            continue
        lists = samples.column(slot["name"]).combine_chunks()
        offset_B1 = lists.offsets.to_numpy().astype(np.int64)
        signs.append(lists.flatten().to_numpy())
        offsets.append(offset_B1 - offset_B1[0] + begin)
        begin += len(signs[-1])
        name = f"{slot['name']}.weight"
        has = name in samples.schema.names
        values = samples.column(name).combine_chunks().flatten().to_numpy() if has else np.ones(len(signs[-1]))
        weights.append(values.astype(np.float32))
    offset_SB1 = np.array(offsets, np.int64).reshape(len(table.slots), len(samples) + 1)
    return TableSigns(np.concatenate(signs).astype(np.uint64), offset_SB1, np.concatenate(weights))


# Fills slots with what the job remembers at the served version, where a request leaves them out.
#
# Shapes: B samples, U unique keys, D floats of a row; as above.


class MemoryMissing(BadInput):
    """A request leaves out a slot, and the served version came without what fills it."""


@dataclass(frozen=True, slots=True)
class Memories:
    """The memories of the job that a version has."""

    tables: frozenset[str] = frozenset()
    """Of histories, counters and statistics of rows."""
    decays: Mapping[str, DayDecay] = field(default_factory=dict)
    """By table of statistics: the day of the version, and the rates up to it."""

    def has(self, needed: Sequence[AnySlotFiles]) -> bool:
        """Whether a slot can be filled that needs these."""
        return all(
            each.table in self.tables and (each.table in self.decays or not isinstance(each, Statistics))
            for each in needed
        )

    def rows_from(self, views: Mapping[str, TableView]) -> RowsOf:
        """Reads rows in `views`; shows and clicks as they are on the version's day."""

        def rows_of(table: str, _group: int, keys_U: U64) -> F32:
            view, row_U = views[table], np.empty(len(keys_U), np.int32)
            find(view.index_I, view.keys_R, keys_U, row_U)
            rows_UD = np.zeros((len(keys_U), view.rows_RW.shape[1]), np.float32)
            rows_UD[row_U != EMPTY] = view.rows_RW[row_U[row_U != EMPTY]]
            return self.decays[table].present(rows_UD) if table in self.decays else rows_UD

        return rows_of


def filled(
    model: ServingModel, views: Mapping[str, TableView], inputs: InferenceInputs, memories: Memories
) -> InferenceInputs:
    """The inputs with all slots; `memories` are in `views`. Raises MemoryMissing."""
    if not inputs.left_out:
        return inputs
    samples, rows_of = _keyed_samples(model, inputs), memories.rows_from(views)
    columns, dense = dict[str, Ragged](), dict(inputs.dense)
    for name in inputs.left_out:
        needed, slot = model.memories[name], model.schema.by_name[name]
        if slot in model.schema.crossed:
            columns[name] = pair_column(samples.sparse, slot)
            continue
        if not memories.has(needed):
            what = "signs" if slot.kind is SlotKind.SPARSE else "values"
            raise MemoryMissing(
                f"input {name!r} is missing, and this version came without {needed[0].kind}: send its {what}"
            )
        match needed[0]:
            case Histories():
                columns[name] = history_column(samples, slot, model.schema, rows_of)
            case Counters():
                dense[name] = counted_column(samples, slot, model.schema, rows_of)
            case Statistics():
                dense[name] = known_column(samples, slot, model.schema, rows_of)
            case _:
                assert_never(needed[0])
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
