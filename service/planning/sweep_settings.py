"""The settings of a sweep: a grid of values, a file of settings, or one for each slot left out."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from headrace.config import parse_value
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.secrets import secrets_of, without_secrets
from headrace.service.planning.toml_text import toml_value
from headrace.service.spec.left_out import WITHOUT

MAX_SETTINGS = 64
"""Most settings of a sweep; more are refused."""
SLICES = "metrics.slices"
BASE = "as it is"
"""Name of the job file's own setting."""
BRACKETS = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """One run of a sweep."""

    name: str
    """For people: the keys in which it differs."""
    overrides: tuple[str, ...]
    """Each "a.b=value", as for --set."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data, without secrets."""
        return {"name": self.name, "overrides": [shown(each) for each in self.overrides]}

    @property
    def without(self) -> list[str]:
        """The slots that it leaves out."""
        found = [each.partition("=")[2] for each in self.overrides if each.startswith(f"{WITHOUT}=")]
        return list(parse_value(found[-1])) if found else []


def shown(override: str) -> str:
    """An override with "***" in place of secrets."""
    key, _, text = override.partition("=")
    raw: Any = parse_value(text)
    for part in reversed(key.split(".")):
        raw = {part: raw}
    if not secrets_of(raw):
        return override
    visible = without_secrets(raw)
    for part in key.split("."):
        visible = visible[part] if isinstance(visible, dict) else visible
    return f"{key}={visible if isinstance(visible, str) else json.dumps(visible, default=str)}"


def split_values(text: str) -> list[str]:
    """The parts of a text between commas that are not inside brackets or quotes."""
    parts, closing, quote = [""], list[str](), ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in BRACKETS:
            closing.append(BRACKETS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == "," and not closing:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def grid(sets: Sequence[str], without: Sequence[str] = ()) -> list[SweepSetting]:
    """Every combination of the values of `sets` ("a.b=1,2,3"); keys with one value belong to all. Raises SpecError."""
    axes: list[list[tuple[str, bool]]] = []
    for text in sets:
        key, equals, values = text.partition("=")
        if not equals or not key:
            raise SpecError(f"--set {text!r} is not of the form a.b=1,2,3")
        found = split_values(values)
        axes.append([(f"{key}={value}", len(found) > 1) for value in found])
    fixed = (f"{WITHOUT}={json.dumps(list(without))}",) if without else ()
    settings = []
    for choice in product(*axes):
        name = " ".join(shown(text) for text, varies in choice if varies) or BASE
        settings.append(SweepSetting(name, (*(text for text, _ in choice), *fixed)))
    return settings


def read_settings(path: Path, common: Sequence[str] = ()) -> list[SweepSetting]:
    """The settings of a file, each after the `common` overrides. Raises SpecError."""
    try:
        return of_file(path.read_text(encoding="utf-8"), common)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}", "--settings") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8", "--settings") from None


def of_file(text: str, common: Sequence[str] = ()) -> list[SweepSetting]:
    """The settings of a TOML file: a table for each, named, of keys and values. Raises SpecError.

    A key is a path in quotes, "model.name", or a table of its own, [wide.model]. Each setting begins with `common`.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not TOML: {error}", "--settings") from error
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise SpecError(
            'needs a table for each setting: ["wide"], then keys such as "model.name" = "dcn_v2"', "--settings"
        )
    return [SweepSetting(name, (*common, *_overrides(table))) for name, table in tables.items()]


def _overrides(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Each key of a table as "a.b=value". A table is merged with the job file's; one with a `kind` takes its place."""
    for key, value in table.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value and "kind" not in value:
            yield from _overrides(value, f"{path}.")
        else:
            yield f"{path}={value if isinstance(value, str) and parse_value(value) == value else toml_value(value)}"


def ablations(base: SweepSetting, schema: Schema) -> list[SweepSetting]:
    """`base`, and one setting for each further slot that is left out of it."""
    gone = base.without
    slots = [slot.name for slot in schema.slots if slot.kind is not SlotKind.META and slot.name not in gone]
    rest = tuple(each for each in base.overrides if not each.startswith(f"{WITHOUT}="))
    return [
        base,
        *(SweepSetting(f"without {name}", (*rest, f"{WITHOUT}={json.dumps([*gone, name])}")) for name in slots),
    ]


def without_slices(setting: SweepSetting, slices: Sequence[str]) -> SweepSetting:
    """The setting without slices of metrics by slots that it leaves out; `slices` are those it would have."""
    kept = [name for name in slices if name not in setting.without]
    if len(kept) == len(slices):
        return setting
    return replace(setting, overrides=(*setting.overrides, f"{SLICES}={json.dumps(kept)}"))


def check_settings(settings: Sequence[SweepSetting]) -> None:
    """Raise SpecError for a sweep that compares nothing, or too much."""
    if len(settings) < 2:
        raise SpecError("one setting compares with nothing: give a key several values, --ablate, or a file of settings")
    if len(settings) > MAX_SETTINGS:
        raise SpecError(f"{len(settings)} settings; a sweep has at most {MAX_SETTINGS}")
    if len({each.name for each in settings}) < len(settings):
        raise SpecError("two settings are the same: a value is given twice")
