"""Keeps the catalogue of a replica, and has the vectors of its items computed by each version before it is served.

trainer.exports.item_tower computes them. The catalogue comes from files that the replica looks at again and again, or
with the export that is served.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from headrace.errors import BadInput
from headrace.trainer.exports.item_tower import ItemTower, subgraph
from headrace.trainer.exports.onnx_model import OnnxModel
from headrace.trainer.replica.serving_model import ServingModel, Tensors
from headrace.trainer.replica.updates import ItemSource
from headrace.trainer.serving.item_catalogue import (
    CatalogueRefused,
    ItemCatalogue,
    catalogue_of,
    files_of,
    read_catalogue,
)
from headrace.trainer.serving.item_index import ItemIndex
from headrace.trainer.serving.slot_layout import TableView

LOOK_S = 0.5
"""Interval at which the files of a catalogue are looked at."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedItems:
    """The items of a served version, and what finds the vectors of its users."""

    index: ItemIndex
    user_tower: OnnxModel
    user_output: str
    build_s: float
    """Seconds that the vectors of the items took."""


@dataclass(frozen=True, slots=True, eq=False)
class _Towers:
    """The towers of one model, for items and for users."""

    model: ServingModel
    items: ItemTower
    user: OnnxModel


@dataclass(frozen=True, slots=True, eq=False)
class _ReadCatalogue:
    """The catalogue that was read for the slots of a model."""

    told: Mapping[str, Any]
    slots: tuple[Mapping[str, Any], ...]
    source: ItemSource | None
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
        """`files`: where the catalogue is, if not where the versions say."""
        self._files = tuple(files)
        self._source: ItemSource | None = self._files or None
        self._read: _ReadCatalogue | None = None
        self._proven: _ReadCatalogue | None = None
        """The last one from which an index was computed."""
        self._towers: _Towers | None = None
        self.trouble = ""
        """Why there is no index, or why it has an older catalogue; empty if neither."""

    def found(self, source: ItemSource | None) -> ItemSource | None:
        """Take the catalogue from here from now on, as a version says -> where it came from."""
        before = self._source
        if source is not None and not self._files:
            self._source = source
        return before

    def index(self, model: ServingModel, tables: Mapping[str, TableView], weights: Tensors) -> ServedItems | None:
        """The index of a version; None where its model has no items, or no catalogue can be used.

        Raises BadInput where a catalogue that had an index has none by this version. One thread at a time.
        """
        told = model.described.get("retrieval")
        if told is None:
            return None
        read = self._read
        if read is None or read.slots != model.slots or read.told != told or not _same(read.source, self._source):
            self._read = read = self._read_for(model, told)
        if read.catalogue is None:
            return None
        begin_s = time.perf_counter()
        towers = self._towers
        if towers is None or towers.model is not model or towers.items.catalogue is not read.catalogue:
            graph = model.graph.content
            user = OnnxModel(subgraph(graph, str(told["user_vector"])))
            self._towers = towers = _Towers(model, ItemTower(model.described, graph, read.catalogue), user)
        try:
            found = towers.items.index(tables, weights)
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
        nobody_BV = np.empty((0, found.vectors_IV.shape[1]), np.float32)
        found.search(nobody_BV, 1, found.there_I)  # it is compiled before a request waits for it
        return ServedItems(found, towers.user, str(told["user_vector"]), time.perf_counter() - begin_s)

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
        if read is None or _signature(read.source) == read.files:
            return False
        new = self._read_for(model, read.told)
        if new.catalogue is None:
            self._read = replace(new, catalogue=read.catalogue if read.slots == new.slots else None)
            return False
        self._read = new
        return True

    def _read_for(self, model: ServingModel, told: Mapping[str, Any]) -> _ReadCatalogue:
        source = self._source
        files = _signature(source)
        try:
            catalogue = _catalogue(source, told, model)
        except CatalogueRefused as error:
            self._doubt(str(error))
            return _ReadCatalogue(told, model.slots, source, files, None)
        self.trouble = ""
        log.info("the catalogue has %d items", len(catalogue))
        return _ReadCatalogue(told, model.slots, source, files, catalogue)


def _catalogue(source: ItemSource | None, told: Mapping[str, Any], model: ServingModel) -> ItemCatalogue:
    """Raises CatalogueRefused."""
    match source:
        case None:
            raise CatalogueRefused("catalogue: this version came without one; name its files with --items")
        case pa.Table():
            return catalogue_of(source, told["slot"], told["item_slots"], model.slots)
        case _:
            return read_catalogue(source, told["slot"], told["item_slots"], model.slots)


def _same(one: ItemSource | None, other: ItemSource | None) -> bool:
    return one is other or (isinstance(one, tuple) and isinstance(other, tuple) and one == other)


def _signature(source: ItemSource | None) -> tuple[Any, ...]:
    """Names, times and sizes of the files of a catalogue; empty for one without files."""
    if not isinstance(source, tuple):
        return ()
    try:
        found = [(each, each.stat()) for each in files_of(source)]
    except (CatalogueRefused, OSError):
        return ()
    return tuple((str(path), stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) for path, stat in found)
