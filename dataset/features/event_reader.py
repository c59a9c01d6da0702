"""The protocol of readers of one schema, and the decoder that uses one reader for all events.

dataset.features.registry_events has the decoder whose events name their schemas.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from headrace.dataset.features.plain_rows import Unreadable, decoded_of
from headrace.dataset.spec.event_format import Decoded, EventField
from headrace.errors import BadInput


class InvalidSchema(BadInput):
    """A schema that cannot be used. The text says why, and follows the name of the schema."""


class EventReader(Protocol):
    """Reads the events of one schema."""

    def read(self, event: bytes) -> Mapping[str, Any] | Unreadable:
        """The fields of an event, at least those that were asked for. Never raises."""
        ...


class SchemaDecoder:
    """A Decoder of events that all have one schema."""

    def __init__(self, reader: EventReader, fields: Sequence[EventField]) -> None:
        self._reader, self._fields = reader, fields

    def decode(self, events: pa.BinaryArray) -> Decoded:
        return decoded_of([self._reader.read(event) for event in events.to_pylist()], self._fields)
