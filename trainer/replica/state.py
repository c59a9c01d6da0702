"""What a replica answers with: one version at a time, changed as a whole, and the way back to versions that are kept.

Applying never makes a reader wait: tables have two sides (trainer.replica.table). Where updates come from, and what
becomes of one that is refused, is trainer.replica.keeping's work.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from millrace.errors import BadInput, DeadlineExceeded, MillraceError
from trainer.exports.golden import TOLERANCE
from trainer.replica.graph import Graph
from trainer.replica.history import Epoch, History, Kept, Version
from trainer.replica.inference import Inputs, Model, differs_by
from trainer.replica.table import Step, Table, TableView
from trainer.replica.updates import F32, U64, Rows, TableUpdate, Update

LEAVE_S = 60.0
"""How long reading the rows of one request may take at most; longer is a bug."""
NOTHING = TableUpdate((), np.empty(0, np.uint64))


class UpdateRefused(BadInput):
    """An update is not served: what was served before goes on. `reason` is one of few, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class HeldBack(MillraceError):
    """Somebody went back to an older version: nothing newer is served until they say so."""


class NothingServed(MillraceError):
    """No version has been loaded yet."""


class NotKept(MillraceError):
    """A version that is not there to go back to."""


@dataclass(slots=True, eq=False)
class View:
    """One version as requests read it."""

    kept: Kept
    tables: Mapping[str, TableView]
    side: int
    readers: int = 0
    """Requests that read rows of it now."""


