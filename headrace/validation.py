"""Formats validation errors of a spec: the key's path, the problem, the allowed values, the nearest name.

It turns errors of pydantic into messages for users who do not know pydantic.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from headrace.errors import SpecError
from headrace.secrets import without_secrets

NOT_A_SECTION = ("model_type", "model_attributes_type", "dict_type")
KEY = "[key]"
"""Pydantic's marker for the key of a mapping."""
LABELS = ("str", "int", "float", "bool", "constrained-", "tuple[", "list[", "dict[", "literal[", "function-")
"""Beginnings of pydantic's names of the alternatives of a union that has no kinds."""
OF_ANOTHER_TYPE = ("string_type", "tuple_type")
UNKNOWN_KIND = ("union_tag_invalid", "union_tag_not_found", "slot_kind", "pipe_kind")


MAX_LISTED = 20
"""Most errors of a spec that are listed; of the others only the number."""
MAX_COMPARED_PROBLEMS = 200
"""Most errors of a spec that are compared with each other."""
MAX_COMPARED = 200
"""Characters of a name that are compared with known names, as the comparison takes time and memory for each."""


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the known name most similar to `name`, or else at all known names."""
    near = difflib.get_close_matches(name[:MAX_COMPARED], known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(sorted(known))}" if known else "there is none"


def no_such(kind: str, name: object, known: Collection[str]) -> str:
    """The message about a name of nothing: of a "table", a "sparse slot", with a hint at the known ones."""
    return f"there is no {kind} {name!r}; {nearest(str(name), known)}"


@contextmanager
def naming_entries(raw: Mapping[str, Any]) -> Iterator[None]:
    """Errors of a spec also have the names of the slots and tasks that their keys give by number, as in slots.19.

    Each line ends with the name, so that the key at its beginning stays as `--set` takes it.
    """
    try:
        yield
    except SpecError as error:
        text = "\n".join(line + _entry_name(line, raw) for line in str(error).split("\n"))
        named = SpecError(text)
        named.path = error.path
        raise named from error.__cause__


def _entry_name(line: str, raw: Mapping[str, Any]) -> str:
    found = re.match(r"(slot|task)s\.(\d{1,9})[.:]", line)
    entries = raw.get(f"{found[1]}s") if found else None
    if found is None or not isinstance(entries, list) or int(found[2]) >= len(entries):
        return ""
    entry = entries[int(found[2])]
    given = (entry.get("name") or entry.get("names")) if isinstance(entry, dict) else None
    names = [repr(name)[:MAX_COMPARED] for name in (given if isinstance(given, list) else [given]) if name]
    if not names or names[0] in line:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f" ({found[1]}{'s' if more else ''} {names[0]}{more})"


def format_errors(model: type[BaseModel], problems: Sequence[Any]) -> list[str]:
    """One line for each of pydantic's errors at a `model`, without errors that follow from others."""
    around = {tuple(problem["loc"][:length]) for problem in problems for length in range(len(problem["loc"]))}
    shown = [each for each in problems if each["type"] != "too_short" or tuple(each["loc"]) not in around]
    shown = _of_the_type_given(model, shown)
    left = len(shown) - MAX_LISTED
    return [format_error(model, problem) for problem in shown[:MAX_LISTED]] + ([f"and {left} more"] if left > 0 else [])


def _of_the_type_given(model: type[BaseModel], problems: Sequence[Any]) -> list[Any]:
    """The problems without "is no text" at a key that takes a text or a list, where another problem says more. Of more
    problems than are compared, all."""
    if len(problems) > MAX_COMPARED_PROBLEMS:
        return list(problems)
    placed = [(_place(model, each["loc"]).path, each) for each in problems]
    precise = {path for path, each in placed if each["type"] not in OF_ANOTHER_TYPE}

    def told(path: str, problem: Any) -> bool:
        if problem["type"] not in OF_ANOTHER_TYPE:
            return True
        return path not in precise and not any(other.startswith(f"{path}.") for other, _ in placed)

    return [each for path, each in placed if told(path, each)]


