"""The parts of a dense strategy whose parameters are on every trainer, in one flat buffer; nothing is on the shards."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.pserver.protocol.shards import F32, Gradients, Keys
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.buffers import Buffers
from headrace.trainer.dense.flat_parameters import FlatParameters
from headrace.trainer.dense_config import DenseSection

PREFIX = "optimizer."
"""Before the names of an optimizer's state in commits."""


class FlatDense:
    one_reader = False

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Mapping[str, nn.Parameter] | None = None,
        multiple: int = 1,
        flat: FlatParameters | None = None,
    ) -> None:
        """`more`: parameters by name that learn with the model's and are not part of its module. The buffer's length
        is a multiple of `multiple`. `flat`: the buffer, if it is made already.

        Raises SpecError for a name that the module also has.
        """
        self._flat = FlatParameters(model, more, multiple) if flat is None else flat
        self._grad = self._flat.gradient
        self._config, self._ranks = config, ranks
        self.buffers = Buffers(model, ranks)

    @property
    def slices(self) -> Mapping[str, Keys]:
        """Nothing of it is on the shards."""
        return {}

    def take(self, rows: Mapping[str, F32]) -> None:
        pass

    def push(self) -> dict[str, Gradients]:
        return {}

    def clear(self) -> None:
        self._flat.clear()

    def fills(self, loss_scale: float) -> None:
        """Nothing is exchanged before the end of the backward pass."""

    def note(self, share: float, loss: float) -> None:
        """The gradient is divided by the samples of all ranks already."""


def clip(gradient: Tensor, norm: Tensor, most: float) -> None:
    """Scale a gradient of the norm `norm` to `most` if it is longer."""
    gradient.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))


def state_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state in the tensors of a commit."""
    return {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
