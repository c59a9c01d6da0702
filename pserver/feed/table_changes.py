"""The changes of one table for the live feed: changed rows as inference reads them, and deleted keys.

A close notes the keys of changed rows; their values are copied when a version is published. Deleted keys are noted
always, for as many versions as a bound allows, so that a subscriber that reconnects gets them.
pserver.feed.publisher decides when a version is published, and to whom.

Threads: any may note deleted keys. The rest is called by the step and by subscribers, each call under its own lock.

Shapes: U keys of a call, P present rows, D weights of a row.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from headrace.keys import unique_keys
from headrace.pserver.lifecycle.aging import STAYS, RowStatistics, TableAging
from headrace.pserver.lifecycle.day_decay import DayDecay, dated
from headrace.pserver.lifecycle.deletions import Deletions
from headrace.pserver.protocol.shards import F32, U16, U64
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.row_format import HEAD, groups_of
from headrace.pserver.rows.table_rows import I32, RowArrays

PIECE_ROWS = 1 << 12
"""Rows copied while steps wait: well below a millisecond."""
STORED_ROWS = 1 << 10
"""Rows looked up in the store at a time: a batch that needs rows from the store waits that long."""
PAUSE_S = 0.0005
"""Pause after each piece, as in pserver.tables.sweeping."""
MAX_DELETED_KEYS = 1 << 20
"""Most deleted keys remembered. Beyond it those of the oldest versions are dropped; a subscriber at such a version
gets all rows."""
NO_KEYS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class PresentRows:
    """Present rows, with the weights that a model reads."""

    keys_P: U64
    group_P: U16
    rows_PD: F32
    known_P3: F32 | None = None
    """Show, click and the day of which they are; None where nobody asks for them."""

    def known_of(self, group: int) -> "PresentRows":
        """Those of a slot group, with show, click and day in place of weights."""
        assert self.known_P3 is not None, "asked for"
        own_P = self.group_P == group
        return PresentRows(self.keys_P[own_P], self.group_P[own_P], self.known_P3[own_P])


@dataclass(frozen=True, slots=True)
class TableDelta:
    """The changes of a table since it was published last."""

    rows: PresentRows
    gone_U: U64
    """Keys without a row now; some may never have been published."""


class TableFeed:
    """The changes of one table for the live feed."""

    def __init__(self, rows: RowArrays, life: TableAging, deletions: Deletions) -> None:
        self._rows, self._life, self._deletions = rows, life, deletions
        self._lock = threading.Lock()
        self.tells_statistics = False
        """Whether rows are read with show, click and day."""
        self._following = False
        self._touched: list[U64] = []
        self._deleted: list[U64] = []
        self._version = 0
        self._log: dict[int, list[U64]] = {}
        self._num_logged = 0
        self.known_since = 0
        """Keys deleted at this version or later are known."""

    @property
    def width(self) -> int:
        """D."""
        return self._rows.num_weights

    def decay_of(self, group: int) -> DayDecay:
        """The present day, and the rates up to it, of a slot group."""
        return DayDecay.of(self._life, group)

    @property
    def sweeping(self) -> bool:
        """Whether a shrink still has to find the keys that it deletes."""
        return bool(self._life.shrinks)

    # --- events of the table -----------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Start from the rows of a commit of `version`; keys deleted before are not known."""
        with self._lock:
            self._version = self.known_since = version

    def follow(self, following: bool) -> None:
        """Start or stop noting changed rows: whether there are subscribers."""
        with self._lock:
            self._following = following
            self._touched, self._deleted = [], []

    def note_changed(self, rows_U: I32) -> None:
        """At a close: note the rows that its pass changed. Costs nothing without subscribers."""
        if self._following:
            keys_U = self._rows.columns["keys"][rows_U]
            with self._lock:
                self._touched.append(keys_U)

    def closed(self, version: int) -> None:
        """A pass is closed: keys deleted from here on belong to this version or a later one."""
        with self._lock:
            if self._version in self._log:
                self._log[self._version] = [np.concatenate(self._log[self._version])]
            self._version = version

    def note_deleted(self, keys_U: U64) -> None:
        """Note that the rows of these keys are deleted."""
        keys_U = np.array(keys_U)
        with self._lock:
            if self._following:
                self._deleted.append(keys_U)
            self._log.setdefault(self._version, []).append(keys_U)
            self._num_logged += len(keys_U)
            while self._num_logged > MAX_DELETED_KEYS:
                oldest = next(iter(self._log))
                self._num_logged -= sum(len(each) for each in self._log.pop(oldest))
                self.known_since = oldest + 1

    # --- what is published -------------------------------------------------------------------------------------------

    def take(self) -> TableDelta:
        """Between passes: the rows changed, as they are now, and the keys deleted since the last call."""
        with self._lock:
            touched, deleted = self._touched, self._deleted
            self._touched, self._deleted = [], []
        present = self.read(_unique(touched))
        gone_U = _unique(deleted)
        return TableDelta(present, gone_U[~np.isin(gone_U, present.keys_P)] if len(gone_U) else gone_U)

    def take_deleted(self, delta: TableDelta) -> TableDelta:
        """`delta` with the keys deleted since it was taken, by operations from before."""
        with self._lock:
            deleted, self._deleted = self._deleted, []
        return TableDelta(delta.rows, _unique([delta.gone_U, *deleted]))

    def restore_changes(self, delta: TableDelta) -> None:
        """Have the next `take` return these changes again, as they were not sent."""
        with self._lock:
            self._touched.append(delta.rows.keys_P)
            self._deleted.append(delta.gone_U)

    def deleted_since(self, version: int) -> U64:
        """Keys deleted after `version`, or at its close; some may have rows again."""
        with self._lock:
            found = [keys_U for stamp, many in self._log.items() if stamp >= version for keys_U in many]
        return _unique(found)

    # --- rows --------------------------------------------------------------------------------------------------------

    def read(self, keys_U: U64, since: int = 0) -> PresentRows:
        """The rows of those keys that have one, changed after version `since`; in any order."""
        with self._rows.still:
            with self._rows.removing():
                rows_U = self._rows.look_up(keys_U)
                there = self._copied(rows_U[rows_U != kernels.EMPTY], since)
            away_U = keys_U[rows_U == kernels.EMPTY]
            found_A, words_FW = self._rows.stored.get(away_U)
        if not len(words_FW):
            return there
        newer_F = words_FW[:, 1] > since
        words_FW = words_FW[newer_F]
        rows_FD = words_FW[:, HEAD : HEAD + self.width].copy().view(np.float32)
        known_P3 = None
        if there.known_P3 is not None:
            known_P3 = np.concatenate([there.known_P3, dated(RowStatistics.of_words(words_FW))])
        return PresentRows(
            np.concatenate([there.keys_P, away_U[found_A][newer_F]]),
            np.concatenate([there.group_P, groups_of(words_FW)]),
            np.concatenate([there.rows_PD, rows_FD]),
            known_P3,
        )

    def scan(self, since: int, pause: Callable[[float], None] = time.sleep) -> Iterator[PresentRows]:
        """Every row changed after version `since`, in pieces, each as it is when its piece is copied.

        A row that changes meanwhile may be missed, or be copied in the middle of a pass: its close publishes it again.
        Rows in memory come first, then rows in the store; a row may come twice.
        """
        for begin in range(0, self._rows.num_numbers, PIECE_ROWS):
            with self._rows.removing():
                end = min(begin + PIECE_ROWS, self._rows.num_numbers)
                piece = self._copied(np.arange(begin, end, dtype=np.int32), since)
            if len(piece.keys_P):
                yield piece
            pause(PAUSE_S)
        for keys_U, words_UW in self._rows.stored.scan():
            keys_U = keys_U[words_UW[:, 1] > since]  # a row changed since its commit is in memory, or was published
            for begin in range(0, len(keys_U), STORED_ROWS):
                piece = self.read(keys_U[begin : begin + STORED_ROWS], since)
                if len(piece.keys_P):
                    yield piece
                pause(PAUSE_S)

    def _copied(self, rows_U: I32, since: int) -> PresentRows:
        """Those of the rows in memory that are present and changed after `since`; called within `removing`."""
        rows_U = rows_U[self._rows.columns["changed_version"][rows_U] > since]
        if self._life.shrinks:
            rows_U = rows_U[self._life.gone(self._deletions.statistics(), frozen(rows_U)) == STAYS]
        rows_PD = np.empty((len(rows_U), self.width), np.float32)
        if len(rows_U):
            self._rows.floats.gather(frozen(rows_U), 0, len(rows_U), rows_PD)
        known_P3 = None
        if self.tells_statistics:
            known_P3 = dated(RowStatistics._make(each[rows_U] for each in self._deletions.statistics()))
        return PresentRows(self._rows.columns["keys"][rows_U], self._rows.columns["group"][rows_U], rows_PD, known_P3)


def _unique(many: list[U64]) -> U64:
    """The keys of all arrays, each once; a single array has each once already."""
    if len(many) == 1:
        return many[0]
    return unique_keys(*many) if many else NO_KEYS
