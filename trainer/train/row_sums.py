"""The gradients of the rows of a step, summed over its micro-batches.

Shapes: as in trainer.features.lookup_kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from headrace.dataset.samples.batch import F32
from headrace.pserver.protocol.shards import Gradients
from headrace.trainer.features.default_rows import DefaultRows, Readers
from headrace.trainer.features.pooling import Pooling
from headrace.trainer.features.training_batches import TrainingBatch


@dataclass(slots=True)
class RowSums:
    """See module docstring."""

    grads_UD: dict[str, F32]
    """By table."""
    finite: bool = True
    """Whether these and all losses are finite."""
    readers: Readers = field(default_factory=dict)
    """Keys that read a default row, by table with a learnt default row."""

    @classmethod
    def of(cls, batch: TrainingBatch) -> "RowSums":
        """No gradients yet. A batch of one micro-batch brings arrays of its own."""
        if len(batch.ends) == 1:
            return cls({})
        shapes = {look.table.name: (len(look.keys.keys_U), look.table.width) for look in batch.lookups}
        return cls({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})

    def add(self, batch: TrainingBatch, leaves: Mapping[str, Tensor], pooling: Pooling) -> None:
        """Add those of a micro-batch; `leaves`: its cells by table, after the backward pass."""
        for look in batch.lookups:
            name = look.table.name
            if look.is_part:
                finite = pooling.add_gradients(look, leaves[name], self.grads_UD[name])
            else:
                self.grads_UD[name], finite = pooling.gradients(look, leaves[name])
            self.finite = self.finite and finite

    def gradients(self, batch: TrainingBatch, default_rows: DefaultRows, loss_scale: float) -> dict[str, Gradients]:
        """The push of the whole batch, without the loss scale. Default rows get their gradients, with it."""
        found: dict[str, Gradients] = {}
        for look in batch.lookups:
            grads_UD = self.grads_UD[look.table.name]
            default_rows.learn(look.table.name, grads_UD, self.readers)
            if loss_scale != 1:
                grads_UD /= np.float32(loss_scale)
            found[look.table.name] = Gradients(grads_UD, look.show_U, look.click_U)
        return found
