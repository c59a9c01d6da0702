"""Typed values as JSON-able data, and back: records of the log, facts of commits, states, status.

A value is a frozen dataclass, or a msgspec.Struct where keys have other names (`rename`), are left out at their default
(`omit_defaults`), or a tag tells the class (`tag`). Its annotations are the only description of the form on disk and on
wires. Fields that a class does not know are ignored: a newer program may have written them. What people write is
pydantic's (headrace.config).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from headrace.errors import HeadraceError

T = TypeVar("T")


class NotUnderstood(HeadraceError):
    """Data that is not a value of the class asked for."""


def plain(value: object) -> Any:
    """A typed value as dicts, lists, text and numbers; fields in the order of the class, keys of mappings as text."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_mapping)


def typed(cls: type[T], data: object, what: str) -> T:
    """The value of `cls` with this data: the inverse of `plain`. `what` names the data in the error.

    Raises NotUnderstood, with the path of the first field that is missing or of another type.
    """
    try:
        return msgspec.convert(data, cls, str_keys=True)
    except msgspec.ValidationError as error:
        raise NotUnderstood(f"{what}: {error}") from error


def _mapping(value: object) -> dict[Any, Any]:
    """A mapping of another class, such as a read-only one."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no form as JSON")
