"""The weights and gradients of a rank where both are divided over ranks by blocks.

A rank holds its slices of all weights and of the gradient. The weights of a block are there as a whole while it is
*held*; its gradient from when backward fills it until it is summed. A weight that is used while its block is not held
is not a number, so that it shows.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.block_layout import BlockLayout, OwnSlices, ParameterBlock
from headrace.trainer.dense.flat_parameters import NamedTensors, within
from headrace.trainer.dense_optimizers import Segments


class BlockBuffers(NamedTensors):
    """All blocks of a rank. They are all held at first."""

    def __init__(
        self, model: nn.Module, more: Mapping[str, nn.Parameter] | None, ranks: Ranks, size: int, least: int
    ) -> None:
        """Ranks form groups of `size`. A block has at least so many floats, but for the last one. `more` has a block of
        its own, the last one, which is always held.

        Raises SpecError for a name that the module also has.
        """
        super().__init__(model, more)
        self._ranks, self.size, self._number = ranks, size, ranks.rank % size
        names, sizes = list(self.parameters), [each.numel() for each in self.parameters.values()]
        own = [each for each in names if each not in self.more]
        self.layout = BlockLayout(names, sizes, _cuts(names, sizes, len(own), least), size)
        self.num_divided = sum(each.names[0] not in self.more for each in self.layout)
        """Blocks of the model's own parameters; there may be one more."""
        device = next(iter(self.parameters.values())).device if names else torch.device("cpu")
        self._begins = dict(zip(names, self.layout.begins, strict=True))
        """Where each parameter begins in the flat buffer."""
        self.segments = Segments(
            [(begin, begin + size) for begin, size in zip(self.layout.begins, sizes, strict=True)], names
        )
        self.weights = torch.zeros(self.layout.slice_floats, device=device)
        """This rank's slices, one after another; and"""
        self.gradient = torch.zeros_like(self.weights)
        """of the sums of gradients."""
        self.own = OwnSlices(self.layout, self._number, self.weights, self.gradient)
        self._nothing = torch.full((), math.nan, device=device)
        self._whole: dict[int, Tensor] = {}
        self._filled: dict[int, Tensor] = {}
        self._summing: Callable[[], None] | None = None
        self._blocks_at: dict[int, int] = {}
        """By the address of its weights, each block that is held."""
        for number, block in enumerate(self.layout):
            self._hold(number, self._joined(block))
        self.keep_slices()

    # --- weights

    def is_held(self, number: int) -> bool:
        """Whether all weights of a block are there."""
        return number in self._whole

    def gather(self, number: int) -> None:
        """Collective: hold a block, with the weights that its ranks have."""
        block = self.layout[number]
        own = self.weights[block.slice_begin : block.slice_begin + block.slice_floats]
        if self.size == 1:
            self._hold(number, own)
            return
        flat = torch.empty(self.size * block.slice_floats, device=own.device)
        flat.view(self.size, -1)[self._number] = own
        self._ranks.all_gather(flat, self.size)
        self._hold(number, flat)

    def _joined(self, block: ParameterBlock) -> Tensor:
        """The weights of a block as its parameters have them, padded."""
        flat = torch.zeros(self.size * block.slice_floats, device=self.weights.device)
        for name, place in self._places(block):
            parameter = self.parameters[name]
            flat[place].view_as(parameter).copy_(parameter.detach())
        return flat

    def _places(self, block: ParameterBlock) -> Sequence[tuple[str, slice]]:
        """The parameters of a block, and their places in it."""
        found = []
        for name in block.names:
            begin = self._begins[name] - block.begin
            found.append((name, slice(begin, begin + self.parameters[name].numel())))
        return found

    def _hold(self, number: int, flat: Tensor) -> None:
        self.free(number, to_hold=True)
        self._whole[number] = flat
        self._blocks_at[flat.untyped_storage().data_ptr()] = number
        for name, place in self._places(self.layout[number]):
            self.parameters[name].data = flat[place].view(self.parameters[name].shape)

    def free(self, number: int, *, to_hold: bool = False) -> None:
        """Give a block's weights back."""
        if (flat := self._whole.pop(number, None)) is None:
            return
        self._blocks_at.pop(flat.untyped_storage().data_ptr(), None)
        for name in () if to_hold else self.layout[number].names:
            self.parameters[name].data = self._nothing.expand(self.parameters[name].shape)

    def keep_slices(self) -> None:
        """Take this rank's slices from blocks that are all held."""
        for number, block in enumerate(self.layout):
            own = self.weights[block.slice_begin : block.slice_begin + block.slice_floats]
            own.copy_(self._whole[number].view(self.size, -1)[self._number])
            if self.size == 1:
                self._hold(number, own)

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of the block that is held and has this tensor; None for any other tensor."""
        return self._blocks_at.get(tensor.untyped_storage().data_ptr())

    def storage(self, number: int) -> Tensor:
        """The weights of a block that is held."""
        return self._whole[number]

    # --- gradients

    def clear(self) -> None:
        self.gradient.zero_()
        for number in range(len(self.layout)):
            self._drop(number)
        if self.more:
            self.open_gradient(self.num_divided)

    def open_gradient(self, number: int) -> None:
        """Backward may add to the gradients of a block, which are 0."""
        if number in self._filled:
            return
        self.finish_sum()  # so that at most one block's gradient is in memory beside this one
        block = self.layout[number]
        flat = self._filled[number] = torch.zeros(self.size * block.slice_floats, device=self.weights.device)
        for name, place in self._places(block):
            self.parameters[name].grad = flat[place].view(self.parameters[name].shape)

    def _drop(self, number: int) -> Tensor | None:
        """The gradient of a block, which parameters have no more."""
        for name in self.layout[number].names:
            self.parameters[name].grad = None
        return self._filled.pop(number, None)

    def sum(self, number: int, largest: float) -> bool:
        """Collective: begin to add the gradient of a block over ranks to the slices, in rank order.

        Whether all numbers of this rank are at most `largest`.
        """
        self.finish_sum()
        block, flat = self.layout[number], self._drop(number)
        fits = flat is None or within(flat, largest)
        if flat is None:
            flat = torch.zeros(self.size * block.slice_floats, device=self.weights.device)
        own = flat.view(self.size, -1)[self._number]
        begun = self._ranks.reduce_scatter(flat, self.size)

        def finish() -> None:
            begun()
            self.gradient[block.slice_begin : block.slice_begin + block.slice_floats].add_(own)

        self._summing = finish
        return fits

    def finish_sum(self) -> None:
        """Wait for the sum that was begun last."""
        summing, self._summing = self._summing, None
        if summing is not None:
            summing()

    # --- what commits hold

    def undivided(self) -> dict[str, Tensor]:
        """Buffers and parameters that do not learn, by name: each rank has them as a whole."""
        return {name: each for name, each in super().tensors().items() if name not in self._learnt}

    def tensors(self) -> dict[str, Tensor]:
        """Also the weights of blocks that are held."""
        names = self._learnt
        held = {name for number in self._whole for name in self.layout[number].names}
        return {name: each for name, each in super().tensors().items() if name not in names or names[name] in held}

    @property
    def _learnt(self) -> dict[str, str]:
        """The parameter of each name that commits have for it: modules may share one."""
        of = {id(each): name for name, each in self.parameters.items()}
        return {f"model.{name}": of[id(each)] for name, each in self._held().items() if id(each) in of}

    def whole(self, weights: NDArray[np.float32]) -> dict[str, Tensor]:
        """All that commits hold of the model, with the weights of the flat buffer."""
        found = super().tensors()
        for name, of in self._learnt.items():
            shape, begin = self.parameters[of].shape, self._begins[of]
            found[name] = torch.from_numpy(weights[begin : begin + shape.numel()]).view(shape)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for number, block in enumerate(self.layout):
            if number not in self._whole:
                self._hold(number, torch.zeros(self.size * block.slice_floats, device=self.weights.device))
        super().load(tensors)
        self.keep_slices()


def give_back_freed_memory() -> None:
    """Have the C library give the system what it keeps of freed memory, once: see trainer.train.device. glibc only."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _cuts(names: Sequence[str], sizes: Sequence[int], num_own: int, least: int) -> list[int]:
    """The first parameters of blocks of whole modules, of at least so many floats.

    All after the first `num_own` parameters are one more block.
    """
    found, floats, module = [], least, ""
    for number, (name, size) in enumerate(zip(names[:num_own], sizes, strict=False)):
        if not number or (floats >= least and name.rpartition(".")[0] != module):
            found.append(number)
            floats = 0
        floats, module = floats + size, name.rpartition(".")[0]
    return [*found, num_own] if num_own < len(sizes) else found
