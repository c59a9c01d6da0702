"""The contract between the trainer and a model: what goes in, what comes out.

A model is a torch module built as `Class(shape, settings)` and called with `Inputs`. It returns one *logit* (loss
"bce") or value (loss "mse") per task under the task's name, (B,) each, and any other tensors it wants measured under
other names. It holds dense parameters only: rows of embedding tables come in as tensors and learn by themselves.

A module may declare `Settings`, a `millrace.config.Section`: its settings from the spec are then checked and given as
one; without it they are given as a plain dictionary. It may define `losses(outputs, inputs) -> Mapping[str, Tensor]`:
further losses per sample, (B,) each, added to the tasks' under the sample's weight.

Shapes: B samples, F pooled sparse slots, D length of a vector, L longest sequence, C dense values of a sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotShape:
    """One sparse slot as a model sees it."""

    name: str
    dim: int
    """Length of its vector; 0 = none."""
    first_order: bool
    """Whether its rows have a first-order weight."""
    max_len: int = 1
    """Longest sequence; only for slots that are not pooled."""


@dataclass(frozen=True, slots=True)
class Shape:
    """All a model needs to know to be built."""

    pooled: tuple[SlotShape, ...]
    """Sparse slots with pooling, in the order of the spec."""
    sequences: tuple[SlotShape, ...]
    """Sparse slots with pooling = "none"."""
    dense: tuple[tuple[str, int], ...]
    """Dense slots: name and size."""
    tasks: tuple[str, ...]
    """Names of the tasks."""

    @property
    def dense_size(self) -> int:
        """C: all dense slots side by side."""
        return sum(size for _, size in self.dense)


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """A sparse slot that is not pooled."""

    vectors_BLD: "Tensor"
    """Zeros behind the end."""
    first_order_BL: "Tensor"
    mask_BL: "Tensor"
    """bool: True where there is a sign."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One batch, on the model's device."""

    vectors: "Mapping[str, Tensor]"
    """(B, D) by pooled slot; D may differ between tables."""
    vectors_BFD: "Tensor | None"
    """All pooled slots stacked; None where their dims differ, (B, 0, 0) where there are none."""
    first_order_BF: "Tensor"
    """Pooled first-order weights of the slots that have one; (B, 0) where there are none."""
    sequences: Mapping[str, SequenceInput]
    dense_BC: "Tensor"
    """(B, C); dense slots side by side in the order of the spec."""

    @property
    def num_samples(self) -> int:
        """B; while a model is traced for export a traced number, which `int` would make a constant."""
        return self.dense_BC.shape[0]
