"""Inputs, requests and results of the actions that a job's page offers. Pure.

The API checks the rights of the reader, and what is sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.service.api.actions import JobAction
from headrace.service.api.app import OFFERED
from headrace.service.api.forms import FormContext, FormField, Group
from headrace.service.planning.suggestion_text import lines_of, tables_of
from headrace.service.tables.table_requests import format_dry_run
from headrace.service.ui.format import format_count


class InputKind(StrEnum):
    """The kind of an input."""

    TEXT = "text"
    NUMBER = "number"
    FLAG = "flag"
    CHOICE = "choice"


class Weight(StrEnum):
    """How an action is offered: everyday ones as buttons, the others in a menu of this name."""

    EVERYDAY = "Everyday"
    MAINTENANCE = "Maintenance"
    DANGEROUS = "Danger"


@dataclass(frozen=True, slots=True)
class Input:
    """One input of an action's dialog."""

    name: str
    label: str
    kind: InputKind
    optional: bool
    default: Any
    """The value that it begins with; None: the first option of a choice that must be made, else none."""
    options: Sequence[str]
    """The options of a choice; the suggestions for a text."""


def permitted_actions(may: Callable[[str], bool]) -> list[JobAction]:
    """The actions that a visitor has the right to, in the order of their buttons."""
    return [act for act in OFFERED if may(act.id)]


def weight_of(act: JobAction) -> Weight:
    """Where an action is offered."""
    if act.form.grave:
        return Weight.DANGEROUS
    return Weight.EVERYDAY if act.form.group in (Group.STATE, Group.COPIES) else Weight.MAINTENANCE


def inputs_of(act: JobAction, known: FormContext) -> list[Input]:
    """The inputs of an action's dialog, from its form and the schema of its body."""
    schema = _schema(act)
    return [_input_of(each, schema, known) for each in act.form.fields]


def request_of(act: JobAction, filled: Mapping[str, Any]) -> tuple[dict[str, str], Any]:
    """The names in the address, and the body, for an action and its input. Raises ValueError for missing input."""
    schema = _schema(act)
    for each in act.form.fields:
        if not _optional(each, schema) and filled.get(each.name) in (None, ""):
            raise ValueError(f"{each.label}: must be filled in")
    names = {name: str(value) for name, value in filled.items() if f"{{{name}}}" in act.path}
    rest = {name: value for name, value in filled.items() if name not in names}
    if act.body is None:
        return names, None
    return names, (_given if act.form.body is None else act.form.body)(rest)


def _schema(act: JobAction) -> dict[str, Any]:
    return {} if act.body is None else act.body.model_json_schema()


def _optional(field: FormField, schema: Mapping[str, Any]) -> bool:
    return field.name in schema.get("properties", {}) and field.name not in schema.get("required", ())


def _input_of(field: FormField, schema: Mapping[str, Any], known: FormContext) -> Input:
    told: Mapping[str, Any] = schema.get("properties", {}).get(field.name, {})
    parts = told.get("anyOf", [told])  # one of which may be null
    types = {part.get("type") for part in parts}
    options = [value for part in parts for value in part.get("enum", ())]
    if field.choices is not None:
        options = list(field.choices(known))
    if "boolean" in types:
        kind = InputKind.FLAG
    elif types & {"integer", "number"}:
        kind = InputKind.NUMBER
    elif field.free or (field.choices is None and not options):
        kind = InputKind.TEXT
    else:
        kind = InputKind.CHOICE
    default = told.get("default") if field.default is None else field.default
    default = known.given.get(field.name, default)
    return Input(field.name, field.label, kind, _optional(field, schema), default, options)


def _given(filled: Mapping[str, Any]) -> dict[str, Any]:
    """The filled-in values. A browser makes no difference between 3 and 3.0."""
    whole = {name: int(value) for name, value in filled.items() if isinstance(value, float) and value.is_integer()}
    return {name: value for name, value in {**filled, **whole}.items() if value is not None and value != ""}


def outcome_lines(operation: Mapping[str, Any]) -> list[str]:
    """The result of an operation that has ended, as lines of text."""
    if (problem := operation["problem"]) is not None:
        return [str(problem.get("detail") or problem.get("title") or "it failed without a reason")]
    result = operation["result"]
    match result:
        case {"fraction": _, "going": _, "below": _}:
            return [line.replace("needs --allow", "needs Allow") for line in format_dry_run(result)]
        case {"features": list(_), "slots": dict(_), "admission": dict(_)}:
            tables = [[*table.lines(), ""] for table in tables_of(result) if table.rows]
            return [*(line for table in tables for line in table), *lines_of(result)]
        case {"said": str(said)}:
            return [said]
        case {"lines": list(lines)}:
            return [str(line) for line in lines]
        case dict():
            return [f"{name}: {_text(value)}" for name, value in result.items() if value not in (None, [], {})]
        case None:
            return []
        case _:
            return [_text(result)]


def answered_words(act: JobAction, job: str, answer: Mapping[str, Any] | None) -> str:
    """The answer to an action that is no operation, as text: the phase changes later, or all is done."""
    if answer is not None and "desired" in answer:
        return f"{act.form.label} is requested: {job} will be {answer['desired']}."
    return "\n".join([f"{act.form.label}: it is done.", *outcome_lines({"problem": None, "result": answer})])


def ended_words(operation: Mapping[str, Any]) -> str:
    """How an operation ended, as text."""
    match operation["state"]:
        case "done":
            return "It is done."
        case "failed":
            return "It failed."
        case "cancelled":
            return "It was cancelled."
        case _:
            return "The service ended meanwhile: request it again."


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return format_count(value)
    return value if isinstance(value, str) else json.dumps(value)
