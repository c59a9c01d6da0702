"""Reads events of Protobuf: one message an event. Types come from descriptors alone; no generated code is run.

Each schema has a pool of descriptors of its own. Of a message only the fields that are asked for become Python values.
A field without presence that is not in the event has its default, as 0; one with presence is missing. An enumeration
is its name where text is asked for, else its number; google.protobuf's wrappers, such as Int64Value, are their value.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import (
    any_pb2,
    descriptor,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    message,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

from headrace.dataset.features.conversion import BadValue
from headrace.dataset.features.event_reader import InvalidSchema
from headrace.dataset.features.plain_rows import Unreadable
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.validation import nearest

MAX_FILES = 256
"""Most files of a FileDescriptorSet."""
WELL_KNOWN = {
    module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb
    for module in (
        any_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
        descriptor_pb2,
    )
}
"""Files that come with the library: a schema may import them and leave them out."""
WRAPPERS = frozenset(f"google.protobuf.{name}" for name in wrappers_pb2.DESCRIPTOR.message_types_by_name)
BROKEN = (message.DecodeError, RecursionError, MemoryError)

Field = descriptor.FieldDescriptor
Message = descriptor.Descriptor
"""The descriptor of a message."""


class ProtobufSchema:
    """Descriptors of messages, in a pool of their own."""

    def __init__(self, files: Sequence[bytes]) -> None:
        """`files`: serialized FileDescriptorProtos, each after those that it imports. Raises InvalidSchema."""
        if not files or len(files) > MAX_FILES:
            raise InvalidSchema(f"has {len(files)} files; 1 to {MAX_FILES} are possible")
        self._pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()
        for data in files:
            try:
                proto = descriptor_pb2.FileDescriptorProto.FromString(data)
            except BROKEN as error:
                raise InvalidSchema(f"is not a descriptor of Protobuf: {error}") from None
            self._add(proto)
            self._last = proto.name

    @classmethod
    def of_set(cls, data: bytes) -> "ProtobufSchema":
        """The schema in a FileDescriptorSet, as `protoc --include_imports --descriptor_set_out` writes it."""
        try:
            found = descriptor_pb2.FileDescriptorSet.FromString(data)
        except BROKEN as error:
            raise InvalidSchema(f"is not a FileDescriptorSet of Protobuf: {error}") from None
        return cls([file.SerializeToString(deterministic=True) for file in found.file])

    def _add(self, proto: descriptor_pb2.FileDescriptorProto) -> None:
        if proto.name in self._added:
            return
        for name in proto.dependency:
            if name in WELL_KNOWN and name not in self._added:
                self._add(descriptor_pb2.FileDescriptorProto.FromString(WELL_KNOWN[name]))
        if missing := [name for name in proto.dependency if name not in self._added]:
            raise InvalidSchema(
                f"imports {missing[0]!r} and does not have it before; make it by protoc --include_imports "
                "--descriptor_set_out"
            )
        try:
            self._pool.Add(proto)
            self._pool.FindFileByName(proto.name)
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidSchema(f"has a file {proto.name!r} that is not valid: {str(error)[:200]}") from None
        self._added.add(proto.name)

    def message(self, name: str) -> Message:
        """The message of a full name, such as "shop.Event". Raises InvalidSchema."""
        try:
            return self._pool.FindMessageTypeByName(name)
        except KeyError:
            known = sorted(each for file in self._added for each in self._names(file) if file not in WELL_KNOWN)
            raise InvalidSchema(f"has no message {name!r}; {nearest(name, known)}") from None

    def _names(self, file: str) -> list[str]:
        return [each.full_name for each in self._pool.FindFileByName(file).message_types_by_name.values()]

    def message_at(self, indexes: Sequence[int]) -> Message:
        """The message at some place of the last file: [1, 0] is the first inside the second. Raises InvalidSchema."""
        found: Any = list(self._pool.FindFileByName(self._last).message_types_by_name.values())
        for number, index in enumerate(indexes):
            if not 0 <= index < len(found):
                raise InvalidSchema(f"has no message at {list(indexes)}")
            if number == len(indexes) - 1:
                return found[index]  # type: ignore[no-any-return]
            found = found[index].nested_types
        raise InvalidSchema("has no message at []")


class ProtobufEvents:
    """Reads the events of one message."""

    def __init__(self, message_type: Message, fields: Sequence[EventField]) -> None:
        self._type = message_type
        self._new: Any = message_factory.GetMessageClass(message_type)
        self._fields = [(field, field.kind is FieldKind.TEXT) for field in fields]

    def read(self, event: bytes) -> Mapping[str, Any] | Unreadable:
        """The fields of an event that are asked for."""
        try:
            found = self._new.FromString(event)
        except BROKEN as error:
            return Unreadable(f"the event is not a message {self._type.full_name}: {error}")
        fields: dict[str, Any] = {}
        try:
            for field, named in self._fields:
                _put(fields, field.names, _at(found, self._type, field.names, named))
        except BadValue as error:
            return Unreadable(str(error))
        except UnicodeDecodeError as error:  # of the key of a map, which proto2 does not check
            return Unreadable(f"not UTF-8: {error}")
        return fields

    def check_fields(self) -> None:
        """Raise InvalidSchema for a field that no event can have."""
        for field, _ in self._fields:
            self._check_path(field)

    def _check_path(self, field: EventField) -> None:
        node: Message | None = self._type
        found: Field | None = None
        for number, name in enumerate(field.names):
            path = ".".join(field.names[: number + 1])
            if node is None:
                raise InvalidSchema(f"has no field {path!r}: what is above it is no message")
            if found is not None and _is_map(found):
                found, node = node.fields_by_name["value"], node.fields_by_name["value"].message_type
                continue
            if name not in node.fields_by_name:
                known: Iterable[str] = node.fields_by_name
                raise InvalidSchema(f"has no field {path!r} in message {node.full_name}; {nearest(name, list(known))}")
            found = node.fields_by_name[name]
            node = found.message_type
        assert found is not None
        if node is not None and node.full_name not in WRAPPERS:
            raise InvalidSchema(f"has field {field.path!r}, a message {node.full_name}; name a field of it")
        if found.type == Field.TYPE_BYTES:
            raise InvalidSchema(f"has field {field.path!r} of bytes, which no slot takes; write it as a string")


def _put(fields: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Put a value at its path."""
    if value is not None:
        for name in names[:-1]:
            fields = fields.setdefault(name, {})
        fields[names[-1]] = value


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _at(node: Any, kind: Message, names: Sequence[str], named: bool) -> Any:
    """The value below a message of a type; None where the event, or its message, lacks it. Raises BadValue.

    A field may have the name of a method of messages, and hides it then."""
    field = kind.fields_by_name.get(names[0])
    if field is None:
        return None
    if _is_map(field):
        return None if len(names) == 1 else _in_map(node, field, names, named)
    if field.is_repeated:
        found = [_below(each, field, names, named) for each in getattr(node, names[0])]
        if any(isinstance(each, list) for each in found):
            raise BadValue(f"field {'.'.join(names)!r}: a list inside a list")
        return found
    if field.has_presence and not type(node).HasField(node, names[0]):
        return None
    return _below(getattr(node, names[0]), field, names, named)


def _in_map(node: Any, field: Field, names: Sequence[str], named: bool) -> Any:
    """The value of a map under the text of its key."""
    assert field.message_type is not None
    value_field = field.message_type.fields_by_name["value"]
    for key, value in getattr(node, names[0]).items():
        if (str(key).lower() if isinstance(key, bool) else str(key)) == names[1]:
            return _below(value, value_field, names[1:], named)
    return None


def _below(value: Any, field: Field, names: Sequence[str], named: bool) -> Any:
    """The rest of the path below a value that is not repeated."""
    if field.message_type is not None:
        if field.message_type.full_name in WRAPPERS and len(names) == 1:
            return value.value
        if len(names) == 1:
            raise BadValue(f"field {names[0]!r} is a message; name a field of it")
        return _at(value, field.message_type, names[1:], named)
    if len(names) > 1:
        raise BadValue(f"{names[1]!r} is looked for in a value that is no message")
    if field.enum_type is not None and named:
        found = field.enum_type.values_by_number.get(value)
        return str(value) if found is None else found.name
    return value
