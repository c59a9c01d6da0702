"""Finds the rows of the newest commit in which a value takes part, beside the row of the value itself.

These are its rows in other slots, rows of crosses with it, the histories and counters of all these, histories that
remember it, and samples with it that wait for a join. A cross is found by the rows of the other slots that it crosses.

Shapes: P signs of a part of a cross, N combinations, U keys of rows, M signs of histories, B samples that wait.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.features.pair_columns import mark_of
from headrace.dataset.samples.sample_bytes import decode_samples
from headrace.dataset.spec.schema import Schema, Slot
from headrace.deadline import Deadline
from headrace.key_kernels import keys_of, signs_of
from headrace.keys import are_among, unique_keys
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.histories import counters_table_of, table_of
from headrace.pserver.protocol.joins import JOIN_TABLE
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows import history_kernels, join_kernels
from headrace.pserver.rows.row_format import groups_of
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.history.commit_lookup import lease, reader, scratch
from headrace.service.monitor.lines import count
from headrace.service.predict.versions import check_fits
from headrace.service.spec.job import LoadedJob
from headrace.service.tables.committed_tables import newest, tables_in_force
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, weights_of
from headrace.trainer.spec.history_tables import history_tables
from headrace.trainer.spec.join_tables import join_tables

U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]

MAX_COMBINATIONS = 1 << 28
"""Most combinations of one cross that are tried: about a minute. A cross with more is named, and not searched."""
PIECE = 1 << 22
"""Combinations that are tried at a time."""
CROSS_GROUP = 0
"""The sign of a cross is made like keys of this slot group, part by part."""
NO_KEYS: U64 = np.empty(0, np.uint64)
PLAIN = ("from", "split", "default")
"""Keys of a slot with which its values are those of its field."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The rows of a commit in which a value takes part."""

    keys: Mapping[tuple[str, int], U64]
    """By table and slot group; never empty."""
    notes: Sequence[str]
    """Lines about what cannot be told apart from the values of others."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(len(keys_U) for keys_U in self.keys.values())


def find_traces(job: LoadedJob, slot: str, sign: int, deadline: Deadline) -> Traces:
    """The rows of the newest commit in which `sign` of `slot` takes part.

    Raises NothingCommitted; SpecError if the commit has other slots or tables; StoreDamaged, DeadlineExceeded.
    """
    commit, what, job = newest(job), reader(), with_store_defaults(job)
    check_fits(commit, job)
    schema = Schema.of(job.spec.slots)
    filled = {**history_tables(schema), **join_tables(job.spec.join)}
    tables = {**tables_in_force(job, commit), **filled}
    with lease(Commits(job.store), commit.name, what), scratch(job.store, what) as folder:
        rows = _CommitRows(commit, schema, tables, folder, deadline)
        return _Search(schema, rows, slot, np.array([sign], np.uint64)).run()


@dataclass(frozen=True)
class _CommitRows:
    """The rows of a commit, a chunk at a time."""

    commit: Commit
    schema: Schema
    tables: Mapping[str, TableSection]
    folder: Path
    deadline: Deadline

    def of(self, table: str) -> Iterator[tuple[U64, NDArray[np.uint16], F32]]:
        """Keys, slot groups and weights of a table's rows."""
        section = self.tables[table]
        groups = {each.name: each.group for each in self.schema.sparse if each.sparse.table == table}
        everything = RowSelection(ExportCut(since=0), self.commit.version, is_base=True)
        with CommitTableRows(self.commit, table, section, groups, self.folder) as source:
            for chunk in source.all(everything, self.deadline):
                weights_UD = weights_of(chunk.words_UW, section.num_weights)
                yield chunk.keys_U, groups_of(chunk.words_UW), weights_UD


