"""The index of items at the start of a pass, on rank 0: what a replica would search now.

trainer.metrics.found_items measures how many items of clicks it finds. Rows and weights are those of the last closed
pass, and trainer.exports.item_tower computes the vectors, as for replicas.

Shapes: I items, E users, V length of a vector, U unique items.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.errors import BadInput, DeadlineExceeded
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.shards import F32, U64, Keys, absent
from headrace.trainer.exports.item_tower import ItemTower, weights_of
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.serving.item_catalogue import CatalogueRefused, ItemCatalogue, files_of, read_catalogue
from headrace.trainer.serving.item_index import ItemIndex
from headrace.trainer.serving.slot_layout import TableView, view_of
from headrace.trainer.train.model_feed import FeedContent, copies_of

ITEMS_OF_A_PASS = 1 << 16
"""A catalogue with n times as many items is measured in every n-th pass alone, which bounds what a pass costs."""
BLOCK_BYTES = 1 << 19
"""Rows are read in blocks of so many bytes: half of the shortest `cluster.max_message`."""
KEY_BYTES = 16
"""Most bytes of a key in a message."""
LOOK_S = 60.0
"""Longest time to read all rows."""

log = logging.getLogger(__name__)


class IndexAtStart:
    """The index that is searched for the clicks of a pass: trainer.metrics.found_items's `Searched`."""

    def __init__(self, index: ItemIndex) -> None:
        self._index, self._sign_I = index, index.catalogue.sign_I
        self._found_U = np.sort(self._sign_I[index.there_I])

    def best(self, user_EV: F32, most: int) -> list[U64]:
        found = self._index.search(user_EV, min(most, len(self._sign_I)), self._index.there_I)
        return [self._sign_I[at_K] for _, at_K in found]

    def has(self, sign_U: U64) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.isin(sign_U, self._found_U)
        return found


class LiveIndex:
    """Makes the index of each pass. Rank 0, between passes."""

    def __init__(self, content: FeedContent, look: Callable[[Mapping[str, Keys], Deadline], Mapping[str, F32]]) -> None:
        """`look`: `Shards.look`."""
        self._content, self._look = content, look
        self._described: Mapping[str, Any] = {}
        self._graph: DenseGraph | None = None
        self._files: tuple[Any, ...] = ()
        self._catalogue: ItemCatalogue | None = None
        self._tower: ItemTower | None = None
        self._refused, self._trouble = CatalogueRefused("catalogue: was not read yet"), ""

    def at(self, number: int) -> IndexAtStart | None:
        """The index of the version before pass `number`; None where the pass is not measured.

        That is no reason to stop: a shard that does not answer is found when the pass opens.
        """
        try:
            return self._made(number)
        except (BadInput, InvalidShardCall, DeadlineExceeded) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("what the index finds is not measured: %s", error)
            return None

    def _made(self, number: int) -> IndexAtStart | None:
        """Raises BadInput, and what `look` raises."""
        tensors = self._content.tensors()
        if tensors is None:
            raise BadInput("the weights of the model are divided over trainers")
        described = self._content.model()
        catalogue = self._catalogue_now(described)
        if number % -(-len(catalogue) // ITEMS_OF_A_PASS):
            return None
        tower = self._tower_of(described, catalogue)
        assert self._graph is not None
        deadline = Deadline.after(LOOK_S)
        tables = {name: self._rows(name, keys_U, deadline) for name, keys_U in tower.keys().items()}
        index = tower.index(tables, weights_of(described, self._graph, copies_of(tensors)))
        self._trouble = ""
        return IndexAtStart(index)

    def _rows(self, name: str, keys_U: U64, deadline: Deadline) -> TableView:
        """The rows of a table, in blocks that fit a message."""
        table = self._described["tables"][name]
        width = int(table["dim"]) + int(table["first_order"])
        rows_UW, step = np.empty((len(keys_U), width), np.float32), BLOCK_BYTES // (KEY_BYTES + 4 * width)
        for begin in range(0, len(keys_U), step):
            block_N = keys_U[begin : begin + step]
            keys = Keys(block_N, np.zeros(len(block_N), np.uint16))
            rows_UW[begin : begin + step] = self._look({name: keys}, deadline)[name]
        return _view(keys_U, rows_UW)

    def _catalogue_now(self, described: Mapping[str, Any]) -> ItemCatalogue:
        """The present catalogue, which is read anew where its files have changed. Raises BadInput."""
        files = _signature(self._content.catalogue)
        if files != self._files:
            told, self._files = described["retrieval"], files
            try:
                self._catalogue = read_catalogue(
                    self._content.catalogue, told["slot"], told["item_slots"], described["slots"]
                )
            except CatalogueRefused as error:
                self._refused = error
                log.warning("the catalogue is not measured: %s", error)
        if self._catalogue is None:
            raise self._refused
        return self._catalogue

    def _tower_of(self, described: Mapping[str, Any], catalogue: ItemCatalogue) -> ItemTower:
        """The tower with this catalogue; the one before if nothing changed. Raises BadInput."""
        if self._graph is None:
            if (template := self._content.onnx()) is None:
                raise BadInput("the model could not be traced")
            self._graph = DenseGraph(template)
        if self._tower is None or catalogue is not self._tower.catalogue or described != self._described:
            self._tower, self._described = ItemTower(described, self._graph.content, catalogue), described
        return self._tower


def _view(keys_U: U64, rows_UW: F32) -> TableView:
    """The rows that are there: shards give zeros, or a mark, for a key without a row."""
    there_U = rows_UW.any(axis=1) & ~absent(rows_UW)
    return view_of(keys_U[there_U], np.ascontiguousarray(rows_UW[there_U]))


def _signature(patterns: tuple[str, ...]) -> tuple[Any, ...]:
    """Names, times and sizes of the files of a catalogue. Raises CatalogueRefused."""
    try:
        found = [(each, each.stat()) for each in files_of(patterns)]
    except OSError as error:
        raise CatalogueRefused(f"catalogue: {error}") from None
    return tuple((str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in found)
