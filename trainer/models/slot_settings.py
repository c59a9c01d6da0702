"""Settings that name slots: finds the slots, or says what is wrong. Does not import torch.

Each function raises SpecError with the path of the key. A model calls it when it is built, the registry when a spec is
checked.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import SpecError
from headrace.trainer.models.contract import Shape, SlotShape
from headrace.trainer.models.settings import (
    DinSettings,
    FinalMlpSettings,
    NextItemSettings,
    SasrecSettings,
    TwoTowerSettings,
)


def din_slots(shape: Shape, settings: DinSettings) -> tuple[SlotShape, tuple[SlotShape, ...]]:
    """The target, and the sequences it is compared with."""
    target, sequences = _target(shape, "din", settings.target), _sequences(shape, "din")
    names = settings.sequence or tuple(slot.name for slot in sequences)
    attended = tuple(_named(sequences, name, "sequence", 'a slot with pooling = "none"') for name in names)
    for slot in attended:
        _one_length(target, slot, "din")
    return target, attended


def sasrec_slots(shape: Shape, settings: SasrecSettings) -> tuple[SlotShape, SlotShape]:
    """The target, and the sequence that the blocks read."""
    target, sequences = _target(shape, "sasrec", settings.target), _sequences(shape, "sasrec")
    if settings.sequence is None and len(sequences) > 1:
        raise _refusal(f"sasrec reads one sequence: name it, as {_listed(sequences)} are there", "sequence")
    name = settings.sequence or sequences[0].name
    sequence = _named(sequences, name, "sequence", 'a slot with pooling = "none"')
    _one_length(target, sequence, "sasrec")
    if sequence.dim % settings.attention_heads:
        heads = settings.attention_heads
        raise _refusal(f"{heads} does not divide {sequence.dim}, the dim of slot {name!r}", "attention_heads")
    return target, sequence


def without(shape: Shape, sequences: Sequence[SlotShape]) -> Shape:
    """The shape without these sequences."""
    names = {slot.name for slot in sequences}
    return replace(shape, sequences=tuple(slot for slot in shape.sequences if slot.name not in names))


def tower_shapes(shape: Shape, settings: TwoTowerSettings) -> tuple[Shape, Shape]:
    """The slots of the user, and those of the item in the order of the spec."""
    if not settings.item:
        raise _refusal('two_tower needs the slots of the item: item = ["article"]', "item")
    _known(shape, settings.item, "item")
    first = _named(shape.pooled, settings.item[0], "item", "a sparse slot with pooling: it tells items apart")
    _has_vector(first, "two_tower", "item")
    item = set(settings.item)
    user, items = _part(shape, item, inside=False), _part(shape, item, inside=True)
    if not width_of(user):
        raise SpecError("two_tower needs slots of the user: vectors or dense values beside those of the item", "slots")
    return user, items


def user_shape(shape: Shape, settings: NextItemSettings) -> Shape:
    """The slots that next_item reads."""
    _known(shape, settings.without, "without")
    user = _part(shape, set(settings.without), inside=False)
    if not width_of(user):
        raise _refusal("the slots that are left have neither vectors nor dense values", "without")
    return user


def context_shapes(shape: Shape, settings: FinalMlpSettings) -> tuple[Shape, Shape]:
    """The slots of the contexts of both perceptrons."""
    found = []
    for key in ("first_context", "second_context"):
        names: tuple[str, ...] = getattr(settings, key)
        if names and not settings.gates:
            raise _refusal("it is of no use with gates = false", key)
        _known(shape, names, key)
        context = _part(shape, set(names), inside=True)
        if names and not width_of(context):
            raise _refusal("its slots have neither vectors nor dense values", key)
        found.append(context)
    for hidden in (settings.hidden, settings.second_hidden):
        width = hidden[-1] if hidden else width_of(shape)
        if width % settings.bilinear_heads:
            raise _refusal(f"{settings.bilinear_heads} does not divide {width}, the last width", "bilinear_heads")
    return found[0], found[1]


def width_of(shape: Shape) -> int:
    """Number of values of all slots, side by side."""
    return sum(slot.dim for slot in shape.pooled + shape.sequences) + shape.dense_size


def _part(shape: Shape, names: set[str], *, inside: bool) -> Shape:
    def pick(slots: tuple[SlotShape, ...]) -> tuple[SlotShape, ...]:
        return tuple(slot for slot in slots if (slot.name in names) == inside)

    dense = tuple((name, size) for name, size in shape.dense if (name in names) == inside)
    return replace(shape, pooled=pick(shape.pooled), sequences=pick(shape.sequences), dense=dense)


def _target(shape: Shape, model: str, name: str | None) -> SlotShape:
    if name is None:
        raise _refusal(f'{model} needs the slot of the item that is judged: target = "article"', "target")
    target = _named(shape.pooled, name, "target", "a sparse slot with pooling")
    _has_vector(target, model, "target")
    return target


def _sequences(shape: Shape, model: str) -> tuple[SlotShape, ...]:
    found = tuple(slot for slot in shape.sequences if slot.dim)
    if not found:
        raise _refusal(f'{model} needs a sequence: a slot with pooling = "none" and vectors', "sequence")
    return found


def _one_length(target: SlotShape, sequence: SlotShape, model: str) -> None:
    if target.dim != sequence.dim:
        raise _refusal(
            f"{model} needs vectors of one length: slot {target.name!r} has dim {target.dim}, slot {sequence.name!r} "
            f"{sequence.dim}; give their tables the same dim",
            "sequence",
        )


def _has_vector(slot: SlotShape, model: str, key: str) -> None:
    if not slot.dim:
        raise _refusal(f"{model} needs vectors: the table of slot {slot.name!r} has dim = 0", key)


def _named(slots: Sequence[SlotShape], name: str, key: str, kind: str) -> SlotShape:
    found = next((slot for slot in slots if slot.name == name), None)
    if found is None:
        raise _refusal(f"{name!r} is not {kind}; there are: {_listed(slots)}", key)
    return found


def _known(shape: Shape, names: Sequence[str], key: str) -> None:
    known = [slot.name for slot in shape.pooled + shape.sequences] + [name for name, _ in shape.dense]
    if missing := next((name for name in names if name not in known), None):
        raise _refusal(f"{missing!r} is no sparse or dense slot; there are: {', '.join(known)}", key)


def _listed(slots: Sequence[SlotShape]) -> str:
    return ", ".join(repr(slot.name) for slot in slots) or "none"


def _refusal(message: str, key: str) -> SpecError:
    return SpecError(message, f"model.settings.{key}")
