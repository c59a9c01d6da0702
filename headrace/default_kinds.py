"""Kinds of sections that leave them out: `optimizer.lr=0.02` alone means the default's optimizer with another rate.

Pure functions on a spec as it was read, before it is checked; the sections say what their defaults are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from headrace.validation import alternatives, alternatives_below


def with_default_kinds(model: type[BaseModel], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw`, a spec of `model`, with the kind in each section that has keys, but no `kind`, where a default has one."""
    return dict(_completed([model], raw))


def _completed(choices: Sequence[Any], raw: Any) -> Any:
    if isinstance(raw, list):
        return [_completed(_below(choices, number), each) for number, each in enumerate(raw)]
    if not isinstance(raw, Mapping):
        return raw
    beginnings = {key: each for choice in choices for key, each in _beginnings(choice, raw).items()}
    return {
        key: _completed(
            _below(choices, key),
            {**beginnings.get(key, {}), **value} if isinstance(value, Mapping) and "kind" not in value else value,
        )
        for key, value in raw.items()
    }


def _beginnings(choice: Any, raw: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By key of a section: what its own section begins with if it has no kind."""
    if not (isinstance(choice, type) and issubclass(choice, BaseModel)):
        return {}
    found: dict[str, Mapping[str, Any]] = {
        field.alias or name: {"kind": field.default.kind}
        for name, field in choice.model_fields.items()
        if hasattr(field.default, "kind") and len(alternatives(field.annotation)) > 1
    }
    for key, other in getattr(choice, "begins_as", {}).items():
        given = raw.get(other, {})
        found[key] = {**found[other], **given} if isinstance(given, Mapping) else found[other]
    return found


def _below(choices: Sequence[Any], part: int | str) -> Sequence[Any]:
    return [choice for each in choices for choice in alternatives_below(each, part)]
