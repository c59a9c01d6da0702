"""Declares, reads and validates sections of the job spec.

A section is a frozen pydantic model in the `config.py` of the package that reads it; `service.spec.job` composes
them. This module has the base class, the units, and reading of TOML with overrides; headrace.validation formats errors.
"""

import ast
import inspect
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    WithJsonSchema,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue

from headrace import documents
from headrace.default_kinds import with_default_kinds
from headrace.errors import SpecError
from headrace.relative_names import check_lengths
from headrace.renamed_keys import Renamed, with_present_names, with_written_names
from headrace.text_kinds import TextKind
from headrace.validation import format_errors

DURATION_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MAX_OVERRIDES_BYTES = 1 << 20
"""Longest file of overrides."""
MAX_DURATION_S = 36_500 * 86_400.0
"""A hundred years; longer waits overflow clocks."""
MIN_DURATION_S = 0.001
"""The shortest interval that can be waited for."""
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
"""The largest float32; tables count and learn in float32."""
MIN_FLOAT32 = 2.0**-126
"""The smallest normal float32 above 0; far smaller numbers become 0."""


class Section(BaseModel):
    """A part of the spec, frozen. Unknown keys are errors, and so are numbers that JSON lacks, as the log is JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)
    renamed: ClassVar[Renamed] = {}
    """Of a whole spec: its keys with an old name, which `validate` accepts."""
    holds: ClassVar[Mapping[str, TextKind]] = {}
    """The kind of text in each of its own keys that can hold free text. A key without one is refused over the API."""
    begins_as: ClassVar[Mapping[str, str]] = {}
    """Keys of sections that begin with the settings of another one, where they have no `kind` of their own."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the keys' docstrings. Every process has these classes; that each reads its source costs half a second,
        so `use_attribute_docstrings` is not set.
        """
        found = handler(core)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        docstrings = _key_docstrings(cls)
        for name, field in cls.model_fields.items():
            if name in docstrings:
                properties.get(field.alias or name, {}).setdefault("description", docstrings[name])
        return found


class GrownSection(Section):
    """A section with later keys: where they have their defaults it is written as before there were any."""

    later: ClassVar[frozenset[str]] = frozenset()
    """The later keys. Their defaults change nothing."""

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        unset = {name for name in self.later if getattr(self, name) == fields[name].default}
        return {name: value for name, value in dump(self).items() if name not in unset}


def _key_docstrings(section: type[Section]) -> dict[str, str]:
    """The docstring below each key of a section and of its bases, cleaned. A class without a source has none."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if not issubclass(each, Section):
            continue
        try:
            source = inspect.getsource(each)
        except (OSError, TypeError):
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef), body
        for key, below in pairwise(body.body):
            match key, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def _with_unit(text: object, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not of the form {example!r}; units are {', '.join(units)}")
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value


def parse_duration(text: object) -> float:
    """Seconds of a text such as "250ms", "1s" or "24h"."""
    return _with_unit(text, DURATION_S, "30s")


def parse_size(text: object) -> int:
    """Bytes of a text such as "64KiB" or "512MiB"."""
    return int(_with_unit(text, SIZE_BYTES, "512MiB"))


def _duration_or_seconds(value: object) -> float:
    # A default, or a model built in code or from its own dump, is already in seconds.
    return value if isinstance(value, float) else parse_duration(value)


def _takes_time(duration_s: float) -> float:
    if duration_s < MIN_DURATION_S:
        raise ValueError(f"is shorter than {MIN_DURATION_S * 1000:g}ms")
    return duration_s


def _size_or_bytes(value: object) -> int:
    return value if type(value) is int else parse_size(value)


Duration = Annotated[
    float,
    BeforeValidator(_duration_or_seconds),
    Field(ge=0, le=MAX_DURATION_S),
    WithJsonSchema({"type": "string", "examples": ["1s", "24h"]}),
]
"""Seconds, written "1s", "24h"; may be 0."""

PositiveDuration = Annotated[Duration, AfterValidator(_takes_time)]
"""Seconds of an interval or a deadline, above 0."""

Size = Annotated[
    int,
    BeforeValidator(_size_or_bytes),
    Field(ge=0, lt=1 << 62),
    WithJsonSchema({"type": "string", "examples": ["512MiB"]}),
]
"""Bytes, written "512MiB"; may be 0."""

PositiveSize = Annotated[Size, Field(ge=1)]
"""Bytes, at least 1."""

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
"""A count or an index; sums of two fit 64 bits."""

PositiveCount = Annotated[Count, Field(ge=1)]
"""A count, at least 1."""

Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
"""The seed of all random choices."""

SlotGroup = Annotated[int, Field(ge=0, lt=1 << 16)]
"""Number of a slot group; rows store it in 16 bits."""


def _is_within(number: float) -> float:
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"is beyond float32, in which it is used; the greatest is {MAX_FLOAT32}")
    return number


