"""Placement of keys on shards: bucket = lowest bits of the key, shard = map[bucket].

Pure functions on a map; no network. A map gives each shard one contiguous range of buckets.

Shapes: U unique keys, P of them on one shard, S shards.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.keys import NUM_BUCKETS, bucket_of
from headrace.pserver.protocol.shards import F32, U64, Keys

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RoutedKeys:
    """The keys of a batch that belong to one shard, in their order."""

    position_P: I32
    """The place of each in the batch, ascending."""
    keys: Keys


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

    def route(self, keys: Keys) -> list[RoutedKeys]:
        """The keys of each shard."""
        position_U, start_S1 = np.empty(len(keys.keys_U), np.int32), np.empty(self.num_shards + 1, np.int64)
        keys_U, group_U = np.empty_like(keys.keys_U), np.empty_like(keys.group_U)
        sort_by_shard(keys.keys_U, keys.group_U, self.shard_of_bucket, start_S1, position_U, keys_U, group_U)
        ends = start_S1.tolist()
        return [
            RoutedKeys(position_U[begin:end], Keys(keys_U[begin:end], group_U[begin:end]))
            for begin, end in zip(ends[:-1], ends[1:], strict=True)
        ]


@njit(nogil=True, cache=True)
def sort_by_shard(keys_U, group_U, shard_of_bucket, start_S1, position_U, sorted_U, sorted_group_U):  # type: ignore[no-untyped-def]
    """A stable counting sort of keys with their groups: shard s owns those from start_S1[s] to start_S1[s + 1].

    `position_U` has the place of each in `keys_U`.
    """
    start_S1[:] = 0
    for key in keys_U:
        start_S1[shard_of_bucket[key & np.uint64(NUM_BUCKETS - 1)] + 1] += 1
    for s in range(len(start_S1) - 1):
        start_S1[s + 1] += start_S1[s]
    next_S = start_S1[:-1].copy()
    for u in range(len(keys_U)):
        shard = shard_of_bucket[keys_U[u] & np.uint64(NUM_BUCKETS - 1)]
        at = next_S[shard]
        position_U[at], sorted_U[at], sorted_group_U[at] = u, keys_U[u], group_U[u]
        next_S[shard] = at + 1


def positions_by_shard_reference(keys_U: U64, shard_of_bucket: NDArray[np.int16], num_shards: int) -> list[list[int]]:
    """The twin of `sort_by_shard`: each shard's positions."""
    shards = [int(shard_of_bucket[bucket_of(int(key))]) for key in keys_U]
    return [[u for u, owner in enumerate(shards) if owner == shard] for shard in range(num_shards)]


@njit(nogil=True, cache=True)
def take_push(grads_UD, show_U, click_U, position_P, grads_PD, show_P, click_P):  # type: ignore[no-untyped-def]
    """The records of a push at `position_P`: grads_PD = grads_UD[position_P], and so on."""
    for p in range(len(position_P)):
        u = np.uint32(position_P[p])
        show_P[p], click_P[p] = show_U[u], click_U[u]
        for d in range(grads_UD.shape[1]):
            grads_PD[p, d] = grads_UD[u, d]


@njit(nogil=True, cache=True)
def put_rows(part_PD, position_P, rows_UD):  # type: ignore[no-untyped-def]
    """rows_UD[position_P] = part_PD."""
    for p in range(len(position_P)):
        u = np.uint32(position_P[p])
        for d in range(rows_UD.shape[1]):
            rows_UD[u, d] = part_PD[p, d]


def take_push_reference(grads_UD: F32, show_U: F32, click_U: F32, position_P: I32) -> tuple[F32, F32, F32]:
    """The twin of `take_push`."""
    return grads_UD[position_P], show_U[position_P], click_U[position_P]
