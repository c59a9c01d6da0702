"""The input and the results of a forward pass. At the first read the host gets all that it reads of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.dataset.samples.batch import F32
from headrace.pserver.protocol.shards import Floats
from headrace.trainer.device_copies import Later
from headrace.trainer.features.default_rows import Readers
from headrace.trainer.models.calibration import moments
from headrace.trainer.models.contract import Inputs


@dataclass(frozen=True, slots=True)
class GivenBatch:
    """The input of a forward pass; `leaves` and `readers` as in ForwardResult, `rows` as pulled."""

    inputs: Inputs
    leaves: dict[str, Tensor]
    readers: Readers
    rows: Mapping[str, Floats]


class CalibratedTask(NamedTuple):
    """The part of calibration in a batch, in one task; each (B,)."""

    logit: Later
    """The model's own."""
    weight: Later
    label_B: F32


@dataclass(slots=True, kw_only=True)
class ForwardResult:
    """The results that a step needs; the properties are for the host."""

    loss: Tensor
    """This rank's share of the step's loss: sums over samples, divided by the weights of all ranks."""
    leaves: dict[str, Tensor]
    """Cells by table; autograd fills their gradients. Empty after the backward pass, and where there is none."""
    readers: Readers
    """Keys that read a default row, by table with a learnt default row."""
    has_weight: bool
    """Whether any task has weight in the step, over all ranks. If not, the loss is 0."""
    predictions: Mapping[str, Later] = field(default_factory=dict)
    """These and the rest are empty in a pass that is not measured."""
    measured: Mapping[str, Later] = field(default_factory=dict)
    calibrated: Mapping[str, CalibratedTask] = field(default_factory=dict)
    users: Later | None = None

    @property
    def prediction_B(self) -> dict[str, F32]:
        """By task: calibrated probability (bce) or value (mse)."""
        return {name: each.array for name, each in self.predictions.items()}

    @property
    def tensors(self) -> dict[str, F32]:
        """Further outputs of the model by name, which are measured and not learnt; and "loss", of each sample."""
        return {name: each.array for name, each in self.measured.items()}

    @property
    def moments(self) -> Mapping[str, NDArray[np.float64]]:
        """By task with calibration: its sums (trainer.models.calibration)."""
        return {
            name: moments(each.logit.array, self.predictions[name].array, each.label_B, each.weight.array)
            for name, each in self.calibrated.items()
        }

    @property
    def user_BV(self) -> F32 | None:
        """The vectors of users, where the model has them."""
        return None if self.users is None else self.users.array
