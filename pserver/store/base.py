"""The protocol of a row store: the committed rows of one table on one shard, encoded, by key.

`pserver.store.rocks.RocksRows` keeps them in RocksDB, `pserver.store.memory.MemoryRows` is its twin for tests; one
contract suite runs over both. What a row's words mean is pserver.row_words' matter, when rows come and go is
pserver.table's.

Shapes: U unique keys, G unique keys that go, W words (uint32) of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.keys import NUM_BUCKETS

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

BUCKET_BITS = NUM_BUCKETS.bit_length() - 1
"""Lowest bits of a key that number its virtual bucket: 12 of them."""


def order_of(keys_U: U64) -> U64:
    """(U,) places of keys in a store: keys rotated right by 12 bits, so that the bucket comes first; a bijection."""
    order_U: U64 = keys_U >> np.uint64(BUCKET_BITS) | keys_U << np.uint64(64 - BUCKET_BITS)
    return order_U


def sorted_keys(keys_N: U64) -> U64:
    """(U,) the unique ones of (N,) keys, ascending by `order_of`."""
    return keys_at(np.unique(order_of(keys_N)))


def keys_at(order_U: U64) -> U64:
    """(U,) keys whose places these are: the inverse of `order_of`."""
    keys_U: U64 = order_U << np.uint64(BUCKET_BITS) | order_U >> np.uint64(64 - BUCKET_BITS)
    return keys_U


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint, as the commit's manifest lists it."""

    sha256: str
    num_bytes: int


class RowStore(Protocol):
    """See module docstring. One thread writes, checkpoints and closes; any thread may read meanwhile.

    Order is that of buckets, then keys: ascending by `order_of(key)`, the key rotated right by 12 bits, so that each
    virtual bucket (the key's lowest 12 bits) is one range. Errors: pserver.errors.StoreFailed where the disk is full
    or fails: what was asked for did not happen, and may be asked for again; StoreDamaged where what is read is wrong.
    """

    num_writes: int
    """Writes that are over: what was read when there were as many is what is there still."""

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        """Which keys are there, (U,), and the rows of those that are, in the order of the keys: (found, W)."""
        ...

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None:
        """Insert or replace rows of unique keys, and delete those of unique other keys, in any order: all or none.

        A key that goes need not be there.
        """
        ...

    def scan(self, begin_bucket: int = 0, end_bucket: int = 4096, *, beside: bool = False) -> Iterator[tuple[U64, U32]]:
        """All rows of a range of buckets in order, in chunks; of the state at the call.

        With `beside` other threads of the process, which learn, are let in often, and it takes longer.
        """
        ...

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        """Put the state as it is now into `folder`, which does not exist, as immutable files, and sync all of it.

        -> every file by its name in `folder`. A file that was part of an earlier checkpoint, or of the one this store
        was opened from, is linked and not hashed again. After an error nothing is left of `folder`.
        """
        ...

    def memory_bytes(self) -> int:
        """What the store holds in memory now, beside the system's cache of files."""
        ...

    def close(self) -> None:
        """Let go of files and threads. Harmless when called twice."""
        ...
