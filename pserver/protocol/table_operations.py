"""Operations on tables: changes of rows at the close of a pass, beside learning.

Pure values, and their form on the wire. They act in log order at the close of version v, after the day tick of that
close; a replay repeats them. When they happen is decided in trainer.rank0.operations.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from headrace.pserver.errors import InvalidShardCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceDay:
    """The day of a job without event time advances."""

    op: ClassVar[str] = "day_tick"
    to: int
    """The new day; no effect if the day is the same already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkRows:
    """Rows of one table that meet the rule, and do not change after this close, are removed."""

    op: ClassVar[str] = "shrink"
    table: str
    delete_below: float | None = None
    """Replaces the limit of the table and its slots."""
    delete_after_days: int | None = None
    """Likewise. If both are None, the settings in force decide."""
    at_once: bool = False
    """True if the close waits until they are removed; rank 0 decides so for small tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRow:
    """One row is deleted."""

    op: ClassVar[str] = "forget"
    table: str
    group: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTables:
    """New settings of tables while a job runs."""

    op: ClassVar[str] = "set"
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By table: its whole new section, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCut:
    """An export is cut here; delta_score of the selected rows restarts at 0."""

    op: ClassVar[str] = "cut"
    tables: tuple[str, ...] = ()
    """The exported tables; () means all."""
    since: int
    """Version of the parent export: only rows changed after it are considered. 0 for a base, which considers all."""
    base_threshold: float = 0.0
    delta_threshold: float = 0.0
    delta_keep_days: int | None = None


TableOperation = AdvanceDay | ShrinkRows | ForgetRow | SetTables | ExportCut
KINDS: Mapping[str, type[TableOperation]] = {
    kind.op: kind for kind in (AdvanceDay, ShrinkRows, ForgetRow, SetTables, ExportCut)
}


def message_of(operation: TableOperation) -> dict[str, Any]:
    """As JSON-able data."""
    return {"op": operation.op, **asdict(operation)}


def operation_of(message: Mapping[str, Any]) -> TableOperation:
    """The inverse of `message_of`. Raises InvalidShardCall for an unknown operation."""
    if message.get("op") not in KINDS:
        raise InvalidShardCall(f"unknown operation {message.get('op')!r}; known are {', '.join(KINDS)}")
    fields = {name: value for name, value in message.items() if name != "op"}
    return KINDS[message["op"]](**fields)


@dataclass(frozen=True, slots=True)
class ShrinkSurvey:
    """The rows that a shrink of a table would remove now, over all shards."""

    rows: int
    """All rows of the table."""
    below: Mapping[int, int]
    """Rows to remove because of their score, by slot group."""
    unseen: Mapping[int, int]
    """Rows to remove only because they are unseen for too long, by slot group."""

    @classmethod
    def total(cls, surveys: Sequence["ShrinkSurvey"]) -> "ShrinkSurvey":
        """The sum of the counts of all shards."""
        below, unseen = sum_by_group(each.below for each in surveys), sum_by_group(each.unseen for each in surveys)
        return cls(sum(each.rows for each in surveys), below, unseen)

    @property
    def going(self) -> int:
        """Rows to remove."""
        return sum(self.below.values()) + sum(self.unseen.values())

    @property
    def fraction(self) -> float:
        """Share of the rows to remove."""
        return self.going / self.rows if self.rows else 0.0


def sum_by_group(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sums by slot group, in their order."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    return {group: total[group] for group in sorted(total)}
