"""One table on one shard: its rows are found, read, updated and aged, step by step and pass by pass.

A row number is found or reserved ahead of time. The row *exists* from its first push on, which gives it a
`changed_version` above 0. A reserved row holds its initial value and is otherwise absent: not counted, hashed or
saved. With unbounded memory, a reservation without a push (a key of a skipped or abandoned batch) stays until the
process ends. A key is reserved once, so there are at most as many as keys of those batches.

A *selective* table, one with admission, makes a row only for an admitted key: at the push that reaches the threshold,
at its initial value. Its keys without a row read the table's default row: zeros, or a mark if that row is learnt.

pserver.rows.table_rows holds the rows; pserver.rows.row_cache decides which are in memory, and nothing here depends on
it. pserver.lifecycle.aging ages rows. Other parts have callers of their own: `deletions` sweeps and surveys,
`snapshots` copies rows for commits, `overview` reads all of them or one.

Threads: any number may reserve, find and release rows. The step's thread calls gather, apply, close, operate and
`snapshots.take`. Any thread may settle a snapshot, sweep, survey and explain.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.admission.slot_admission import SlotAdmission
from headrace.pserver.config import TableSection
from headrace.pserver.feed.table_changes import TableFeed
from headrace.pserver.lifecycle.aging import TableAging
from headrace.pserver.lifecycle.deletions import Deletions, by_group
from headrace.pserver.protocol.shards import F32, U16, U64, Gradients
from headrace.pserver.protocol.table_operations import (
    AdvanceDay,
    ClearSlot,
    ExportCut,
    ForgetRow,
    FreezeSlot,
    SetTables,
    ShrinkRows,
    TableOperation,
    UnfreezeSlot,
)
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.protocol.wire import is_exact
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import Empty, empty_floats, frozen, grown
from headrace.pserver.rows.dirty_rows import DirtyRows
from headrace.pserver.rows.gradient_merge import frozen_gradients, merge
from headrace.pserver.rows.row_cache import RowCache
from headrace.pserver.rows.row_settings import FirstSteps, RowSettings
from headrace.pserver.rows.slab import Slab, SlabMaker
from headrace.pserver.rows.split_work import WorkSplitter
from headrace.pserver.rows.table_rows import I32, NO_VERSION, U32, RowArrays
from headrace.pserver.tables.snapshots import TableSnapshot as TableSnapshot
from headrace.pserver.tables.snapshots import TableSnapshots
from headrace.pserver.tables.table_overview import TableOverview

ALL_BUCKETS = (0, 4096)

log = logging.getLogger(__name__)


class ShardTable:
    """The rows of one table on one shard."""

    def __init__(
        self,
        name: str,
        section: TableSection,
        seed: int,
        pool: ThreadPoolExecutor | None = None,
        groups: Mapping[str, int] | None = None,
        buckets: tuple[int, int] = ALL_BUCKETS,
        *,
        clips: bool = True,
        slab: SlabMaker = Slab,
    ) -> None:
        """`groups` are the slot groups by slot, `buckets` those of the shard. `clips`: whether `clip_norm` is for the
        gradients of steps; if not, trainers have clipped what is in their sums. `slab`: as in RowArrays."""
        self.name, self.section, self._clips = name, section, clips
        self._groups = dict(groups or {})
        settings, self._halves = RowSettings.of(section, self._groups), WorkSplitter(pool)
        self._life = TableAging(section, self._groups)
        self.dirty = DirtyRows()
        """The rows changed since the last commit."""
        self.deletions = Deletions(self._life, self.dirty)
        """Deleted rows, and the numbers of rows."""
        self.rows = self.deletions.rows = self._rows_of(settings, seed, slab)
        """The rows in memory, found and reserved by key."""
        self._selection = SlotAdmission(settings.classes, int(self.rows.seed), buckets)
        parts = self.rows, self._life, self._selection
        self.snapshots = TableSnapshots(name, *parts, self.dirty, self.deletions, self._halves)
        """The table in commits."""
        self.overview = TableOverview.of(*parts, self.deletions, self._halves, words=is_exact(name))
        """The table for readers: its digest, and single rows."""
        self.feed = TableFeed(self.rows, self._life, self.deletions)
        """The changes for subscribers of the live feed."""
        self.deletions.on_deleted = self.feed.note_deleted
        self._steps: FirstSteps | None = None
        self._touched = np.empty(0, np.int32)
        self._num_touched = 0
        self._new_rows = self._unadmitted = 0
        self._made_before_G = self.deletions.made_G.copy()
        self.num_admitted = 0
        """Keys of a selective table that got a row since the start."""

    def _rows_of(self, settings: RowSettings, seed: int, slab: SlabMaker) -> RowArrays:
        if self.section.memory is None:
            return RowArrays(self.name, settings, seed, slab=slab)
        return RowCache(
            self.name,
            settings,
            seed,
            self.section.memory,
            waiting=self._num_waiting,
            touched=lambda: self._num_touched,
            is_deleted=self.deletions.is_deleted,
            slab=slab,
        )

    @property
    def selective(self) -> bool:
        """Whether some keys need admission to get a row."""
        return bool(self._selection)

    # --- steps -----------------------------------------------------------------------------------------------------

    def read_again(self, rows_U: I32, keys_U: U64) -> I32:
        """For a selective table, at a pull: look up keys without a row again, in place. Returns the numbers found.

        A key that gets a row before this batch is pushed is known at its push: see `admit`.
        """
        self.deletions.purge(rows_U)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if len(unknown_U):
            found_U = self.rows.find(keys_U[unknown_U])
            rows_U[unknown_U] = found_U
            self.rows.hand_over(found_U, rows_U)
            self.deletions.purge(found_U)
        changed_R = self.rows.columns["changed_version"]
        present_U = (rows_U != kernels.EMPTY) & (changed_R[np.maximum(rows_U, 0)] != 0)
        return np.where(present_U, rows_U, np.int32(kernels.EMPTY))

    def gather(self, rows_U: I32, empty: Empty = empty_floats) -> F32:
        """(U, D) weights of rows, none of them EMPTY, in an array made by `empty`."""
        self.deletions.purge(rows_U)
        out_UD, gather = empty(len(rows_U), self.rows.num_weights), self.rows.floats.gather
        self._halves.do(len(rows_U), lambda begin, end: gather(rows_U, begin, end, out_UD))
        return out_UD

    def to_learn(self, rows_U: I32, empty: Empty = empty_floats) -> F32:
        """(U, E) the rows of a batch to learn from, in an array made by `empty`: their weights, of EMPTY ones zeros or
        marks; with `in_batch`, two columns more (pserver.rows.kernels)."""
        if not self.section.in_batch:
            return self.gather_present(rows_U, None, empty) if self.selective else self.gather(rows_U, empty)
        self.deletions.purge(rows_U)
        out_UE, floats, steps = empty(len(rows_U), self.section.num_pulled), self.rows.floats, self._steps
        assert isinstance(floats, Slab) and steps is not None, (
            "in_batch refuses vectors that join later; a pass is open"
        )
        group_R, gather = self.rows.columns["group"], floats.gather_learning
        self._halves.do(len(rows_U), lambda begin, end: gather(rows_U, begin, end, group_R, steps, out_UE))
        return out_UE

    def gather_present(self, rows_U: I32, keys_U: U64 | None = None, empty: Empty = empty_floats) -> F32:
        """(U, D) weights of rows; zeros, or marks, for EMPTY and reserved rows; in an array made by `empty`.

        With `keys_U`, EMPTY ones are looked up again by key: they may have got rows since `find`.
        """
        out_UD = empty(len(rows_U), self.rows.num_weights)
        self.deletions.purge(rows_U)
        with self.rows.moving:
            self.rows.floats.gather_present(self.rows.columns["changed_version"], rows_U, out_UD)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if keys_U is not None and len(unknown_U):
            again_UD = np.empty((len(unknown_U), self.rows.num_weights), np.float32)
            self.rows.gather_present(keys_U[unknown_U], again_UD, self.deletions.purge_within)
            out_UD[unknown_U] = again_UD
        return out_UD

    def learn_after(self, samples: int, versions: int) -> None:
        """Learn the next steps at the rates after so many samples and versions."""
        settings = self.rows.settings
        share = settings.share_after(samples, versions)
        if share != settings.share:
            self.rows.set(settings.at(share))

    def merge(self, pushes: Sequence[tuple[I32, Gradients]]) -> tuple[I32, Gradients]:
        """The pushes of a step, in rank order, as one with unique rows."""
        return merge(pushes)

    def apply(self, rows_U: I32, push: Gradients, batch_samples: int, version: int) -> None:
        """Apply one step's merged records of unique rows; `version` is that of the pass's close."""
        with self.rows.moving:
            self.rows.open_version = version
            learning_U = self._learning(rows_U)
            learns_U = frozen(rows_U[learning_U])
            passes_U = self._passes(learns_U, version)
            self._life.bring(self.deletions.statistics(), rows_U, version)
            self._learn(learns_U, frozen_gradients(push.chosen(learning_U)), batch_samples, passes_U)
            self._record(rows_U, push, version)

    def _learn(self, rows_U: I32, push: Gradients, batch_samples: int, passes_U: U32 | None) -> None:
        """Apply gradients to rows. `passes_U`: as RowSettings.learn."""
        grads_UD, group_R, learn = self._scaled(push, batch_samples), self.rows.columns["group"], self.rows.floats.learn
        self._halves.do(len(rows_U), lambda begin, end: learn(rows_U, grads_UD, group_R, begin, end, passes_U))

    def expect(self, rows_U: I32) -> None:
        """A later step reads these rows. Any thread."""

    def _learning(self, rows_U: I32) -> NDArray[np.bool_] | slice:
        """Which of the rows are in slots that are not frozen."""
        if not self._life.frozen_groups:
            return slice(None)
        return ~np.isin(self.rows.columns["group"][rows_U], list(self._life.frozen_groups))

    def _passes(self, rows_U: I32, version: int) -> U32 | None:
        """(U,) passes for which each row owes weight decay, if there is any; 0 for a new row."""
        if not self.section.weight_decay:
            return None
        changed_U = self.rows.columns["changed_version"][rows_U]
        since_U = np.maximum(changed_U, self._life.owing_since(self.rows.columns["group"][rows_U]))
        return frozen(np.where((changed_U == 0) | (since_U > version), 0, version - since_U).astype(np.uint32))

    def _scaled(self, push: Gradients, batch_samples: int) -> F32:
        """The gradients of merged records as the optimizer takes them."""
        grads_UD, most = push.grads_UD, self.section.clip_norm if self._clips else None
        if self.section.grad_scale == "show":
            scaled_UD = np.empty_like(grads_UD)
            kernels.scale_by_show(grads_UD, push.show_U, np.float32(batch_samples), scaled_UD)
            grads_UD = frozen(scaled_UD)
        elif self.section.grad_scale == "sum":
            grads_UD = frozen(grads_UD * np.float32(batch_samples))
        if most is None:
            return grads_UD
        long_UD, clipped_UD = frozen(grads_UD), np.empty_like(grads_UD)
        self._halves.do(len(long_UD), lambda begin, end: kernels.clip_rows(long_UD, begin, end, most, clipped_UD))
        return frozen(clipped_UD)

    def rows_of(self, keys_U: U64) -> F32:
        """(U, D) present weights of keys, for a table that no step learns; zeros without a row. Any thread."""
        rows_U = self.rows.find(keys_U)
        try:
            return self.gather_present(frozen(rows_U))
        finally:
            self.rows.release(rows_U)

    def first_words(self, num_words: int) -> tuple[U64, U32]:
        """Keys of all rows, in any order, and (U, `num_words`) the first words of their weights: for a table that no
        step learns, in unbounded memory; on the step's thread."""
        with self.rows.moving:
            assert isinstance(self.rows.floats, Slab), "no vector joins later"
            rows_U = np.flatnonzero(self.rows.columns["changed_version"][: self.rows.num_numbers])
            words_UW = self.rows.floats.slab_RW[rows_U, :num_words].view(np.uint32)
            return self.rows.columns["keys"][rows_U], words_UW

    def overwrite(self, keys_U: U64, group_U: U16, rows_UD: F32, show_U: F32, version: int) -> None:
        """Write the weights of unique keys, bit for bit, for a table that no step learns; before the close of
        `version`. `show_U` is added to their shows."""
        rows_U = self.rows.reserve(keys_U, group_U)
        self.deletions.purge(frozen(rows_U))
        with self.rows.moving:
            assert isinstance(self.rows.floats, Slab), "no vector joins later"
            self.rows.open_version = version
            self._life.bring(self.deletions.statistics(), frozen(rows_U), version)
            self.rows.floats.put(rows_U, rows_UD)
            self._record(frozen(rows_U), Gradients(rows_UD, show_U, np.zeros_like(show_U)), version)
        self.rows.release(rows_U)

    def admit(self, keys_U: U64, group_U: U16, push: Gradients, version: int, since: int) -> None:
        """For a selective table: count one step's merged records of unique keys without rows.

        Admitted keys get a row, at its initial value, with these statistics. `since`: `num_admitted` when the keys had
        no row. Of those that have got one since, the row gets the statistics; nothing is counted, and nothing learnt,
        because the gradient is that of the default row.
        """
        if since != self.num_admitted:
            late_U = self._record_late(keys_U, push, version)
            keys_U, group_U, push = keys_U[~late_U], group_U[~late_U], push.chosen(~late_U)
        admitted_U = self._selection.admit(keys_U, group_U, push.show_U, push.click_U, self._life.day)
        chosen_A = np.flatnonzero(admitted_U)
        self._unadmitted += len(keys_U) - len(chosen_A)
        if len(chosen_A):
            self.num_admitted += len(chosen_A)
            rows_A = self.rows.reserve(keys_U[chosen_A], group_U[chosen_A])
            with self.rows.moving:
                self.rows.open_version = version
                self._record(frozen(rows_A), push.chosen(chosen_A), version)
            self.rows.release(rows_A)

    def _record_late(self, keys_U: U64, push: Gradients, version: int) -> NDArray[np.bool_]:
        """Add the statistics of those keys that have a row by now; returns (U,) which ones."""
        rows_U = np.full(len(keys_U), kernels.EMPTY, np.int32)
        late_U: NDArray[np.bool_] = self.read_again(rows_U, keys_U) != kernels.EMPTY
        late_L = np.flatnonzero(late_U)
        if len(late_L):
            rows_L = frozen(rows_U[late_L])
            with self.rows.moving:
                self.rows.open_version = version
                self._life.bring(self.deletions.statistics(), rows_L, version)
                self._record(rows_L, push.chosen(late_L), version)
        self.rows.release(rows_U)
        return late_U

    def _record(self, rows_U: I32, push: Gradients, version: int) -> None:
        room = self._num_touched + len(rows_U)
        if room > len(self._touched):
            self._touched = grown(self._touched, self._num_touched, max(room, 2 * len(self._touched)))
        columns = tuple(self.rows.columns[c] for c in ("show", "click", "delta_score", "changed_version", "group"))
        coefficients = np.float32(self.section.nonclk_coeff), np.float32(self.section.click_coeff)
        self._num_touched, made = kernels.record(
            rows_U,
            frozen(push.show_U),
            frozen(push.click_U),
            *coefficients,
            np.uint32(version),
            columns,
            self.deletions.made_G,
            self._touched,
            self._num_touched,
        )
        self._new_rows += made
        self.rows.floats.join(frozen(rows_U[self._learning(rows_U)]), self.rows.columns, *coefficients)

    # --- passes ------------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """After a restore of `version`: go on under the present settings, which may be others than before."""
        self._life.set(self.section, self._groups, version)

    def open_pass(self, samples: int = 0, versions: int = 0) -> None:
        """Begin a pass after so many learnt samples and versions: no rows touched, none new."""
        if self.section.in_batch:  # the same in the whole pass, since early rows are read before their step
            settings = self.rows.settings.at(self.rows.settings.share_after(samples, versions))
            self._steps = settings.first_steps(self._life.frozen_groups)
        self._num_touched = self._new_rows = self._unadmitted = 0
        self._made_before_G = self.deletions.made_G.copy()

    def close_pass(self, day: int) -> int:
        """Close a pass: advance to `day` with its ticks, set it on the touched rows, and mark them dirty.

        Returns the digest of those rows.
        """
        touched, before = self._touched[: self._num_touched], self._life.day
        touched.sort()  # rows are read faster in the order of memory
        self._life.tick(day)
        with self.rows.moving:
            self._life.close(self.deletions.statistics(), touched, before)
            self.dirty.touch(self.rows.marks_R, touched)
            self.feed.note_changed(touched)  # before operations, which report the rows they delete
            self._settle(frozen(touched))
            self._num_touched, self.rows.open_version = 0, NO_VERSION
            return self.overview.digest_of(touched)

    def _settle(self, rows_U: I32) -> None:
        """The pass has changed these rows; within `moving`."""

    # --- operations ------------------------------------------------------------------------------------------------

    def operate(self, operation: TableOperation, version: int) -> None:
        """Apply an operation at the close of `version`. Rows deleted by a shrink remain to be swept."""
        match operation:
            case AdvanceDay(to=day):
                self._life.tick(day)
            case ShrinkRows():
                self._life.shrink(operation, version)
            case ForgetRow(key=key):
                keys_U = np.array([key], np.uint64)
                self._selection.forget(keys_U)
                self.deletions.forget(keys_U)
            case SetTables(tables=tables):
                self._set(TableSection.model_validate(tables[self.name]), version)
            case ClearSlot(group=group):
                self._life.clear(group, version)
            case FreezeSlot(group=group):
                self._life.freeze(group)
            case UnfreezeSlot(group=group):
                self._life.unfreeze(group, version)
            case ExportCut():
                self._life.cut(operation, version)
            case _:
                assert_never(operation)

    def _set(self, section: TableSection, version: int) -> None:
        self.section = section
        settings = RowSettings.of(section, self._groups)
        self.rows.set(settings)
        self._life.set(section, self._groups, version)
        if restarted := self._selection.set(settings.classes):
            log.warning("table %r: admission of %s counts differently now and starts anew", self.name, restarted)

    def _num_waiting(self) -> int:
        """Rows that commits must copy: those in flight, and those changed since, including the open pass."""
        return self.dirty.num_in_flight + self.dirty.num_dirty + self._num_touched

    def stats(self) -> TableStats:
        """Counts; memory is that of numbered rows and of the index. Once not sweeping, all deleted rows are gone."""
        sweeping = self.deletions.sweeping  # asked first: another thread may remove the last deleted rows meanwhile
        return TableStats(
            self.deletions.num_rows,
            self.rows.num_bytes,
            self._new_rows,
            self.deletions.rows_by_group,
            dirty_rows=self.dirty.num_dirty,
            max_dirty_rows=self.rows.max_dirty,
            sweeping=sweeping,
            unadmitted=self._unadmitted,
            new_by_group=by_group(self.deletions.made_G - self._made_before_G),
            frozen_groups=tuple(sorted(self._life.frozen_groups)),
        )
