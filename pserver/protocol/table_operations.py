"""Operations on tables: changes of rows at the close of a pass, beside learning.

Pure values; the tag is their name on the wire. They act in log order at the close of version v, after the day tick of
that close; a replay repeats them. When they happen is decided in trainer.rank0.operations.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from msgspec import Struct


class AdvanceDay(Struct, frozen=True, kw_only=True, tag_field="op", tag="day_tick"):
    """The day of a job without event time advances."""

    to: int
    """The new day; no effect if the day is the same already."""

    def tables_among(self, names: Iterable[str]) -> Iterable[str]:
        """The tables that it changes, of those with these names."""
        return names


class ShrinkRows(Struct, frozen=True, kw_only=True, tag_field="op", tag="shrink"):
    """Rows of one table that meet the rule, and do not change after this close, are removed."""

    table: str
    delete_below: float | None = None
    """Replaces the limit of the table and its slots."""
    delete_after_days: int | None = None
    """Likewise. If both are None, the settings in force decide."""
    at_once: bool = False
    """True if the close waits until they are removed; rank 0 decides so for small tables."""

    def tables_among(self, names: Iterable[str]) -> Iterable[str]:
        """The tables that it changes, of those with these names."""
        return (self.table,)


class ForgetRow(Struct, frozen=True, kw_only=True, tag_field="op", tag="forget"):
    """One row is deleted."""

    table: str
    group: int
    key: int

    def tables_among(self, names: Iterable[str]) -> Iterable[str]:
        """The tables that it changes, of those with these names."""
        return (self.table,)


class SetTables(Struct, frozen=True, kw_only=True, tag_field="op", tag="set"):
    """New settings of tables while a job runs."""

    tables: Mapping[str, Mapping[str, Any]]
    """By table: its whole new section, as JSON."""

    def tables_among(self, names: Iterable[str]) -> Iterable[str]:
        """The tables that it changes, of those with these names."""
        return self.tables


class ExportCut(Struct, frozen=True, kw_only=True, tag_field="op", tag="cut"):
    """An export is cut here; delta_score of the selected rows restarts at 0."""

    tables: tuple[str, ...] = ()
    """The exported tables; () means all."""
    since: int
    """Version of the parent export: only rows changed after it are considered. 0 for a base, which considers all."""
    base_threshold: float = 0.0
    delta_threshold: float = 0.0
    delta_keep_days: int | None = None

    def tables_among(self, names: Iterable[str]) -> Iterable[str]:
        """The tables that it changes, of those with these names."""
        return self.tables or names


class _TagName:
    """The tag of a class, as an attribute of it."""

    def __get__(self, change: Struct | None, of: type[Struct]) -> str:
        return str(of.__struct_config__.tag)


class SlotChange(Struct, frozen=True, kw_only=True, tag_field="op"):
    """A change of all rows of one slot. Record, check, route, command and button follow from its class.

    The tag is the command, the first line of the docstring the summary, the rest of it the effect in words.
    """

    slot: str
    table: str
    group: int
    """The slot's table and slot group."""
    name: ClassVar[_TagName] = _TagName()
    """The tag."""
    deletes: ClassVar[bool] = False
    """Whether rows are absent after it, and removed while training goes on."""

    def tables_among(self, names: Iterable[str]) -> Iterable[str]:
        """The tables that it changes, of those with these names."""
        return (self.table,)

    def __str__(self) -> str:
        """The effect in words, for the log page."""
        raise NotImplementedError


class ClearSlot(SlotChange, frozen=True, kw_only=True, tag="clear"):
    """Delete all rows of a slot.

    Use it if wrong values came in the slot. Its values, and those of slots that share its rows, start anew from initial
    rows. Only a rewind brings deleted rows back.
    """

    deletes = True

    def __str__(self) -> str:
        return f"all rows of slot {self.slot} are deleted"


class FreezeSlot(SlotChange, frozen=True, kw_only=True, tag="freeze"):
    """Keep the weights of a slot's rows as they are.

    Steps no longer change them, nor those of slots that share the rows; new values keep their initial rows, and no row
    gets its vector. Shows, clicks and ages go on, so rows leave and are exported as before. Use unfreeze to go on
    learning.
    """

    def __str__(self) -> str:
        return f"the rows of slot {self.slot} keep their weights"


class UnfreezeSlot(SlotChange, frozen=True, kw_only=True, tag="unfreeze"):
    """Let the rows of a frozen slot learn again.

    It goes on from the weights and the optimizer state that the rows had when they were frozen.
    """

    def __str__(self) -> str:
        return f"the rows of slot {self.slot} learn again"


AnySlotChange = ClearSlot | FreezeSlot | UnfreezeSlot
SLOT_CHANGES: tuple[type[AnySlotChange], ...] = get_args(AnySlotChange)
TableOperation = AdvanceDay | ShrinkRows | ForgetRow | SetTables | ExportCut | AnySlotChange


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


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row by its shows."""

    key: int
    group: int
    show: float
    """Now; decayed, as every use of shows and clicks."""
    click: float
    unseen_days: int


@dataclass(frozen=True, slots=True)
class RankedRows:
    """The rows of a table with most shows, and how long ago rows were seen."""

    edges: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 7, 14, 30, 90)
    """The least days of each part of `unseen`; the last part has no end."""

    rows: Sequence[RankedRow]
    """Most shows first."""
    unseen: Sequence[int]
    """Rows by days since they were seen."""
    scanned: int
    """Rows that were looked at."""
    total: int
    """All rows."""

    @classmethod
    def of_shards(cls, parts: Sequence["RankedRows"], top: int) -> "RankedRows":
        """Those of all shards."""
        rows = sorted((row for part in parts for row in part.rows), key=lambda row: (-row.show, row.key))
        unseen = [sum(counts) for counts in zip(*(part.unseen for part in parts), strict=True)]
        return cls(rows[:top], unseen, sum(part.scanned for part in parts), sum(part.total for part in parts))


def sum_by_group(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sums by slot group, in their order."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    return {group: total[group] for group in sorted(total)}
