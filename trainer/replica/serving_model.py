"""Computes predictions from signs and numbers of samples, by the rules of model.json and the rows of one version.

trainer.replica.inference_messages parses requests; trainer.replica.replica_state chooses the version.

Shapes: B samples, S slots of a table, N signs of a table in the order slot, sample, place; W floats of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.features.served_events import ServedFeatures
from headrace.errors import BadInput
from headrace.trainer.exports import golden as goldens
from headrace.trainer.exports.memory_files import memories_of, served_schema
from headrace.trainer.replica import pooling_kernels
from headrace.trainer.replica.dense_graph import DenseGraph, Tensors
from headrace.trainer.replica.replica_table import TableView
from headrace.trainer.replica.updates import F32, U64

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
POOLINGS = {
    "sum": pooling_kernels.SUM,
    "mean": pooling_kernels.MEAN,
    "sqrtn": pooling_kernels.SQRTN,
    "none": pooling_kernels.SEQUENCE,
}
NO_WEIGHTS = np.empty(0, np.float32)
FORMAT = 1
"""Newest format of model.json that this module reads."""


@dataclass(frozen=True, slots=True)
class TableSigns:
    """The signs of the slots of one table, for some samples."""

    sign_N: U64
    offset_SB1: I64
    """Slot s of sample b has the signs from [s, b] to [s, b + 1]."""
    weight_N: F32
    """Weight of each sign; NO_WEIGHTS where all are 1."""


@dataclass(frozen=True, slots=True)
class InferenceInputs:
    """B samples for a model: signs in the order of `Model.tables`, dense slots by name."""

    num_samples: int
    signs: Sequence[TableSigns]
    dense: Mapping[str, F32]
    """(B, size)."""
    events: Sequence[int] | None = None
    """(B,) the event of each sample, where a request has raw events."""
    left_out: tuple[str, ...] = ()
    """Slots that the job fills and the request lacks: trainer.replica.filled_inputs fills them."""
    time_s_B: F64 | None = None
    """(B,) unix seconds at which windows of counters end; None: now."""


@dataclass(frozen=True, slots=True)
class _Input:
    """Position of one input of the graph, for one sample, in the output of `kernels.pool`."""

    name: str
    begin: int
    shape: tuple[int, ...]
    is_mask: bool
    end: int


class SlotLayout:
    """The slots of one table, as `kernels.pool` needs them."""

    def __init__(self, name: str, table: Mapping[str, Any], slots: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.slots = name, tuple(slots)
        self.width = int(table["dim"]) + int(table["first_order"])
        default = table["default_row"]
        self.default_W = np.zeros(self.width, np.float32) if default == "zeros" else np.array(default, np.float32)
        if self.default_W.shape != (self.width,):
            raise BadInput(f"model.json: the default row of table {name!r} does not have {self.width} numbers")
        inputs: list[_Input] = []
        rows, self.num_floats, self.num_marks = [], 0, 0
        for slot in slots:
            pooling, length = POOLINGS[slot["pooling"]], int(slot["max_len"] or 0)
            rows.append([slot["group"], pooling, length, slot["keep"] == "tail", slot["padding"] is not None])
            rows[-1] += [self.num_floats, self.num_marks]
            shape = (length, self.width) if pooling == pooling_kernels.SEQUENCE else (self.width,)
            end = self.num_floats + int(np.prod(shape))
            inputs.append(_Input(slot["name"], self.num_floats, shape, is_mask=False, end=end))
            self.num_floats = end
            if pooling == pooling_kernels.SEQUENCE:
                end = self.num_marks + length
                inputs.append(_Input(f"{slot['name']}.mask", self.num_marks, (length,), is_mask=True, end=end))
                self.num_marks = end
        self._inputs = tuple(inputs)
        self._slot_S7 = np.array(rows, np.int64)
        self._padding_S = np.array([int(slot["padding"] or 0) for slot in slots], np.uint64)

    def feed(self, view: TableView, signs: TableSigns, num_samples: int, feeds: dict[str, NDArray[Any]]) -> None:
        """Put the graph's inputs of these slots into `feeds`."""
        out, mask = (
            np.zeros(num_samples * self.num_floats, np.float32),
            np.zeros(num_samples * self.num_marks, np.bool_),
        )
        pooling_kernels.pool(
            view.index_I, view.keys_R, view.rows_RW, self.default_W, signs.sign_N, signs.weight_N, signs.offset_SB1,
            self._slot_S7, self._padding_S, out, mask,
        )  # fmt: skip
        for each in self._inputs:
            values = mask if each.is_mask else out
            begin, end = num_samples * each.begin, num_samples * each.end
            feeds[each.name] = values[begin:end].reshape(num_samples, *each.shape)


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
        self.memories = {each.slot.name: each for each in memories_of(self.schema)}
        self.features = ServedFeatures(described["features"]) if described.get("features") else None
        if missing := [name for name in self.outputs if name not in graph.outputs]:
            raise BadInput(f"dense.onnx does not say {missing[0]!r}, which model.json names as an output")
        self._check_inputs()

    def widths(self, memories: frozenset[str] | None = None) -> dict[str, int]:
        """Floats of a row by table, of `memories` too: tables of histories and counters; None: of all these."""
        of_memories = {each.table: each.width for each in self.memories.values()}
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
            table.feed(views[table.name], signs, inputs.num_samples, feeds)
        return feeds

    def empty(self) -> InferenceInputs:
        """One sample without signs, all numbers 0."""
        signs = [
            TableSigns(np.empty(0, np.uint64), np.zeros((len(each.slots), 2), np.int64), NO_WEIGHTS)
            for each in self.tables
        ]
        return InferenceInputs(1, signs, {name: np.zeros((1, size), np.float32) for name, size in self.dense.items()})


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
