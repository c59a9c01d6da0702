"""The guard of daily shrinks: decides whether one that removes many rows may act, or waits for an operator. Pure.

Steady ageing is never held, however many rows it removes. Above `max_shrink_fraction` of a table's rows, a shrink is
held in three cases:

- *The rule changed*: the settings that select rows (`delete_below`, `delete_after_days`, `decay`, the coefficients and
  columns of the score, of the table or of a slot) differ from those of the last shrink by the table's own rule, or from
  those when the table had no rows.
- *The day jumped*: days passed without a learnt sample, and more of them than the last time the day advanced. The next
  day that begins without such a jump releases the shrink.
- *Statistics broke*: a slot had no value, or a table no show or no click, during the whole day that ended and since,
  though it had some before; and the rows removed for that reason alone are more than `max_shrink_fraction`. The hold
  ends when the values return, or when an operator allows the shrink.

All inputs come from closes and logged operations (trainer.rank0.shrinks keeps them in commits): a replay decides the
same.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import SlotLife, TableSection
from headrace.pserver.protocol.table_operations import ShrinkSurvey

SLOT, SHOW, CLICK = "slot", "show", "click"
"""The kinds of signals. A signal's name is its kind, a dot, and the slot or table: "slot.user", "click.default"."""

Rule = Mapping[str, Any]
"""The settings that select the rows to remove, as JSON-able data."""

MAX_AHEAD = 64
"""Most days ahead to remember, the nearest ones: some samples have wrong clocks."""
_LIFE = {"delete_below", "delete_after_days", "decay"}
_SCORE = {"nonclk_coeff", "click_coeff", "show", "click"}


def signal(kind: str, name: str) -> str:
    """The name of a signal: an input of the statistics of rows."""
    return f"{kind}.{name}"


def has_rule(table: TableSection) -> bool:
    """True if the table ever removes rows."""
    lives: list[TableSection | SlotLife] = [table, *table.slots.values()]
    return any(life.delete_below is not None or life.delete_after_days is not None for life in lives)


def rule_of(table: TableSection) -> Rule:
    """The rule of a table and its slots."""
    own = {name: life.model_dump(include=_LIFE, exclude_none=True) for name, life in sorted(table.slots.items())}
    return table.model_dump(include=_LIFE | _SCORE) | {"slots": {name: life for name, life in own.items() if life}}


@dataclass(frozen=True, slots=True)
class DayAdvance:
    """The last advance of the job's day."""

    before: int = 0
    """The day that ended."""
    day: int = 0
    """The day that began."""
    skipped: int = 0
    """Number of days between them without a learnt sample."""
    usual: int = 0
    """`skipped` of the advance before."""
    ahead: tuple[int, ...] = ()
    """Later days with learnt samples, ascending: the day of a pass is that of its median sample."""

    @property
    def jumped(self) -> bool:
        """True if more days were skipped than in the advance before."""
        return self.skipped > self.usual

    def learnt(self, seen: Collection[int]) -> "DayAdvance":
        """After a learnt pass; `seen`: days of its samples."""
        ahead = sorted({day for day in (*self.ahead, *seen) if day > self.day})
        return replace(self, ahead=tuple(ahead[:MAX_AHEAD]))

    def advanced(self, day: int) -> "DayAdvance":
        """After the day has advanced to `day`."""
        skipped = len(set(range(self.day + 1, day)) - set(self.ahead))
        return DayAdvance(self.day, day, skipped, self.skipped, tuple(each for each in self.ahead if each > day))


def silent(heard: Mapping[str, int], days: DayAdvance) -> dict[str, int]:
    """Signals that were absent for the whole day that ended, and since; each with its last day."""
    return {name: day for name, day in sorted(heard.items()) if day < days.before}


def reason(
    survey: ShrinkSurvey,
    max_fraction: float,
    *,
    same_rule: bool,
    days: DayAdvance,
    broken: Mapping[str, int],
    table: str,
    schema: Schema,
) -> str:
    """The reason why a shrink waits, in words; empty if it may act. `broken`: see `silent`."""
    if survey.fraction <= max_fraction:
        return ""
    if not same_rule:
        return "the table has not been shrunk by this rule before"
    if days.jumped:
        return f"the day jumped from {days.before} to {days.day}, and {_days(days.skipped)} between had no samples"
    causes = _causes(survey, broken, table, schema)
    if causes and _taken(survey, causes, table, schema) > max_fraction * survey.rows:
        return f"statistics broke: {'; '.join(_words(name, broken[name]) for name in causes)}"
    return ""


def _causes(survey: ShrinkSurvey, broken: Mapping[str, int], table: str, schema: Schema) -> Sequence[str]:
    """The absent signals because of which rows of the table would be removed."""
    found = [name for name in broken if name in (signal(SHOW, table), signal(CLICK, table)) and survey.below]
    for slot in schema.sparse:
        name = signal(SLOT, slot.name)
        if slot.sparse.table == table and name in broken and slot.group in {*survey.below, *survey.unseen}:
            found.append(name)
    return found


def _taken(survey: ShrinkSurvey, causes: Collection[str], table: str, schema: Schema) -> int:
    """Number of rows removed because of absent signals: all of absent slots; by score for shows or clicks."""
    sharing: dict[int, bool] = {}
    for slot in schema.sparse:
        if slot.sparse.table == table:
            sharing[slot.group] = sharing.get(slot.group, True) and signal(SLOT, slot.name) in causes
    by_score = bool({signal(SHOW, table), signal(CLICK, table)} & set(causes))
    below = sum(rows for group, rows in survey.below.items() if by_score or sharing.get(group))
    return below + sum(rows for group, rows in survey.unseen.items() if sharing.get(group))


def _words(name: str, day: int) -> str:
    kind, _, of = name.partition(".")
    subject, what = (f"slot {of}", "value") if kind == SLOT else (f"table {of}", kind)
    return f"{subject} had no {what} since day {day}"


def _days(number: int) -> str:
    return "1 day" if number == 1 else f"{number} days"
