"""A batch passes through the stages of a model, one on each trainer, in micro-batches: torch.distributed.pipelining.

The first rank brings the batch, the last one computes the loss, and gradients come back to the first. Micro-batches
have the same size, so a batch is padded with zeros of weight 0. Gradients of parameters are added in the order of
micro-batches, whatever the schedule and the number of ranks.

Shapes: B samples of a batch, M of a micro-batch, W width of the tower's input, T tasks, K columns of the target.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.trainer.collectives.collective_traffic import CollectiveTraffic


class Together(NamedTuple):
    """Some ranks, and torch's group of them; None is torch's group of all."""

    members: Sequence[int]
    process_group: dist.ProcessGroup | None


TARGET, LOGITS = 1, 2
"""Tags of messages between the first and the last rank; those between neighbours have the tag 0."""


@dataclass(frozen=True)
class StagePlan:
    """The stage of this rank, and how a batch passes through all of them."""

    stage: nn.Module
    """(M, in), (M, T) -> (M, out), (M, T); the last one returns logits, (M, T)."""
    width_in: int
    width_out: int
    """Widths of the first input and output; that of the last stage is T."""
    type_in: torch.dtype
    type_out: torch.dtype
    """Their types; all else is float32."""
    num_tasks: int
    num_columns: int
    """K."""
    num_told: int
    """How many batches of a step the first rank tells the others the sizes of; 0: they know it, and there is one."""
    num_micro_batches: int
    eager_backward: bool
    """Whether the backward pass of a micro-batch is computed as soon as it can be ("1f1b")."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Logits (M, T) and target (M, K) -> the loss of a micro-batch, which is added to that of the others; 0 where the
    target is 0."""


class StageSteps(Protocol):
    """The steps of this rank. In each, the first rank calls `tell`, and `lead` for each batch; the others `follow`."""

    def tell(self, sizes: Sequence[int]) -> None:
        """Tell the others the samples of each batch of a step, of which there may be none."""
        ...

    def lead(self, x_BW: Tensor, beside_BT: Tensor, target_BK: Tensor) -> Tensor:
        """Run forward and backward pass of a batch through all stages; returns the logits, (B, T), without a graph.

        Gradients are added to the parameters of all ranks, and to what the first two inputs were computed from.
        """
        ...

    def follow(self, num_samples: int) -> None:
        """Take part in a step; if nothing is told, in one batch of so many samples."""
        ...


def micro_batch_size(num_samples: int, num_micro_batches: int) -> int:
    """M: B divided by the number, rounded up to four binary digits, so that few sizes occur."""
    least = max(1, -(-num_samples // num_micro_batches))
    step = 1 << max(0, least.bit_length() - 4)
    return -(-least // step) * step


class WholeSteps:
    """One rank has the whole model."""

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan

    def tell(self, sizes: Sequence[int]) -> None:
        pass

    def lead(self, x_BW: Tensor, beside_BT: Tensor, target_BK: Tensor) -> Tensor:
        number = self._plan.num_micro_batches
        rows = number * micro_batch_size(len(x_BW), number)
        x_BW, beside_BT = x_BW.float(), beside_BT.float()
        leaves = _leaf(x_BW, rows), _leaf(beside_BT, rows)
        targets = torch.tensor_split(_padded(target_BK, rows), number)
        logits: list[Tensor] = []
        for x_MW, beside_MT, target_MK in zip(
            *(torch.tensor_split(each, number) for each in leaves), targets, strict=True
        ):
            output_MT = self._plan.stage(x_MW, beside_MT)
            self._plan.loss(output_MT, target_MK).backward()  # type: ignore[no-untyped-call]
            logits.append(output_MT.detach())
        _backward((x_BW, beside_BT), leaves)
        return torch.cat(logits)[: len(x_BW)]

    def follow(self, num_samples: int) -> None:
        raise AssertionError("there is no other rank")


class DividedSteps:
    """Each rank has a stage; neighbours exchange activations and their gradients by torch.distributed."""

    def __init__(
        self,
        plan: StagePlan,
        rank: int,
        together: Together,
        joined: Callable[[], AbstractContextManager[None]],
        traffic: CollectiveTraffic,
    ) -> None:
        """`together`: the ranks that share a model, in the order of stages. `joined`: a context that translates errors
        of torch where another rank is gone."""
        self._plan, self._members, self._group = plan, together.members, together.process_group
        self._stage, self._joined, self._traffic = self._members.index(rank), joined, traffic
        self._first, self._last = self._members[0], self._members[-1]
        self._is_last = rank == self._last
        self._schedules: dict[int, Any] = {}
        """By the size of micro-batches: at most eight for each power of two up to the largest batch."""

    def tell(self, sizes: Sequence[int]) -> None:
        if self._plan.num_told:
            self._told(torch.tensor([*sizes, *[0] * (self._plan.num_told - len(sizes))]))

    def _told(self, sizes: Tensor) -> list[int]:
        """Collective: the sizes that the first rank has."""
        with self._joined():
            dist.broadcast(sizes, self._first, group=self._group)
        for member in self._members[1:] if self._stage == 0 else ():
            self._traffic.exchange(member, sizes.nbytes, 0)
        if self._stage:
            self._traffic.exchange(self._first, 0, sizes.nbytes)
        return [int(size) for size in sizes if size]

    def lead(self, x_BW: Tensor, beside_BT: Tensor, target_BK: Tensor) -> Tensor:
        num_samples, last = len(x_BW), self._last
        size = micro_batch_size(num_samples, self._plan.num_micro_batches)
        rows = size * self._plan.num_micro_batches
        x_BW, beside_BT = x_BW.float(), beside_BT.float()
        leaves = _leaf(x_BW, rows), _leaf(beside_BT, rows)
        target = _padded(target_BK, rows)
        logits_BT = torch.empty((rows, self._plan.num_tasks))
        with self._joined():
            sending = dist.isend(target, last, group=self._group, tag=TARGET)
            self._schedule(size).step(*leaves)
            assert sending is not None, "this rank is in the group"
            sending.wait()
            dist.recv(logits_BT, last, group=self._group, tag=LOGITS)
        self._count(rows)
        self._traffic.exchange(last, target.nbytes, logits_BT.nbytes)
        _backward((x_BW, beside_BT), leaves)
        return logits_BT[:num_samples]

    def follow(self, num_samples: int) -> None:
        told = self._plan.num_told
        for each in self._told(torch.zeros(told, dtype=torch.int64)) if told else [num_samples]:
            self._follow(each)

    def _follow(self, num_samples: int) -> None:
        """Take part in a batch."""
        size = micro_batch_size(num_samples, self._plan.num_micro_batches)
        rows = size * self._plan.num_micro_batches
        with self._joined():
            if not self._is_last:
                self._schedule(size).step()
            else:
                target = torch.empty((rows, self._plan.num_columns))
                dist.recv(target, self._first, group=self._group, tag=TARGET)
                logits_BT = self._schedule(size).step(target=target).detach().contiguous()
                dist.send(logits_BT, self._first, group=self._group, tag=LOGITS)
                self._traffic.exchange(self._first, logits_BT.nbytes, target.nbytes)
        self._count(rows)

    def _schedule(self, size: int) -> Any:
        """torch's schedule for micro-batches of this size. Shapes are given: torch would exchange them as pickles."""
        if size not in self._schedules:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # slow to import

            plan = self._plan
            beside = plan.num_tasks, torch.float32
            given = _like(size, (plan.width_in, plan.type_in), beside)
            returned = _like(size, beside) if self._is_last else _like(size, (plan.width_out, plan.type_out), beside)
            cpu, num_stages = torch.device("cpu"), len(self._members)
            stage = PipelineStage(
                *(plan.stage, self._stage, num_stages, cpu), input_args=given, output_args=returned, group=self._group
            )
            eager = plan.eager_backward and plan.num_micro_batches >= num_stages
            kind = Schedule1F1B if eager else ScheduleGPipe
            self._schedules[size] = kind(stage, plan.num_micro_batches, loss_fn=plan.loss, scale_grads=False)
        return self._schedules[size]

    def _count(self, rows: int) -> None:
        """Count the bytes of a step: activations to the next rank and their gradients back, in both directions."""
        plan = self._plan
        sides = {self._stage - 1: (plan.width_in, plan.type_in), self._stage + 1: (plan.width_out, plan.type_out)}
        for stage, (width, kind) in sides.items():
            if 0 <= stage < len(self._members):
                num_bytes = rows * (kind.itemsize * width + 4 * plan.num_tasks)
                self._traffic.exchange(self._members[stage], num_bytes, num_bytes)


def _like(size: int, *columns: tuple[int, torch.dtype]) -> tuple[Tensor, ...]:
    return tuple(torch.empty((size, width), dtype=kind, requires_grad=True) for width, kind in columns)


def _padded(values_BK: Tensor, rows: int) -> Tensor:
    """(rows, K): zeros after the B values."""
    padded = values_BK.new_zeros((rows, values_BK.shape[1]))
    padded[: len(values_BK)] = values_BK.detach()
    return padded


def _leaf(values_BK: Tensor, rows: int) -> Tensor:
    return _padded(values_BK, rows).requires_grad_()


def _backward(inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Continue the backward pass, from the gradients of the padded `leaves` to what `inputs` were computed from."""
    found = [(each, leaf.grad) for each, leaf in zip(inputs, leaves, strict=True) if each.requires_grad]
    grads = [torch.zeros_like(each) if grad is None else grad[: len(each)] for each, grad in found]
    if found:  # else there are only dense values
        torch.autograd.backward([each for each, _ in found], grads)
