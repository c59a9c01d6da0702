"""The contract between the trainer and a model: its inputs and outputs.

A model is a torch module that is built as `Class(shape, settings)` and called with `Inputs`. It returns one *logit*
(loss "bce") or value (loss "mse") for each task under the task's name, (B,) each, and other tensors to measure under
other names. It holds only dense parameters: rows of embedding tables are inputs, and shards update them.

A module may say more of itself, by attributes and methods with the names of the fields of `Declared`. A user's class
may also declare `Settings`, a `headrace.config.Section`: the settings in the spec are then checked and passed as an
instance of it; otherwise they are a dictionary.

A task with loss "softmax" gets its loss of each sample from `losses`, under its own name; `Targets.class_B` has the
right classes. While gradients are computed, the model's output of such a task is not read; else it is the probability
of the best class.

Shapes: B samples, F pooled sparse slots, D length of a vector, L longest sequence, C dense values of a sample,
W width of a tower's input, T tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from headrace.dataset.spec.schema import Schema, Slot
    from headrace.pserver.config import TableSection
    from headrace.trainer.collectives.divided_softmax import ClassRows
    from headrace.trainer.collectives.ranks import Ranks


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The shape of one sparse slot."""

    name: str
    dim: int
    """Length of its vector; 0: no vector."""
    first_order: bool
    """Whether its rows have a first-order weight."""
    max_len: int = 1
    """Longest sequence, for slots that are not pooled."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything that a model needs to be built, except its settings."""

    pooled: tuple[SlotShape, ...]
    """Sparse slots with pooling, in the order of the spec."""
    sequences: tuple[SlotShape, ...]
    """Sparse slots with pooling = "none"."""
    dense: tuple[tuple[str, int], ...]
    """Dense slots: name and size."""
    tasks: tuple[str, ...]
    """Names of the tasks."""

    @classmethod
    def of(cls, schema: "Schema", tables: "Mapping[str, TableSection]", tasks: Sequence[str]) -> "Shape":
        """The shape of a job."""

        def shape(slot: "Slot") -> SlotShape:
            table = tables[slot.sparse.table]
            return SlotShape(slot.name, table.dim, table.first_order, slot.sparse.max_len or 1)

        return cls(
            pooled=tuple(shape(slot) for slot in schema.sparse if slot.sparse.pooling != "none"),
            sequences=tuple(shape(slot) for slot in schema.sparse if slot.sparse.pooling == "none"),
            dense=tuple((slot.name, getattr(slot.entry, "size", 1)) for slot in schema.dense),
            tasks=tuple(tasks),
        )

    @property
    def dense_size(self) -> int:
        """C: total size of all dense slots."""
        return sum(size for _, size in self.dense)


@dataclass(frozen=True, slots=True)
class AxisPart:
    """Neighbouring places along an axis of a weight."""

    name: str
    """Their purpose: different along an axis, the same in a model of other slots."""
    size: int
    """Number of places."""
    slots: frozenset[str] = frozenset()
    """Slots with which they come and go."""


Axis = Sequence[AxisPart]
"""All places along an axis, in order."""
SlotAxes = Mapping[str, Sequence[Axis | None]]
"""By name in the module's state: its axes; None for one without places for slots. Weights without such axes are left
out. A sum over places of a new slot must not change while their weights are zeros."""


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """A sparse slot that is not pooled."""

    vectors_BLD: "Tensor"
    """Zeros after the end of a sequence."""
    first_order_BL: "Tensor"
    mask_BL: "Tensor"
    """bool: True where there is an id."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Facts of a batch for a model's `losses` and `measures`, beside its inputs. A prediction has none of them."""

    label_B: "Mapping[str, Tensor]"
    """By task; 0 where the weight is 0."""
    weight_B: "Mapping[str, Tensor]"
    """By task: the sample's weight, 0 where masked."""
    sign_B: "Mapping[str, Tensor]"
    """By sparse slot: the bits of a sample's first sign as int64, 0 where it has none."""
    class_B: "Mapping[str, Tensor]"
    """By task with loss "softmax": the numbers of the right classes, int64."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one batch, on the model's device."""

    vectors: "Mapping[str, Tensor]"
    """(B, D) by pooled slot. D may differ between tables."""
    vectors_BFD: "Tensor | None"
    """All pooled slots with vectors stacked; None if their dims differ, (B, 0, 0) if there are none."""
    first_order_BF: "Tensor"
    """Pooled first-order weights of the slots that have them; (B, 0) if there are none."""
    sequences: Mapping[str, SequenceInput]
    dense_BC: "Tensor"
    """(B, C): dense slots in the order of the spec."""

    @property
    def num_samples(self) -> int:
        """B. While a model is traced for export this is a traced number; `int` would turn it into a constant."""
        return self.dense_BC.shape[0]


