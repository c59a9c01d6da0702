"""What the live feed tells of one table: rows as inference reads them, which of them changed, which keys went.

Of rows that changed only keys are noted, at the close of their pass; their values are copied when a version is told.
Keys that went are noted always, for as many versions as a bound allows, so that whoever comes back is told of them.
Who is told, and when, is pserver.feed's matter.

Threads: any may note what went; the rest is the step's and the subscribers', each call under a lock of its own.

Shapes: U keys of a call, P rows that are, D weights of a row.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pserver import kernels
from pserver.aging import STAYS, Life
from pserver.arrays import frozen
from pserver.client import F32, U16, U64
from pserver.departures import Departures
from pserver.row_words import HEAD, groups_of
from pserver.rows import I32, Rows

PIECE_ROWS = 1 << 12
"""Rows copied while steps wait: well below a millisecond."""
STORED_ROWS = 1 << 10
"""Rows looked up in the store at a time: a batch that needs some of its own waits for that."""
PAUSE_S = 0.0005
"""After each piece, as in pserver.sweeping."""
MAX_WENT_KEYS = 1 << 20
"""Keys that went and are remembered; beyond it the oldest versions' are forgotten, and who has those reads all rows."""
NO_KEYS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Present:
    """Rows that are, with what a model sees of them."""

    keys_P: U64
    group_P: U16
    rows_PD: F32


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a table since it was told last."""

    rows: Present
    gone_U: U64
    """Keys that have no row now; some may never have been told of."""


class TableFeed:
    """See module docstring."""

    def __init__(self, rows: Rows, life: Life, departures: Departures) -> None:
        self._rows, self._life, self._departures = rows, life, departures
        self._lock = threading.Lock()
        self._following = False
        self._touched: list[U64] = []
        self._went: list[U64] = []
        self._version = 0
        self._log: dict[int, list[U64]] = {}
        self._num_logged = 0
        self.known_since = 0
        """Keys that went at this version or later are known."""

    @property
    def width(self) -> int:
        """D."""
        return self._rows.num_weights

    @property
    def sweeping(self) -> bool:
        """Whether keys that went at closes are still to be found."""
        return bool(self._life.shrinks)

    # --- what happens ------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """The rows are those of a commit of `version`: what went before is not known."""
        with self._lock:
            self._version = self.known_since = version

    def follow(self, following: bool) -> None:
        """Whether anybody is to be told; from here on, or no longer."""
        with self._lock:
            self._following = following
            self._touched, self._went = [], []

    def touched(self, rows_U: I32) -> None:
        """At a close: these rows have changed in its pass. Costs nothing while nobody is told."""
        if self._following:
            keys_U = self._rows.columns["keys"][rows_U]
            with self._lock:
                self._touched.append(keys_U)

    def closed(self, version: int) -> None:
        """A pass is closed: what goes from here on is this version's, or a later one's."""
        with self._lock:
            if self._version in self._log:
                self._log[self._version] = [np.concatenate(self._log[self._version])]
            self._version = version

    def went(self, keys_U: U64) -> None:
        """Rows of these keys are no longer."""
        keys_U = np.array(keys_U)
        with self._lock:
            if self._following:
                self._went.append(keys_U)
            self._log.setdefault(self._version, []).append(keys_U)
            self._num_logged += len(keys_U)
            while self._num_logged > MAX_WENT_KEYS:
                oldest = next(iter(self._log))
                self._num_logged -= sum(len(each) for each in self._log.pop(oldest))
                self.known_since = oldest + 1

    # --- what is told ------------------------------------------------------------------------------------------------

    def take(self) -> Told:
        """Between passes: what changed and went since the last time, as it is now."""
        with self._lock:
            touched, went = self._touched, self._went
            self._touched, self._went = [], []
        present = self.read(_unique(touched))
        gone_U = _unique(went)
        return Told(present, gone_U[~np.isin(gone_U, present.keys_P)] if len(gone_U) else gone_U)

    def take_gone(self, told: Told) -> Told:
        """With what went since it was taken, all of it by what had happened then."""
        with self._lock:
            went, self._went = self._went, []
        return Told(told.rows, _unique([told.gone_U, *went]))

    def put_back(self, told: Told) -> None:
        """It was not said: it is to be taken again."""
        with self._lock:
            self._touched.append(told.rows.keys_P)
            self._went.append(told.gone_U)

    def gone_since(self, version: int) -> U64:
        """Keys whose rows went after `version`, or at its close; some may be rows again."""
        with self._lock:
            found = [keys_U for stamp, many in self._log.items() if stamp >= version for keys_U in many]
        return _unique(found)

    # --- rows --------------------------------------------------------------------------------------------------------

    def read(self, keys_U: U64, since: int = 0) -> Present:
        """Those of the keys that have a row now, changed after version `since`; in any order."""
        with self._rows.still:
            with self._rows.removing():
                rows_U = self._rows.look_up(keys_U)
                there = self._copied(rows_U[rows_U != kernels.EMPTY], since)
            away_U = keys_U[rows_U == kernels.EMPTY]
            found_A, words_FW = self._rows.look_away(away_U)
        if not len(words_FW):
            return there
        newer_F = words_FW[:, 1] > since
        words_FW = words_FW[newer_F]
        rows_FD = words_FW[:, HEAD : HEAD + self.width].copy().view(np.float32)
        away = Present(away_U[found_A][newer_F], groups_of(words_FW), rows_FD)
        return Present(
            np.concatenate([there.keys_P, away.keys_P]),
            np.concatenate([there.group_P, away.group_P]),
            np.concatenate([there.rows_PD, away.rows_PD]),
        )

    def scan(self, since: int, pause: Callable[[float], None] = time.sleep) -> Iterator[Present]:
        """Every row changed after version `since`, a piece at a time, each as it is when its piece is copied.

        Rows that change meanwhile may be missed or come as they are in the midst of a pass: their close tells them.
        What is in memory comes first, then what is in the store, where a row may come again.
        """
        for begin in range(0, self._rows.num_numbers, PIECE_ROWS):
            with self._rows.removing():
                end = min(begin + PIECE_ROWS, self._rows.num_numbers)
                piece = self._copied(np.arange(begin, end, dtype=np.int32), since)
            if len(piece.keys_P):
                yield piece
            pause(PAUSE_S)
        for keys_U, words_UW in self._rows.stored():
            keys_U = keys_U[words_UW[:, 1] > since]  # a row that changed since its commit is in memory, or told of
            for begin in range(0, len(keys_U), STORED_ROWS):
                piece = self.read(keys_U[begin : begin + STORED_ROWS], since)
                if len(piece.keys_P):
                    yield piece
                pause(PAUSE_S)

    def _copied(self, rows_U: I32, since: int) -> Present:
        """Those rows in memory that are, changed after `since`; within `removing`."""
        rows_U = rows_U[self._rows.columns["changed_version"][rows_U] > since]
        if self._life.shrinks:
            rows_U = rows_U[self._life.gone(self._departures.statistics(), frozen(rows_U)) == STAYS]
        rows_PD = np.empty((len(rows_U), self.width), np.float32)
        if len(rows_U):
            self._rows.floats.gather(frozen(rows_U), 0, len(rows_U), rows_PD)
        return Present(self._rows.columns["keys"][rows_U], self._rows.columns["group"][rows_U], rows_PD)


def _unique(many: list[U64]) -> U64:
    """Keys of all arrays, each once; a lone array has each once."""
    if len(many) == 1:
        return many[0]
    keys_U: NDArray[np.uint64] = np.unique(np.concatenate(many)) if many else NO_KEYS
    return keys_U
