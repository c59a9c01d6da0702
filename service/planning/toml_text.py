"""Values and slots as text of a job file. Imports no spec, so commands that only print are quick."""

import json
from collections.abc import Mapping
from typing import Any


def toml_value(value: Any) -> str:
    """A value in one line of TOML."""
    match value:
        case dict():
            return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case bool():
            return json.dumps(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def slot_lines(keys: Mapping[str, Any]) -> list[str]:
    """An entry of `slots`, by its keys."""
    return ["[[slots]]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())]
