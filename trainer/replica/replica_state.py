"""The state of a replica: serves one version at a time, applies updates as a whole, and rolls back to kept versions.

An update never makes a reader wait: tables have two sides (trainer.replica.replica_table). trainer.replica.update_loop
takes updates from a source and handles refused ones.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.errors import BadInput, DeadlineExceeded, HeadraceError
from headrace.trainer.exports.golden import TOLERANCE
from headrace.trainer.exports.item_tower import weights_of
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.replica.item_indexer import ItemIndexer, ServedItems
from headrace.trainer.replica.replica_table import ReplicaTable, TableStep
from headrace.trainer.replica.serving_model import (
    BoundModel,
    Memories,
    ServingModel,
    Tensors,
    filled,
    golden_difference,
)
from headrace.trainer.replica.updates import F32, U64, ReplicaRows, ReplicaUpdate, TableUpdate
from headrace.trainer.serving.item_index import ItemIndex
from headrace.trainer.serving.slot_layout import InferenceInputs, TableView

# The versions that a replica keeps for a rollback, bounded in number and memory.
#
# Versions since the last whole update share tables and are one step apart. Versions before it have tables of their own.


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """Names a state of a model."""

    job: str
    timeline: str
    number: int

    def __str__(self) -> str:
        return f"{self.timeline}-{self.number}"


@dataclass(eq=False)
class TableEpoch:
    """Tables that began with a whole version, and the version they have now."""

    tables: Mapping[str, ReplicaTable]
    at: int = 0
    """The version of the tables, as the number of steps from the first of the epoch."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.num_bytes for table in self.tables.values())


@dataclass(slots=True, eq=False)
class KeptVersion:
    """One version that is kept."""

    version: ServedVersion
    epoch: TableEpoch
    place: int
    """Its number of steps from the first version of its epoch."""
    steps: Mapping[str, TableStep]
    """By table, the step from the version before it in its epoch; empty for the oldest kept one."""
    model: ServingModel
    weights: Tensors
    event_time_s: float | None
    served_at_s: float
    """When it was first served, unix seconds."""
    memories: Memories
    """The memories of the job that the version has."""

    @property
    def num_bytes(self) -> int:
        """Memory that this version adds: its steps, the old rows they keep, its weights."""
        tables, steps = self.epoch.tables, self.steps.items()
        rows = sum(step.num_bytes + step.num_kept * tables[name].row_bytes for name, step in steps)
        return rows + sum(tensor.nbytes for tensor in self.weights.values())


@dataclass
class VersionHistory:
    """Versions from oldest to newest, bounded in number and memory. Any of them may be the served one."""

    max_versions: int
    """Most versions beside the newest."""
    max_bytes: int
    """Most memory beside the newest version."""
    kept: list[KeptVersion] = field(default_factory=list)

    @property
    def newest(self) -> KeptVersion | None:
        """The version applied last."""
        return self.kept[-1] if self.kept else None

    def find(self, number: int, timeline: str | None = None) -> KeptVersion | None:
        """The kept version of a number; without a timeline, the one of the newest timeline that has it."""
        fits = (each for each in reversed(self.kept) if each.version.number == number)
        return next((each for each in fits if timeline in (None, each.version.timeline)), None)

    def num_bytes(self) -> int:
        """Memory of versions beside the newest. Any thread may call."""
        kept = list(self.kept)
        epochs = {id(each.epoch): each.epoch for each in kept if each.epoch is not kept[-1].epoch}
        return sum(each.num_bytes for each in kept) + sum(epoch.num_bytes for epoch in epochs.values())

    def add(self, kept: KeptVersion) -> None:
        """Add the version that was applied last; drop the oldest ones beyond the bounds."""
        self.kept.append(kept)
        total = self.num_bytes()
        while len(self.kept) > 1 and (len(self.kept) > self.max_versions + 1 or total > self.max_bytes):
            total -= self._drop_oldest()

    def _drop_oldest(self) -> int:
        """Drop the oldest version -> the memory that became free."""
        oldest, second = self.kept[0], self.kept[1]
        del self.kept[0]
        if second.epoch is not oldest.epoch:
            return oldest.num_bytes + oldest.epoch.num_bytes
        freed = sum(tensor.nbytes for tensor in oldest.weights.values())
        for name, step in second.steps.items():
            table = second.epoch.tables[name]
            table.forget(step)
            freed += step.num_bytes + step.num_kept * table.row_bytes
        second.steps = {}
        return freed


