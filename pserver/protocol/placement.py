"""Placement of keys on shards: bucket = lowest bits of the key, shard = map[bucket].

Pure functions on a map; no network. A map gives each shard one contiguous range of buckets.

Shapes: U unique keys, S shards.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from millrace.keys import NUM_BUCKETS, bucket_of
from pserver.protocol.shards import F32, U64

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which shard owns each virtual bucket."""

    num_shards: int
    shard_of_bucket: NDArray[np.int16]
    """(4096,)"""

    @classmethod
    def even(cls, num_shards: int) -> "Placement":
        """Contiguous ranges of buckets of nearly equal size."""
        if not 1 <= num_shards <= NUM_BUCKETS:
            raise ValueError(f"{num_shards} shards; there may be 1 to {NUM_BUCKETS}")
        return cls(num_shards, (np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS).astype(np.int16))

    def shard_of(self, keys_U: U64) -> NDArray[np.int16]:
        """(U,) shard of each key."""
        owner_U: NDArray[np.int16] = self.shard_of_bucket[keys_U % np.uint64(NUM_BUCKETS)]
        return owner_U

    def buckets_of(self, shard: int) -> tuple[int, int]:
        """First bucket of a shard, and one past its last."""
        begin, end = np.searchsorted(self.shard_of_bucket, [shard, shard + 1])
        return int(begin), int(end)

    def route(self, keys_U: U64) -> list[I32]:
        """For each shard: the positions of its keys in `keys_U`, ascending."""
        position_U, start_S1 = np.empty(len(keys_U), np.int32), np.empty(self.num_shards + 1, np.int64)
        positions_by_shard(keys_U, self.shard_of_bucket, start_S1, position_U)
        return [position_U[begin:end] for begin, end in zip(start_S1[:-1], start_S1[1:], strict=True)]


@njit(nogil=True, cache=True)
def positions_by_shard(keys_U, shard_of_bucket, start_S1, position_U):  # type: ignore[no-untyped-def]
    """A stable counting sort: shard s owns the keys at position_U[start_S1[s]:start_S1[s + 1]]."""
    start_S1[:] = 0
    for key in keys_U:
        start_S1[shard_of_bucket[key & np.uint64(NUM_BUCKETS - 1)] + 1] += 1
    for s in range(len(start_S1) - 1):
        start_S1[s + 1] += start_S1[s]
    next_S = start_S1[:-1].copy()
    for u in range(len(keys_U)):
        shard = shard_of_bucket[keys_U[u] & np.uint64(NUM_BUCKETS - 1)]
        position_U[next_S[shard]] = u
        next_S[shard] += 1


def positions_by_shard_reference(keys_U: U64, shard_of_bucket: NDArray[np.int16], num_shards: int) -> list[list[int]]:
    """The twin of `positions_by_shard`: each shard's positions."""
    shards = [int(shard_of_bucket[bucket_of(int(key))]) for key in keys_U]
    return [[u for u, owner in enumerate(shards) if owner == shard] for shard in range(num_shards)]


@njit(nogil=True, cache=True)
def take_rows(rows_UD, position_P, out_PD):  # type: ignore[no-untyped-def]
    """out_PD = rows_UD[position_P]."""
    for p in range(len(position_P)):
        u = np.uint32(position_P[p])
        for d in range(rows_UD.shape[1]):
            out_PD[p, d] = rows_UD[u, d]


@njit(nogil=True, cache=True)
def put_rows(part_PD, position_P, rows_UD):  # type: ignore[no-untyped-def]
    """rows_UD[position_P] = part_PD."""
    for p in range(len(position_P)):
        u = np.uint32(position_P[p])
        for d in range(rows_UD.shape[1]):
            rows_UD[u, d] = part_PD[p, d]


def take_rows_reference(rows_UD: F32, position_P: I32) -> F32:
    """The twin of `take_rows`."""
    return rows_UD[position_P]


def put_rows_reference(part_PD: F32, position_P: I32, rows_UD: F32) -> None:
    """The twin of `put_rows`."""
    rows_UD[position_P] = part_PD