@dataclass
class _Search:
    schema: Schema
    rows: _CommitRows
    slot: str
    own_P: U64
    """The sign of the value."""
    signs: dict[str, U64] = field(default_factory=dict)
    """By slot: its signs in which the value takes part."""
    found: dict[tuple[str, int], list[U64]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    known: dict[tuple[str, int], U64] = field(default_factory=dict)
    """Keys of rows to compare with, by table and slot group, ascending."""

    def run(self) -> Traces:
        """1. Rows of the value in all slots, and of crosses. 2. What is kept under these. 3. What contains them."""
        self.signs = dict.fromkeys(self._same(), self.own_P)
        crosses = [each for each in self.schema.sparse if each.entry.cross and any(map(self._is_own, each.entry.cross))]
        crossed = [each for each in self.schema.crossed if self.signs.keys() & _parts(each)]
        self.known = self._keys_by_group([*crosses, *crossed])
        for each in self.schema.sparse:  # 1
            if each.name in self.signs:
                self._add(each.sparse.table, each.group, self._there(each, _keys(self.own_P, each.group)))
        for each in crosses:
            self._search_cross(each)
        for each in crossed:
            self._search_pairs(each)
        self._search_keyed()  # 2
        self._search_histories()  # 3
        self._search_join()
        return Traces({where: unique_keys(*keys) for where, keys in self.found.items()}, self.notes)

    def _add(self, table: str, group: int, keys_U: U64) -> None:
        if len(keys_U):
            self.found.setdefault((table, group), []).append(keys_U)

    # --- slots with the value -----------------------------------------------------------------------------------------

    def _same(self) -> list[str]:
        """The slots whose values are those of the slot: it, those that share its rows or its field, their histories."""
        own = self.schema.by_name[self.slot]
        same = {self.slot}
        if not own.entry.cross:
            for each in self.schema.emitted.sparse:
                shares = each.group == own.group or _field(each) == _field(own)
                if shares and each.sparse.values == own.sparse.values and not each.entry.cross:
                    if each.entry.hash is None or each.name == self.slot:
                        same.add(each.name)
                    else:
                        self._note_hash(each)
        if own.entry.hash is not None:
            self._note_hash(own)
        same |= {each.name for each in self.schema.histories if each.history.of in same}
        return [each.name for each in self.schema.sparse if each.name in same]

    def _note_hash(self, slot: Slot) -> None:
        self.notes.append(f"slot {slot.name}: values share rows by `hash`, so that no row is of one value alone")

    def _is_own(self, part: str) -> bool:
        """Whether a part of a cross has the value: a slot, or the field of the slot."""
        own = self.schema.by_name[self.slot]
        plain = set(own.entry.feature_keys) <= set(PLAIN)
        return part in self.signs or (part not in self.schema.by_name and plain and part == _field(own))

    # --- crosses ------------------------------------------------------------------------------------------------------

    def _keys_by_group(self, crosses: Sequence[Slot]) -> dict[tuple[str, int], U64]:
        """The keys of rows of the slots that a search compares with, read once for each table."""
        names = {*self.signs, *(each.name for each in crosses)}
        names |= {part for each in crosses for part in _parts(each) if part in self.schema.by_name}
        keyed = (each.counters.keys for each in self.schema.counters)
        names |= {part for keys in keyed if len(keys) > 1 for part in keys}
        slots = [each for each in self.schema.sparse if each.name in names]
        found: dict[tuple[str, int], list[U64]] = {(each.sparse.table, each.group): [NO_KEYS] for each in slots}
        for table in sorted({table for table, _ in found}):
            for keys_U, group_U, _ in self.rows.of(table):
                for group in (group for other, group in found if other == table):
                    found[table, group].append(keys_U[group_U == group])
        return {where: np.sort(np.concatenate(keys)) for where, keys in found.items()}

    def _there(self, slot: Slot, keys_N: U64) -> U64:
        """Those of the keys that have a row."""
        return keys_N[are_among(keys_N, self.known[slot.sparse.table, slot.group])]

    def _signs_of(self, slot: Slot) -> U64:
        """(P,) the signs of a slot with which the value occurs: its own, or those of all rows."""
        if slot.name in self.signs:
            return self.signs[slot.name]
        keys_U = self.known[slot.sparse.table, slot.group]
        return _signs(keys_U, slot.group)

    def _search_cross(self, slot: Slot) -> None:
        if slot.entry.hash is not None:
            self._note_hash(slot)
            return
        parts = []
        for part in slot.entry.cross:
            if part not in self.schema.by_name and not self._is_own(part):
                self.notes.append(
                    f"slot {slot.name}: {part} is no slot, so the crosses of the value with it are not known; forget "
                    f"each by the values of all parts: {slot.name} {','.join(slot.entry.cross)}"
                )
                return
            own = part not in self.schema.by_name
            parts.append((self.own_P if own else self._signs_of(self.schema.by_name[part]), CROSS_GROUP))
        there: list[U64] = [self._there(slot, _keys(sign_N, slot.group)) for sign_N in self._chained(slot.name, parts)]
        keys_U = unique_keys(NO_KEYS, *there)
        self.signs[slot.name] = _signs(keys_U, slot.group)
        self._add(slot.sparse.table, slot.group, keys_U)

    def _search_pairs(self, slot: Slot) -> None:
        for pair in (pair for pair in slot.sparse.pairs if self.signs.keys() & set(pair)):
            parts = [
                np.array([mark_of(pair)], np.uint64),
                *(self._signs_of(self.schema.by_name[name]) for name in pair),
            ]
            for sign_N in self._chained(slot.name, [(part_P, CROSS_GROUP) for part_P in parts]):
                self._add(slot.sparse.table, slot.group, self._there(slot, _keys(sign_N, slot.group)))

    def _chained(self, name: str, parts: Sequence[tuple[U64, int]]) -> Iterator[U64]:
        """(N,) all combinations of signs as one number each, in pieces: `key of (part ^ number before)`, part by part,
        each with its slot group."""
        num = math.prod(len(part_P) for part_P, _ in parts)
        if num > MAX_COMBINATIONS:
            self.notes.append(
                f"slot {name}: {count(num)} combinations are too many to search; forget each by the values of all parts"
            )
            return
        longest = max(range(len(parts)), key=lambda place: len(parts[place][0]))
        step = max(1, PIECE // max(1, num // max(1, len(parts[longest][0]))))
        for begin in range(0, len(parts[longest][0]) if num else 0, step):
            number_N = np.zeros(1, np.uint64)
            for place, (part_P, group) in enumerate(parts):
                chosen_P = part_P[begin : begin + step] if place == longest else part_P
                mixed_N = np.repeat(number_N, len(chosen_P)) ^ np.tile(chosen_P, len(number_N))
                number_N = _keys(mixed_N, group)
            self.rows.deadline.check(f"searching crosses of slot {name!r}")
            yield number_N

    # --- what the job fills -------------------------------------------------------------------------------------------

    def _search_keyed(self) -> None:
        """Histories and counters whose key has the value."""
        keyed: list[tuple[str, str, tuple[str, ...]]] = [
            (table_of(each.name), each.name, (each.history.key,)) for each in self.schema.histories
        ]
        keyed += [(counters_table_of(each.name), each.name, each.counters.keys) for each in self.schema.counters]
        for table, name, keys in keyed:
            slots = [self.schema.by_name[each] for each in keys]
            if not any(each.name in self.signs for each in slots):
                continue
            there_U = np.sort(np.concatenate([NO_KEYS, *(keys_U for keys_U, _, _ in self.rows.of(table))]))
            parts = [(self.signs[each.name] if len(slots) == 1 else self._signs_of(each), each.group) for each in slots]
            for keys_N in self._chained(name, parts):
                self._add(table, slots[-1].group, keys_N[are_among(keys_N, there_U)])

    def _search_histories(self) -> None:
        """Histories of others that remember the value: they begin anew."""
        for each in self.schema.histories:
            if not len(sign_P := self.signs.get(each.history.of, NO_KEYS)):
                continue
            table, group = table_of(each.name), self.schema.by_name[each.history.key].group
            for keys_U, _, rows_UD in self.rows.of(table):
                count_U, sign_UL = history_kernels.unpacked(rows_UD)
                remembered_UL = np.arange(sign_UL.shape[1]) < count_U[:, None]
                self._add(table, group, keys_U[(remembered_UL & np.isin(sign_UL, sign_P)).any(axis=1)])

    def _search_join(self) -> None:
        """Samples with the value that wait for a join."""
        if JOIN_TABLE not in self.rows.tables:
            return
        for keys_U, group_U, rows_UD in self.rows.of(JOIN_TABLE):
            has_U = np.isin(rows_UD.view(np.uint32)[:, 0], (join_kernels.WAITING, join_kernels.CLICKED))
            offset_B1, data_N = join_kernels.samples_of(rows_UD[has_U])
            with_B = np.diff(offset_B1) > 0  # a clicked impression may have been released already
            keys_B, kept_B = keys_U[has_U][with_B], np.unique(offset_B1)
            unknown_B = np.zeros(len(keys_B))
            samples = decode_samples(kept_B, data_N, self.schema, unknown_B.astype(np.int64), unknown_B)
            hit_B = np.zeros(len(keys_B), np.bool_)
            for name, sign_P in self.signs.items():
                column = samples.sparse[name]
                row_M = np.repeat(np.arange(len(keys_B)), np.diff(column.offset_B1))
                hit_B[row_M[np.isin(column.values_N, sign_P)]] = True
            self._add(JOIN_TABLE, int(group_U[0]) if len(group_U) else 0, keys_B[hit_B])


def _field(slot: Slot) -> str:
    """The field of the event with the values of a plain slot."""
    return slot.entry.source or slot.name


def _parts(slot: Slot) -> set[str]:
    """The slots and fields that a cross crosses, or those of all pairs."""
    return {*slot.entry.cross, *(name for pair in slot.sparse.pairs for name in pair)}


def _keys(sign_N: U64, group: int) -> U64:
    keys_N = np.empty(len(sign_N), np.uint64)
    keys_of(np.ascontiguousarray(sign_N), group, keys_N)
    return keys_N


def _signs(keys_U: U64, group: int) -> U64:
    sign_U = np.empty(len(keys_U), np.uint64)
    signs_of(keys_U, np.full(len(keys_U), group, np.uint16), sign_U)
    return sign_U
