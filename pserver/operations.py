"""What may happen to tables at the close of a pass beside learning: logged operations, as tables take them.

Pure values. They act in log order at the close of version v, after the day's tick of that close; a replay gives them
again. Which happen, and when, is trainer.operations' decision.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class DayTick:
    """The day of a job without event time moves on."""

    op: ClassVar[str] = "day_tick"
    to: int
    """The day it then is; nothing happens where it is that already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """Rows of one table that were not changed after this close, and meet the rule, are absent from here on."""

    op: ClassVar[str] = "shrink"
    table: str
    delete_below: float | None = None
    """In place of the table's and its slots' own."""
    delete_after_days: int | None = None
    """Likewise; where both are None, the settings in force decide."""
    at_once: bool = False
    """Whether the close waits until they are removed: what the chief decides for small tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """One row is deleted."""

    op: ClassVar[str] = "forget"
    table: str
    group: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTables:
    """Settings that may change while a job runs."""

    op: ClassVar[str] = "set"
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By table: its whole section from here on, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An export was cut here, and what it selects begins to count delta_score anew."""

    op: ClassVar[str] = "cut"
    tables: tuple[str, ...] = ()
    """Those exported; all unless given."""
    since: int
    """Version of the parent export: rows changed after it are considered; 0 for a base, which considers all."""
    base_threshold: float = 0.0
    delta_threshold: float = 0.0
    delta_keep_days: int | None = None


TableOperation = DayTick | Shrink | Forget | SetTables | Cut
KINDS: Mapping[str, type[TableOperation]] = {kind.op: kind for kind in (DayTick, Shrink, Forget, SetTables, Cut)}


def message_of(operation: TableOperation) -> dict[str, Any]:
    """As JSON-able data."""
    return {"op": operation.op, **asdict(operation)}


def of_message(message: Mapping[str, Any]) -> TableOperation:
    """The inverse of `message_of`."""
    fields = {name: value for name, value in message.items() if name != "op"}
    return KINDS[message["op"]](**fields)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a shrink of a table would take now, over all shards."""

    rows: int
    """Of the table."""
    below: Mapping[int, int]
    """Rows that would go for their score, by slot group."""
    unseen: Mapping[int, int]
    """Rows that would go because they are unseen for too long, and for that alone, by slot group."""

    @property
    def going(self) -> int:
        """Rows that would go."""
        return sum(self.below.values()) + sum(self.unseen.values())

    @property
    def fraction(self) -> float:
        """Share of the rows that would go."""
        return self.going / self.rows if self.rows else 0.0
