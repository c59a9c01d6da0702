"""Requirements of models on the slots, checked with the spec and when a model is built. Does not import torch.

Each check raises SpecError, which names the slot or key and what to change.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.trainer.models.contract import Shape, SlotShape

Need = Callable[[Shape, str], None]
"""Called with the shape and the name of the model."""


def shape_of(schema: Schema, tables: Mapping[str, TableSection], tasks: Sequence[str]) -> Shape:
    """The shape from which a model is built."""

    def shape(slot: Slot) -> SlotShape:
        table = tables[slot.sparse.table]
        return SlotShape(slot.name, table.dim, table.first_order, slot.sparse.max_len or 1)

    return Shape(
        pooled=tuple(shape(slot) for slot in schema.sparse if slot.sparse.pooling != "none"),
        sequences=tuple(shape(slot) for slot in schema.sparse if slot.sparse.pooling == "none"),
        dense=tuple((slot.name, getattr(slot.entry, "size", 1)) for slot in schema.dense),
        tasks=tuple(tasks),
    )


def some_slot(shape: Shape, model: str) -> None:
    """Require a slot to learn from."""
    if not shape.pooled and not shape.sequences and not shape.dense_size:
        raise SpecError(f"{model} needs a sparse or dense slot to learn from", "slots")


def some_values(shape: Shape, model: str) -> None:
    """Require a vector or a dense value."""
    if not sum(slot.dim for slot in shape.pooled + shape.sequences) + shape.dense_size:
        raise SpecError(
            f"{model} needs vectors or dense values: there is no dense slot and every table has dim = 0", "model.name"
        )


def vectors_of_one_length(shape: Shape, model: str) -> None:
    """Require sparse slots whose vectors all have one length."""
    slots = shape.pooled + shape.sequences
    if not slots:
        raise SpecError(f"{model} needs at least one sparse slot", "model.name")
    first = slots[0]
    if other := next((slot for slot in slots if slot.dim != first.dim), None):
        raise SpecError(
            f"{model} needs vectors of one length: slot {first.name!r} has dim {first.dim}, slot {other.name!r} "
            f"{other.dim}; give their tables the same dim",
            "model.name",
        )
    if not first.dim:
        raise SpecError(
            f"{model} needs vectors: the table of slot {first.name!r} has dim = 0; use lr, or raise it", "model.name"
        )


def first_order(shape: Shape, model: str) -> None:
    """Require first-order weights for every sparse slot: a linear model reads nothing else."""
    missing = [repr(slot.name) for slot in shape.pooled + shape.sequences if not slot.first_order]
    if missing:
        raise SpecError(
            f"{model} reads first-order weights, and the tables of slots {', '.join(missing)} have none; "
            "set first_order = true",
            "model.name",
        )


def two_tasks(shape: Shape, model: str) -> None:
    """Require two tasks: the click, then the click with a conversion."""
    if len(shape.tasks) != 2:  # noqa: PLR2004
        raise SpecError(
            f"{model} needs two tasks, the click and then the click with a conversion; there are {len(shape.tasks)}",
            "model.name",
        )
