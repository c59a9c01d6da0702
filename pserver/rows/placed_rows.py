"""Rows of a table that learn on a device: the seam between a shard and the trainer that it lives in.

The shard numbers the rows, admits keys, records statistics and writes commits as ever; it knows no torch. The trainer
brings `PlacedSlab`, which keeps rows in the memory of its device, reads them for steps and applies gradients there
(trainer.train.device_rows). At each close the shard has the changed rows back, before it hashes, exports or commits.

Shapes: U rows of a step, R rows of a table, D weights of a row, W floats of a row in the slab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from headrace.pserver.protocol.shards import F32, U16, Floats, Gradients
from headrace.pserver.protocol.table_stats import DeviceRows
from headrace.pserver.rows.row_settings import FirstSteps
from headrace.pserver.rows.slab import Slab

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PlacedGradients(Gradients):
    """Gradients that are on a device; `grads_UD` has no columns."""

    tensor: Floats
    """(T, D) floats on the device; until `PlacedSlab.merged`, they may still be on their way."""
    at_U: NDArray[Any] | None = None
    """(U,) the rows of `tensor` that count, in this order; None: all."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (len(self.show_U), self.tensor.shape[1])

    @override
    def copied(self) -> "PlacedGradients":
        return replace(self, show_U=self.show_U.copy(), click_U=self.click_U.copy())

    @override
    def chosen(self, at: NDArray[Any] | slice) -> "PlacedGradients":
        if isinstance(at, slice):
            return self
        at_U = np.arange(len(self.show_U)) if self.at_U is None else self.at_U
        return PlacedGradients(self.grads_UD[at], self.show_U[at], self.click_U[at], self.tensor, at_U[at])


@dataclass(frozen=True, slots=True)
class GradientScale:
    """How a table's gradients are scaled before its optimizer: `grad_scale` and `clip_norm`."""

    kind: str
    """`grad_scale`."""
    batch_samples: int
    """Samples of the step over all ranks."""
    most: float | None
    """`clip_norm`."""


class PlacedSlab(Slab):
    """The floats of rows, of which some are on a device. Those in the slab itself are as of the last close.

    Threads: `expect` runs in any thread, ahead; all others in that of steps.
    """

    def expect(self, rows_U: I32) -> None:
        """A later step reads these rows: those without a place may begin to travel."""
        raise NotImplementedError

    def read(self, rows_U: I32, group_R: U16, steps: FirstSteps | None) -> Floats:
        """(U, D) weights on the device, `absent` for EMPTY rows; with `steps`, two columns more (kernels)."""
        raise NotImplementedError

    def to_host(self, floats_UD: Floats) -> F32:
        """A copy in the memory of the host."""
        raise NotImplementedError

    def merged(self, pushes: Sequence[tuple[I32, PlacedGradients]]) -> tuple[I32, PlacedGradients]:
        """The pushes of a step, in rank order, as one with unique rows: the twin of gradient_merge.merge."""
        raise NotImplementedError

    def learn_placed(
        self, rows_U: I32, push: PlacedGradients, scale: GradientScale, group_R: U16, passes_U: U32 | None
    ) -> None:
        """Apply a step's gradients to unique rows; within `moving`. `passes_U`: as RowSettings.learn."""
        raise NotImplementedError

    def settle(self, rows_U: I32) -> None:
        """At a close, within `moving`: take back the floats of the rows that the pass changed."""
        raise NotImplementedError

    def open_pass(self) -> None:
        """Begin to count anew."""
        raise NotImplementedError

    def figures(self) -> DeviceRows:
        """Counts. Any thread."""
        raise NotImplementedError


PlacedMaker = Callable[[int, Any, np.uint64], PlacedSlab]
"""As SlabMaker, of a slab whose rows learn on a device."""
