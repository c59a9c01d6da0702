"""One table on one shard: rows found, read, learnt and aged, step by step and pass by pass.

A row number is found or reserved ahead of time; the row *is* from its first push on, which gives it a
`changed_version` above 0. A reserved row holds its initial value and is otherwise absent: not counted, hashed or
saved. Where memory is not bounded, reservations that never see a push (keys of skipped or abandoned batches) keep
theirs until the process ends; a key is reserved once however often it comes, so they are at most those batches' keys.

A *selective* table, one with admission, makes a row only of an admitted key: at the push that crosses, at its initial
value. Its keys without a row read the table's default row: zeros, or, where it is learnt, a mark in its place.

Where rows lie is pserver.rows' work, which of them are in memory pserver.residency's: nothing here depends on it. How
they age is pserver.aging's, how they go pserver.departures', how they come to commits and back pserver.snapshots', what
is told of all of them or of one pserver.overview's.
Threads: any number may reserve, find and release; gather, apply, close, operate and snapshot are the step's; any may
settle, sweep, survey and explain.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from pserver import kernels
from pserver.aging import Life
from pserver.arrays import frozen, moved
from pserver.client import F32, U16, U64, Gradients, TableStats
from pserver.config import TableSection
from pserver.departures import Departures
from pserver.dirty import Dirty
from pserver.feed_table import TableFeed
from pserver.halves import Halves
from pserver.operations import Cut, DayTick, Forget, SetTables, Shrink, Survey, TableOperation
from pserver.overview import Overview
from pserver.residency import BoundedRows
from pserver.row_words import HEAD
from pserver.rows import I32, NO_VERSION, Rows
from pserver.selection import Selection
from pserver.settings import RowSettings
from pserver.snapshots import Snapshots
from pserver.snapshots import TableSnapshot as TableSnapshot
from pserver.store.base import RowStore

ALL_BUCKETS = (0, 4096)

log = logging.getLogger(__name__)


class Table:
    """The rows of one table on one shard."""

    def __init__(
        self,
        name: str,
        section: TableSection,
        seed: int,
        pool: ThreadPoolExecutor | None = None,
        groups: Mapping[str, int] | None = None,
        buckets: tuple[int, int] = ALL_BUCKETS,
    ) -> None:
        """`groups` are slot groups by slot, `buckets` the shard's."""
        self.name, self.section = name, section
        self._groups = dict(groups or {})
        settings, self._halves = RowSettings.of(section, self._groups), Halves(pool)
        self._dirty, self._life = Dirty(), Life(section, self._groups)
        self._departures = Departures(self._life, self._dirty)
        self._rows = self._departures.rows = self._rows_of(settings, seed)
        self._selection = Selection(settings.classes, int(self._rows.seed), buckets)
        parts = self._rows, self._life, self._selection
        self._snapshots = Snapshots(name, *parts, self._dirty, self._departures, self._halves)
        self._overview = Overview.of(*parts, self._departures, self._halves)
        self.feed = TableFeed(self._rows, self._life, self._departures)
        """What subscribers of the live feed are told."""
        self._departures.went = self.feed.went
        self._touched = np.empty(0, np.int32)
        self._num_touched = 0
        self._new_rows = self._unadmitted = 0

    def _rows_of(self, settings: RowSettings, seed: int) -> Rows:
        if self.section.memory is None:
            return Rows(self.name, settings, seed)
        return BoundedRows(
            self.name,
            settings,
            seed,
            self.section.memory,
            waiting=self._num_waiting,
            touched=lambda: self._num_touched,
            departed=self._departures.departed,
            forgotten=self._departures.forgotten,
        )

    @property
    def width(self) -> int:
        """W: floats of a row in commits."""
        return self._rows.width

    @property
    def num_weights(self) -> int:
        """D: floats of a row that a model sees."""
        return self._rows.num_weights

    @property
    def num_words(self) -> int:
        """Words of a row in snapshots and stores."""
        return HEAD + self.width

    @property
    def selective(self) -> bool:
        """Whether some keys are given a row only when they are admitted."""
        return bool(self._selection)

    # --- keys to row numbers -------------------------------------------------------------------------------------

    def find(self, keys_U: U64) -> I32:
        """Row number of each key, until `release`; EMPTY for a key without one."""
        return self._rows.find(keys_U)

    def find_ahead(self, keys_U: U64) -> I32:
        """As `find`, of a batch of a selective table that will learn: `read_again` finds what is left out."""
        return self._rows.find_ahead(keys_U)

    def reserve(self, keys_U: U64, group_U: U16) -> I32:
        """Row number of each key, until `release`; reserved at its initial value for a key without one.

        Raises OutOfMemory where memory is bounded and rows that wait for a commit, or for a step, fill it.
        """
        return self._rows.reserve(keys_U, group_U)

    def release(self, rows_U: I32) -> None:
        """The batch that got these numbers from `find` or `reserve` needs them no longer. Once a batch."""
        self._rows.release(rows_U)

    # --- steps -----------------------------------------------------------------------------------------------------

    def read_again(self, rows_U: I32, keys_U: U64) -> I32:
        """Of a selective table, at a pull: look up again what had no row, in place. -> the numbers of what has one now.

        Nobody adds rows until this batch is pushed.
        """
        self._departures.renew(rows_U)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if len(unknown_U):
            found_U = self._rows.find(keys_U[unknown_U])
            rows_U[unknown_U] = found_U
            self._rows.hand_over(found_U, rows_U)
            self._departures.renew(found_U)
        changed_R = self._rows.columns["changed_version"]
        present_U = (rows_U != kernels.EMPTY) & (changed_R[np.maximum(rows_U, 0)] != 0)
        return np.where(present_U, rows_U, np.int32(kernels.EMPTY))

    def gather(self, rows_U: I32) -> F32:
        """(U, D) weights of rows, each with a number."""
        self._departures.renew(rows_U)
        out_UD, gather = np.empty((len(rows_U), self.num_weights), np.float32), self._rows.floats.gather
        self._halves.do(len(rows_U), lambda begin, end: gather(rows_U, begin, end, out_UD))
        return out_UD

    def gather_present(self, rows_U: I32, keys_U: U64 | None = None) -> F32:
        """(U, D) weights of rows; zeros, or marks, for EMPTY and for rows that are only reserved.

        With `keys_U`, EMPTY ones are looked up again by key: they may have become rows since `find`.
        """
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        self._departures.renew(rows_U)
        with self._rows.moving:
            self._rows.floats.gather_present(self._rows.columns["changed_version"], rows_U, out_UD)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if keys_U is not None and len(unknown_U):
            again_UD = np.empty((len(unknown_U), self.num_weights), np.float32)
            self._rows.gather_present(keys_U[unknown_U], again_UD, self._departures.renew_alone)
            out_UD[unknown_U] = again_UD
        return out_UD

    def apply(self, rows_U: I32, push: Gradients, batch_samples: int, version: int) -> None:
        """Learn from one step's merged records of unique rows; `version` is that of the pass's close."""
        grads_UD = push.grads_UD
        if self.section.grad_scale == "show":
            scaled_UD = np.empty_like(grads_UD)
            kernels.scale_by_show(grads_UD, push.show_U, np.float32(batch_samples), scaled_UD)
            grads_UD = frozen(scaled_UD)
        with self._rows.moving:
            self._rows.open_version = version
            group_R, learn = self._rows.columns["group"], self._rows.floats.learn
            self._life.bring(self._departures.statistics(), rows_U, version)
            self._halves.do(len(rows_U), lambda begin, end: learn(rows_U, grads_UD, group_R, begin, end))
            self._record(rows_U, push, version)

    def admit(self, keys_U: U64, group_U: U16, push: Gradients, version: int) -> None:
        """Of a selective table: one step's merged records of unique keys without rows.

        Those admitted get one, at its initial value, with these statistics.
        """
        admitted_U = self._selection.admit(keys_U, group_U, push.show_U, push.click_U, self._life.day)
        chosen_A = np.flatnonzero(admitted_U)
        self._unadmitted += len(keys_U) - len(chosen_A)
        if len(chosen_A):
            rows_A = self._rows.reserve(keys_U[chosen_A], group_U[chosen_A])
            records = Gradients(push.grads_UD[chosen_A], frozen(push.show_U[chosen_A]), frozen(push.click_U[chosen_A]))
            with self._rows.moving:
                self._rows.open_version = version
                self._record(frozen(rows_A), records, version)
            self._rows.release(rows_A)

    def _record(self, rows_U: I32, push: Gradients, version: int) -> None:
        room = self._num_touched + len(rows_U)
        if room > len(self._touched):
            self._touched = moved(self._touched, self._num_touched, max(room, 2 * len(self._touched)))
        columns = tuple(self._rows.columns[c] for c in ("show", "click", "delta_score", "changed_version", "group"))
        coefficients = np.float32(self.section.nonclk_coeff), np.float32(self.section.click_coeff)
        self._num_touched, made = kernels.record(
            rows_U,
            push.show_U,
            push.click_U,
            *coefficients,
            np.uint32(version),
            columns,
            self._departures.made_G,
            self._touched,
            self._num_touched,
        )
        self._new_rows += made
        self._rows.floats.join(rows_U, self._rows.columns, *coefficients)

    # --- passes ------------------------------------------------------------------------------------------------------

    def open_pass(self) -> None:
        """Begin a pass: nothing touched, nothing new."""
        self._num_touched = self._new_rows = self._unadmitted = 0

    def close_pass(self, day: int) -> int:
        """The day comes, ticks included, and is that of the rows touched, which wait for a commit from here on.

        -> the digest of those rows.
        """
        touched, before = self._touched[: self._num_touched], self._life.day
        self._life.tick(day)
        with self._rows.moving:
            self._life.close(self._departures.statistics(), touched, before)
            self._dirty.touch(self._rows.marks_R, touched)
            self.feed.touched(touched)  # before operations: what they remove is told as gone
            self._num_touched, self._rows.open_version = 0, NO_VERSION
            return self._overview.digest_of(touched)

    # --- operations ------------------------------------------------------------------------------------------------

    def operate(self, operation: TableOperation, version: int) -> None:
        """An operation acts at the close of `version`. What a shrink took remains to be swept."""
        match operation:
            case DayTick(to=day):
                self._life.tick(day)
            case Shrink():
                self._life.shrink(operation, version)
            case Forget(key=key):
                keys_U = np.array([key], np.uint64)
                self._selection.forget(keys_U)
                self._departures.forget(keys_U)
            case SetTables(tables=tables):
                self._set(TableSection.model_validate(tables[self.name]))
            case Cut():
                self._life.cut(operation, version)
            case _:
                assert_never(operation)

    def _set(self, section: TableSection) -> None:
        self.section = section
        settings = RowSettings.of(section, self._groups)
        self._rows.set(settings)
        self._life.set(section, self._groups)
        if anew := self._selection.set(settings.classes):
            log.warning("table %r: admission of %s is counted in another way now, and begins anew", self.name, anew)

    @property
    def sweeping(self) -> bool:
        """Whether rows that a shrink took are still to be removed."""
        return bool(self._life.shrinks)

    def when_swept(self, act: Callable[[], None]) -> None:
        """Have `act` called whenever no shrink has rows left to remove, by whoever removed the last."""
        self._departures.swept = act

    def sweep(self) -> Iterator[None]:
        """Remove the rows that shrinks have taken, a piece at a time. Raises StoreFailed and StoreDamaged."""
        return self._departures.sweep()

    def survey(self, shrink: Shrink, stopping: Callable[[], bool] = lambda: False) -> Survey:
        """See Departures."""
        return self._departures.survey(shrink, stopping)

    def explain(self, key: int, group: int) -> dict[str, Any]:
        """All that is known of a key here, as of its last push; JSON-able.

        "row": whether it has one; then "show", "click", "score", "delta_score", "last_seen_day", "unseen_days",
        "changed_version", "weights", "vector" (whether it has joined), "leaves_after_days" (None: not within ten years,
        if it is never seen again).
        "admission": what each entry says; [] where there is none.
        """
        return self._overview.explain(key, group)

    # --- commits ---------------------------------------------------------------------------------------------------

    @property
    def num_dirty(self) -> int:
        """Rows changed by closed passes that are neither committed nor in flight."""
        return self._dirty.num_dirty

    def _num_waiting(self) -> int:
        """Copies that commits need: those in flight, and of all that changed since, the open pass's rows included."""
        return self._dirty.num_in_flight + self.num_dirty + self._num_touched

    def snapshot(self) -> TableSnapshot:
        """Copies of the dirty rows, and all else that changed; in flight until `settle`. Between passes only."""
        return self._snapshots.take()

    def settle(self, committed: bool) -> None:
        """The rows in flight are clean; or, where their commit failed, dirty again."""
        self._snapshots.settle(committed)

    def attach(
        self,
        store: RowStore,
        rows_by_group: Mapping[int, int],
        lives: Sequence[Mapping[str, Any]] = (),
        admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]] = (),
    ) -> None:
        """After a restore, into an empty table: the committed rows are those of `store`, counted in `rows_by_group`.

        `lives` and `admission` (with the first bucket of each) are those of all parts of the commit. All rows are
        loaded at once, or, where memory is bounded, come on demand. Raises StoreDamaged where the store holds other
        counts.
        """
        self._snapshots.attach(store, rows_by_group, lives, admission)

    # --- all rows -----------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that were pushed at least once."""
        return self._departures.num_rows

    @property
    def rows_by_group(self) -> dict[int, int]:
        """How many rows each slot group has."""
        return self._departures.rows_by_group

    def digest(self) -> int:
        """128-bit hash over all rows, and what admission has counted."""
        return self._overview.digest()

    def stats(self) -> TableStats:
        """Counts; the memory of rows with a number and of the index."""
        return TableStats(
            self.num_rows,
            self._rows.num_bytes,
            self._new_rows,
            self.rows_by_group,
            dirty_rows=self.num_dirty,
            max_dirty_rows=self._rows.max_dirty,
            sweeping=self.sweeping,
            unadmitted=self._unadmitted,
        )
