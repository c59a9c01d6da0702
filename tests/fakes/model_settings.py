"""Headrace's models of tasks with logits that read any slots, and settings of any model that fit a shape."""

from typing import Any

from headrace.trainer.models.contract import Shape
from headrace.trainer.models.registry import MODELS

MODEL_NAMES = [name for name in MODELS.own if name != "skip_gram" and not MODELS.load(name).of_classes]
NEEDS_SEQUENCE = tuple(name for name in MODEL_NAMES if "sequence" in MODELS.load(name).model_fields)


def fitting(name: str, shape: Shape) -> dict[str, Any]:
    """The settings that a model needs for `shape`, as [model.settings] holds them: keys that name slots."""
    pooled, sequences = [slot.name for slot in shape.pooled if slot.dim], [slot.name for slot in shape.sequences]
    fields = MODELS.load(name).model_fields if name in MODELS.names() else {}
    slots = {"target": pooled[-1:], "item": pooled[:1], "sequence": sequences[:1]}
    if "sequence" in fields and fields["sequence"].default == ():  # all of them
        slots.pop("sequence")
    return {key: names[0] for key, names in slots.items() if key in fields and names}