MAX_BOUND_SAMPLES = 16
"""Most samples of a request whose arrays are kept for the next one: of more, the arrays cost little beside the work."""
MAX_BOUND = 4
"""Most arrays that are kept of each number of samples; as many requests as threads need some at a time."""
LEAVE_S = 60.0
"""Longest time a request may read rows; longer is a bug."""
NOTHING = TableUpdate((), np.empty(0, np.uint64))


class UpdateRefused(BadInput):
    """An update is refused; the version before is still served. `reason` is a label for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RollbackInForce(HeadraceError):
    """A rollback is in force: nothing newer is served until `follow`."""


class NoVersionLoaded(HeadraceError):
    """No version has been loaded yet."""


class VersionNotKept(HeadraceError):
    """A version that is not kept."""


class VersionUnservable(HeadraceError):
    """A kept version that cannot be served: its items have no vectors."""


@dataclass(slots=True, eq=False)
class VersionView:
    """One version as requests read it."""

    kept: KeptVersion
    tables: Mapping[str, TableView]
    side: int
    items: ServedItems | None = None
    """The vectors of items, if it can retrieve them."""
    readers: int = 0
    """Requests that read its rows now."""
    idle: dict[int, list[BoundModel]] = field(default_factory=dict)
    """By number of samples: the model with arrays that no request uses now."""

    def bound(self, num_samples: int) -> BoundModel | None:
        """The model with arrays for so many samples; None for many. Any thread. Raises BadInput."""
        if num_samples > MAX_BOUND_SAMPLES:
            return None
        try:
            return self.idle[num_samples].pop()
        except (KeyError, IndexError):
            return BoundModel(self.kept.model, self.kept.weights, num_samples)

    def release(self, bound: BoundModel) -> None:
        """Keep it for the next request. Any thread."""
        idle = self.idle.setdefault(bound.num_samples, [])
        if len(idle) < MAX_BOUND:
            idle.append(bound)


class ReplicaState:
    """Rows, weights and models of the kept versions. One thread at a time may change it; any may read."""

    def __init__(self, max_versions: int, max_bytes: int, indexer: ItemIndexer | None = None) -> None:
        self._history = VersionHistory(max_versions, max_bytes)
        self._indexer = indexer or ItemIndexer()
        self._view: VersionView | None = None
        self._timeline = ""
        self._is_held_back = False
        self._left = threading.Condition()
        self._changing = threading.RLock()

    @property
    def served(self) -> KeptVersion | None:
        """The served version."""
        view = self._view
        return None if view is None else view.kept

    @property
    def is_held_back(self) -> bool:
        """Whether a rollback is in force."""
        return self._is_held_back

    def model(self) -> ServingModel:
        """The model of the served version. Raises NoVersionLoaded."""
        if (served := self.served) is None:
            raise NoVersionLoaded("no version is loaded yet; try again once /v2/health/ready reports ready")
        return served.model

    def predict(self, model: ServingModel, inputs: InferenceInputs) -> tuple[KeptVersion, dict[str, F32]] | None:
        """Predictions of the served version; None where it has another model than `model`, which `inputs` are for.

        Raises NoVersionLoaded, BadInput.
        """
        with self._reading() as view:
            kept = view.kept
            if kept.model is not model:
                return None
            inputs = filled(model, view.tables, inputs, kept.memories)
            if (bound := view.bound(inputs.num_samples)) is not None:
                bound.fill(view.tables, inputs)
            else:
                feeds = model.feeds(view.tables, inputs)
        if bound is None:
            feeds.update(kept.weights)
            return kept, model.graph.run(feeds)
        found = bound.run()
        view.release(bound)
        return kept, found

    @property
    def items(self) -> ServedItems | None:
        """The vectors of items by the served version; None where it has none."""
        view = self._view
        return None if view is None else view.items

    def users(self, model: ServingModel, inputs: InferenceInputs) -> tuple[KeptVersion, ItemIndex | None, F32] | None:
        """The version that is served, its items, and the vectors of users by it; None as in `predict`.

        Raises NoVersionLoaded, BadInput.
        """
        with self._reading() as view:
            kept, items = view.kept, view.items
            if kept.model is not model:
                return None
            if items is None:
                return kept, None, np.zeros((inputs.num_samples, 0), np.float32)
            feeds = model.feeds(view.tables, filled(model, view.tables, inputs, kept.memories))
        feeds.update(kept.weights)
        return kept, items.index, items.user_tower.run(feeds)[items.user_output]

    @property
    def served_model(self) -> ServingModel | None:
        served = self.served
        return None if served is None else served.model

    @property
    def index_trouble(self) -> str:
        """Why there is no index, or an older catalogue; empty if neither."""
        return self._indexer.trouble

    def reindex(self) -> None:
        """Compute the items of the served version anew, since the catalogue has changed. Raises BadInput."""
        with self._changing:
            if (view := self._view) is not None:
                view.items = self._indexed(view.kept, view.tables)

    def _indexed(self, kept: KeptVersion, tables: Mapping[str, TableView]) -> ServedItems | None:
        return self._indexer.index(kept.model, tables, kept.weights)

    @contextmanager
    def _reading(self) -> Iterator[VersionView]:
        with self._left:
            view = self._view
            if view is None:
                raise NoVersionLoaded("no version is loaded yet; try again once /v2/health/ready reports ready")
            view.readers += 1
        try:
            yield view
        finally:
            with self._left:
                view.readers -= 1
                if not view.readers and view is not self._view:
                    self._left.notify_all()

    def versions(self) -> list[KeptVersion]:
        """All kept versions, oldest first."""
        return list(self._history.kept)

    def name_of(self, kept: KeptVersion) -> str:
        """Name of a version among the kept ones: "25", or "25@t1" where a timeline newer than t1 is kept."""
        number, timeline = kept.version.number, kept.version.timeline
        return str(number) if timeline == self._timeline else f"{number}@{timeline}"

    def num_rows(self) -> dict[str, int]:
        """Rows of the served version, by table."""
        served = self.served
        return {} if served is None else {name: table.num_rows for name, table in served.epoch.tables.items()}

    def kept_bytes(self) -> int:
        """Memory of kept versions."""
        return self._history.num_bytes()

    def apply(self, update: ReplicaUpdate) -> KeptVersion:
        """Serve another version. Raises UpdateRefused, RollbackInForce; then nothing has changed.

        1. Write new rows to unused memory. 2. Apply the step to the idle side. 3. Check its predictions, and compute
        the vectors of items. 4. Publish the
        idle side: the version is served. 5. When the last reader has left the other side, apply the step to it, too.
        6. Drop old versions.
        """
        with self._changing:
            if self._is_held_back:
                raise RollbackInForce("a rollback is in force")
            newest = self._history.newest
            check_order(None if newest is None else newest.version, update)
            before = self._indexer.found(update.items)
            try:
                model = _model_of(update, newest)
                kept = self._next(update, model, newest)
            except BaseException as error:
                self._indexer.found(before)
                if isinstance(error, BadInput) and not isinstance(error, UpdateRefused):
                    raise UpdateRefused("broken", f"version {update.version} is not served: {error}") from error
                raise
            self._history.add(kept)  # 6
            return kept

    def _next(self, update: ReplicaUpdate, model: ServingModel, newest: KeptVersion | None) -> KeptVersion:
        weights = weights_of(model.described, model.graph, update.dense)
        version, now_s = ServedVersion(update.job, update.timeline, update.version), time.time()
        if update.whole or newest is None:
            widths = model.widths(update.memories)
            epoch = TableEpoch({name: ReplicaTable(width, _count(update, name)) for name, width in widths.items()})
            for name, table in epoch.tables.items():
                table.load(_rows(update, name, table.width))  # 1, 2
            facts = update.event_time_s, now_s, Memories(update.memories, update.decays)
            kept = KeptVersion(version, epoch, 0, {}, model, weights, *facts)
            view = VersionView(kept, _views(epoch, 0), 0)
            _try(view, update)  # 3
            view.items = self._indexed(kept, view.tables)
            self._timeline = update.timeline
            self._publish(view)  # 4, 5
            return kept
        epoch, idle, steps = newest.epoch, self._idle(newest.epoch), dict[str, TableStep]()
        held = Memories(newest.memories.tables & update.memories, update.decays)
        facts = update.event_time_s, now_s, held
        kept = KeptVersion(version, epoch, newest.place + 1, steps, model, weights, *facts)
        try:
            for name, table in epoch.tables.items():
                steps[name] = table.stage(_rows(update, name, table.width), _gone(update, name), idle)  # 1
            view = self._tried(kept, idle, update)  # 2, 3
        except BaseException:
            for name, step in steps.items():
                epoch.tables[name].discard(step)
            raise
        self._publish(view)  # 4
        _turn(epoch, steps, 1 - idle)  # 5
        _count_rows(epoch, steps)
        epoch.at = kept.place
        return kept

    def _tried(self, kept: KeptVersion, idle: int, update: ReplicaUpdate) -> VersionView:
        _turn(kept.epoch, kept.steps, idle)
        view = VersionView(kept, _views(kept.epoch, idle), idle)
        try:
            _try(view, update)
            view.items = self._indexed(kept, view.tables)
        except BaseException:
            _turn(kept.epoch, kept.steps, idle, back=True)
            raise
        return view

    def go_to(self, number: int, timeline: str | None = None) -> KeptVersion:
        """Serve a kept version, older or newer, and no other until `go_to_newest`. Raises VersionNotKept,
        VersionUnservable; then nothing has changed.

        Without a timeline it is the version of the newest timeline that has the number.
        """
        with self._changing:
            kept = self._history.find(number, timeline)
            if kept is None:
                asked = f"version {number}" if timeline is None else f"version {number} of timeline {timeline}"
                held = ", ".join(self.name_of(each) for each in self._history.kept[-20:]) or "none"
                raise VersionNotKept(f"{asked} is not kept; the newest kept versions: {held}")
            self._switch(kept)
            self._is_held_back = True
            return kept

    def go_to_newest(self) -> KeptVersion | None:
        """Serve the version applied last, and later ones. Raises VersionUnservable."""
        with self._changing:
            newest = self._history.newest
            if newest is not None:
                self._switch(newest)
            self._is_held_back = False
            return newest

    def _switch(self, kept: KeptVersion) -> None:
        """Serve a kept version, in the order of `apply`."""
        epoch, back = kept.epoch, kept.place < kept.epoch.at
        low, high = sorted((kept.place, epoch.at))
        between = [each for each in self._history.kept if each.epoch is epoch and low < each.place <= high]
        path = [each.steps for each in (reversed(between) if back else between)]
        idle = self._idle(epoch)
        for steps in path:
            _turn(epoch, steps, idle, back=back)
        tables = _views(epoch, idle)
        try:
            items = self._indexed(kept, tables)
        except BaseException as error:
            for steps in reversed(path):
                _turn(epoch, steps, idle, back=not back)
            if isinstance(error, BadInput):
                raise VersionUnservable(f"version {self.name_of(kept)} cannot be served: {error}") from error
            raise
        self._publish(VersionView(kept, tables, idle, items))
        for steps in path:
            _turn(epoch, steps, 1 - idle, back=back)
            _count_rows(epoch, steps, back=back)
        epoch.at = kept.place

    def _idle(self, epoch: TableEpoch) -> int:
        """The side of an epoch that has no readers."""
        view = self._view
        return 1 - view.side if view is not None and view.kept.epoch is epoch else 0

    def _publish(self, view: VersionView) -> None:
        """Give readers `view`, and wait until the last one has left the old view. Raises DeadlineExceeded."""
        with self._left:
            old, self._view = self._view, view
            if old is not None and not self._left.wait_for(lambda: not old.readers, LEAVE_S):
                raise DeadlineExceeded(f"a request has read rows for longer than {LEAVE_S:g} s")


def check_order(newest: ServedVersion | None, update: ReplicaUpdate) -> None:
    """Raise UpdateRefused where an update may not follow the newest version."""
    label = f"version {update.version} of timeline {update.timeline}"
    if newest is None:
        if not update.whole:
            raise UpdateRefused("no-base", f"{label} is a difference, and there is no version to apply it to")
    elif update.job != newest.job:
        raise UpdateRefused(
            "another-job", f"{label} is of job {update.job!r}; this replica serves {newest.job!r}: start another for it"
        )
    elif update.timeline != newest.timeline:
        if not update.whole:
            raise UpdateRefused(
                "no-base", f"{label} is a difference, and the newest version is of timeline {newest.timeline}"
            )
    elif update.version <= newest.number and not (update.goes_back and update.whole and update.version < newest.number):
        raise UpdateRefused("older", f"{label} is not newer than version {newest.number}")


def _model_of(update: ReplicaUpdate, newest: KeptVersion | None) -> ServingModel:
    """The model of a version; what the update lacks comes from the version before. Raises UpdateRefused, BadInput."""
    old = None if newest is None or update.whole else newest.model
    described = update.model if update.model is not None else None if old is None else old.described
    if described is None:
        raise UpdateRefused("no-model", f"version {update.version} has no model.json")
    graph = None if old is None else old.graph
    if update.onnx is not None:
        graph = DenseGraph(update.onnx)
        if newest is not None and graph.content == newest.model.graph.content:
            graph = newest.model.graph
    if graph is None:
        raise UpdateRefused("no-model", f"version {update.version} has no dense.onnx: its model could not be traced")
    if newest is not None and newest.model.graph is graph and newest.model.described == described:
        return newest.model
    model = ServingModel(described, graph.open())
    if old is not None and model.widths() != old.widths():
        raise UpdateRefused("no-base", f"version {update.version} has other tables than the version before")
    return model


def _rows(update: ReplicaUpdate, table: str, width: int) -> Iterator[ReplicaRows]:
    """Chunks of a table's rows, validated. Raises BadInput."""
    for rows in update.tables.get(table, NOTHING).rows:
        if rows.rows_UD.shape != (len(rows.keys_U), width):
            shape = "x".join(map(str, rows.rows_UD.shape))
            raise BadInput(f"rows of table {table!r} are {shape}, not {len(rows.keys_U)}x{width}")
        if table not in update.memories and not np.isfinite(rows.rows_UD).all():
            raise BadInput(f"rows of table {table!r} have numbers that are not finite")
        yield rows


