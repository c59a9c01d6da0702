"""Reads events of Avro: one record an event, without the header of a file, under the schema that wrote it.

Logical types are read as what they are stored in: a timestamp is a whole number. Recursive types are refused, as the
depth of an event would be without bound; so are types of which few bytes can hold very many values.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import fastavro
from fastavro.schema import SchemaParseException, UnknownType

from headrace.dataset.features.event_reader import InvalidSchema
from headrace.dataset.features.plain_rows import Unreadable
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.documents import MAX_DEPTH, InvalidDocument, parse
from headrace.validation import nearest

KEPT = ("type", "name", "namespace", "fields", "items", "values", "symbols", "size", "aliases", "default")
"""Attributes of a schema that decide how bytes are read."""
PRIMITIVE = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
MAX_SCHEMA_BYTES = 1 << 20
FEWEST_BYTES = {"null": 0, "float": 4, "double": 8}
"""Bytes of a value of a primitive type, if not 1 at least."""
VALUES_OF_BYTE, MAX_EXCESS = 16, 1_000
"""Most values for each byte of an event, and how many more it may have: the work for an event is bounded so."""
BROKEN = (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, StopIteration)
"""Errors of fastavro for bytes that are not of the schema; UnicodeDecodeError is a ValueError."""
ADDRESS = re.compile(r" from <[^>]* at 0x[0-9a-f]+>")

Schema = Mapping[str, Any]


class AvroEvents:
    """Reads the events of one schema."""

    def __init__(self, text: bytes | str, references: Sequence[str] = ()) -> None:
        """`references`: texts of schemas whose names `text` uses, each after those that it uses itself.

        Raises InvalidSchema.
        """
        named: dict[str, Any] = {}
        for each in (*references, text):
            schema = _cleaned(_parsed(each))
            _check_bounded(schema, named)
            try:
                self._schema: Any = fastavro.parse_schema(schema, named_schemas=named)
            except (SchemaParseException, UnknownType, ValueError, KeyError, TypeError) as error:
                raise InvalidSchema(f"is not a schema of Avro: {_shown(error)}") from None
        self._named = named
        if not isinstance(self._schema, dict) or self._schema.get("type") != "record":
            raise InvalidSchema("is not a schema of a record; an event is a record with fields")

    def read(self, event: bytes) -> Mapping[str, Any] | Unreadable:
        """The fields of an event."""
        data = io.BytesIO(event)
        try:
            record = fastavro.schemaless_reader(data, self._schema, None)
        except UnicodeDecodeError as error:
            return Unreadable(f"not UTF-8: {error}")
        except BROKEN as error:
            return Unreadable(f"the event is not of the schema of Avro: {_shown(error)}")
        if data.tell() != len(event):
            return Unreadable(
                f"the event is not of the schema of Avro: {len(event) - data.tell()} bytes follow the record"
            )
        assert isinstance(record, dict)
        return record

    def check_fields(self, fields: Iterable[EventField]) -> None:
        """Raise InvalidSchema for a field that no event can have."""
        for field in fields:
            node: Any = self._schema
            for number, name in enumerate(field.names):
                node = self._field(node, name, ".".join(field.names[: number + 1]))
            kinds = self._kinds(node)
            if all(kind in ("record", "map") for kind in kinds) and field.kind is not FieldKind.LENGTH:
                raise InvalidSchema(f"has field {field.path!r}, a {kinds[0]}; name a field of it")
            if all(kind in ("bytes", "fixed") for kind in kinds):
                raise InvalidSchema(f"has field {field.path!r} of bytes, which no slot takes; write it as a string")

    def _field(self, node: Any, name: str, path: str) -> Any:
        """The type of a field of a record, in whatever unions and lists the record is; any name is in a map."""
        known: list[str] = []
        for kind in self._branches(node):
            if isinstance(kind, dict) and kind["type"] in ("record", "error"):
                found = {each["name"]: each["type"] for each in kind["fields"]}
                known += found
                if name in found:
                    return found[name]
            elif isinstance(kind, dict) and kind["type"] == "map":
                return kind["values"]
        raise InvalidSchema(f"has no field {path!r}; {nearest(name, known)}")

    def _branches(self, node: Any) -> list[Any]:
        """The types that a value can have: branches of unions, and elements of lists."""
        if isinstance(node, list):
            return [kind for branch in node for kind in self._branches(branch)]
        if isinstance(node, str):
            return [node] if node in PRIMITIVE else self._branches(self._named[node])
        if node["type"] == "array":
            return self._branches(node["items"])
        return (
            [node] if isinstance(node["type"], str) and node["type"] not in PRIMITIVE else self._branches(node["type"])
        )

    def _kinds(self, node: Any) -> list[str]:
        kinds = [kind if isinstance(kind, str) else str(kind["type"]) for kind in self._branches(node)]
        return [kind for kind in kinds if kind != "null"] or ["null"]


def _parsed(text: bytes | str) -> Any:
    try:
        return parse(text, "the schema", MAX_SCHEMA_BYTES)
    except InvalidDocument as error:
        raise InvalidSchema(error.why) from None


def _cleaned(node: Any) -> Any:
    """A schema without logical types, documentation and other attributes that do not decide how bytes are read."""
    if isinstance(node, list):
        return [_cleaned(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain = ("default", "symbols", "aliases", "name", "namespace", "size")
    return {name: node[name] if name in plain else _cleaned(node[name]) for name in KEPT if name in node}


class Extent(NamedTuple):
    """Of a type: what bounds the work and the depth of its values."""

    excess: int
    """Most values beyond VALUES_OF_BYTE for each byte: of a record, the sum of its fields."""
    depth: int
    """Types inside each other, by names too."""


def _check_bounded(node: Any, named: Mapping[str, Any]) -> None:
    """Raise InvalidSchema for a recursive type, and where few bytes can have very many values."""
    known: dict[str, Extent] = {}
    for name, schema in named.items():
        known[name] = _extent(schema, known, ())
    if (excess := _extent(node, known, ()).excess) > MAX_EXCESS:
        raise InvalidSchema(f"has records of {excess:,} values without a byte; at most {MAX_EXCESS:,}")


def _extent(node: Any, known: dict[str, Extent], above: tuple[str, ...], space: str = "") -> Extent:
    """The extent of a type. Elements of a list must have no excess, since their number is free.

    `known` has the named types so far, `above` those open."""
    if isinstance(node, str) and node in PRIMITIVE:
        return Extent(1 - VALUES_OF_BYTE * FEWEST_BYTES.get(node, 1), 0)
    if isinstance(node, str):
        name = node if "." in node or not space else f"{space}.{node}"
        if name in above or node in above:
            raise InvalidSchema(f"has a recursive type, {node!r}; the depth of its events has no bound")
        return known.get(name, known.get(node, Extent(0, 0)))  # an unknown name is an error of parse_schema
    full_name = ""
    if isinstance(node, list):
        excess, inner = -VALUES_OF_BYTE, [_extent(branch, known, above, space) for branch in node]
        excess += max((each.excess for each in inner), default=0)
    elif not isinstance(node, dict):
        _refuse(node)
    elif (kind := node.get("type")) in ("record", "error"):
        full_name, within = _full_name(node, space)
        fields = node.get("fields")
        if not isinstance(fields, list) or not all(isinstance(each, dict) for each in fields):
            _refuse(node)
        inner = [_extent(each.get("type"), known, (*above, full_name), within) for each in fields]
        excess = 1 + sum(each.excess for each in inner)
    elif kind in ("array", "map"):
        inner = [_extent(node.get("items" if kind == "array" else "values"), known, above, space)]
        if inner[0].excess > (VALUES_OF_BYTE - 1 if kind == "map" else 0):  # a key is a value of a byte at least
            few = f"take no bytes, or have more than {VALUES_OF_BYTE} values for each"
            raise InvalidSchema(f"has a list of elements that {few}; their number has no bound")
        excess = 1 - VALUES_OF_BYTE
    elif kind in ("fixed", "enum"):
        full_name, _ = _full_name(node, space)
        inner, size = [], node.get("size") if kind == "fixed" else 1
        excess = 1 - VALUES_OF_BYTE * (size if isinstance(size, int) else 0)
    else:
        return _extent(kind, known, above, space)
    extent = Extent(excess, 1 + max((each.depth for each in inner), default=0))
    if extent.depth > MAX_DEPTH:
        raise InvalidSchema(f"has types nested deeper than {MAX_DEPTH}, by their names")
    if full_name:
        known[full_name] = extent
    return extent


def _full_name(node: Schema, space: str) -> tuple[str, str]:
    """The full name of a named type, and the namespace of the names inside."""
    name, given = node.get("name"), node.get("namespace", space)
    if not isinstance(name, str) or not isinstance(given, str):
        _refuse(node)
    full = name if "." in name or not given else f"{given}.{name}"
    return full, full.rpartition(".")[0]


def _refuse(node: Any) -> NoReturn:
    raise InvalidSchema(f"is not a schema of Avro: {json.dumps(node, default=str)[:100]}")


def _shown(error: Exception) -> str:
    """Its text, without the address of an object: it is the same whenever it is said."""
    return (ADDRESS.sub("", str(error)) or type(error).__name__)[:200]
