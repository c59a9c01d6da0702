"""The order in which ranks gather and sum the blocks of parameters in a step: the same on all of them.

A rank with a batch makes what comes next as soon as its model needs it, one without at the end of the step. So the
order is fixed before a step begins. It follows the calls of the blocks in the first forward pass of a process; autograd
differentiates in the inverse order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Act(Enum):
    """A collective, or a mark between collectives."""

    FORWARD = "forward"
    """A forward pass begins."""
    BACKWARD = "backward"
    """A backward pass begins."""
    GATHER = "gather"
    """A block's weights come from all ranks."""
    SUM = "sum"
    """A block's gradient goes to its owners, and its weights are freed."""


Acts = Sequence[tuple[Act, int]]
"""With the numbers of blocks."""
Calls = Sequence[tuple[int, bool]]
"""The calls of blocks in a forward pass: each begin (True) and end, by number."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order for one model."""

    forward: Acts
    backward: Acts
    num_calls: Sequence[int]
    """Calls of each block in a forward pass, after the last of which its weights are freed; 0: they stay."""

    @classmethod
    def of(cls, calls: Calls, num_blocks: int) -> "BlockOrder":
        """A block that is not called is there from the forward pass to the end of the backward pass."""
        called = {number for number, _ in calls}
        always = [number for number in range(num_blocks) if number not in called]
        counts = [sum(each == number and begins for each, begins in calls) for number in range(num_blocks)]
        calls = [*((each, True) for each in always), *calls, *((each, False) for each in reversed(always))]
        gathers = [(Act.GATHER, each) for each in dict.fromkeys(number for number, begins in calls if begins)]
        first = {number: at for at, (number, begins) in reversed(list(enumerate(calls))) if begins}
        last = {number: at for at, (number, begins) in enumerate(calls) if not begins}
        backward = [(Act.BACKWARD, -1)]
        for at in range(len(calls) - 1, -1, -1):
            number, _ = calls[at]
            if last[number] == at and number in called:
                backward.append((Act.GATHER, number))
            if first[number] == at:
                backward.append((Act.SUM, number))
        return cls([(Act.FORWARD, -1), *gathers], backward, counts)

    @classmethod
    def of_sums(cls, num_blocks: int) -> "BlockOrder":
        """Where all weights are always there: from the last block to the first, as backward fills them."""
        sums = [(Act.SUM, number) for number in reversed(range(num_blocks))]
        return cls([(Act.FORWARD, -1)], sums, [0] * num_blocks)

    def step(self, batches: int, forwards: int, *, learn: bool) -> Acts:
        """All of a step of so many batches, with so many forward passes for each."""
        one = [*(list(self.forward) * forwards), *(self.backward if learn else ())]
        return one * batches
