"""A format of events: names and whole numbers, "number=7 click=1"."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.dataset.features.plain_rows import Unreadable, decoded_of
from headrace.dataset.spec.event_format import Decoded, EventField, EventFormat, FormatKind


class PairsFormat(FormatKind):
    """Pairs with a space between."""

    def open(self, pipe: EventFormat, fields: Sequence[EventField], folder: Path | None, patience_s: float) -> "Pairs":
        return Pairs(fields)


class Pairs:
    def __init__(self, fields: Sequence[EventField]) -> None:
        self._fields = fields

    def decode(self, events: pa.BinaryArray) -> Decoded:
        return decoded_of([read(event) for event in events.to_pylist()], self._fields)


def read(event: bytes) -> Mapping[str, Any] | Unreadable:
    """The numbers of an event by name."""
    try:
        return {name: int(number) for name, number in (pair.split("=") for pair in event.decode().split())}
    except ValueError as error:
        return Unreadable(f"not pairs: {error}")
