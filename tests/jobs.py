"""Job files made from others by their keys. A job refuses a key it does not know; a text to replace may be lost."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

BARE = re.compile(r"[\w-]+", re.ASCII)
"""Keys that TOML takes without quotes."""


def changed(spec: str, changes: Mapping[str, Any], *, slots: Sequence[Mapping[str, Any]] = ()) -> str:
    """The job file with other values of dotted keys; None takes a key away. `slots` come after those it has.

    Sections can be appended to the text. Raises KeyError for a key to take away that is not there.
    """
    document = tomllib.loads(spec)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            del place[key]
        else:
            place[key] = value
    document["slots"] = [*document["slots"], *slots]
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> list[str]:
    """Values without a section first, then a header for each section and each element of a list of sections."""
    plain, sections = [], []
    for key, value in document.items():
        if isinstance(value, Mapping):
            sections += ["", f"[{key}]", *_pairs(value)]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            sections += [line for each in value for line in ("", f"[[{key}]]", *_pairs(each))]
        else:
            plain += _pairs({key: value})
    return plain + sections


def _pairs(section: Mapping[str, Any]) -> list[str]:
    return [f"{key if BARE.fullmatch(key) else json.dumps(key)} = {_text(value)}" for key, value in section.items()]


def _text(value: Any) -> str:
    """TOML's text of a value, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
