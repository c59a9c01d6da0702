"""Deep gradient compression: each rank sends the k numbers of its flat buffer that are largest, and keeps the others.

A rank adds its gradient to its velocity (momentum correction), and its velocity to its residual. It sends the k largest
numbers of the residual with their indices, and sets those of residual and velocity to 0 (factor masking). All ranks add
what they get in rank order; the optimizer then has no momentum. Where k is all, nothing is late, so velocities stay.
The gradient of a rank is clipped before, to clip_norm / sqrt(ranks) (local clipping). Then a rank adds its part of a
weight decay that passes through the momentum, so that it is not missing where nothing is sent (decay correction).

Source: Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018. There k is a share of each layer, here of the
buffer. Velocities and residuals belong to ranks; on another number of ranks each begins with an equal part of the sum.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.config import MAX_FLOAT32
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatParameters, clip, within
from headrace.trainer.dense.gradient_sums import CompleteSums
from headrace.trainer.dense.rank_tensors import RESIDUAL, VELOCITY, RankTensors
from headrace.trainer.dense_config import DenseSection, DgcSection
from headrace.trainer.dense_optimizers import DecayingOptimizer

STEPS = "dgc.steps"
"""Name of the count of steps in commits."""
WARMUP_STAGES = 5
MAX_FLOATS = 1 << 31
"""Indices are sent as 32 bits."""


def num_sent(config: DgcSection, num_floats: int, step: int) -> int:
    """How many numbers of so many a rank sends in a step; steps count from 0."""
    if step < config.begin:
        return num_floats
    step -= config.begin
    if config.stages:
        warming = step < config.warmup_steps
        sparsity = config.stages[len(config.stages) * step // config.warmup_steps] if warming else config.sparsity
        return max(1, round(num_floats * (1 - sparsity)))
    stage = WARMUP_STAGES
    if step < config.warmup_steps:
        stage = 1 + WARMUP_STAGES * step // config.warmup_steps
    share: float = (1 - config.sparsity) ** (stage / WARMUP_STAGES)
    return max(1, round(num_floats * share))


def largest(values_N: Tensor, k: int) -> Tensor:
    """(k,) indices, ascending, of the k finite numbers of the largest size; of equal ones, those that come first."""
    sizes_N = values_N.abs()
    least = torch.topk(sizes_N, k, sorted=False).values.min()
    above = torch.nonzero(sizes_N > least).view(-1)
    equal = torch.nonzero(sizes_N == least).view(-1)[: k - len(above)]
    return torch.cat([above, equal]).sort().values


def largest_reference(values: list[float], k: int) -> list[int]:
    """The plain twin of `largest`."""
    return sorted(sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))[:k])


class DgcSums(CompleteSums):
    """With no more bytes than indices need, all numbers are sent, as 0 or not.

    `velocity` and `residual` change when a step counts; until then the gradient holds the next velocity.
    """

    by_ranks = True

    def __init__(self, flat: FlatParameters, ranks: Ranks, config: DenseSection, seed: int) -> None:
        gradient = flat.gradient
        assert 0 < len(gradient) < MAX_FLOATS
        super().__init__(flat, ranks, config, seed)
        self._config = config.dgc or DgcSection()
        self._clip_norm = None if config.clip_norm is None else config.clip_norm / math.sqrt(ranks.world)
        optimizer = config.optimizer
        self._momentum, _ = optimizer.split_momentum()
        self._flat = flat
        self._local = optimizer if isinstance(optimizer, DecayingOptimizer) and optimizer.local_decay else None
        """The optimizer whose weight decay ranks apply."""
        self._bucket_floats = config.bucket_bytes // gradient.element_size()
        self.residual = torch.zeros_like(gradient)
        self.velocity = torch.zeros_like(gradient if self._momentum else gradient[:0])
        held = {RESIDUAL: self.residual} | ({VELOCITY: self.velocity} if self._momentum else {})
        self.of_ranks = RankTensors(held, ranks, keeps_sum=True)
        self._num_steps = 0
        self._all = torch.zeros_like(gradient)
        """The numbers to choose from: the next residual, if the rank sent nothing."""
        self._chosen, self._sums = torch.zeros(0), torch.zeros(0)
        self._waits: list[Callable[[], None]] = []

    def _prepare(self) -> bool:
        """The gradient becomes the next velocity; whether the rank can send its sum with the residual."""
        own, most = self._gradient, MAX_FLOAT32 / self._ranks.world
        if not within(own, most):
            return False
        if self._clip_norm is not None:
            clip(own, torch.linalg.vector_norm(own), self._clip_norm)
        if self._local is not None:
            self._local.add_decay(own, self._flat.weights, self._flat.segments, 1 / self._ranks.world)
        if self._momentum:
            own.add_(self.velocity * self._momentum)
        torch.add(self.residual, own, out=self._all)
        return within(self._all, most)

    def begin(self, loss_scale: float) -> None:
        super().begin(loss_scale)
        num_floats = len(self._all)
        k = num_sent(self._config, num_floats, self._num_steps)
        self._chosen = largest(self._all, k)
        if k * self._ranks.world >= num_floats:
            self._sums = torch.zeros_like(self._all)
            self._sums[self._chosen] = self._all[self._chosen]
            self._waits = [self._ranks.all_reduce(each) for each in torch.split(self._sums, self._bucket_floats)]
            return
        brought = torch.zeros((self._ranks.world, 2, k), dtype=torch.int32, device=self._all.device)
        brought[self._ranks.rank, 0] = self._chosen
        brought[self._ranks.rank, 1] = self._all[self._chosen].view(torch.int32)
        gathered = self._ranks.all_gather_of_ranks(brought.view(-1))
        self._waits = [gathered, lambda: self._add(brought)]

    def _add(self, brought_R2K: Tensor) -> None:
        """Add the numbers of all ranks, in rank order."""
        self._sums = torch.zeros_like(self._all)
        for indices_K, bits_K in brought_R2K:
            self._sums.index_add_(0, indices_K, bits_K.view(torch.float32))

    def wait(self) -> None:
        waits, self._waits = self._waits, []
        for each in waits:
            each()

    def result(self) -> None:
        self.residual.copy_(self._all)
        self.residual[self._chosen] = 0
        if self._momentum:
            self.velocity.copy_(self._gradient)
            if len(self._chosen) < len(self._all):
                self.velocity[self._chosen] = 0
        self._gradient.copy_(self._sums)
        self._num_steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """The count of steps."""
        return {STEPS: torch.tensor(self._num_steps, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """After another compression the residual goes on, and the warm-up begins."""
        super().load(tensors)
        self._num_steps = int(tensors[STEPS]) if STEPS in tensors else 0
