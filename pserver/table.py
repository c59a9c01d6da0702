"""One table on one shard: rows found, read, learnt, aged, committed and restored.

A row number is found or reserved ahead of time; the row *is* from its first push on, which gives it a
`changed_version` above 0. A reserved row holds its initial value and is otherwise absent: not counted, hashed or
saved. Where memory is not bounded, reservations that never see a push (keys of skipped or abandoned batches) keep
theirs until the process ends; a key is reserved once however often it comes, so they are at most those batches' keys.

A *selective* table, one with admission, makes a row only of an admitted key: at the push that crosses, at its initial
value. Its keys without a row read zeros.

Where rows lie is pserver.rows' work, which of them are in memory pserver.residency's: nothing here depends on it. How
they age is pserver.aging's, removing those that a shrink took pserver.sweeping's.
Threads: any number may reserve, find and release; gather, apply, close, operate and snapshot are the step's; any may
settle, sweep, survey and explain.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from pserver import kernels
from pserver.aging import BELOW, STAYS, UNSEEN, Life, Statistics
from pserver.client import F32, U16, U64, Gradients, TableStats
from pserver.config import TableSection
from pserver.digest import add, digest_rows, join, multipliers_of
from pserver.dirty import Dirty
from pserver.errors import StoreDamaged
from pserver.gone import Gone
from pserver.operations import Cut, DayTick, Forget, SetTables, Shrink, Survey, TableOperation
from pserver.residency import BoundedRows
from pserver.row_words import HEAD, groups_of, pack, unpack
from pserver.rows import COLUMNS, I32, NO_VERSION, U32, Rows, bits_of, frozen, roomy
from pserver.selection import Selection
from pserver.settings import RowSettings
from pserver.slot_classes import NUM_GROUPS
from pserver.store.base import RowStore

log = logging.getLogger(__name__)

MIN_ROWS_A_THREAD = 4096
"""Fewer are done sooner than another thread wakes."""
PIECE_ROWS = 1 << 14
"""Rows looked at while steps wait."""
ALL_BUCKETS = (0, 4096)


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """What of a table a commit takes down."""

    keys_U: U64
    """Of the rows changed since the last commit."""
    words_UW: U32
    went_keys_U: U64
    """Of the rows that went since; some of them may be rows again, and in `keys_U`."""
    went_group_U: U16
    rows_by_group: Mapping[int, int]
    """How many rows each slot group has without those that went."""
    life: Mapping[str, Any]
    """See pserver.aging.Life.message."""
    admission: Mapping[str, NDArray[Any]]
    """See pserver.selection.Selection.state."""

    def gone(self) -> tuple[U64, U16]:
        """Keys and groups of rows that went and did not come back. Not for the pause: there may be many."""
        gone_U = ~np.isin(self.went_keys_U, self.keys_U)
        return self.went_keys_U[gone_U], self.went_group_U[gone_U]


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
        self._pool, self._groups = pool, dict(groups or {})
        settings = RowSettings.of(section, self._groups)
        self._dirty, self._gone = Dirty(), Gone()
        self._life = Life(section, self._groups)
        self._rows = (
            Rows(name, settings, seed)
            if section.memory is None
            else BoundedRows(
                name,
                settings,
                seed,
                section.memory,
                waiting=self._num_waiting,
                touched=lambda: self._num_touched,
                departed=self._departed,
                forgotten=self._went,
            )
        )
        self._selection = Selection(settings.classes, int(self._rows.seed), buckets)
        self._multipliers = multipliers_of(self.width)
        self._rows_by_group = np.zeros(NUM_GROUPS, np.int64)
        self._leaving = threading.Lock()
        self._touched = np.empty(0, np.int32)
        self._num_touched = 0
        self._new_rows = self._unadmitted = 0

    @property
    def width(self) -> int:
        """W: floats of a row in the slab."""
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
        self._renew(rows_U)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if len(unknown_U):
            found_U = self._rows.find(keys_U[unknown_U])
            rows_U[unknown_U] = found_U
            self._rows.hand_over(found_U, rows_U)
            self._renew(found_U)
        changed_R = self._rows.columns["changed_version"]
        present_U = (rows_U != kernels.EMPTY) & (changed_R[np.maximum(rows_U, 0)] != 0)
        return np.where(present_U, rows_U, np.int32(kernels.EMPTY))

    def _renew(self, rows_U: I32) -> None:
        """Of these, rows that a shrink took start anew now, rather than when they are swept."""
        if self._life.shrinks:
            rows_U = rows_U[rows_U != kernels.EMPTY]
            with self._rows.removing():
                self._remove(rows_U[self._life.gone(self._statistics(), frozen(rows_U)) != STAYS])

    def _remove(self, rows_U: I32) -> None:
        """Rows are no longer; within `removing`."""
        if len(rows_U):
            group_U = self._rows.columns["group"][rows_U]
            with self._leaving:
                self._gone.add(self._rows.columns["keys"][rows_U], group_U)
                self._rows_by_group -= np.bincount(group_U, minlength=NUM_GROUPS)
            self._dirty.drop(self._rows.marks_R, rows_U)
            self._rows.remove(rows_U)

    def gather(self, rows_U: I32) -> F32:
        """(U, D) weights of rows, each with a number."""
        self._renew(rows_U)
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        slab_RW = self._rows.slab_RW
        self._ranges(len(rows_U), lambda begin, end: kernels.gather(slab_RW, rows_U, begin, end, out_UD))
        return out_UD

    def gather_present(self, rows_U: I32, keys_U: U64 | None = None) -> F32:
        """(U, D) weights of rows; zeros for EMPTY and for rows that are only reserved.

        With `keys_U`, EMPTY ones are looked up again by key: they may have become rows since `find`.
        """
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        self._renew(rows_U)
        with self._rows.moving:
            kernels.gather_present(self._rows.slab_RW, self._rows.columns["changed_version"], rows_U, out_UD)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if keys_U is not None and len(unknown_U):
            again_UD = np.empty((len(unknown_U), self.num_weights), np.float32)
            self._rows.gather_present(keys_U[unknown_U], again_UD)
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
            slab_RW, group_R, learn = self._rows.slab_RW, self._rows.columns["group"], self._rows.settings.learn
            self._life.bring(self._statistics(), rows_U, version)
            self._ranges(len(rows_U), lambda begin, end: learn(slab_RW, rows_U, grads_UD, group_R, begin, end))
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
            larger = roomy((max(room, 2 * len(self._touched)),), np.int32)
            larger[: self._num_touched] = self._touched[: self._num_touched]
            self._touched = larger
        columns = tuple(self._rows.columns[c] for c in ("show", "click", "delta_score", "changed_version", "group"))
        coefficients = np.float32(self.section.nonclk_coeff), np.float32(self.section.click_coeff)
        self._num_touched, made = kernels.record(
            rows_U,
            push.show_U,
            push.click_U,
            *coefficients,
            np.uint32(version),
            columns,
            self._rows_by_group,
            self._touched,
            self._num_touched,
        )
        self._new_rows += made

    def _ranges(self, total: int, work: Callable[[int, int], object]) -> None:
        """Do `work` on 0 .. total - 1, the second half in the pool where there is one."""
        if self._pool is None or total < 2 * MIN_ROWS_A_THREAD:
            work(0, total)
            return
        half = total // 2
        second = self._pool.submit(work, half, total)
        work(0, half)
        second.result()

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
            self._life.close(self._statistics(), touched, before)
            self._dirty.touch(self._rows.marks_R, touched)
            self._num_touched, self._rows.open_version = 0, NO_VERSION
            return self._digest_of(touched)

    def _digest_of(self, rows_U: I32) -> int:
        bits, parts = self._rows.bits(), list[int]()
        self._ranges(len(rows_U), lambda begin, end: parts.append(self._digest(*bits, rows_U[begin:end])))
        return add(parts)

    def _digest(self, slab_bits_RW: U32, columns: tuple[NDArray[Any], ...], rows_U: I32) -> int:
        return join(*digest_rows(slab_bits_RW, columns, rows_U, self._multipliers))

    def _statistics(self) -> Statistics:
        columns = self._rows.columns
        return Statistics(*(columns[name] for name in Statistics._fields))

    # --- operations ------------------------------------------------------------------------------------------------

    def operate(self, operation: TableOperation, version: int) -> None:
        """An operation acts at the close of `version`. What a shrink took remains to be swept."""
        match operation:
            case DayTick(to=day):
                self._life.tick(day)
            case Shrink():
                self._life.shrink(operation, version)
            case Forget(key=key):
                self._forget(np.array([key], np.uint64))
            case SetTables(tables=tables):
                self._set(TableSection.model_validate(tables[self.name]))
            case Cut():
                self._life.cut(operation, version)
            case _:
                assert_never(operation)

    def _set(self, section: TableSection) -> None:
        self.section = section
        self._rows.settings = settings = RowSettings.of(section, self._groups)
        self._life.set(section, self._groups)
        self._selection.set(settings.classes)

    def _forget(self, keys_U: U64) -> None:
        self._selection.forget(keys_U)
        rows_U = self._rows.resident(keys_U)
        with self._rows.removing():
            present_U = rows_U[rows_U != kernels.EMPTY]
            self._remove(present_U[self._rows.columns["changed_version"][present_U] != 0])
        if isinstance(self._rows, BoundedRows) and (rows_U == kernels.EMPTY).any():
            self._rows.forget(keys_U)

    def _departed(self, keys_U: U64, words_UW: U32, *, found_out: bool) -> NDArray[np.bool_]:
        """See pserver.residency.Departed."""
        absent_U = self._life.absent(words_UW)
        with self._leaving:
            went_U = self._gone.contains(keys_U)
            fresh_U = absent_U & ~went_U
            if found_out and fresh_U.any():
                self._went(keys_U[fresh_U], groups_of(words_UW[fresh_U]))
        return went_U | absent_U

    def _went(self, keys_U: U64, group_U: U16) -> None:
        """Rows of the store that are not in memory are no longer."""
        self._gone.add(keys_U, group_U)
        self._rows_by_group -= np.bincount(group_U, minlength=NUM_GROUPS)
        if isinstance(self._rows, BoundedRows):
            self._rows.left(len(keys_U))

    @property
    def sweeping(self) -> bool:
        """Whether rows that a shrink took are still to be removed."""
        return bool(self._life.shrinks)

    def sweep(self) -> Iterator[None]:
        """Remove the rows that shrinks have taken, a piece at a time. Raises StoreFailed and StoreDamaged."""
        while self._life.shrinks:
            upto = self._life.shrinks[-1].version
            for begin in range(0, self._rows.num_numbers, PIECE_ROWS):
                with self._rows.removing():
                    end = min(begin + PIECE_ROWS, self._rows.num_numbers)
                    rows_U = np.arange(begin, end, dtype=np.int32)
                    self._remove(rows_U[self._life.gone(self._statistics(), frozen(rows_U)) != STAYS])
                yield
            if isinstance(self._rows, BoundedRows):
                for chunk in self._rows.stored():
                    self._rows.sweep_away(chunk)
                    yield
            self._life.swept(upto)

    def survey(self, shrink: Shrink) -> Survey:
        """What `shrink` would take now, of the rows that the open pass has not changed."""
        rule = self._life.ruled(shrink, self._rows.open_version - 1)
        below_G, unseen_G = np.zeros(NUM_GROUPS, np.int64), np.zeros(NUM_GROUPS, np.int64)

        def count(statistics: Statistics, rows_U: I32) -> None:
            why_U, group_U = self._life.gone(statistics, rows_U, rule), statistics.group[rows_U]
            for why, counts_G in ((BELOW, below_G), (UNSEEN, unseen_G)):
                counts_G += np.bincount(group_U[why_U == why], minlength=NUM_GROUPS)

        for begin in range(0, self._rows.num_numbers, PIECE_ROWS):
            end = min(begin + PIECE_ROWS, self._rows.num_numbers)
            count(self._statistics(), frozen(np.arange(begin, end, dtype=np.int32)))
        for _, words_UW in self._rows.away():
            count(Statistics.of_words(words_UW), frozen(np.arange(len(words_UW), dtype=np.int32)))
        return Survey(self.num_rows, _by_group(below_G), _by_group(unseen_G))

    def explain(self, key: int, group: int) -> dict[str, Any]:
        """All that is known of a key here, as of its last push; JSON-able.

        "row": whether it has one; then "show", "click", "score", "delta_score", "last_seen_day", "unseen_days",
        "changed_version", "weights", "leaves_after_days" (None: not within ten years, if it is never seen again).
        "admission": what each entry says; [] where there is none.
        """
        told: dict[str, Any] = {"row": False, "day": self._life.day, "sweeping": self.sweeping}
        told["admission"] = self._selection.explain(key, group, self._life.day)
        words_UW = self._words_of(np.array([key], np.uint64))
        if not len(words_UW) or not words_UW[0, 1] or self._life.absent(words_UW)[0]:
            return told
        statistics = Statistics.of_words(words_UW)
        return told | {
            "row": True,
            "show": float(statistics.show[0]),
            "click": float(statistics.click[0]),
            "score": float(self._life.score(words_UW)[0]),
            "delta_score": float(self._life.delta_score(words_UW)[0]),
            "last_seen_day": int(statistics.last_seen_day[0]),
            "unseen_days": int(self._life.unseen(words_UW)[0]),
            "changed_version": int(statistics.changed_version[0]),
            "weights": words_UW[0, HEAD : HEAD + self.num_weights].copy().view(np.float32).tolist(),
            "leaves_after_days": self._life.leaves_after(words_UW[0]),
        }

    def _words_of(self, keys_U: U64) -> U32:
        """(U, W') words of those keys that have a row or a reserved one."""
        with self._rows.removing():
            rows_U = self._rows.look_up(keys_U)
            rows_U = rows_U[rows_U != kernels.EMPTY]
            out_keys_U, words_UW = np.empty(len(rows_U), np.uint64), np.empty((len(rows_U), self.num_words), np.uint32)
            pack(*self._rows.bits(), rows_U, 0, len(rows_U), out_keys_U, words_UW)
        if not len(rows_U) and isinstance(self._rows, BoundedRows):
            return self._rows.words_away(keys_U)
        return words_UW

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
        with self._rows.moving:
            keys_U = roomy((self.num_dirty,), np.uint64)
            words_UW = roomy((self.num_dirty, self.num_words), np.uint32)
            rows_U = self._dirty.take(self._rows.marks_R, self._rows.num_numbers)
            bits = self._rows.bits()
            self._ranges(len(rows_U), lambda begin, end: pack(*bits, rows_U, begin, end, keys_U, words_UW))
            life = self._life.message()  # before what went: a sweep that ends in between is done once more
            with self._leaving:
                went, rows_by_group = self._gone.take(), self.rows_by_group
        return TableSnapshot(keys_U, words_UW, *went, rows_by_group, life, self._selection.state())

    def settle(self, committed: bool) -> None:
        """The rows in flight are clean; or, where their commit failed, dirty again."""
        with self._rows.still, self._rows.moving:  # whoever looks into the store sees it and what went of one moment
            self._gone.settle(committed)
            self._dirty.settle(self._rows.marks_R, committed)
        self._rows.made_room()

    def attach(
        self,
        store: RowStore,
        rows_by_group: Mapping[int, int],
        lives: Sequence[Mapping[str, Any]] = (),
        admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]] = (),
    ) -> None:
        """After a restore, into an empty table: the committed rows are those of `store`, counted in `rows_by_group`.

        `lives` and `admission` (with the first bucket of each) are those of all parts of the commit. All rows are
        loaded at once, or, where memory is bounded, come on demand. Raises StoreDamaged where the store holds other counts.
        """
        self._life.load(lives)
        anew = self._selection.load(admission) if admission else []
        if anew:
            log.warning("table %r: admission of %s is counted in another way now, and begins anew", self.name, anew)
        if isinstance(self._rows, BoundedRows):
            self._rows.attach(store, sum(rows_by_group.values()))
            for group, count in rows_by_group.items():
                self._rows_by_group[group] = count
            return
        self._rows.make_room(sum(rows_by_group.values()))
        self.load(store.scan())
        if self.rows_by_group != dict(rows_by_group):
            raise StoreDamaged(f"table {self.name!r}: the store holds {self.num_rows} rows, not those of its commit")

    def load(self, chunks: Iterable[tuple[U64, U32]]) -> None:
        """Enter committed rows, keys and words, of keys without one, as clean; where memory is not bounded."""
        for keys_U, words_UW in chunks:
            group_U = groups_of(words_UW)
            rows_U = self._rows.reserve(keys_U, group_U, start=False)
            with self._rows.moving:
                self._unpack(frozen(words_UW), rows_U)
            self._rows.release(rows_U)
            self._rows_by_group += np.bincount(group_U, minlength=1 << 16)

    def _unpack(self, words_UW: U32, rows_U: I32) -> None:
        bits = self._rows.bits()
        self._ranges(len(rows_U), lambda begin, end: unpack(words_UW, rows_U, begin, end, *bits))

    # --- all rows -----------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that were pushed at least once."""
        return int(self._rows_by_group.sum())

    @property
    def rows_by_group(self) -> dict[int, int]:
        """How many rows each slot group has."""
        return _by_group(self._rows_by_group)

    def digest(self) -> int:
        """128-bit hash over all rows, and what admission has counted."""
        with self._rows.still:
            rows_U = np.flatnonzero(self._present()).astype(np.int32)
            if self._life.shrinks:
                rows_U = rows_U[self._life.gone(self._statistics(), rows_U) == STAYS]
            away = (self._digest_of_words(*chunk) for chunk in self._rows.away())
            return add([self._digest_of(frozen(rows_U)), *away, self._selection.digest()])

    def _digest_of_words(self, keys_U: U64, words_UW: U32) -> int:
        slab_UW = np.empty((len(keys_U), self.width), np.float32)
        columns = {column: np.empty(len(keys_U), dtype) for column, dtype in COLUMNS.items()} | {"keys": keys_U}
        rows_U = np.arange(len(keys_U), dtype=np.int32)
        unpack(frozen(words_UW), rows_U, 0, len(rows_U), *bits_of(slab_UW, columns))
        return self._digest(*bits_of(slab_UW, columns), rows_U)

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

    def _present(self) -> NDArray[np.bool_]:
        present_R: NDArray[np.bool_] = self._rows.columns["changed_version"][: self._rows.num_numbers] != 0
        return present_R


def _by_group(counts_G: NDArray[np.int64]) -> dict[int, int]:
    return {int(group): int(counts_G[group]) for group in np.flatnonzero(counts_G)}
