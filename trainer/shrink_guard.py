"""Whether a daily shrink that would take many rows may act, or waits for an operator: a pure decision.

Steady ageing is never held, however many rows it takes. Above `max_shrink_fraction` of a table's rows, a shrink is
held in three cases:

- *The rule changed*: what decides that a row goes (`delete_below`, `delete_after_days`, `decay`, the coefficients and
  columns of the score, of the table or of a slot) is not what it was when the table was last shrunk by its own rule,
  or when it had no rows.
- *The day jumped*: days went by of which no sample was learnt, and more of them than the last time the day advanced.
  The next day that begins without such a jump lets the rows go.
- *Statistics broke*: a slot had no value, or a table no show or no click, for the whole day that ended and since,
  though it had some before; and the rows that go for that reason alone are more than `max_shrink_fraction`. Their
  return, or leave from an operator, ends it.

All of it comes from closes and logged operations (trainer.shrinking keeps it in commits), so a replay decides alike.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataset.schema import Schema
from pserver.config import SlotLife, TableSection
from pserver.operations import Survey
from trainer.signals import CLICK, SHOW, SLOT, signal

Rule = Mapping[str, Any]
"""What decides that a row goes, as JSON-able data: equal where it is the same rule."""

MAX_AHEAD = 64
"""Days ahead that are remembered, the nearest: clocks of some samples are wrong."""
_LIFE = {"delete_below", "delete_after_days", "decay"}
_SCORE = {"nonclk_coeff", "click_coeff", "show", "click"}


def has_rule(table: TableSection) -> bool:
    """Whether a row of the table can ever go."""
    lives: list[TableSection | SlotLife] = [table, *table.slots.values()]
    return any(life.delete_below is not None or life.delete_after_days is not None for life in lives)


def rule_of(table: TableSection) -> Rule:
    """The rule of a table and its slots."""
    own = {name: life.model_dump(include=_LIFE, exclude_none=True) for name, life in sorted(table.slots.items())}
    return table.model_dump(include=_LIFE | _SCORE) | {"slots": {name: life for name, life in own.items() if life}}


@dataclass(frozen=True, slots=True)
class Days:
    """How the job's day advanced last."""

    before: int = 0
    """The day that ended."""
    day: int = 0
    """The day that began."""
    skipped: int = 0
    """Days between them of which no sample was learnt."""
    usual: int = 0
    """`skipped`, when the day advanced the time before."""
    ahead: tuple[int, ...] = ()
    """Later days of which samples were learnt already, ascending: a pass is of the day of its median sample."""

    @property
    def jumped(self) -> bool:
        """Whether more days were skipped than the time before."""
        return self.skipped > self.usual

    def learnt(self, seen: Collection[int]) -> "Days":
        """A pass is learnt; `seen`: days of which it has samples."""
        ahead = sorted({day for day in (*self.ahead, *seen) if day > self.day})
        return replace(self, ahead=tuple(ahead[:MAX_AHEAD]))

    def advanced(self, day: int) -> "Days":
        """The day moves on to `day`."""
        skipped = len(set(range(self.day + 1, day)) - set(self.ahead))
        return Days(self.day, day, skipped, self.skipped, tuple(each for each in self.ahead if each > day))


def silent(heard: Mapping[str, int], days: Days) -> dict[str, int]:
    """Signals that did not come for the whole day that ended, nor since; with the day on which each came last."""
    return {name: day for name, day in sorted(heard.items()) if day < days.before}


def reason(
    survey: Survey,
    max_fraction: float,
    *,
    same_rule: bool,
    days: Days,
    broken: Mapping[str, int],
    table: str,
    schema: Schema,
) -> str:
    """Why a shrink waits, in words; empty where it may act. `broken`: see `silent`."""
    if survey.fraction <= max_fraction:
        return ""
    if not same_rule:
        return "the table has not been shrunk by this rule before"
    if days.jumped:
        return f"the day jumped from {days.before} to {days.day}, and {_days(days.skipped)} between had no samples"
    guilty = _guilty(survey, broken, table, schema)
    if guilty and _taken(survey, guilty, table, schema) > max_fraction * survey.rows:
        return f"statistics broke: {'; '.join(_words(name, broken[name]) for name in guilty)}"
    return ""


def _guilty(survey: Survey, broken: Mapping[str, int], table: str, schema: Schema) -> Sequence[str]:
    """Of signals that do not come, those for which rows of the table go."""
    found = [name for name in broken if name in (signal(SHOW, table), signal(CLICK, table)) and survey.below]
    for slot in schema.sparse:
        name = signal(SLOT, slot.name)
        if slot.sparse.table == table and name in broken and slot.group in {*survey.below, *survey.unseen}:
            found.append(name)
    return found


def _taken(survey: Survey, guilty: Collection[str], table: str, schema: Schema) -> int:
    """Rows that go for signals that do not come: of silent slots all, for silent shows or clicks by the score."""
    sharing: dict[int, bool] = {}
    for slot in schema.sparse:
        if slot.sparse.table == table:
            sharing[slot.group] = sharing.get(slot.group, True) and signal(SLOT, slot.name) in guilty
    by_score = bool({signal(SHOW, table), signal(CLICK, table)} & set(guilty))
    below = sum(rows for group, rows in survey.below.items() if by_score or sharing.get(group))
    return below + sum(rows for group, rows in survey.unseen.items() if sharing.get(group))


def _words(name: str, day: int) -> str:
    kind, _, of = name.partition(".")
    subject, what = (f"slot {of}", "value") if kind == SLOT else (f"table {of}", kind)
    return f"{subject} had no {what} since day {day}"


def _days(number: int) -> str:
    return "1 day" if number == 1 else f"{number} days"
