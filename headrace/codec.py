"""Typed values as JSON-able data or as bytes, and back: records of the log, facts of commits, states, calls, status.

A value is a frozen dataclass, or a msgspec.Struct where keys have other names (`rename`), are left out at their default
(`omit_defaults`), or a tag tells the class (`tag`). Its annotations are the only description of the form on disk and on
wires. Fields that a class does not know are ignored: a newer program may have written them. What people write is
pydantic's (headrace.config).
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from headrace.errors import HeadraceError

T = TypeVar("T")


class NotUnderstood(HeadraceError):
    """Data that is not a value of the class asked for."""


def plain(value: object) -> Any:
    """A typed value as dicts, lists, text and numbers; fields in the order of the class, keys of mappings as text."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_builtin)


def typed(cls: type[T], data: object, what: str, error: Callable[[str], Exception] = NotUnderstood) -> T:
    """The value of `cls` with this data: the inverse of `plain`. `what` names the data in the error.

    Raises an `error`, with the path of the first field that is missing or of another type.
    """
    try:
        return msgspec.convert(data, cls, str_keys=True)
    except msgspec.ValidationError as found:
        raise error(f"{what}: {found}") from found


def written(default: T) -> T:
    """The default of a field that is written all the same, in a class with `omit_defaults`."""
    found: T = msgspec.field(default_factory=lambda: default)
    return found


def packed(value: object) -> bytes:
    """A typed value as MessagePack, for calls between processes: paths are absolute text, arrays their bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_packable)


def unpacked(cls: type[T], data: bytes, what: str) -> T:
    """The inverse of `packed`. Raises NotUnderstood."""
    try:
        return msgspec.msgpack.decode(data, type=cls, dec_hook=_unpackable)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotUnderstood(f"{what}: {error}") from error


def _packable(value: object) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if (np := sys.modules.get("numpy")) is not None and isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data
    return _builtin(value)


def _unpackable(cls: type, data: Any) -> Any:
    """A path, or an array of the numbers that its annotation names, as a read-only view."""
    if cls is Path:
        return Path(data)
    if (np := sys.modules.get("numpy")) is not None and get_origin(cls) is np.ndarray:
        (kind,) = get_args(get_args(cls)[1])
        if not isinstance(data, bytes) or len(data) % np.dtype(kind).itemsize:
            raise ValueError("an array ends in the middle of a number")
        return np.frombuffer(data, kind)
    raise NotImplementedError(f"values of {cls} are not packed")


def _builtin(value: object) -> Any:
    """A value of a subclass, such as a read-only mapping or a number of NumPy."""
    if isinstance(value, Mapping):
        return dict(value)
    for cls in (float, str):
        if isinstance(value, cls):
            return cls(value)
    raise TypeError(f"a {type(value).__name__} has no form as JSON")