class State:
    """Rows, weights and model of the versions held. One thread changes it at a time; any may read."""

    def __init__(self, max_versions: int, max_bytes: int) -> None:
        self._history = History(max_versions, max_bytes)
        self._view: View | None = None
        self._timeline = ""
        self._is_held_back = False
        self._left = threading.Condition()
        self._changing = threading.RLock()

    @property
    def served(self) -> Kept | None:
        """The version that answers."""
        view = self._view
        return None if view is None else view.kept

    @property
    def is_held_back(self) -> bool:
        """Whether somebody chose the version that is served."""
        return self._is_held_back

    def model(self) -> Model:
        """The served version's. Raises NothingServed."""
        if (served := self.served) is None:
            raise NothingServed("no version is loaded yet; ask again when /v2/health/ready says so")
        return served.model

    def predict(self, model: Model, inputs: Inputs) -> tuple[Kept, dict[str, F32]] | None:
        """What the served version says; None where `model`, which `inputs` are for, is not its any more: ask anew.

        Raises NothingServed, BadInput.
        """
        with self._reading() as view:
            kept = view.kept
            if kept.model is not model:
                return None
            feeds = model.feeds(view.tables, inputs)
        feeds.update(kept.weights)
        return kept, model.graph.run(feeds)

    @contextmanager
    def _reading(self) -> Iterator[View]:
        with self._left:
            view = self._view
            if view is None:
                raise NothingServed("no version is loaded yet; ask again when /v2/health/ready says so")
            view.readers += 1
        try:
            yield view
        finally:
            with self._left:
                view.readers -= 1
                if not view.readers and view is not self._view:
                    self._left.notify_all()

    def versions(self) -> list[Kept]:
        """All that are held, from the oldest."""
        return list(self._history.kept)

    def name_of(self, kept: Kept) -> str:
        """Which version it is among those that are held: "25", and "25@t1" where a timeline newer than t1 is held."""
        number, timeline = kept.version.number, kept.version.timeline
        return str(number) if timeline == self._timeline else f"{number}@{timeline}"

    def num_rows(self) -> dict[str, int]:
        """Of the served version, by table."""
        served = self.served
        return {} if served is None else {name: table.num_rows for name, table in served.epoch.tables.items()}

    def kept_bytes(self) -> int:
        """Memory of what is there to go back to."""
        return self._history.num_bytes()

    def apply(self, update: Update) -> Kept:
        """Serve another version. Raises UpdateRefused, HeldBack: then all is as it was.

        1. New rows into memory, where nobody looks. 2. The side that nobody reads goes over the step. 3. It is tried.
        4. Readers come to this side: the version is served. 5. The last has left the other side, which goes over the
        step as well. 6. Old versions are let go.
        """
        with self._changing:
            if self._is_held_back:
                raise HeldBack("an older version is served at somebody's wish")
            newest = self._history.newest
            check(None if newest is None else newest.version, update)
            try:
                model = _model_of(update, newest)
                kept = self._next(update, model, newest)
            except UpdateRefused:
                raise
            except BadInput as error:
                raise UpdateRefused("broken", f"version {update.version} is not served: {error}") from error
            self._history.add(kept)  # 6
            return kept

    def _next(self, update: Update, model: Model, newest: Kept | None) -> Kept:
        weights = model.graph.weights(update.dense)
        version, now_s = Version(update.job, update.timeline, update.version), time.time()
        if update.whole or newest is None:
            epoch = Epoch({each.name: Table(each.width, _count(update, each.name)) for each in model.tables})
            for name, table in epoch.tables.items():
                table.load(_rows(update, name, table.width))  # 1, 2
            kept = Kept(version, epoch, 0, {}, model, weights, update.event_time_s, now_s)
            view = View(kept, _views(epoch, 0), 0)
            _try(view, update)  # 3
            self._timeline = update.timeline
            self._publish(view)  # 4, 5
            return kept
        epoch, idle, steps = newest.epoch, self._idle(newest.epoch), dict[str, Step]()
        kept = Kept(version, epoch, newest.place + 1, steps, model, weights, update.event_time_s, now_s)
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

    def _tried(self, kept: Kept, idle: int, update: Update) -> View:
        _turn(kept.epoch, kept.steps, idle)
        view = View(kept, _views(kept.epoch, idle), idle)
        try:
            _try(view, update)
        except BaseException:
            _turn(kept.epoch, kept.steps, idle, back=True)
            raise
        return view

    def go_to(self, number: int, timeline: str | None = None) -> Kept:
        """Serve a version that is kept, older or newer, and no other until `go_to_newest`. Raises NotKept.

        Where several timelines have the number and none is named, it is the newest timeline's.
        """
        with self._changing:
            kept = self._history.find(number, timeline)
            if kept is None:
                asked = f"version {number}" if timeline is None else f"version {number} of timeline {timeline}"
                held = ", ".join(self.name_of(each) for each in self._history.kept[-20:]) or "none"
                raise NotKept(f"{asked} is not kept; of those that are, the newest: {held}")
            self._switch(kept)
            self._is_held_back = True
            return kept

    def go_to_newest(self) -> Kept | None:
        """Serve the last version applied, and what comes after it."""
        with self._changing:
            self._is_held_back = False
            newest = self._history.newest
            if newest is not None:
                self._switch(newest)
            return newest

    def _switch(self, kept: Kept) -> None:
        """Serve a version that is kept: in the order of `apply`."""
        epoch, back = kept.epoch, kept.place < kept.epoch.at
        low, high = sorted((kept.place, epoch.at))
        between = [each for each in self._history.kept if each.epoch is epoch and low < each.place <= high]
        path = [each.steps for each in (reversed(between) if back else between)]
        idle = self._idle(epoch)
        for steps in path:
            _turn(epoch, steps, idle, back=back)
        self._publish(View(kept, _views(epoch, idle), idle))
        for steps in path:
            _turn(epoch, steps, 1 - idle, back=back)
            _count_rows(epoch, steps, back=back)
        epoch.at = kept.place

    def _idle(self, epoch: Epoch) -> int:
        """The side of an epoch that nobody reads."""
        view = self._view
        return 1 - view.side if view is not None and view.kept.epoch is epoch else 0

    def _publish(self, view: View) -> None:
        """Readers come to `view`; returns when the last has left what was read before. Raises DeadlineExceeded."""
        with self._left:
            old, self._view = self._view, view
            if old is not None and not self._left.wait_for(lambda: not old.readers, LEAVE_S):
                raise DeadlineExceeded(f"a request has read rows for longer than {LEAVE_S:g} s")


