"""The protocol of decoders: which fields of an event are needed, and what a decoder answers.

A decoder knows a format of events (JSON, Avro, ...), and nothing of slots. dataset.features.conversion has the rules by
which values become whole numbers, numbers or text.

Shapes: E events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from headrace.dataset.spec.config import FIELD_SEPARATOR

if TYPE_CHECKING:
    import pyarrow as pa


class FieldKind(StrEnum):
    """The type that a field is read as; see dataset.features.conversion for the rules."""

    WHOLE = "whole"
    """Whole numbers of 64 bits: int64 if `signed`, else uint64."""
    NUMBER = "number"
    """float64."""
    TEXT = "text"
    """utf8."""
    LENGTH = "length"
    """Only the number of elements of a list is used: int64."""


@dataclass(frozen=True, slots=True, order=True)
class EventField:
    """A field of events that the plan asks for."""

    path: str
    """Names with dots between: "user.id". A list on the way gives a list: of `{"items": [{"id": 1}, {"id": 2}]}`,
    "items.id" is [1, 2]. A list inside a list is refused."""
    kind: FieldKind
    signed: bool = False
    """Whether whole numbers may be negative."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its path, from the outside in."""
        return tuple(self.path.split(FIELD_SEPARATOR))

    @property
    def type(self) -> "pa.DataType":
        """The Arrow type of its values."""
        import pyarrow as pa  # late: the check of a job file imports this module

        match self.kind:
            case FieldKind.WHOLE:
                return pa.int64() if self.signed else pa.uint64()
            case FieldKind.NUMBER:
                return pa.float64()
            case FieldKind.TEXT:
                return pa.utf8()
            case FieldKind.LENGTH:
                return pa.int64()


@dataclass(frozen=True, slots=True)
class Decoded:
    """The fields of some events."""

    fields: "pa.RecordBatch"
    """E rows. One column for each field that was asked for, in that order, under its path: of the field's type, or a
    list of it. Null: the event lacks the field, or the field is null. A column may be of lists although some of its
    events have a single value: then each is a list of one. Values of events in `errors` are not used."""
    errors: Sequence[tuple[int, str]]
    """Events that are rejected, and why, in order of events, each at most once. A text that begins with "not UTF-8" is
    counted under that reason."""


class Decoder(Protocol):
    """Decodes events of one format. One thread at a time may call it.

    The answer for an event depends on the event alone: not on its neighbours, and not on events decoded before.
    """

    def decode(self, events: "pa.BinaryArray") -> Decoded:
        """The fields of the events; an event that cannot be read is in `errors`, and never raises."""
        ...
