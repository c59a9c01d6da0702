"""Settings of our models that fit a shape: those that name slots have no default."""

from typing import Any

from headrace.trainer.models.contract import Shape

NEEDS_SEQUENCE = ("din", "sasrec")


def fitting(name: str, shape: Shape) -> dict[str, Any]:
    """The settings that model `name` needs for `shape`, as [model.settings] holds them."""
    pooled = [slot.name for slot in shape.pooled if slot.dim]
    named = {
        "din": {"target": pooled[-1:]},
        "sasrec": {"target": pooled[-1:], "sequence": [slot.name for slot in shape.sequences][:1]},
        "two_tower": {"item": pooled[:1]},
    }
    return {key: value if key == "item" else value[0] for key, value in named.get(name, {}).items() if value}
