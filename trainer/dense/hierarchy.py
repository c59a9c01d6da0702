"""Sums over ranks in two levels: within a machine, then between machines, then within a machine again.

Each of the n ranks of a machine is the first one of a slice: it sums that slice over its machine, in rank order, then
with the ranks of other machines that own the same slice; then the machine's ranks gather the slices. So a machine sends
2 (M-1)/M times the gradient over its link, for M machines, by n streams at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense_config import DenseSection

AllReduce = Callable[[Tensor], Callable[[], None]]
"""Begins to sum a flat tensor over ranks in place; the result waits. As Ranks.all_reduce."""


def all_reduce_of(ranks: Ranks, config: DenseSection) -> AllReduce:
    """The sums of `dense.hierarchy`, or those of all ranks at once."""
    size = 1 if config.hierarchy is None else config.hierarchy.size(ranks.world)
    return ranks.all_reduce if size == 1 else lambda flat: _begin(ranks, size, flat)


def _begin(ranks: Ranks, size: int, flat: Tensor) -> Callable[[], None]:
    num_short = -len(flat) % size
    padded = torch.cat([flat, flat.new_zeros(num_short)]) if num_short else flat
    summed = ranks.reduce_scatter(padded, size)

    def wait() -> None:
        summed()
        ranks.all_gather(padded, size)
        if num_short:
            flat.copy_(padded[: len(flat)])

    return wait
