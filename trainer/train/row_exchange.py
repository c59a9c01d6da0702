"""Rows on the devices of several trainers: each has a shard in its process, and they exchange floats among devices.

A row is on the device of the trainer that owns its bucket. Keys, shows, clicks and commands travel to the shards as to
processes of their own (pserver.client.remote), keys ahead of their step. Floats of a step take two exchanges of all
trainers, which wait for no message of the host: gradients of the step to the owners of their rows, which add them in
rank order and learn; then rows of the next step, from their owners. The first rows of a pass come by messages.

Shapes: U keys of a batch, P of them that one trainer owns, D weights of a row, E floats of a pulled one.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from headrace.deadline import Deadline
from headrace.lifecycle import ExitCode
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import AnnouncedBatch, RemoteShards
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.protocol.placement import RoutedKeys
from headrace.pserver.protocol.shards import Floats, Gradients, Prepared, StepScale
from headrace.pserver.rows.placed_rows import PlacedGradients, PlacedMaker
from headrace.pserver.server.shard_server import ShardServer
from headrace.pserver.server.step_floats import PlacedShard, StepFloats
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.device_copies import sent


@contextmanager
def served_shard(config: ShardProcess, makers: Mapping[str, PlacedMaker]) -> Iterator[StepFloats]:
    """Serve the shard of this trainer; the floats that it and the trainer leave each other.

    A shard that can serve no more ends the process at once: all trainers would wait for it.
    """
    floats, failed = StepFloats(config.num_ranks), partial(os._exit, ExitCode.BUG)
    with ShardServer(config, config.socket, failed=failed, placed=PlacedShard(makers, floats)):
        yield floats


@dataclass(frozen=True, slots=True)
class Devices:
    """How a trainer reaches the rows on all devices."""

    ranks: Ranks
    device: torch.device
    floats: StepFloats
    """Of the shard in this process."""


class PeerShards(RemoteShards):
    """Implements pserver.protocol.shards.Shards with shards in the processes of the trainers. Threads: RemoteShards."""

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Mapping[str, TableSection],
        me: ShardCaller,
        deadline: Deadline,
        placed: Collection[str],
        devices: Devices,
    ) -> None:
        """`addresses`: of the shard of each trainer, by rank. `placed`: tables whose rows are on devices."""
        super().__init__(addresses, tables, me, deadline, placed)
        self._devices, self._order = devices, sorted(placed)

    @override
    def pull(self, batch: Prepared, deadline: Deadline) -> Mapping[str, Floats]:  # type: ignore[override]
        rows = super().pull(batch, deadline)
        if not self._ready(batch).learn:
            return rows
        placed = {name: sent(rows[name], self._devices.device) for name in self._order if name in rows}
        return {**rows, **placed}

    @override
    def ask_early(self, step: int, batch: Prepared | None, following: Prepared | None, deadline: Deadline) -> None:
        """Rows do not travel by messages."""

    @override
    def exchange(  # type: ignore[override]
        self,
        step: int,
        batch: Prepared | None,
        gradients: Mapping[str, Gradients] | None,
        following: Prepared | None,
        scale: StepScale,
        deadline: Deadline,
    ) -> Mapping[str, Floats] | None:
        learnt = None if batch is None else self._ready(batch)
        self._devices.floats.bring(self._pass_number, step, self._gradients_here(learnt, gradients or {}))
        others = super().exchange(step, batch, gradients, following, scale, deadline)
        wanted = None if following is None else self._ready(following)
        placed = self._rows_here(wanted, self._devices.floats.rows(self._pass_number, step, deadline))
        return None if others is None else {**others, **placed}

    def _gradients_here(
        self, batch: AnnouncedBatch | None, gradients: Mapping[str, Gradients]
    ) -> Sequence[dict[str, Tensor]]:
        """By rank and table: (P, D) the gradients for the shard of this trainer.

        A rank that skips a step sends zeros, which its shard does not read: others do not know whether it has a batch.
        """
        device = self._devices.device
        parts: list[list[Tensor]] = [[torch.empty(0, device=device)] for _ in range(self._devices.ranks.world)]
        for name, of_shards in self._routed(batch).items():
            push = gradients.get(name)
            for rank, routed in enumerate(of_shards):
                if push is None:
                    part_PD = torch.zeros((len(routed.position_P), self._widths[name]), device=device)
                else:
                    part_PD = _of_device(push).index_select(0, self._index(routed.position_P))
                parts[rank].append(part_PD.flatten())
        return self._exchanged(parts, self._devices.floats.counts(self._pass_number), self._widths)

    def _rows_here(self, batch: AnnouncedBatch | None, left: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        """(U, E) rows of this rank's next batch by table. `left`: by rank, those that the shard of this trainer has."""
        device, routed = self._devices.device, self._routed(batch)
        parts = [
            [torch.empty(0, device=device), *(_tensor(left_Q[name]).flatten() for name in sorted(left_Q))]
            for left_Q in left
        ]
        counts = [
            {name: len(of_shards[rank].position_P) for name, of_shards in routed.items()}
            for rank in range(self._devices.ranks.world)
        ]
        found, rows = self._exchanged(parts, counts, self._pulled), dict[str, Floats]()
        for name, of_shards in routed.items():
            num_keys = sum(len(each.position_P) for each in of_shards)
            rows_UE = torch.empty((num_keys, self._pulled[name]), device=device)
            for rank, each in enumerate(of_shards):
                rows_UE.index_copy_(0, self._index(each.position_P), found[rank][name])
            rows[name] = rows_UE
        return rows

    def _routed(self, batch: AnnouncedBatch | None) -> dict[str, Sequence[RoutedKeys]]:
        """The keys of each trainer, by table, in the order in which all exchange them."""
        return {} if batch is None else {name: batch.routed[name] for name in self._order if name in batch.routed}

    def _exchanged(
        self, parts: Sequence[Sequence[Tensor]], counts: Sequence[Mapping[str, int]], widths: Mapping[str, int]
    ) -> list[dict[str, Tensor]]:
        """By rank and table: what each rank has for this one. `parts`: by rank, flat tensors in the order of tables.
        `counts`: rows that come, by rank and table."""
        sizes = [[counts_Q.get(name, 0) * widths[name] for name in self._order] for counts_Q in counts]
        found = self._devices.ranks.all_to_all([torch.cat(list(each)) for each in parts], [sum(each) for each in sizes])
        return [
            {
                name: part.view(-1, widths[name])
                for name, part in zip(self._order, torch.split(whole, sizes_T), strict=True)
            }
            for whole, sizes_T in zip(found, sizes, strict=True)
        ]

    def _index(self, position_P: NDArray[np.int32]) -> Tensor:
        return sent(position_P.astype(np.int64), self._devices.device)


def _of_device(push: Gradients) -> Tensor:
    assert isinstance(push, PlacedGradients) and push.at_U is None, "gradients come from the device"
    return _tensor(push.tensor)


def _tensor(floats: Floats) -> Tensor:
    assert isinstance(floats, Tensor), "it is on the device"
    return floats
