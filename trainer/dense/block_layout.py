"""The places of dense parameters that are divided over ranks by blocks.

A *block* is some neighbouring parameters in the order of the flat buffer that commits have, or all of them. Each rank
owns one slice of each block, so that every rank has as much to send when a block is gathered or summed. Ranks keep
their slices one after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.trainer.dense.flat_parameters import begins_of

HASHED_FLOATS = 4096
"""Floats of a part of the state that is hashed by itself, so that a digest does not depend on the number of ranks."""


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """Neighbouring parameters that are gathered and summed together."""

    names: tuple[str, ...]
    """Of its parameters."""
    begin: int
    """Of its first float in the flat buffer; and"""
    end: int
    """one past its last."""
    slice_begin: int
    """Of a rank's slice among its slices of all blocks."""
    slice_floats: int
    """Floats of each rank's slice. The last ones are padded with zeros."""

    def used(self, number: int) -> int:
        """Floats of the slice of the rank `number` of a group before the padding."""
        return self.before(self.end, number)

    def before(self, at: int, number: int) -> int:
        """Floats of the slice of the rank `number` of a group before the place `at` in the flat buffer."""
        return min(max(at - self.begin - number * self.slice_floats, 0), self.slice_floats)


class BlockLayout(Sequence[ParameterBlock]):
    """All blocks, for a group of `size` ranks."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], cuts: Sequence[int], size: int) -> None:
        """`sizes`: floats of each parameter. A block begins at each of `cuts`, which are numbers of parameters.

        Slices are as long as a multiple of HASHED_FLOATS.
        """
        self.size = size
        self.begins, self.length = begins_of(sizes)
        """Where each parameter begins in the flat buffer, and the floats of the buffer."""
        self._blocks: list[ParameterBlock] = []
        self.slice_floats = 0
        """Floats of a rank's slices of all blocks, with padding."""
        edges = [*self.begins, self.length]
        for first, last in zip(cuts, [*cuts, len(names)][1:], strict=True):
            begin, end = edges[first], edges[last]
            length = -(-(end - begin) // (size * HASHED_FLOATS)) * HASHED_FLOATS
            self._blocks.append(ParameterBlock(tuple(names[first:last]), begin, end, self.slice_floats, length))
            self.slice_floats += length

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[ParameterBlock]:
        return iter(self._blocks)

    def __getitem__(self, at: Any) -> Any:
        return self._blocks[at]

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The number of the block of each parameter."""
        return {name: number for number, each in enumerate(self) for name in each.names}

    def before(self, at: int, number: int) -> int:
        """Floats of the slices of the rank `number` of a group before the place `at` in the flat buffer."""
        block = next((each for each in self if at <= each.end), None)
        return self.slice_floats if block is None else block.slice_begin + block.before(at, number)

    def cut(self, whole: Tensor, number: int) -> Tensor:
        """The slices of the rank `number` of a group, from the flat buffer."""
        found = torch.zeros(self.slice_floats)
        for each in self:
            begin, used = each.begin + number * each.slice_floats, each.used(number)
            found[each.slice_begin : each.slice_begin + used] = whole[begin : begin + used]
        return found

    def unpadded(self, slices: NDArray[Any], number: int) -> Sequence[NDArray[Any]]:
        """Each slice of the rank `number` of a group without padding."""
        return [slices[each.slice_begin : each.slice_begin + each.used(number)] for each in self]

    def joined(self, slices: Sequence[NDArray[Any]], part: int = 1, of: int = 1) -> NDArray[Any]:
        """The flat buffer, from the slices of all ranks of a group without padding: the inverse of `cut`.

        Or what has `part` numbers for each `of` floats of a slice, of which the last may be fewer.
        """
        taken, found = [0] * self.size, []
        for each in self:
            for number in range(self.size):
                begin = taken[number]
                taken[number] += -(-each.used(number) // of) * part
                found.append(slices[number][begin : taken[number]])
        return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class OwnSlices:
    """The slices of one rank, one after another, padded."""

    layout: BlockLayout
    number: int
    """Of the rank in its group."""
    weights: Tensor
    """Of this rank's slices; and"""
    gradient: Tensor
    """of the sums of gradients."""

    @property
    def used(self) -> int:
        """Floats of the slices; all that come after them are padding."""
        return self.before(self.layout.length)

    def before(self, at: int) -> int:
        """Floats of the slices before the place `at` in the flat buffer."""
        return self.layout.before(at, self.number)

    def cut(self, whole: Tensor) -> Tensor:
        """The slices of a flat buffer."""
        return self.layout.cut(whole, self.number)

    def unpadded(self, slices: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """Each slice without padding."""
        return self.layout.unpadded(slices, self.number)
