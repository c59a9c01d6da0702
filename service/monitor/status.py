"""Reads the chief's status for displays and the API. A key may be missing or null.

The chief (trainer) makes the status; `Status` only names its parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.printable import printable

Number = int | float


def _number(value: Any) -> Number | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Status:
    """One status of the chief."""

    raw: Mapping[str, Any]

    def text(self, key: str, default: str = "") -> str:
        """The text at a top-level key."""
        value = self.raw.get(key)
        return printable(value) if isinstance(value, str) else default

    def number(self, key: str) -> Number | None:
        """The number at a top-level key."""
        return _number(self.raw.get(key))

    def flag(self, key: str) -> bool | None:
        """The boolean at a top-level key."""
        value = self.raw.get(key)
        return value if isinstance(value, bool) else None

    def part(self, key: str) -> "Status":
        """The part at a top-level key; an empty one where it is missing."""
        return Status(_mapping(self.raw.get(key)))

    def parts(self, key: str) -> "dict[str, Status]":
        """A top-level mapping of names to parts."""
        return self.part(key).children()

    def children(self) -> "dict[str, Status]":
        """All top-level keys as parts."""
        return {str(name): Status(_mapping(part)) for name, part in self.raw.items()}

    def links(self) -> "dict[str, dict[str, Status]]":
        """Traffic by worker and peer."""
        return {worker: peers.children() for worker, peers in self.parts("links").items()}

    def texts(self, key: str) -> dict[str, str]:
        """A top-level mapping of names to texts."""
        return {printable(str(name)): printable(str(text)) for name, text in _mapping(self.raw.get(key)).items()}

    def counts(self, key: str) -> dict[str, Number]:
        """A top-level mapping of names to numbers, without values that are no numbers."""
        return self.part(key).numbers()

    def numbers(self) -> dict[str, Number]:
        """All top-level keys that have a number."""
        pairs = ((name, _number(value)) for name, value in self.raw.items())
        return {str(name): value for name, value in pairs if value is not None}

    def total(self, key: str) -> Number | None:
        """The sum of `counts`; None where there is nothing to sum."""
        counts = self.counts(key)
        return sum(counts.values()) if counts else None

    def exports(self) -> "dict[str, Status]":
        """The status of each stream of exports."""
        exporting = self.part("operations").part("exporting")
        return {str(stream): exporting.part(stream) for stream in exporting.raw}

    def metrics(self, span: str) -> dict[str, dict[str, Number]]:
        """Metrics of "window", "life" or "pass": numbers by task and name."""
        tasks = _mapping(_mapping(self.raw.get("metrics")).get(span))
        return {
            str(task): {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
            for task, values in tasks.items()
            if isinstance(values, Mapping)
        }

    def table_rows(self) -> dict[str, Number]:
        """Rows by table."""
        tables = _mapping(self.raw.get("tables"))
        pairs = {name: _number(_mapping(table).get("rows", table)) for name, table in tables.items()}
        return {str(name): rows for name, rows in pairs.items() if rows is not None}
