"""The index of a replica: the vectors of all items by one version, searched exactly.

All vectors are computed by the item tower from the rows and weights of the version before it is served, so an index is
always of one version, and equal bit by bit to one that another replica computes from the same version and catalogue.

Shapes: I items, G blocks of items, V length of a vector, B users, K best items.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.key_kernels import keys_of
from headrace.pserver.rows.kernels import EMPTY, find
from headrace.trainer.exports.onnx_model import OnnxModel
from headrace.trainer.replica.item_catalogue import CatalogueRefused, ItemCatalogue, files_of, read_catalogue
from headrace.trainer.replica.item_search_kernels import LANES, search
from headrace.trainer.replica.replica_table import TableView
from headrace.trainer.replica.serving_model import I64, InferenceInputs, ServingModel, SlotLayout, Tensors
from headrace.trainer.replica.updates import F32

TOWER_ITEMS = 4 * LANES
"""Items whose vectors are computed at a time. Always so many, as the last bits of a product depend on it."""

Bools = NDArray[np.bool_]

LOOK_S = 0.5
"""Interval at which the files of a catalogue are looked at."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ItemIndex:
    """The vectors of all items by one version."""

    catalogue: ItemCatalogue
    vectors_GVL: F32
    """As headrace.trainer.replica.item_search_kernels reads them; zeros for items that are not found."""
    there_I: Bools
    """Whether an item can be found."""
    user_tower: OnnxModel
    user_output: str
    build_s: float
    """Seconds that the vectors took."""

    @property
    def num_items(self) -> int:
        """Items that can be found."""
        return int(np.count_nonzero(self.there_I))

    def search(
        self, user_BV: F32, most: int, open_I: Bools, after: Sequence[tuple[float, int]] = ()
    ) -> list[tuple[F32, I64]]:
        """Scores and places of the best items of each user among the open ones, best first.

        `after`: by user, the score and place after which to begin.
        """
        num_users = len(user_BV)
        score_BK, at_BK = np.zeros((num_users, most), np.float32), np.zeros((num_users, most), np.int64)
        count_B = np.zeros(num_users, np.int64)
        begins = after or [(float("inf"), -1)] * num_users
        after_B = np.array([score for score, _ in begins], np.float32)
        at_B = np.array([at for _, at in begins], np.int64)
        user_BV = np.ascontiguousarray(user_BV, np.float32)
        search(self.vectors_GVL, open_I, user_BV, after_B, at_B, score_BK, at_BK, count_B)
        return [(score_BK[b, : count_B[b]], at_BK[b, : count_B[b]]) for b in range(num_users)]


