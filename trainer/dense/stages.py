"""The stages of a model that is a tower: which blocks each trainer has, and the module that it runs.

Shapes: M samples of a micro-batch, T tasks.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.trainer.dense.batch_norms import evaluating


class Blocks(Protocol):
    """The parts of a tower (trainer.models.contract) that stages need."""

    @property
    def width(self) -> int:
        """Length of the input of the first block."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks, one after another."""
        ...

    @property
    def leave(self) -> nn.Module:
        """From the last block's output to the logits."""
        ...


def divided(costs: Sequence[int], num_stages: int, last: int = 0) -> list[range]:
    """Neighbouring blocks for each stage, so that the most costly stage costs least; `last`: cost of leaving the tower.

    Every stage gets a block as long as there are any. Of equal divisions, the one whose first stages have fewer blocks:
    the first trainer has other work, too.
    """
    if len(costs) <= num_stages:
        return [range(min(at, len(costs)), min(at + 1, len(costs))) for at in range(num_stages)]
    upto = [0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # most[s][n]: cost of the most costly of the last s stages, if they have the blocks from n on
    total = len(costs)
    most = [[upto[total] - upto[n] + last for n in range(total + 1)]]
    for stages in range(2, num_stages + 1):
        row = [0] * (total + 1)
        for n in range(total - stages + 1):
            ends = range(n + 1, total - stages + 2)
            row[n] = min(max(upto[end] - upto[n], most[-1][end]) for end in ends)
        most.append(row)
    found, begin = list[range](), 0
    for left in range(num_stages - 1, 0, -1):
        ends = range(begin + 1, total - left + 1)
        end = next(e for e in ends if max(upto[e] - upto[begin], most[left - 1][e]) <= most[num_stages - 1][0])
        found.append(range(begin, end))
        begin = end
    return [*found, range(begin, total)]


class Stage(nn.Module):
    """The blocks of one trainer; the last one leaves the tower."""

    def __init__(self, tower: Blocks, number: int, num_stages: int) -> None:
        """The stage `number` of so many."""
        super().__init__()
        ranges = divided([_num_weights(each) for each in tower.blocks], num_stages, _num_weights(tower.leave))
        widths = _widths(tower)
        mine = ranges[number]
        self.blocks = nn.ModuleList([tower.blocks[at] for at in mine])
        self.leave = tower.leave if number == num_stages - 1 else None
        self.width_in = widths[mine.start]
        """Length of the input, and"""
        self.width_out = widths[mine.stop] if self.leave is None else widths[-1]
        """of the output."""
        held = [*((at, tower.blocks[n]) for at, each in enumerate(ranges) for n in each), (num_stages - 1, tower.leave)]
        self.numbers = {id(each): at for at, module in held for each in module.parameters()}
        """The stage of each parameter of the tower, by the parameter's identity."""

    def forward(self, x_MI: Tensor, beside_MT: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """(M, in), (M, T) -> (M, out), (M, T); the last stage returns the logits, (M, T)."""
        for block in self.blocks:
            x_MI = block(x_MI)
        if self.leave is not None:
            logits_MT: Tensor = self.leave(x_MI) + beside_MT
            return logits_MT
        return x_MI if len(self.blocks) else x_MI.clone(), beside_MT.clone()


def _num_weights(module: nn.Module) -> int:
    """About the multiplications for one sample."""
    return sum(each.numel() for each in module.parameters())


def _widths(tower: Blocks) -> list[int]:
    """Length of the input of each block, of that of `leave`, and of its output."""
    found = [tower.width]
    modules = [*tower.blocks, tower.leave]
    with torch.no_grad(), evaluating(part for each in modules for part in each.modules()):
        x_1I = torch.zeros((1, tower.width))
        for module in modules:
            x_1I = module(x_1I)
            found.append(x_1I.shape[1])
    return found
