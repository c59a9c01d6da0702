"""The row store in memory, the shortest definition of `RowStore`, for tests; checkpoints are .npy files.

Shapes: U unique keys, G unique deleted keys, W words (uint32) of a row.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.keys import NUM_BUCKETS
from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.store.row_store import U32, U64, StoredFile, sort_order_of


class MemoryRowStore:
    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self.num_writes = 0
        self._rows: dict[int, U32] = {}

    @classmethod
    def open(
        cls, live: Path, checkpoint: Path | None, *, num_words: int, known: Mapping[str, StoredFile] | None = None
    ) -> Self:
        """As RocksRows.open; only checkpoints are on disk."""
        store = cls(num_words)
        if checkpoint is not None:
            try:
                keys_U, rows_UW = (np.load(checkpoint / name, allow_pickle=False) for name in ("keys.npy", "rows.npy"))
            except (OSError, ValueError) as error:
                raise StoreDamaged(f"{checkpoint}: {error}") from error
            if rows_UW.shape != (len(keys_U), num_words):
                raise StoreDamaged(f"{checkpoint}: {rows_UW.shape} words of {len(keys_U)} rows, not {num_words} each")
            store.write(keys_U, rows_UW)
        return store

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        found = [self._rows.get(key) for key in keys_U.tolist()]
        return np.array([row is not None for row in found], bool), self._joined(
            [row for row in found if row is not None]
        )

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None:
        assert rows_UW.shape == (len(keys_U), self.num_words) and rows_UW.dtype == np.uint32
        gone = [] if gone_G is None else gone_G.tolist()
        assert not {*gone} & {*keys_U.tolist()}, "a key cannot be written and deleted"
        for key in gone:
            self._rows.pop(key, None)
        self._rows |= dict(zip(keys_U.tolist(), rows_UW.copy(), strict=True))
        self.num_writes += 1

    def scan(self, begin_bucket: int = 0, end_bucket: int = NUM_BUCKETS) -> Iterator[tuple[U64, U32]]:
        """In one chunk, or none."""
        keys_R = np.array(list(self._rows), np.uint64)
        keys_R = keys_R[np.argsort(sort_order_of(keys_R))]
        bucket_R = keys_R % np.uint64(NUM_BUCKETS)
        wanted_U = keys_R[(begin_bucket <= bucket_R) & (bucket_R < end_bucket)]
        return iter([(wanted_U, self.get(wanted_U)[1])] if len(wanted_U) else [])

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        """Writes every row each time."""
        assert not folder.exists(), folder
        (keys_U, rows_UW), *_ = *self.scan(), (np.empty(0, np.uint64), self._joined([]))
        try:
            folder.mkdir(parents=True)
            np.save(folder / "keys.npy", keys_U)
            np.save(folder / "rows.npy", rows_UW)
            return {path.name: _stored(path.read_bytes()) for path in sorted(folder.iterdir())}
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StoreFailed(f"{folder}: {error}") from error

    def close(self) -> None:
        """Does nothing."""

    def memory_bytes(self) -> int:
        """Memory of the rows."""
        return len(self._rows) * self.num_words * 4

    def _joined(self, rows: list[U32]) -> U32:
        return np.array(rows, np.uint32).reshape(-1, self.num_words)


def _stored(content: bytes) -> StoredFile:
    return StoredFile(hashlib.sha256(content).hexdigest(), len(content))