def check(newest: Version | None, update: Update) -> None:
    """Whether an update may follow the newest version held. Raises UpdateRefused."""
    told = f"version {update.version} of timeline {update.timeline}"
    if newest is None:
        if not update.whole:
            raise UpdateRefused("no-base", f"{told} is a difference, and there is nothing it could be applied to")
    elif update.job != newest.job:
        raise UpdateRefused(
            "another-job", f"{told} is of job {update.job!r}; this replica serves {newest.job!r}: start another for it"
        )
    elif update.timeline != newest.timeline:
        if not update.whole:
            raise UpdateRefused("no-base", f"{told} is a difference, and what is held is of timeline {newest.timeline}")
    elif update.version <= newest.number:
        raise UpdateRefused("older", f"{told} is not newer than {newest.number}, which is held")


def _model_of(update: Update, newest: Kept | None) -> Model:
    """The model of a version: the one before, as far as nothing else is told. Raises UpdateRefused, BadInput."""
    old = None if newest is None or update.whole else newest.model
    described = update.model if update.model is not None else None if old is None else old.described
    if described is None:
        raise UpdateRefused("no-model", f"version {update.version} has no model.json")
    graph = None if old is None else old.graph
    if update.onnx is not None:
        graph = Graph(update.onnx)
        if newest is not None and graph.content == newest.model.graph.content:
            graph = newest.model.graph
    if graph is None:
        raise UpdateRefused("no-model", f"version {update.version} has no dense.onnx: its model could not be traced")
    if newest is not None and newest.model.graph is graph and newest.model.described == described:
        return newest.model
    model = Model(described, graph.open())
    if old is not None and [(each.name, each.width) for each in model.tables] != [
        (each.name, each.width) for each in old.tables
    ]:
        raise UpdateRefused("no-base", f"version {update.version} has other tables than the one it is a difference to")
    return model


def _rows(update: Update, table: str, width: int) -> Iterator[Rows]:
    """Chunks of a table's rows, looked at. Raises BadInput."""
    for rows in update.tables.get(table, NOTHING).rows:
        if rows.rows_UD.shape != (len(rows.keys_U), width):
            shape = "x".join(map(str, rows.rows_UD.shape))
            raise BadInput(f"rows of table {table!r} are {shape}, not {len(rows.keys_U)}x{width}")
        if not np.isfinite(rows.rows_UD).all():
            raise BadInput(f"rows of table {table!r} hold numbers that are not finite")
        yield rows


def _count(update: Update, table: str) -> int:
    rows = update.tables.get(table, NOTHING).rows
    return sum(len(each.keys_U) for each in rows) if isinstance(rows, list | tuple) else 0


def _gone(update: Update, table: str) -> U64:
    return update.tables.get(table, NOTHING).gone


def _turn(epoch: Epoch, steps: Mapping[str, Step], side: int, *, back: bool = False) -> None:
    for name, step in steps.items():
        epoch.tables[name].turn(step, side, back=back)


def _count_rows(epoch: Epoch, steps: Mapping[str, Step], *, back: bool = False) -> None:
    for name, step in steps.items():
        epoch.tables[name].count(step, back=back)


def _views(epoch: Epoch, side: int) -> dict[str, TableView]:
    return {name: table.view(side) for name, table in epoch.tables.items()}


def _try(view: View, update: Update) -> None:
    """Answer golden samples, or where there are none, an empty one. Raises UpdateRefused, BadInput."""
    kept = view.kept
    if update.golden is not None:
        difference = differs_by(kept.model, view.tables, kept.weights, update.golden)
        if not difference <= TOLERANCE:
            raise UpdateRefused(
                "golden",
                f"version {update.version} answers its golden samples with a difference of {difference:.3g}, "
                f"more than {TOLERANCE:g}: its rows or weights are not those it was exported from",
            )
        return
    found = kept.model.graph.run(kept.model.feeds(view.tables, kept.model.empty()) | dict(kept.weights))
    if not all(np.isfinite(found[name]).all() for name in kept.model.outputs):
        raise UpdateRefused("broken", f"version {update.version} answers a sample without signs with no finite number")
