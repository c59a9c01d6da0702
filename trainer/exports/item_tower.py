"""Computes the vectors of all items by the item tower of a model, from the rows and weights of one version.

Vectors are computed in blocks of a fixed size in the order of the catalogue, so exports and replicas have the same bits
for the same version and catalogue. trainer.serving.item_index searches them.

Shapes: I items, B items of a block, V length of a vector, N signs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.key_kernels import keys_of
from headrace.pserver.rows.kernels import EMPTY, find
from headrace.trainer.exports.onnx_model import PREFIX, DenseGraph, OnnxModel
from headrace.trainer.models.item_counts import PART, log_shares
from headrace.trainer.serving.item_catalogue import ItemCatalogue
from headrace.trainer.serving.item_index import Bools, ItemIndex
from headrace.trainer.serving.slot_layout import F32, U64, InferenceInputs, SlotLayout, TableView

TOWER_ITEMS = 4096
"""Items whose vectors are computed at a time. Always so many, as the last bits of a product depend on it."""

Tensors = Mapping[str, NDArray[Any]]


def weights_of(described: Mapping[str, Any], graph: DenseGraph, dense: Tensors) -> dict[str, NDArray[Any]]:
    """The tensors of a version that its graph and its items need, by their names in the graph. Raises BadInput.

    `described`: model.json; `dense`: all tensors of the model.
    """
    found, counts = graph.weights(dense), (described.get("retrieval") or {}).get("popularity")
    return found if counts is None or counts not in dense else {**found, PREFIX + counts: dense[counts]}


class ItemTower:
    """Computes the vectors of a catalogue by the item tower of a model."""

    def __init__(self, described: Mapping[str, Any], graph: bytes, catalogue: ItemCatalogue) -> None:
        """`described`: model.json; `graph`: that of a DenseGraph, with weights as inputs. Raises BadInput."""
        self.catalogue, told = catalogue, described["retrieval"]
        self._counts = told.get("popularity")
        self._output, self._unseen = str(told["item_vector"]), bool(told["unseen"])
        self._tower = OnnxModel(subgraph(graph, self._output))
        read = {name.removesuffix(".mask") for name in self._tower.inputs}
        slots, tables = described["slots"], described["tables"]
        self.layouts = [
            SlotLayout(name, tables[name], of)
            for name in tables
            if (of := [slot for slot in slots if slot["name"] in read and slot.get("table") == name])
        ]
        """The slots of the item, by table."""
        dense = {slot["name"]: slot["size"] for slot in slots if slot["kind"] == "dense" and slot["name"] in read}
        self._blocks: list[InferenceInputs] = [
            catalogue.block(self.layouts, dense, begin, min(begin + TOWER_ITEMS, len(catalogue)))
            for begin in range(0, len(catalogue), TOWER_ITEMS)
        ]
        id_slot = next(slot for slot in slots if slot["name"] == told["slot"])
        self.id_table = str(id_slot["table"])
        """The table that has a row for each item that was seen."""
        self.id_key_I = np.empty(len(catalogue), np.uint64)
        keys_of(catalogue.sign_I, int(id_slot["group"]), self.id_key_I)

    def keys(self) -> dict[str, U64]:
        """By table, the keys of all rows that the vectors are computed from, each once."""
        found = {layout.name: [np.empty(0, np.uint64)] for layout in self.layouts}
        found.setdefault(self.id_table, []).append(self.id_key_I)
        for inputs in self._blocks:
            for layout, signs in zip(self.layouts, inputs.signs, strict=True):
                for slot, offset_B1 in zip(layout.slots, signs.offset_SB1, strict=True):
                    sign_N = signs.sign_N[offset_B1[0] : offset_B1[-1]]
                    key_N = np.empty(len(sign_N), np.uint64)
                    keys_of(sign_N, int(slot["group"]), key_N)
                    found[layout.name].append(key_N)
        return {name: np.unique(np.concatenate(keys)) for name, keys in found.items()}

    def index(
        self, tables: Mapping[str, TableView], weights: Tensors, on_block: Callable[[], None] = lambda: None
    ) -> ItemIndex:
        """The index of a version; `weights` as of `weights_of`; `on_block` is called before each block.

        Raises BadInput, also for vectors that are not finite. Where the popularity of items is part of their vectors,
        it is the last number of each.
        """
        there_I = self._there(tables)
        popularity_I = None
        if self._counts is not None:
            popularity_I = log_shares(weights.get(PREFIX + self._counts), self.catalogue.sign_I) * np.float32(PART)
        vectors_IV: F32 | None = None
        for number, inputs in enumerate(self._blocks):
            on_block()
            begin = number * TOWER_ITEMS
            feeds: dict[str, NDArray[Any]] = {**inputs.dense, **weights}
            for layout, signs in zip(self.layouts, inputs.signs, strict=True):
                feeds |= layout.inputs_of(tables[layout.name], signs, inputs.num_samples)
            found_BV = self._tower.run(feeds)[self._output]
            if found_BV.ndim != 2 or len(found_BV) != inputs.num_samples:
                raise BadInput(
                    f"output {self._output!r} has the shape {list(found_BV.shape)}: it is no vector of items"
                )
            if popularity_I is not None:
                found_BV = np.column_stack([found_BV[:, :-1], popularity_I[begin : begin + len(found_BV)]])
            there_B = there_I[begin : begin + len(found_BV)]
            found_BV = np.where(there_B[:, None], found_BV, np.float32(0))
            if not np.isfinite(found_BV).all():
                raise BadInput(f"output {self._output!r} is not finite for an item of the catalogue")
            if vectors_IV is None:
                vectors_IV = np.empty((len(self.catalogue), found_BV.shape[1]), np.float32)
            vectors_IV[begin : begin + len(found_BV)] = found_BV
        assert vectors_IV is not None, "a catalogue has items"
        return ItemIndex.of(self.catalogue, vectors_IV, there_I)

    def _there(self, tables: Mapping[str, TableView]) -> Bools:
        """Which items can be found: those with a row of their own, unless others may be, too."""
        if self._unseen:
            return np.ones(len(self.catalogue), np.bool_)
        view, row_I = tables[self.id_table], np.empty(len(self.catalogue), np.int32)
        find(view.index_I, view.keys_R, self.id_key_I, row_I)
        there_I: Bools = row_I != EMPTY
        return there_I


def subgraph(content: bytes, output: str) -> bytes:
    """The part of a graph that computes one output. Raises BadInput where it lacks it."""
    model = onnx.load_model_from_string(content)
    graph = model.graph
    if output not in {each.name for each in graph.output}:
        raise BadInput(f"dense.onnx has no output {output!r}: the job that made it is of an older Headrace; restart it")
    maker = {name: node for node in graph.node for name in node.output}
    needed, waiting = set[str](), [output]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        node = maker.get(name)
        if node is not None:
            waiting.extend(each for each in _read_by(node) if each)
    nodes = [each for each in graph.node if needed.intersection(each.output)]
    del graph.node[:]
    graph.node.extend(nodes)
    weights = [each for each in graph.initializer if each.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    for values in (graph.input, graph.output, graph.value_info):
        kept = [each for each in values if each.name in needed]
        if values is graph.output:
            kept = [each for each in kept if each.name == output]
        del values[:]
        values.extend(kept)
    found: bytes = model.SerializeToString(deterministic=True)
    return found


def _read_by(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads, also within its subgraphs."""
    found = list(node.input)
    for each in node.attribute:
        for graph in ([each.g] if each.HasField("g") else []) + list(each.graphs):
            for inner in graph.node:
                found += _read_by(inner)
    return found
