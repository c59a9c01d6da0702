"""The rows of a table that are in its store and not in memory. A table in unbounded memory has none.

pserver.rows.table_rows holds the rows in memory, pserver.rows.row_cache moves rows between both.
"""

import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.protocol.shards import U64
from headrace.pserver.store.row_store import U32, RowStore


class DeletedRows(Protocol):
    """Which rows of a store are deleted, though the store may still have them."""

    def __call__(self, keys_U: U64, words_UW: U32, *, found_out: bool) -> NDArray[np.bool_]:
        """(U,) whether each row is deleted. With `found_out` rows that a shrink deleted get tombstones now."""
        ...


class StoredRows:
    """Callers hold `still` of the table's rows, so that none moves into memory or out of it, except for `scan`."""

    def __init__(self, num_words: int, is_deleted: DeletedRows) -> None:
        """`num_words`: of a row."""
        self._num_words = num_words
        self.is_deleted = is_deleted
        self._store: RowStore | None = None
        self.num_away = 0
        """Number of rows that are only in the store."""
        self._counting = threading.Lock()

    def attach(self, store: RowStore, num_rows: int) -> None:
        """Before any row exists: use `store` with its `num_rows` rows."""
        self._store, self.num_away = store, num_rows

    @property
    def num_writes(self) -> int:
        """Number of writes to the store."""
        return 0 if self._store is None else self._store.num_writes

    def scan(self) -> Iterator[tuple[U64, U32]]:
        """All rows of the store now, including rows in memory and deleted rows."""
        return iter(()) if self._store is None else self._store.scan()

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        """For keys outside memory: which have a row, (U,), and their words, (found, W')."""
        if self.num_away == 0 or len(keys_U) == 0 or self._store is None:
            return np.zeros(len(keys_U), np.bool_), np.empty((0, self._num_words), np.uint32)
        found_U, words_FW = self._store.get(keys_U)
        deleted_F = self.is_deleted(keys_U[found_U], words_FW, found_out=True)
        if deleted_F.any():
            found_U[np.flatnonzero(found_U)[deleted_F]] = False
            words_FW = words_FW[~deleted_F]
        return found_U, words_FW

    def left(self, num_rows: int) -> None:
        """Note that this many rows are no longer only in the store: they are loaded or deleted. Any thread."""
        with self._counting:
            self.num_away -= num_rows
