"""Reads a source into row stores of the job's tables; detects duplicate keys.

Memory is bounded by one batch. After an error the caller removes the folders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.importing.initial_rows import U16, RowMaker, keys_in
from headrace.trainer.importing.selection import ImportSelection
from headrace.trainer.importing.source import U64, ImportSource, SourceRows


@dataclass(frozen=True, slots=True)
class RememberedRows:
    """The rows of a table of histories or counters."""

    section: TableSection
    group: int
    """Slot group of the keys."""
    chunks: Iterator[RowChunk]
    """The rows as shards hold them, in `vector_RD`."""


class ImportTableWriter:
    """The store of one table, while rows are added."""

    def __init__(self, maker: RowMaker, live: Path) -> None:
        self.maker = maker
        self._store = RocksRowStore.open(live / maker.name, None, num_words=maker.num_words)
        self._count_G = np.zeros(1 << 16, np.int64)

    def add(
        self, keys_U: U64, group_U: U16, brought: SourceRows, source: ImportSource, choice: ImportSelection
    ) -> None:
        """Add rows. Raises BadInput."""
        unique_U, first_U, counts_U = np.unique(keys_U, return_index=True, return_counts=True)
        twice = unique_U[counts_U > 1]
        found_U, _ = self._store.get(keys_U)
        if len(twice) or found_U.any():
            key = int(twice[0] if len(twice) else keys_U[found_U][0])
            raise BadInput(_duplicate(key, self.maker.name, source, choice))
        self._store.write(keys_U, self.maker.words(keys_U, group_U, brought))
        self._count_G += np.bincount(group_U, minlength=len(self._count_G))

    def remember(self, memory: RememberedRows) -> None:
        """Add the rows of histories or counters, bit for bit."""
        for chunk in memory.chunks:
            group_U = np.full(len(chunk), memory.group, np.uint16)
            columns = chunk.slots, chunk.slot_R, chunk.sign_R, chunk.key_R
            brought = SourceRows(*columns, None, chunk.vector_RD, None, {}, lambda row: f"row {row}")
            self._store.write(chunk.key_R, self.maker.words(chunk.key_R, group_U, brought, exact=True))
            self._count_G[memory.group] += len(chunk)

    @property
    def facts(self) -> TableFacts:
        """Facts about the table for the commit's part."""
        by_group = {int(group): int(self._count_G[group]) for group in np.flatnonzero(self._count_G)}
        return TableFacts(sum(by_group.values()), by_group)

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        """Write the store to `folder`; returns its files."""
        return self._store.checkpoint(folder)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def open_tables(
    schema: Schema, tables: Mapping[str, TableSection], seed: int, live: Path
) -> dict[str, ImportTableWriter]:
    """An empty store for every table, below `live`."""

    def groups(table: str) -> dict[str, int]:
        return {slot.name: slot.group for slot in schema.sparse if slot.sparse.table == table}

    return {
        name: ImportTableWriter(RowMaker(name, section, groups(name), seed), live) for name, section in tables.items()
    }


def fill(writers: Mapping[str, ImportTableWriter], source: ImportSource, choice: ImportSelection) -> None:
    """Add all rows of a source that `choice` selects. Raises BadInput."""
    for batch in source.batches():
        for number, theirs in enumerate(batch.slots):
            choice.count(theirs, int(np.count_nonzero(batch.slot_R == number)))
        for table, writer in writers.items():
            keys_U, group_U, brought = selected(batch, choice, table)
            if len(keys_U):
                writer.add(keys_U, group_U, brought, source, choice)
    choice.check()


def selected(batch: SourceRows, choice: ImportSelection, table: str) -> tuple[U64, U16, SourceRows]:
    """The rows of a batch for a table: keys, slot groups, values."""
    slots = [choice.slot_of(name) for name in batch.slots]
    group_S = np.array([slot.group if slot and slot.sparse.table == table else -1 for slot in slots] or [-1], np.int32)
    group_R = group_S[batch.slot_R]
    rows = np.flatnonzero(group_R >= 0)
    brought, group_U = batch.select(rows), group_R[rows].astype(np.uint16)
    if brought.key_R is not None:
        return brought.key_R, group_U, brought
    assert brought.sign_R is not None
    keys_U = np.empty(len(rows), np.uint64)
    for group in np.unique(group_U).tolist():
        keys_U[group_U == group] = keys_in(brought.sign_R[group_U == group], group)
    return keys_U, group_U, brought


def _duplicate(key: int, table: str, source: ImportSource, choice: ImportSelection) -> str:
    """A message with both places of a duplicate key; reads the source again up to the second one."""
    places: list[str] = []
    for batch in source.batches():
        keys_U, _, brought = selected(batch, choice, table)
        for row in np.flatnonzero(keys_U == np.uint64(key)).tolist():
            places.append(f"{brought.where(row)} (slot {brought.slots[int(brought.slot_R[row])]!r})")
        if len(places) > 1:
            break
    return f"table {table!r}: duplicate row: {' and '.join(places[:2])}; keep one of them"