def _is_above_0(number: float) -> float:
    if number < MIN_FLOAT32:
        raise ValueError(f"is so small that float32, in which it is used, cannot hold it; the least is {MIN_FLOAT32}")
    return number


Float32 = Annotated[float, AfterValidator(_is_within)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_is_within), AfterValidator(_is_above_0)]
NotNegative = Annotated[float, Field(ge=0), AfterValidator(_is_within)]
Rate = Annotated[float, Field(gt=0, le=1), AfterValidator(_is_above_0)]
Beta = Annotated[float, Field(ge=0, le=1 - 2**-24)]
"""Decay of a moment: below 1, also as float32."""


def _path_of_a_folder(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("is empty, or holds a NUL character, which no path may")
    check_lengths(text)
    return text


FolderPath = Annotated[str, AfterValidator(_path_of_a_folder)]
"""The path of a folder that may be created."""


def load_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The spec at `path` as a dictionary, with each `a.b=value` of `overrides` applied.

    A value is parsed as TOML, or else taken as plain text. A list is indexed by number: `slots.0.dim=8`. `@FILE` stands
    for the overrides in a file, a JSON list of texts. Raises SpecError naming the file, line and key.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # not TOML, or beyond a bound of Python on numbers or depth
        raise SpecError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        for each in _texts_of(Path(override[1:])) if override.startswith("@") else [override]:
            _override(raw, each)
    return raw


def _texts_of(path: Path) -> list[str]:
    """The overrides in a file, which other users cannot see as they see arguments. Raises SpecError."""
    try:
        with path.open("rb") as file:
            found = documents.parse(documents.read_bounded(file, MAX_OVERRIDES_BYTES), path, MAX_OVERRIDES_BYTES)
    except (OSError, documents.InvalidDocument) as error:
        raise SpecError(f"--set @{path} cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise SpecError(f'--set @{path} is not a JSON list of texts: ["a.b=value", "a.c=[1, 2]"]')
    return found


def _override(raw: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise SpecError(f"--set {override!r} is not of the form a.b=value")
    set_key(raw, path, parse_value(text))


def set_key(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set the key at `path` of a spec, "a.b", in place. Raises SpecError where its parent can have none."""
    *parents, last = path.split(".")
    node: Any = raw
    for done, name in enumerate(parents):
        node = _child(node, name, ".".join(parents[: done + 1]))
    if isinstance(node, list):
        _child(node, last, path)
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise SpecError("cannot be set: its parent holds a plain value", path)


def parse_value(text: str) -> Any:
    """The value of a text on the command line: parsed as TOML, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def is_index(name: str) -> bool:
    """Whether a part of a key's path is the index of a list entry, without leading zeros."""
    return re.fullmatch(r"0|[1-9][0-9]{0,8}", name) is not None


def _child(node: Any, name: str, path: str) -> Any:
    if isinstance(node, list):
        if not is_index(name) or int(name) >= len(node):
            raise SpecError(f"is a list of {len(node)}; name an entry by its number from 0", path)
        return node[int(name)]
    if not isinstance(node, dict):
        raise SpecError("cannot be set: its parent holds a plain value", path)
    return node.setdefault(name, {})


Model = TypeVar("Model", bound=Section)


def validate(model: type[Model], raw: Mapping[str, Any], *, only_known: bool = False) -> Model:
    """`raw` as a `model`; `only_known` drops top-level sections that the model does not declare.

    Raises SpecError with one line for each error: the key's path, the value, the allowed values, the nearest name.
    """
    raw, written = with_present_names(raw, model.renamed)
    if only_known:
        raw = {name: value for name, value in raw.items() if name in model.model_fields}
    if documents.value_nested_deeper(raw, documents.MAX_DEPTH):
        raise SpecError(f"lists and sections are nested deeper than {documents.MAX_DEPTH}")
    raw = with_default_kinds(model, raw)
    try:
        # Strict, so that true is not 1 and "7" not 7; from JSON, so that a list may become a tuple and a text an enum.
        return model.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        lines = format_errors(model, error.errors(include_url=False))
        raise SpecError("\n".join(with_written_names(line, written) for line in lines)) from None