class ItemTower:
    """Computes the vectors of a catalogue by the item tower of a model."""

    def __init__(self, model: ServingModel, told: Mapping[str, Any], catalogue: ItemCatalogue) -> None:
        """`told`: the section "retrieval" of model.json. Raises BadInput."""
        self.model, self.catalogue, self._told = model, catalogue, told
        self._output = str(told["item_vector"])
        self._item = OnnxModel(subgraph(model.graph.content, self._output))
        self.user_tower = OnnxModel(subgraph(model.graph.content, str(told["user_vector"])))
        read = {name.removesuffix(".mask") for name in self._item.inputs}
        slots = [slot for slot in model.slots if slot["kind"] == "sparse" and slot["name"] in read]
        tables = model.described["tables"]
        self._layouts = [
            SlotLayout(name, tables[name], of)
            for name in tables
            if (of := [slot for slot in slots if slot["table"] == name])
        ]
        dense = {name: size for name, size in model.dense.items() if name in read}
        self._blocks: list[InferenceInputs] = [
            catalogue.block(self._layouts, dense, begin, min(begin + TOWER_ITEMS, len(catalogue)))
            for begin in range(0, len(catalogue), TOWER_ITEMS)
        ]
        self._id_slot = next(slot for slot in model.slots if slot["name"] == told["slot"])
        self._key_I = np.empty(len(catalogue), np.uint64)
        keys_of(catalogue.sign_I, int(self._id_slot["group"]), self._key_I)

    def index(self, tables: Mapping[str, TableView], weights: Tensors) -> ItemIndex:
        """The index of a version. Raises BadInput for vectors that are not finite."""
        begin_s = time.perf_counter()
        there_I = self._there(tables)
        vectors_GVL: F32 | None = None
        for number, inputs in enumerate(self._blocks):
            begin = number * TOWER_ITEMS
            feeds: dict[str, NDArray[Any]] = {**inputs.dense, **weights}
            for layout, signs in zip(self._layouts, inputs.signs, strict=True):
                feeds |= layout.inputs_of(tables[layout.name], signs, inputs.num_samples)
            found_BV = self._item.run(feeds)[self._output]
            if found_BV.ndim != 2 or len(found_BV) != inputs.num_samples:
                raise BadInput(
                    f"output {self._output!r} has the shape {list(found_BV.shape)}: it is no vector of items"
                )
            there_B = there_I[begin : begin + len(found_BV)]
            found_BV = np.where(there_B[:, None], found_BV, np.float32(0))
            if not np.isfinite(found_BV).all():
                raise BadInput(f"output {self._output!r} is not finite for an item of the catalogue")
            if vectors_GVL is None:
                num_blocks = -(-len(self.catalogue) // LANES)
                vectors_GVL = np.zeros((num_blocks, found_BV.shape[1], LANES), np.float32)
            for place in range(0, len(found_BV), LANES):
                part = found_BV[place : place + LANES]
                vectors_GVL[(begin + place) // LANES, :, : len(part)] = part.T
        assert vectors_GVL is not None, "a catalogue has items"
        took_s = time.perf_counter() - begin_s
        output = str(self._told["user_vector"])
        return ItemIndex(self.catalogue, vectors_GVL, there_I, self.user_tower, output, took_s)

    def _there(self, tables: Mapping[str, TableView]) -> Bools:
        """Which items can be found: those with a row of their own, unless others may be, too."""
        if self._told["unseen"]:
            return np.ones(len(self.catalogue), np.bool_)
        view, row_I = tables[self._id_slot["table"]], np.empty(len(self.catalogue), np.int32)
        find(view.index_I, view.keys_R, self._key_I, row_I)
        there_I: Bools = row_I != EMPTY
        return there_I


@dataclass(frozen=True, slots=True, eq=False)
class _ReadCatalogue:
    """The catalogue that was read for the slots of a model."""

    told: Mapping[str, Any]
    slots: tuple[Mapping[str, Any], ...]
    files: tuple[Any, ...]
    """Names, times and sizes of the files."""
    catalogue: ItemCatalogue | None
    """None where it was refused."""


class Reindexed(Protocol):
    """A state whose items an indexer computes."""

    @property
    def served_model(self) -> ServingModel | None:
        """The model of the served version."""
        ...

    def reindex(self) -> None:
        """Compute the items of the served version anew."""
        ...


class ItemIndexer:
    """Keeps the catalogue of a replica, and makes the index of each version before it is served."""

    def __init__(self, files: Sequence[str] = ()) -> None:
        """`files`: where the catalogue is, if not where the job says."""
        self._files = tuple(files)
        self._read: _ReadCatalogue | None = None
        self._proven: _ReadCatalogue | None = None
        """The last one from which an index was computed."""
        self._tower: ItemTower | None = None
        self.trouble = ""
        """Why there is no index, or why it has an older catalogue; empty if neither."""

    def index(self, model: ServingModel, tables: Mapping[str, TableView], weights: Tensors) -> ItemIndex | None:
        """The index of a version; None where its model has no items, or no catalogue can be used.

        Raises BadInput where a catalogue that had an index has none by this version. One thread at a time.
        """
        told = model.described.get("retrieval")
        if told is None:
            return None
        read = self._read
        if read is None or read.slots != model.slots or read.told != told:
            self._read = read = self._read_for(model, told)
        if read.catalogue is None:
            return None
        tower = self._tower
        if tower is None or tower.model is not model or tower.catalogue is not read.catalogue:
            self._tower = tower = ItemTower(model, told, read.catalogue)
        try:
            found = tower.index(tables, weights)
        except BadInput as error:
            proven = self._proven
            if proven is not None and proven.catalogue is read.catalogue:
                raise
            self._doubt(f"catalogue: {error}")
            if proven is None or proven.slots != read.slots or proven.told != read.told:
                return None
            self._read = replace(read, catalogue=proven.catalogue)
            return self.index(model, tables, weights)
        if self._proven is None or self._proven.catalogue is not read.catalogue:
            self._proven, self.trouble = read, ""
        return found

    def _doubt(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            log.warning("items cannot be taken from the catalogue: %s", trouble)

    def follow(self, state: "Reindexed", stopping: threading.Event) -> None:
        """Have the items of the served version computed anew whenever the catalogue has changed, until `stopping`."""
        while not stopping.wait(LOOK_S):
            try:
                if (model := state.served_model) is not None and self.look(model):
                    state.reindex()
            except BadInput as error:
                self.trouble = str(error)
                log.warning("the new catalogue is not searched: %s", error)
            except Exception:  # noqa: BLE001  # a bug in one catalogue does not end the service
                log.exception("a new catalogue failed; the one before is still searched")

    def look(self, model: ServingModel) -> bool:
        """Read the catalogue again if its files have changed; whether there is a new one. One thread."""
        read = self._read
        if read is None or self._signature(read.told) == read.files:
            return False
        new = self._read_for(model, read.told)
        if new.catalogue is None:
            self._read = replace(new, catalogue=read.catalogue if read.slots == new.slots else None)
            return False
        self._read = new
        return True

    def _read_for(self, model: ServingModel, told: Mapping[str, Any]) -> _ReadCatalogue:
        files, patterns = self._signature(told), self._files or tuple(told["files"])
        try:
            catalogue = read_catalogue(patterns, told["slot"], told["item_slots"], model)
        except CatalogueRefused as error:
            self._doubt(str(error))
            return _ReadCatalogue(told, model.slots, files, None)
        self.trouble = ""
        log.info("the catalogue has %d items", len(catalogue))
        return _ReadCatalogue(told, model.slots, files, catalogue)

    def _signature(self, told: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            found = [(each, each.stat()) for each in files_of(self._files or tuple(told["files"]))]
        except (CatalogueRefused, OSError):
            return ()
        return tuple((str(path), stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) for path, stat in found)


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
