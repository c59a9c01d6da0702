"""The weights of many classes, of which each rank holds a slice of neighbouring ones, with their gradients.

Slices are equal, but for the last ones: rank r has the classes from r * size on. Initial weights are a function of seed
and class alone, so they do not depend on the number of ranks.

Shapes: N classes of this rank, V length of a vector, K classes of a step.
"""

import math

import torch
from torch import Tensor

from headrace.seeds import derive

BLOCK = 16
"""Slices are a multiple of so many classes, but for the last one."""
DRAWN = 1024
"""Classes whose initial weights come from one seed."""


def slice_of(num_classes: int, rank: int, world: int) -> tuple[int, int]:
    """The first class of a rank, and one past its last one."""
    size = -(-num_classes // (world * BLOCK)) * BLOCK
    return min(num_classes, rank * size), min(num_classes, (rank + 1) * size)


def initial_rows(seed: int, dim: int, begin: int, end: int) -> Tensor:
    """(N, V) the initial weights of the classes `begin` to `end`: normal, about 1 long."""
    rows_NV = torch.empty(end - begin, dim)
    for first in range(begin - begin % DRAWN, end, DRAWN):
        generator = torch.Generator().manual_seed(derive(seed, "classes", first))
        drawn = torch.randn(DRAWN, dim, generator=generator) / math.sqrt(dim)
        low, high = max(first, begin), min(first + DRAWN, end)
        rows_NV[low - begin : high - begin] = drawn[low - first : high - first]
    return rows_NV


class ClassRows:
    """The slice of one rank. The softmax writes its gradient, the dense strategy learns from it."""

    def __init__(self, num_classes: int, dim: int, rank: int, world: int, seed: int, device: torch.device) -> None:
        self.num_classes, self.dim = num_classes, dim
        self.begin, self.end = slice_of(num_classes, rank, world)
        self.weights_NV = initial_rows(seed, dim, self.begin, self.end).to(device)
        self.place_K: Tensor | None = None
        """The classes with a gradient, from 0 in the slice; None: all."""
        self.gradient_KV: Tensor | None = None
        """None: there was no loss in the step."""
        self.step = 0
        """Number of steps of the job, from which draws follow."""

    def clear(self) -> None:
        """Drop the gradient of the step."""
        self.place_K, self.gradient_KV = None, None
