"""Sums of which each rank gets a slice, and slices brought together: collectives of groups of trainers.

Ranks form groups of equal size, of neighbours in rank order: with groups of 2, ranks 0 and 1 are one. A tensor has as
many equal slices as a group has ranks; rank r owns slice r modulo the size, so each slice has one owner in every group.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.trainer.collectives.collective_traffic import CollectiveTraffic

BUCKET_FLOATS = 1 << 20
"""Floats in one all-reduce. This is fixed because it determines the order of sums."""


class _Together(NamedTuple):
    """Some ranks, and torch's group of them; None is torch's group of all."""

    members: Sequence[int]
    process_group: dist.ProcessGroup | None


class RankSlices:
    """The groups of one size, as one rank sees them. Every rank makes one, at the same point."""

    def __init__(self, rank: int, world: int, size: int, traffic: CollectiveTraffic, wait_s: float) -> None:
        """`size` divides `world`. `wait_s`: longest time of a collective."""
        self._rank, self._size, self._traffic = rank, size, traffic
        groups = [range(first, first + size) for first in range(0, world, size)]
        owners = [range(number, world, size) for number in range(size)]
        self._group = _party_of(rank, world, groups, wait_s)
        self._owners = _party_of(rank, world, owners, wait_s)
        """The ranks that own this rank's slice."""

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice: a view."""
        return flat.view(self._size, -1)[self._rank % self._size]

    def reduce_scatter(self, flat: Tensor) -> tuple[Sequence[dist.Work], Callable[[], None]]:
        """Begin to sum a flat tensor over all ranks. The calls to wait for; then what is left to do.

        Gloo has a reduce-scatter, but its order of sums is not documented. So each rank gets its slice from every rank
        of its group, and adds them in rank order; these bytes are as few. Groups are added by a ring.
        """
        if self._size == 1:
            return [], lambda: self._add_groups(flat)
        parts = torch.empty_like(flat)
        work = dist.all_to_all_single(parts, flat, group=self._group.process_group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._traffic.all_to_all(flat.nbytes, self._group.members)
        return [work], lambda: self._add(parts.view(self._size, -1), self.own(flat))

    def _add(self, parts_GN: Tensor, total_N: Tensor) -> None:
        torch.add(parts_GN[0], parts_GN[1], out=total_N)
        for part_N in parts_GN[2:]:
            total_N.add_(part_N)
        self._add_groups(total_N)

    def _add_groups(self, total: Tensor) -> None:
        if len(self._owners.members) > 1:
            for bucket in torch.split(total, BUCKET_FLOATS):
                dist.all_reduce(bucket, group=self._owners.process_group)
            self._traffic.all_reduce(total.nbytes, self._owners.members)

    def all_gather(self, flat: Tensor) -> None:
        """Fill all slices of a flat tensor, each from its owner in this rank's group."""
        if self._size > 1:
            own = self.own(flat)
            dist.all_gather_into_tensor(flat, own, group=self._group.process_group)
            self._traffic.all_gather(own.nbytes, self._group.members)


def _party_of(rank: int, world: int, parties: Sequence[Sequence[int]], wait_s: float) -> _Together:
    """The party of this rank. Collective: every rank makes the groups of all parties, in the same order."""
    found, wait = _Together([rank], None), timedelta(seconds=wait_s)
    for members in parties:
        if len(members) == 1:
            continue
        made = None if len(members) == world else dist.new_group(list(members), timeout=wait)
        if rank in members:
            assert made is None or isinstance(made, dist.ProcessGroup), "this rank is in the group"
            found = _Together(members, made)
    return found
