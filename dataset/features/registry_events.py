"""Decodes events that name their schema in a registry: a zero byte, the id in four bytes, then the event.

In Protobuf the place of the message in the schema's file follows the id, as numbers of variable length.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from headrace.dataset.features.event_reader import EventReader, InvalidSchema
from headrace.dataset.features.format_kinds import SchemaFormat
from headrace.dataset.features.plain_rows import Unreadable, decoded_of
from headrace.dataset.features.schema_registry import SchemaNotThere, SchemaTexts, UnknownSchema
from headrace.dataset.spec.event_format import Decoded, EventField
from headrace.dataset.stream.errors import SourceUnavailable

HEAD_BYTES = 5
MAX_SCHEMAS = 256
"""Schemas kept; the one that was not used for longest is dropped, and fetched again when an event names it."""
MAX_INDEXES = 16
"""Deepest message in messages."""
REST = 10
"""After a wait in vain, ids that come within so many times its length are not waited for, so that events with made-up
ids do not stand in the way of the others."""
Place: TypeAlias = tuple[int, ...]
"""Where the message is in its file; () in Avro."""


class BadFrame(ValueError):
    """The bytes before an event are not those of a registry."""


class RegistryDecoder:
    """A Decoder of events whose schemas are in a registry. Raises SourceUnavailable if the registry does not answer."""

    def __init__(
        self,
        texts: SchemaTexts,
        fields: Sequence[EventField],
        kind: SchemaFormat,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience_s`: how long an id that the registry does not know raises SourceUnavailable too, so that the caller
        asks again; then its events are rejected. 0: at once."""
        self._texts, self._fields, self._kind = texts, fields, kind
        self._patience_s, self._clock = patience_s, clock
        self._missed_since_s: float | None = None
        self._readers: OrderedDict[tuple[int, Place], EventReader] = OrderedDict()

    def decode(self, events: pa.BinaryArray) -> Decoded:
        """An event whose schema cannot be used is rejected."""
        unknown: dict[tuple[int, Place], Unreadable] = {}
        missing: list[str] = []
        rows = [self._read(event, unknown, missing) for event in events.to_pylist()]
        if self._waits(missing=bool(missing)):
            raise SourceUnavailable(
                f"{missing[0]}; it may learn of it, so it is asked again for {self._patience_s:g} s, then such events "
                "are rejected"
            )
        return decoded_of(rows, self._fields)

    def _waits(self, *, missing: bool) -> bool:
        """Whether the registry is to be asked again for ids that it does not know."""
        now_s, since_s = self._clock(), self._missed_since_s
        waited_s = math.inf if since_s is None else now_s - since_s
        if not missing:
            if waited_s < self._patience_s:  # not in vain
                self._missed_since_s = None
            return False
        if waited_s >= REST * self._patience_s:
            self._missed_since_s, waited_s = now_s, 0.0
        return waited_s < self._patience_s

    def _read(
        self, event: bytes, unknown: dict[tuple[int, Place], Unreadable], missing: list[str]
    ) -> Mapping[str, Any] | Unreadable:
        try:
            number, place, begin = split_frame(event, has_place=self._kind.has_places)
        except BadFrame as error:
            return Unreadable(str(error))
        key = number, place
        if key in unknown:
            return unknown[key]
        try:
            reader = self._reader(number, place)
        except UnknownSchema as error:
            if isinstance(error, SchemaNotThere):
                missing.append(str(error))
            unknown[key] = Unreadable(str(error))
            return unknown[key]
        found = reader.read(event[begin:])
        return Unreadable(f"{self._texts.name(number)}: {found.error}") if isinstance(found, Unreadable) else found

    def _reader(self, number: int, place: Place) -> EventReader:
        """The reader of a schema. Raises UnknownSchema, SourceUnavailable."""
        key = number, place
        if key not in self._readers:
            schema = self._texts.schema(number)
            wanted = self._kind.registry_type
            if schema.kind != wanted:
                raise UnknownSchema(f"{self._texts.name(number)} is of type {schema.kind}; the job reads {wanted}")
            try:
                reader = self._kind.reader_of(schema, place, self._fields)
            except InvalidSchema as error:
                raise UnknownSchema(f"{self._texts.name(number)} {error}") from None
            if len(self._readers) >= MAX_SCHEMAS:
                self._readers.popitem(last=False)
            self._readers[key] = reader
        self._readers.move_to_end(key)
        return self._readers[key]


def split_frame(event: bytes, *, has_place: bool) -> tuple[int, Place, int]:
    """The id of an event's schema, the place of its message, and where the event begins. Raises BadFrame."""
    if len(event) < HEAD_BYTES or event[0] != 0:
        raise BadFrame("the event does not begin with a zero byte and the id of a schema, as events of a registry do")
    number = int.from_bytes(event[1:HEAD_BYTES], "big")
    if not has_place:
        return number, (), HEAD_BYTES
    count, at = _varint(event, HEAD_BYTES)
    if count == 0:  # short for the first message
        return number, (0,), at
    if not 0 < count <= MAX_INDEXES:
        raise BadFrame(f"the event names a message at {count} places; at most {MAX_INDEXES}")
    place = []
    for _ in range(count):
        index, at = _varint(event, at)
        place.append(index)
    return number, tuple(place), at


def _varint(event: bytes, at: int) -> tuple[int, int]:
    """A number in zigzag code, and the position after it."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(event):
            raise BadFrame("the event ends before the place of its message")
        value |= (event[at] & 0x7F) << shift
        at += 1
        if event[at - 1] < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise BadFrame("the event names a message at a place beyond 32 bits")
