"""The input and the results of a forward pass."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.dataset.samples.batch import F32
from headrace.trainer.features.default_rows import Readers
from headrace.trainer.models.contract import Inputs


@dataclass(slots=True)
class ForwardResult:
    """The results of a forward pass."""

    prediction_B: dict[str, F32]
    """By task: probability (bce) or value (mse)."""
    loss: Tensor
    """This rank's share of the step's loss: sums over samples, divided by the weights of all ranks."""
    leaves: dict[str, Tensor]
    """Cells by table; autograd fills their gradients."""
    tensors: dict[str, NDArray[np.float32]]
    """Further outputs of the model by name, which are measured and not learnt; and "loss", the loss of each sample."""
    readers: Readers
    """Keys that read a default row, by table with a learnt default row."""
    has_weight: bool
    """Whether any task has weight in the step, over all ranks. If not, the loss is 0."""


@dataclass(frozen=True, slots=True)
class GivenBatch:
    """The input of a forward pass."""

    inputs: Inputs
    leaves: dict[str, Tensor]
    """See ForwardResult."""
    readers: Readers
    """See ForwardResult."""
