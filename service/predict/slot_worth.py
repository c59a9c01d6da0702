"""Measures the worth of slots: what a holdout's metrics lose when the model gets other samples' values of a slot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.dataset.spec.config import SlotEntry, SlotKind
from headrace.dataset.spec.schema import Schema

LOSSES = {"auc": 1, "gauc": 1, "logloss": -1, "rmse": -1}
"""Metrics that are compared, and the sign of a loss."""

Metrics = Mapping[str, Any]


def measure(
    slots: Sequence[SlotEntry], fixed: Sequence[str], found: Metrics, measured: Callable[[Sequence[str]], Metrics]
) -> list[dict[str, Any]]:
    """By task and slot: the losses, the greatest first. `found`: metrics with only the slots `fixed` shuffled."""
    names = [slot.name for slot in Schema.of(slots).slots if slot.kind is not SlotKind.META and slot.name not in fixed]
    without = {name: measured([*fixed, name]) for name in names}
    lines = [
        {"task": task, "slot": name, **_losses(before, without[name]["tasks"][task])}
        for task, before in found.get("tasks", {}).items()
        for name in names
    ]
    return sorted(lines, key=lambda line: (line["task"], -next((line[each] for each in LOSSES if each in line), 0.0)))


def _losses(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    pairs = {name: (before.get(name), after.get(name)) for name in LOSSES}
    return {name: LOSSES[name] * (a - b) for name, (a, b) in pairs.items() if a is not None and b is not None}


def format_losses(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table for people."""
    named = [name for name in LOSSES if any(name in line for line in lines)]
    yield f"{'task':<12} {'slot':<24}" + "".join(f"{name:>10}" for name in named) + "   lost without the slot's values"
    for line in lines:
        yield f"{line['task']:<12} {line['slot']:<24}" + "".join(f"{line.get(name, 0.0):>+10.5f}" for name in named)
