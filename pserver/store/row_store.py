"""The protocol of a row store: the committed rows of one table on one shard, encoded, by key.

`pserver.store.rocks_store.RocksRowStore` stores them in RocksDB; `pserver.store.memory_store.MemoryRowStore` is its
twin for tests. One contract suite runs over both. pserver.rows.row_format defines the words of a row;
pserver.tables.table decides when rows are written and deleted.

Shapes: U unique keys, G unique deleted keys, W words (uint32) of a row.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.keys import NUM_BUCKETS

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

BUCKET_BITS = NUM_BUCKETS.bit_length() - 1
"""Lowest bits of a key that number its virtual bucket: 12 of them."""


def sort_order_of(keys_U: U64) -> U64:
    """(U,) sort order of keys in a store: keys rotated right by 12 bits, so the bucket comes first; a bijection."""
    order_U: U64 = keys_U >> np.uint64(BUCKET_BITS) | keys_U << np.uint64(64 - BUCKET_BITS)
    return order_U


def keys_in_order(order_U: U64) -> U64:
    """(U,) keys in this order: the inverse of `sort_order_of`."""
    keys_U: U64 = order_U << np.uint64(BUCKET_BITS) | order_U >> np.uint64(64 - BUCKET_BITS)
    return keys_U


class StoredFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint, as the commit's manifest lists it."""

    sha256: str
    num_bytes: int = msgspec.field(name="bytes")


class RowWriter(Protocol):
    """The part of a RowStore that reads and replaces rows."""

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]: ...

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None: ...


class RowStore(Protocol):
    """One thread writes, checkpoints and closes; any thread may read meanwhile.

    Rows are ordered by `order_of(key)`, the key rotated right by 12 bits, so that each virtual bucket (the key's lowest
    12 bits) is one range. Errors of pserver.errors: StoreFailed if the disk is full or fails; the call had no effect
    and may be repeated. StoreDamaged if data that is read is wrong.
    """

    num_writes: int
    """Number of finished writes: rows read at an equal number are unchanged."""

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        """Which keys have a row, (U,), and these rows in the order of the keys: (found, W)."""
        ...

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None:
        """Insert or replace rows of unique keys, and delete rows of other unique keys, in any order: all or none.

        A deleted key need not have a row.
        """
        ...

    def scan(self, begin_bucket: int = 0, end_bucket: int = 4096) -> Iterator[tuple[U64, U32]]:
        """All rows of a range of buckets as of the call, in order, in chunks."""
        ...

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        """Write the present state to `folder`, which does not exist, as immutable files, and sync it.

        Returns every file by its name in `folder`. A file of an earlier checkpoint, or of the one that this store was
        opened from, is linked and not hashed again. After an error `folder` does not exist.
        """
        ...

    def memory_bytes(self) -> int:
        """Memory that the store uses now, without the system's page cache."""
        ...

    def close(self) -> None:
        """Close files and threads. May be called twice."""
        ...
