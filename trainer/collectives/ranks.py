"""Collectives of the trainers: sums in a fixed order, and small messages from and to rank 0.

`SingleRank` is the implementation for one trainer. Nothing is pickled: messages are JSON and plain arrays.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed has it without types
from torch.nn import functional

from headrace import documents
from headrace.errors import Unavailable
from headrace.traffic import Links, links_of
from headrace.trainer.collectives.collective_traffic import CollectiveTraffic
from headrace.trainer.collectives.stage_steps import DividedSteps, StagePlan, StageSteps, Together, WholeSteps

# Sums of which each rank gets a slice, and slices brought together: collectives of groups of trainers.
#
# Ranks form groups of equal size, of neighbours in rank order: with groups of 2, ranks 0 and 1 are one. A tensor has as
# many equal slices as a group has ranks; rank r owns slice r modulo the size, so each slice has one owner in every
# group.

BUCKET_FLOATS = 1 << 20
"""Floats in one all-reduce. This is fixed because it determines the order of sums."""


class RankSlices:
    """The groups of one size, as one rank sees them. Every rank makes one, at the same point."""

    def __init__(self, rank: int, world: int, size: int, traffic: CollectiveTraffic, wait_s: float) -> None:
        """`size` divides `world`. `wait_s`: longest time of a collective."""
        self._rank, self._size, self._traffic = rank, size, traffic
        groups = [range(first, first + size) for first in range(0, world, size)]
        owners = [range(number, world, size) for number in range(size)]
        self.group = _party_of(rank, world, groups, wait_s)
        """The ranks of this rank's group."""
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
        work = dist.all_to_all_single(parts, flat, group=self.group.process_group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._traffic.all_to_all(flat.nbytes, self.group.members)
        return [work], lambda: self._add(parts.view(self._size, -1), self.own(flat))

    def _add(self, parts_GN: Tensor, total_N: Tensor) -> None:
        _sum_in_order(parts_GN, total_N)
        self._add_groups(total_N)

    def _add_groups(self, total: Tensor) -> None:
        if len(self._owners.members) > 1:
            for bucket in torch.split(total, BUCKET_FLOATS):
                dist.all_reduce(bucket, group=self._owners.process_group)
            self._traffic.all_reduce(total.nbytes, self._owners.members)

    def all_reduce_of_owners(self, flat: Tensor) -> tuple[Sequence[dist.Work], Callable[[], None]]:
        """Begin to sum a flat tensor over the ranks with this rank's number in their groups, in rank order. The calls
        to wait for; then what is left to do."""
        members, group = self._owners
        if len(members) == 1:
            return [], lambda: None
        whole = functional.pad(flat, (0, -len(flat) % len(members)))
        parts = torch.empty_like(whole)
        work = dist.all_to_all_single(parts, whole, group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._traffic.all_to_all(whole.nbytes, members)

        def rest() -> None:
            own = whole.view(len(members), -1)[members.index(self._rank)]
            _sum_in_order(parts.view(len(members), -1), own)
            dist.all_gather_into_tensor(whole, own.clone(), group=group)
            self._traffic.all_gather(own.nbytes, members)
            flat.copy_(whole[: len(flat)])

        return [work], rest

    def bring(self, flat: Tensor, source: int) -> None:
        """Copy a flat tensor from the member `source` of the group to the first one. Only these two call it."""
        members, group = self.group
        first, sender = members[0], members[source]
        if self._rank == first:
            dist.recv(flat, sender, group=group)
            self._traffic.exchange(sender, 0, flat.nbytes)
        else:
            dist.send(flat, first, group=group)
            self._traffic.exchange(first, flat.nbytes, 0)

    def all_gather(self, flat: Tensor) -> None:
        """Fill all slices of a flat tensor, each from its owner in this rank's group."""
        if self._size > 1:
            own = self.own(flat)
            dist.all_gather_into_tensor(flat, own, group=self.group.process_group)
            self._traffic.all_gather(own.nbytes, self.group.members)


def _sum_in_order(parts_GN: Tensor, total_N: Tensor) -> None:
    torch.add(parts_GN[0], parts_GN[1], out=total_N)
    for part_N in parts_GN[2:]:
        total_N.add_(part_N)


def _party_of(rank: int, world: int, parties: Sequence[Sequence[int]], wait_s: float) -> Together:
    """The party of this rank. Collective: every rank makes the groups of all parties, in the same order."""
    found, wait = Together([rank], None), timedelta(seconds=wait_s)
    for members in parties:
        if len(members) == 1:
            continue
        made = None if len(members) == world else dist.new_group(list(members), timeout=wait)
        if rank in members:
            assert made is None or isinstance(made, dist.ProcessGroup), "this rank is in the group"
            found = Together(members, made)
    return found


Asked = ParamSpec("Asked")
Result = TypeVar("Result")

TELL_S = 0.2
"""Interval at which rank 0 tells waiting ranks that it is still at work."""
MEET_S = 86_400.0
"""Longest time that a trainer waits at the end of a pass for the slowest one, whose steps have their own deadlines."""
FIRST_BYTES, SIZE_BYTES = 1024, 8
"""Length of the first part of a broadcast, and of the message's size in it: most messages fit."""


class Ranks(Protocol):
    """The trainers of a job. Every rank makes the same calls in the same order."""

    rank: int
    world: int

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum over ranks."""
        ...

    def sum_floats(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over ranks, in rank order."""
        ...

    def all_reduce(self, flat: Tensor) -> Callable[[], None]:
        """Begin to sum a flat float tensor over ranks in place, in a fixed order; the result waits for the sum.

        Nothing may use the tensor until then.
        """
        ...

    def reduce_scatter(self, flat: Tensor, size: int) -> Callable[[], None]:
        """Begin to sum a flat float tensor over ranks, in a fixed order, in groups of `size` neighbours.

        The result waits. The tensor has `size` equal slices; slice rank % size then holds the sum, others anything.
        """
        ...

    def all_gather(self, flat: Tensor, size: int) -> None:
        """Fill the `size` equal slices of a flat tensor, each from the rank of this rank's group that owns it."""
        ...

    def all_gather_of_ranks(self, flat: Tensor) -> Callable[[], None]:
        """Begin to fill the equal slices of a flat tensor, one of each rank, from their ranks; the result waits.

        Nothing may use the tensor until then.
        """
        ...

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """A flat tensor from each rank, by rank, for one to each rank; `sizes`: floats that come from each."""
        ...

    def copy_from_rank_0(self, flat: Tensor) -> None:
        """Overwrite a flat tensor on the CPU with the one of rank 0. Same size and type on all ranks."""
        ...

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """On rank 0 the columns of all ranks, by rank; None elsewhere. Same names and types on all ranks."""
        ...

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """The message of rank 0 on all ranks."""
        ...

    def meet(self) -> None:
        """Wait until all ranks call it, at most MEET_S: other calls wait for one step, this one for a whole pass."""
        ...

    def stages(self, plan: StagePlan, size: int) -> StageSteps:
        """Steps through the stages of models, each of which `size` neighbours share, in their order."""
        ...

    def all_reduce_of_stage(self, flat: Tensor, size: int) -> Callable[[], None]:
        """Begin to sum a flat float tensor in place, in rank order, over the ranks that have this rank's place in their
        groups of `size` neighbours; the result waits. Nothing may use the tensor until then."""
        ...

    def bring(self, flat: Tensor, source: int, size: int) -> None:
        """Copy a flat tensor from the member `source` of each group of `size` neighbours to the first one of the group.
        Only these call it."""
        ...

    def links(self) -> Links:
        """This rank's traffic in collectives with each other rank: "trainer-1". Any thread."""
        ...

    def waited_s(self) -> NDArray[np.float64]:
        """[r, q]: seconds that rank r waited for rank q in collectives of steps, since the start. Any thread."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class SingleRank:
    """One trainer."""

    rank = 0
    world = 1

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        return array

    def sum_floats(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        return array

    def all_reduce(self, flat: Tensor) -> Callable[[], None]:
        return lambda: None

    def reduce_scatter(self, flat: Tensor, size: int) -> Callable[[], None]:
        return lambda: None

    def all_gather(self, flat: Tensor, size: int) -> None:
        pass

    def all_gather_of_ranks(self, flat: Tensor) -> Callable[[], None]:
        return lambda: None

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        return parts

    def copy_from_rank_0(self, flat: Tensor) -> None:
        pass

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        return [dict(columns)]

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        assert message is not None, "rank 0 passes a message"
        return message

    def meet(self) -> None:
        pass

    def stages(self, plan: StagePlan, size: int) -> StageSteps:
        return WholeSteps(plan)

    def all_reduce_of_stage(self, flat: Tensor, size: int) -> Callable[[], None]:
        return lambda: None

    def bring(self, flat: Tensor, source: int, size: int) -> None:
        raise AssertionError("there is no other rank")

    def links(self) -> Links:
        return {}

    def waited_s(self) -> NDArray[np.float64]:
        return np.zeros((1, 1))

    def close(self) -> None:
        pass


@contextmanager
def _joined(rank: int) -> Iterator[None]:
    """Translate errors of torch where another trainer is gone. Raises Unavailable."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).partition("\n")[0].split())
        lost = f"trainer {rank} lost touch with the other trainers"
        raise Unavailable(f"{lost}: one is gone, or too slow for train.step_deadline: {why}") from error


def _together(
    call: Callable[Concatenate["TorchRanks", Asked], Result],
) -> Callable[Concatenate["TorchRanks", Asked], Result]:
    """Decorator of a collective: its time counts. The call raises Unavailable if another trainer is gone."""
    kind = call.__name__

    @wraps(call)
    def translated(ranks: "TorchRanks", /, *args: Asked.args, **kwargs: Asked.kwargs) -> Result:
        since_s = time.perf_counter()
        with _joined(ranks.rank):
            result = call(ranks, *args, **kwargs)
        ranks.waits.add(kind, time.perf_counter() - since_s)
        return result

    return translated


class TorchRanks:
    """Trainers joined by torch.distributed: gloo for tensors on CPUs, NCCL for tensors on GPUs."""

    def __init__(
        self, rank: int, world: int, store: Store, interface: str, device: torch.device, wait_s: float
    ) -> None:
        """Join the group over a network interface, of which collectives use no other."""
        # One fixed algorithm keeps the order of sums the same at every run.
        os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"] = "Ring", "Simple"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _joined(rank):
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=wait_s),
            )
        self.rank, self.world = rank, world
        self._store, self._num_met = store, 0
        self._wait_s = wait_s
        self._slices: dict[int, RankSlices] = {}
        """By the size of groups."""
        self._traffic, self.waits = CollectiveTraffic(rank, world), CollectiveWaits(world)

    @_together
    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        tensor = torch.from_numpy(array.copy())
        dist.all_reduce(tensor)
        self._traffic.all_reduce(array.nbytes)
        return tensor.numpy()

    @_together
    def sum_floats(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        mine = torch.from_numpy(np.concatenate([array.reshape(-1), self.waits.bring()]))
        parts_RN = torch.empty((self.world, len(mine)), dtype=mine.dtype)
        dist.all_gather(list(parts_RN), mine)
        self._traffic.all_gather(mine.nbytes)
        self.waits.heard(parts_RN[:, -len(KINDS) :].numpy())
        arrays_R: list[NDArray[np.float64]] = [part.numpy()[: array.size].reshape(array.shape) for part in parts_RN]
        total = arrays_R[0]
        for other in arrays_R[1:]:
            total = total + other
        return total

    def all_reduce(self, flat: Tensor) -> Callable[[], None]:
        """Torch's own threads sum meanwhile. Only the time in the wait counts."""
        with _joined(self.rank):
            work = [dist.all_reduce(bucket, async_op=True) for bucket in torch.split(flat, BUCKET_FLOATS)]
        self._traffic.all_reduce(flat.nbytes)
        return lambda: self._finish(work, ALL_REDUCE)

    def reduce_scatter(self, flat: Tensor, size: int) -> Callable[[], None]:
        """Its time counts as that of all_reduce, whose place it takes in a step."""
        return self._begun(self._sliced(size).reduce_scatter, flat)

    def _begun(
        self, collective: Callable[[Tensor], tuple[Sequence[dist.Work], Callable[[], None]]], flat: Tensor
    ) -> Callable[[], None]:
        """Begin a collective in two parts; the result waits for its end."""
        with _joined(self.rank):
            work, rest = collective(flat)

        def finish() -> None:
            self._finish(work, ALL_REDUCE)
            with _joined(self.rank):
                rest()

        return finish

    def all_gather(self, flat: Tensor, size: int) -> None:
        with _joined(self.rank):
            self._sliced(size).all_gather(flat)

    def all_gather_of_ranks(self, flat: Tensor) -> Callable[[], None]:
        """Its time counts as that of all_reduce, whose place it takes in a step."""
        own = flat.view(self.world, -1)[self.rank]
        with _joined(self.rank):
            work = dist.all_gather_into_tensor(flat, own, async_op=True)
        assert work is not None, "this rank is in the group"
        self._traffic.all_gather(own.nbytes)
        return lambda: self._finish([work], ALL_REDUCE)

    def _sliced(self, size: int) -> RankSlices:
        if size not in self._slices:
            self._slices[size] = RankSlices(self.rank, self.world, size, self._traffic, self._wait_s)
        return self._slices[size]

    def _finish(self, work: Sequence[dist.Work], kind: str) -> None:
        since_s = time.perf_counter()
        with _joined(self.rank):
            for handle in work:
                handle.wait()
        self.waits.add(kind, time.perf_counter() - since_s)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        sent = torch.cat(list(parts))
        found = sent.new_empty(sum(sizes))
        with _joined(self.rank):
            dist.all_to_all_single(found, sent, list(sizes), [len(part) for part in parts])
        for peer in range(self.world):
            if peer != self.rank:
                self._traffic.exchange(peer, parts[peer].nbytes, sizes[peer] * sent.element_size())
        return torch.split(found, list(sizes))

    @_together
    def copy_from_rank_0(self, flat: Tensor) -> None:
        for bucket in torch.split(flat, BUCKET_FLOATS):
            dist.broadcast(bucket, 0)
        self._traffic.broadcast(flat.nbytes)

    @_together
    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """Each rank sends its lengths and its bytes, so a slow link is waited for twice at most."""
        payload = b"".join(np.ascontiguousarray(column).tobytes() for column in columns.values())
        sizes = torch.tensor([len(payload), *(len(column) for column in columns.values())])
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        if self.rank:
            self._traffic.gather(self.rank, sizes.nbytes + mine.nbytes)
            for work in [dist.isend(part, 0) for part in (sizes, mine) if part.numel()]:
                _done(work)
            return None
        sizes_RC = self._received([torch.empty_like(sizes) for _ in range(1, self.world)])
        bodies_R = self._received([torch.empty(int(sizes_C[0]), dtype=torch.uint8) for sizes_C in sizes_RC])
        for rank, (sizes_C, body) in enumerate(zip(sizes_RC, bodies_R, strict=True), 1):
            self._traffic.gather(rank, sizes_C.nbytes + body.nbytes)
        parts = zip([sizes, *sizes_RC], [mine, *bodies_R], strict=True)
        return [_columns(columns, sizes_C.numpy()[1:], body.numpy().tobytes()) for sizes_C, body in parts]

    def _received(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0: a tensor of each other rank, whose sizes are known; an empty one is not sent."""
        for work in [dist.irecv(part, rank) for rank, part in enumerate(parts, 1) if part.numel()]:
            _done(work)
        return parts

    @_together
    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """One broadcast for a short message, two for a long one."""
        text = json.dumps(message).encode() if self.rank == 0 else b""
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            begins = len(text).to_bytes(SIZE_BYTES, "big") + text[: FIRST_BYTES - SIZE_BYTES]
            first[: len(begins)] = torch.frombuffer(bytearray(begins), dtype=torch.uint8)
        dist.broadcast(first, 0)
        begins = first.numpy().tobytes()
        size, upto = int.from_bytes(begins[:SIZE_BYTES], "big"), FIRST_BYTES - SIZE_BYTES
        rest = torch.empty(max(0, size - upto), dtype=torch.uint8)
        if rest.numel():
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(text[upto:]), dtype=torch.uint8)
            dist.broadcast(rest, 0)
        self._traffic.broadcast(first.nbytes + rest.nbytes)
        body = begins[SIZE_BYTES : SIZE_BYTES + size] + rest.numpy().tobytes()
        return documents.parse_object(body, "the message of rank 0")

    @_together
    def meet(self) -> None:
        """Each rank leaves a key in the store, and waits for those of the others."""
        self._num_met += 1
        self._store.set(_met(self._num_met, self.rank), "")
        self._store.wait([_met(self._num_met, rank) for rank in range(self.world)], timedelta(seconds=MEET_S))
        if self.rank == 0:  # it holds the store; every rank has left the meeting before
            for rank in range(self.world):
                self._store.delete_key(_met(self._num_met - 1, rank))

    def stages(self, plan: StagePlan, size: int) -> StageSteps:
        """By torch's pipelining. Its time does not count as a wait for other ranks."""
        if size == 1:
            return WholeSteps(plan)
        return DividedSteps(plan, self.rank, self._sliced(size).group, lambda: _joined(self.rank), self._traffic)

    def all_reduce_of_stage(self, flat: Tensor, size: int) -> Callable[[], None]:
        """Its time counts as that of all_reduce, whose place it takes in a step."""
        return self._begun(self._sliced(size).all_reduce_of_owners, flat)

    def bring(self, flat: Tensor, source: int, size: int) -> None:
        with _joined(self.rank):
            self._sliced(size).bring(flat, source)

    def links(self) -> Links:
        return links_of(self._traffic.peers)

    def waited_s(self) -> NDArray[np.float64]:
        return self.waits.waited_s

    def close(self) -> None:
        dist.destroy_process_group()


def _done(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def _met(number: int, rank: int) -> str:
    """The key that a rank leaves in the store at a meeting."""
    return f"met/{number}/{rank}"


def _columns(like: Mapping[str, NDArray[Any]], sizes: NDArray[np.int64], payload: bytes) -> dict[str, NDArray[Any]]:
    """The inverse of the packing in `gather`."""
    found, at = {}, 0
    for (name, column), size in zip(like.items(), sizes, strict=True):
        found[name] = np.frombuffer(payload, column.dtype, int(size), at)
        at += int(size) * column.dtype.itemsize
    return found


def gather_messages(ranks: Ranks, message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """On rank 0 the JSON messages of all ranks, by rank; None elsewhere."""
    text: NDArray[np.uint8] = np.frombuffer(json.dumps(message).encode(), np.uint8)
    gathered = ranks.gather({"json": text})
    return (
        None
        if gathered is None
        else [documents.parse_object(columns["json"].tobytes(), "a trainer's message") for columns in gathered]
    )


def on_rank_0(ranks: Ranks, work: Callable[[], Result]) -> Result | None:
    """The result of `work` on rank 0, None elsewhere. `work` may take long: rank 0 keeps the waiting ranks informed."""
    if ranks.world == 1:
        return work()
    if ranks.rank:
        while "wait" in ranks.broadcast(None):
            pass
        return None
    with ThreadPoolExecutor(1) as thread:
        doing = thread.submit(work)
        while not wait([doing], timeout=TELL_S).done:
            ranks.broadcast({"wait": True})
        result = doing.result()
    ranks.broadcast({})
    return result


# How long ranks waited for each other in collectives, without a common clock.
#
# All ranks leave a collective at about the same time, so the rank that waits least is the last to come, and the others
# wait longer by what it is late. Each rank brings its waits to the next sum of floats; so all ranks know all waits, for
# a few bytes a step. These are figures for operators; nothing is decided by them.

F64 = NDArray[np.float64]

ALL_REDUCE = "all_reduce"
KINDS = ("sum_floats", ALL_REDUCE, "sum")
"""Collectives of a step, by the names of methods of Ranks; at most one call of each in a step."""


class CollectiveWaits:
    """The waits of all ranks since the start. One thread counts, any thread reads `waited_s`."""

    def __init__(self, world: int) -> None:
        self._mine = dict.fromkeys(KINDS, 0.0)
        self.waited_s = np.zeros((world, world))
        """[r, q]: seconds that rank r waited for rank q, the last one."""

    def add(self, kind: str, seconds: float) -> None:
        """This rank was in a collective for so long."""
        if kind in self._mine:
            self._mine[kind] += seconds

    def bring(self) -> F64:
        """(kinds,) the waits since the last call."""
        brought = np.array(list(self._mine.values()))
        self._mine = dict.fromkeys(KINDS, 0.0)
        return brought

    def heard(self, waits_RK: F64) -> None:
        """The waits of all ranks, by kind."""
        for kind in range(len(KINDS)):
            last = int(np.argmin(waits_RK[:, kind]))
            self.waited_s[:, last] += waits_RK[:, kind] - waits_RK[last, kind]
