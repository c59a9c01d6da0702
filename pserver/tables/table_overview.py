"""Read-only views of one table: the digest of all rows, shows and clicks of some, the rows with most shows, everything
known about one key.

pserver.rows.table_rows holds the rows in memory; pserver.rows.digest hashes rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.admission.slot_admission import SlotAdmission
from headrace.pserver.lifecycle.aging import STAYS, RowStatistics, TableAging
from headrace.pserver.lifecycle.deletions import Deletions
from headrace.pserver.protocol.shards import F32, U64
from headrace.pserver.protocol.table_operations import RankedRow, RankedRows
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.digest import add, digest_rows, join, multipliers_of
from headrace.pserver.rows.row_format import HEAD, unpack
from headrace.pserver.rows.split_work import WorkSplitter
from headrace.pserver.rows.table_rows import COLUMNS, I32, U32, RowArrays, bits_of

KEYS_AT_ONCE = 1 << 16
"""Keys whose statistics are read while rows neither move nor leave memory."""
MAX_RANKED = 1 << 24
"""Rows that are ranked at most on a shard: about a second. Those in memory come first."""


@dataclass(frozen=True, slots=True)
class TableOverview:
    rows: RowArrays
    life: TableAging
    selection: SlotAdmission
    deletions: Deletions
    halves: WorkSplitter
    multipliers: U64
    """The multipliers of a row's digest: see pserver.rows.digest."""
    words: bool
    """Whether weights are bits, which `explain` then tells, too."""

    @classmethod
    def of(
        cls,
        rows: RowArrays,
        life: TableAging,
        selection: SlotAdmission,
        deletions: Deletions,
        halves: WorkSplitter,
        *,
        words: bool,
    ) -> "TableOverview":
        """The view of one table."""
        return cls(rows, life, selection, deletions, halves, multipliers_of(rows.width), words)

    def digest(self) -> int:
        """128-bit hash over all present rows and the counts of admission."""
        with self.rows.still:
            rows_U = np.flatnonzero(self._present()).astype(np.int32)
            if self.life.shrinks:
                rows_U = rows_U[self.life.gone(self.deletions.statistics(), rows_U) == STAYS]
            rows_U = rows_U[self.rows.columns["changed_version"][rows_U] != 0]  # not swept meanwhile
            away = (self._digest_of_words(*chunk) for chunk in self.rows.away())
            return add([self.digest_of(frozen(rows_U)), *away, self.selection.digest()])

    def digest_of(self, rows_U: I32) -> int:
        """128-bit hash of some rows in memory."""
        bits, digest, parts = self.rows.bits(), self.rows.floats.digest, list[int]()
        multipliers = self.multipliers
        self.halves.do(len(rows_U), lambda begin, end: parts.append(digest(bits, rows_U[begin:end], multipliers)))
        return add(parts)

    def _present(self) -> NDArray[np.bool_]:
        present_R: NDArray[np.bool_] = self.rows.columns["changed_version"][: self.rows.num_numbers] != 0
        return present_R

    def _digest_of_words(self, keys_U: U64, words_UW: U32) -> int:
        slab_UW = np.empty((len(keys_U), self.rows.width), np.float32)
        columns = {column: np.empty(len(keys_U), dtype) for column, dtype in COLUMNS.items()} | {"keys": keys_U}
        rows_U = np.arange(len(keys_U), dtype=np.int32)
        unpack(frozen(words_UW), rows_U, 0, len(rows_U), *bits_of(slab_UW, columns))
        return join(*digest_rows(*bits_of(slab_UW, columns), rows_U, self.multipliers))

    def explain(self, key: int, group: int) -> dict[str, Any]:
        """Everything known about a key on this shard, as of its last push; JSON-able.

        "row": whether it has one; then "show", "click", "score", "delta_score", "last_seen_day", "unseen_days",
        "changed_version", "weights", "vector" (whether it has joined), "leaves_after_days" (None: not within ten years,
        if it is never seen again). Of histories and counters also "words": the weights as bits.
        "admission": the state of each entry; [] without entries. "frozen": only there, and true, if its slot is frozen.
        """
        facts: dict[str, Any] = {"row": False, "day": self.life.day, "sweeping": bool(self.life.shrinks)}
        facts["admission"] = self.selection.explain(key, group, self.life.day)
        facts |= {"frozen": True} if group in self.life.frozen_groups else {}
        words_UW = self._words_of(np.array([key], np.uint64))
        if not len(words_UW) or not words_UW[0, 1] or self.life.absent(words_UW)[0]:
            return facts
        statistics, num_weights = RowStatistics.of_words(words_UW), self.rows.num_weights
        bits = words_UW[0, HEAD : HEAD + num_weights].tolist()
        facts |= {"words": bits} if self.words else {}
        return facts | {
            "row": True,
            "show": float(statistics.show[0]),
            "click": float(statistics.click[0]),
            "score": float(self.life.score(words_UW)[0]),
            "delta_score": float(self.life.delta_score(words_UW)[0]),
            "last_seen_day": int(statistics.last_seen_day[0]),
            "unseen_days": int(self.life.unseen(words_UW)[0]),
            "changed_version": int(statistics.changed_version[0]),
            "weights": words_UW[0, HEAD : HEAD + num_weights].copy().view(np.float32).tolist(),
            "vector": not self.rows.settings.extends or bool(words_UW[0, -1]),
            "leaves_after_days": self.life.leaves_after(words_UW[0]),
        }

    def statistics_of(self, keys_U: U64) -> tuple[NDArray[np.bool_], F32]:
        """(U,) which keys have a row, and (U, 2) shows and clicks of these now; 0 without a row. Any thread, while no
        step is applied. Loads nothing into memory."""
        found_U, value_U2 = np.zeros(len(keys_U), np.bool_), np.zeros((len(keys_U), 2), np.float32)
        for begin in range(0, len(keys_U), KEYS_AT_ONCE):
            keys_P = keys_U[begin : begin + KEYS_AT_ONCE]
            with self.rows.still:
                with self.rows.removing():
                    rows_P = self.rows.look_up(keys_P)
                    held_P = rows_P != kernels.EMPTY
                    held = RowStatistics(*(each[rows_P[held_P]] for each in self.deletions.statistics()))
                away_P = np.flatnonzero(~held_P)
                there_P, words_FW = self.rows.stored.get(keys_P[away_P])
            away = RowStatistics.of_words(words_FW)
            for place_F, statistics in ((np.flatnonzero(held_P), held), (away_P[there_P], away)):
                why_F = self.life.gone(statistics, np.arange(len(place_F), dtype=np.int32))
                present_F = (statistics.changed_version != 0) & (why_F == STAYS)
                found_U[begin + place_F[present_F]] = True
                value_U2[begin + place_F[present_F]] = self.life.present(statistics)[present_F]
        return found_U, value_U2

    def ranked(self, top: int) -> RankedRows:
        """The rows with most shows, and how long ago rows were seen. Any thread. Steps go on meanwhile: of a row that
        changes, either state counts. A row that leaves memory meanwhile may be scanned twice, or not at all; it is once
        among the rows. Loads nothing into memory."""
        rows, scanned, unseen_E = list[RankedRow](), 0, np.zeros(len(RankedRows.edges), np.int64)
        for keys_U, statistics in self._pieces():
            why_U = self.life.gone(statistics, np.arange(len(keys_U), dtype=np.int32))
            present_U = (statistics.changed_version != 0) & (why_U == STAYS)
            value_U2, days_U = self.life.present(statistics), self.life.day - statistics.last_seen_day.astype(np.int64)
            days_U = np.maximum(days_U, 0)
            place_P = np.searchsorted(RankedRows.edges, days_U[present_U], "right") - 1
            unseen_E += np.bincount(place_P, minlength=len(unseen_E))
            scanned += len(place_P)
            least = rows[-1].show if len(rows) == top else -np.inf
            chosen_C = np.flatnonzero(present_U & (value_U2[:, 0] >= least))
            chosen_C = chosen_C[np.lexsort((keys_U[chosen_C], -value_U2[chosen_C, 0]))[:top]]
            columns, known = (
                (keys_U, statistics.group, value_U2[:, 0], value_U2[:, 1], days_U),
                {row.key for row in rows},
            )
            more = map(RankedRow, *(each[chosen_C].tolist() for each in columns))
            rows += [row for row in more if row.key not in known]
            rows = sorted(rows, key=lambda row: (-row.show, row.key))[:top]
            if scanned >= MAX_RANKED:
                break
        return RankedRows(rows, unseen_E.tolist(), scanned, self.deletions.num_rows)

    def _pieces(self) -> Iterator[tuple[U64, RowStatistics]]:
        """Keys and statistics of all rows: copies of those in memory, then those on the disk."""
        for begin in range(0, self.rows.num_numbers, KEYS_AT_ONCE):
            piece = slice(begin, min(begin + KEYS_AT_ONCE, self.rows.num_numbers))  # before the columns are read
            statistics = RowStatistics._make(each[piece].copy() for each in self.deletions.statistics())
            yield self.rows.columns["keys"][piece].copy(), statistics
        for keys_U, words_UW in self.rows.away():
            yield keys_U, RowStatistics.of_words(words_UW)

    def _words_of(self, keys_U: U64) -> U32:
        """(found, W') words of those keys that have a row or a reserved one."""
        with self.rows.still:
            with self.rows.removing():
                rows_U = self.rows.look_up(keys_U)
                there_U = rows_U[rows_U != kernels.EMPTY]
                words_UW = np.empty((len(there_U), HEAD + self.rows.width), np.uint32)
                keys = np.empty(len(there_U), np.uint64)
                self.rows.floats.pack(self.rows.bits(), there_U, 0, len(there_U), keys, words_UW)
            return np.concatenate([words_UW, self.rows.stored.get(keys_U[rows_U == kernels.EMPTY])[1]])