def format_error(model: type[BaseModel], problem: Any) -> str:
    """One line for one of pydantic's errors at a `model`."""
    location = problem["loc"]
    if location and location[-1] == KEY:  # the name itself is wrong: show it as the value
        location = location[:-2]
    place = _place(model, location)
    value, kind = without_secrets(problem.get("input")), problem["type"]
    if kind == "extra_forbidden":
        name = str(problem["loc"][-1])
        if kinds := _other_kinds_with(name, place):
            return f"{place.path}: is a key of kind = {' or '.join(map(repr, kinds))}, which is not set here"
        return f"{place.path}: unknown key; {_hint(name, _field_names(place.parents))}"
    if kind == "missing":
        return f"{place.path}: is missing"
    if kind in UNKNOWN_KIND and isinstance(value, dict):
        return f"{place.path}.kind: {_kind_message(value.get('kind'), _kinds(place.choices))}"
    if kind in NOT_A_SECTION or kind in UNKNOWN_KIND:
        return f"{place.path}: is a section with keys of its own (got {value!r})"
    if kind == "tuple_type":
        return f"{place.path}: is a list, written [..., ...] (got {value!r})"
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Tuple should", "The list should")
    hides = isinstance(value, str) and "://" in value and "@" in value  # an address, perhaps with a password
    known = hides or isinstance(value, dict | list | BaseModel) or repr(value) in message
    shown = "" if known else f" (got {value!r})"
    return f"{place.path}: {message}{shown}"


def _hint(name: str, known: Sequence[str]) -> str:
    if not known:
        return "no key is known here"
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known here: {', '.join(known)}"


def _kind_message(given: Any, kinds: Sequence[str]) -> str:
    allowed = ", ".join(repr(kind) for kind in kinds)
    if given is None:
        return f"is missing; one of {allowed}"
    near = difflib.get_close_matches(str(given), kinds, n=1)
    return f"{given!r} is none of {allowed}" + (f"; did you mean {near[0]!r}?" if near else "")


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an error in the spec."""

    path: str
    """The path of the key, as the user writes it."""
    parents: Sequence[Any]
    """The annotations of the enclosing value."""
    siblings: Sequence[Any]
    """The same with those of other kinds."""
    choices: Sequence[Any]
    """The annotations allowed here."""


def _place(model: type[BaseModel], location: Sequence[int | str]) -> _Place:
    """Follow `location`, without the union tags that pydantic inserts."""
    path: list[str] = []
    parents: Sequence[Any] = ()
    choices: Sequence[Any] = (model,)
    siblings = of_all_kinds = choices
    for part in location:
        tagged = [choice for choice in choices if _tag_fits(choice, part)]
        if tagged and len(tagged) < sum(map(_is_model, choices)):
            of_all_kinds, choices = choices, tagged
            continue
        if isinstance(part, str) and part.startswith(LABELS) and sum(choice is not NoneType for choice in choices) > 1:
            continue
        path.append(str(part))
        parents, siblings = choices, of_all_kinds
        choices = of_all_kinds = [choice for parent in choices for choice in alternatives_below(parent, part)]
    return _Place(".".join(path) or "(spec)", parents, siblings, choices)


def alternatives_below(annotation: Any, part: int | str) -> Sequence[Any]:
    """The annotations allowed under `part` of a value with `annotation`."""
    origin = get_origin(annotation)
    if origin is dict:
        return alternatives(get_args(annotation)[1])
    if origin in (tuple, list) and isinstance(part, int):
        return alternatives(get_args(annotation)[0])
    if _is_model(annotation):
        for name, field in annotation.model_fields.items():
            if part in (name, field.alias):
                return alternatives(field.annotation)
    return ()


def alternatives(annotation: Any) -> Sequence[Any]:
    """The alternatives of a union; for another annotation, itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin is Union or origin is UnionType:
        return [choice for arg in get_args(annotation) for choice in alternatives(arg)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kinds(choices: Sequence[Any]) -> list[str]:
    """The values of `kind` in a union's alternatives."""
    fields = [choice.model_fields["kind"].annotation for choice in choices if _has_kind(choice)]
    return [str(kind) for field in fields if get_origin(field) is Literal for kind in get_args(field)]


def _has_kind(choice: Any) -> bool:
    return _is_model(choice) and "kind" in choice.model_fields


def _other_kinds_with(name: str, place: _Place) -> list[str]:
    """The kinds that have a key, of those that are not chosen."""
    others = [choice for choice in place.siblings if choice not in place.parents]
    return [kind for choice in others if name in _field_names([choice]) for kind in _kinds([choice])]


def _tag_fits(choice: Any, part: int | str) -> bool:
    return _has_kind(choice) and str(part).removeprefix("tag:") in _kinds([choice])


def _field_names(choices: Sequence[Any]) -> list[str]:
    fields = [field for choice in choices if _is_model(choice) for field in choice.model_fields.items()]
    return sorted({field.alias or name for name, field in fields})