def _count(update: ReplicaUpdate, table: str) -> int:
    rows = update.tables.get(table, NOTHING).rows
    return sum(len(each.keys_U) for each in rows) if isinstance(rows, list | tuple) else 0


def _gone(update: ReplicaUpdate, table: str) -> U64:
    return update.tables.get(table, NOTHING).gone


def _turn(epoch: TableEpoch, steps: Mapping[str, TableStep], side: int, *, back: bool = False) -> None:
    for name, step in steps.items():
        epoch.tables[name].turn(step, side, back=back)


def _count_rows(epoch: TableEpoch, steps: Mapping[str, TableStep], *, back: bool = False) -> None:
    for name, step in steps.items():
        epoch.tables[name].count(step, back=back)


def _views(epoch: TableEpoch, side: int) -> dict[str, TableView]:
    return {name: table.view(side) for name, table in epoch.tables.items()}


def _try(view: VersionView, update: ReplicaUpdate) -> None:
    """Predict the golden samples, or an empty one where there are none. Raises UpdateRefused, BadInput."""
    kept = view.kept
    known = tuple(name for name, needed in kept.model.memories.items() if kept.memories.has(needed))
    inputs = replace(kept.model.empty(), left_out=known)
    filled(kept.model, view.tables, inputs, kept.memories)  # its kernels are compiled before a request waits for them
    if update.golden is not None:
        difference = golden_difference(kept.model, view.tables, kept.weights, update.golden)
        if not difference <= TOLERANCE:
            raise UpdateRefused(
                "golden",
                f"version {update.version} predicts its golden samples with a difference of {difference:.3g}, "
                f"more than {TOLERANCE:g}: its rows or weights differ from the exported ones",
            )
        return
    found = kept.model.graph.run(kept.model.feeds(view.tables, kept.model.empty()) | dict(kept.weights))
    if not all(np.isfinite(found[name]).all() for name in kept.model.outputs):
        raise UpdateRefused("broken", f"version {update.version} does not predict a finite number for an empty sample")
