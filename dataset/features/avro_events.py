"""Reads events of Avro: one record an event, without the header of a file, under the schema that wrote it.

Logical types are read as what they are stored in: a timestamp is a whole number. Recursive types are refused, as the
depth of an event would be without bound; so are types of which few bytes can hold very many values.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import fastavro
from fastavro.schema import SchemaParseException, UnknownType

from headrace.dataset.features.decoding import EventField, FieldKind
from headrace.dataset.features.event_reader import InvalidSchema
from headrace.dataset.features.plain_rows import Unreadable
from headrace.documents import InvalidDocument, parse
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


def _check_bounded(node: Any, named: Mapping[str, Any]) -> None:
    """Raise InvalidSchema for a recursive type, and where few bytes can have very many values."""
    known: dict[str, int] = {}
    for name, schema in named.items():
        known[name] = _excess(schema, known, ())
    if (excess := _excess(node, known, ())) > MAX_EXCESS:
        raise InvalidSchema(f"has records of {excess:,} values without a byte; at most {MAX_EXCESS:,}")


def _excess(node: Any, known: dict[str, int], above: tuple[str, ...], space: str = "") -> int:
    """Most values of a type beyond VALUES_OF_BYTE for each of its bytes: of a record, the sum of its fields.

    Elements of a list must have none, since their number is free. `known` has the named types so far, `above` those
    open."""
    if isinstance(node, list):
        return max((_excess(branch, known, above, space) for branch in node), default=0) - VALUES_OF_BYTE
    if isinstance(node, str):
        if node in PRIMITIVE:
            return 1 - VALUES_OF_BYTE * FEWEST_BYTES.get(node, 1)
        name = node if "." in node or not space else f"{space}.{node}"
        if name in above or node in above:
            raise InvalidSchema(f"has a recursive type, {node!r}; the depth of its events has no bound")
        return known.get(name, known.get(node, 0))  # an unknown name is an error of parse_schema
    if not isinstance(node, dict):
        _refuse(node)
    kind = node.get("type")
    match kind:
        case "record" | "error":
            name, inner = _full_name(node, space)
            fields = node.get("fields")
            if not isinstance(fields, list) or not all(isinstance(each, dict) for each in fields):
                _refuse(node)
            known[name] = 1 + sum(_excess(each.get("type"), known, (*above, name), inner) for each in fields)
            return known[name]
        case "array" | "map":
            of_key = 1 - VALUES_OF_BYTE if kind == "map" else 0
            each = of_key + _excess(node.get("items" if kind == "array" else "values"), known, above, space)
            if each > 0:
                few = f"take no bytes, or have more than {VALUES_OF_BYTE} values for each"
                raise InvalidSchema(f"has a list of elements that {few}; their number has no bound")
            return 1 - VALUES_OF_BYTE
        case "fixed":
            size = node.get("size")
            known[_full_name(node, space)[0]] = 1 - VALUES_OF_BYTE * (size if isinstance(size, int) else 0)
            return known[_full_name(node, space)[0]]
        case "enum":
            known[_full_name(node, space)[0]] = 1 - VALUES_OF_BYTE
            return 1 - VALUES_OF_BYTE
        case _:
            return _excess(kind, known, above, space)


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
    return (str(error) or type(error).__name__)[:200]