@dataclass(frozen=True, slots=True)
class DeepTower:
    """A model as blocks, one after another. Its logits are those of the tower plus what is beside it."""

    enter: "Callable[[Inputs], tuple[Tensor, Tensor]]"
    """The input of the first block, (B, W), and the part of the logits beside the tower, (B, T)."""
    width: int
    """W."""
    blocks: "Sequence[nn.Module]"
    """Each takes the (B, width) that the one before returns. No parameter is in two of them."""
    leave: "nn.Module"
    """From the last block's output to the tower's part of the logits, (B, T)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """All that a module may say of itself beside `forward`, under the names of these fields; each may be left out."""

    losses: "Callable[..., Mapping[str, Tensor]] | None" = None
    """`losses(outputs, inputs)` or `losses(outputs, inputs, targets)`: further losses of each sample, (B,) each, which
    are added to the tasks' losses with the sample's weight."""
    measures: "Callable[[Mapping[str, Tensor], Inputs, Targets | None], Mapping[str, Tensor]] | None" = None
    """Tensors of any shape by name, measured and not learnt, as other outputs are."""
    for_losses: Sequence[str] = ()
    """Outputs that only these two read, and which are not measured."""
    served: Sequence[str] = ()
    """Further outputs for exports, which are there without gradients."""
    forget: Callable[[Mapping[str, Sequence[int]]], None] | None = None
    """Called on every rank between passes with the signs, by sparse slot, that were forgotten: its buffers are not to
    hold them any more."""
    parameters_in_calls: bool = False
    """Whether each parameter is used only while the module that holds it is called, so that a layer's parameters may
    arrive when the forward pass has begun (`dense.slice_floats`)."""
    sums_first_order: bool = True
    """Whether each task's logit is a sum with the layer `FirstOrder`, if the module has one, so that
    `tables.<t>.in_batch` corrects it."""
    slot_axes: Callable[[], SlotAxes] | None = None
    """Which axes of its weights have places for slots. A job whose slots change then goes on with its weights: places
    are found by name, new ones are zeros, those of removed slots are cut (trainer.models.carried_weights). A module
    without it, or one whose `slot_axes` cannot say so, is a new model then."""
    tower: Callable[[], DeepTower] | None = None
    """Its blocks, one after another, which trainers may divide among themselves (`dense.strategy = "pipeline"`)."""
    divide: "Callable[[Ranks, torch.device], None] | None" = None
    """Divides parameters over ranks: called once on each rank when the model is built. `losses` is then called with
    gradients only."""
    class_rows: "ClassRows | None" = None
    """The divided parameters of this rank, which are no parameters of the module; None if nothing was divided."""
    whole: "Callable[[], nn.Module] | None" = None
    """A copy with all parameters, of any value, where they are divided."""
    follow: Callable[[], None] | None = None
    """By it a rank without a batch makes the collectives of `losses` and its backward pass. With `dense.accumulate`
    every rank makes them so many times a step: by this those for which it has no batch, which are its first ones."""

    @classmethod
    def of(cls, module: object) -> "Declared":
        """All that `module` says now."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: getattr(module, name) for name in names if hasattr(module, name)})
