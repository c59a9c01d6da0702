"""When tables shrink: a decider. Rows that would go are counted first; too many wait for an operator.

Which rows go is the tables' rule (pserver.aging), and so is their going; here it is decided that they do.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataset.schema import Schema
from millrace.deadline import Deadline
from millrace.errors import MillraceError, NotYet, SpecError
from millrace.mistakes import nearest
from pserver.client import Shards
from pserver.config import MAX_DAYS, MAX_FLOAT32, SlotLife, TableSection
from pserver.operations import Shrink, Survey
from trainer.operations import FROZEN, Body, Closing

SMALL_ROWS = 262_144
"""A table with fewer rows is counted and swept at the close itself: alike at every run. A larger one is counted, and
later swept, while training goes on."""
SURVEY_S = 60.0
"""How long counting at a close, or asking for what was counted meanwhile, may take."""

log = logging.getLogger(__name__)


class TooMany(MillraceError):
    """A shrink would take more of a table than `max_shrink_fraction`."""


def has_rule(table: TableSection) -> bool:
    """Whether a row of the table can ever go."""
    lives: list[TableSection | SlotLife] = [table, *table.slots.values()]
    return any(life.delete_below is not None or life.delete_after_days is not None for life in lives)


class Shrinking:
    """See module docstring."""

    def __init__(
        self, tables: Callable[[], Mapping[str, TableSection]], schema: Schema, shards: Shards, *, learn: bool = True
    ) -> None:
        """`tables` gives the sections in force. `learn`: else no table shrinks; what is to waits until one may."""
        self._tables, self._shards, self._learn = tables, shards, learn
        self._slots = {slot.group: slot.name for slot in reversed(schema.sparse)}
        self._day = 0
        self._wanted: dict[str, int] = {}
        """Since which version a table's daily shrink is to be logged."""
        self._held: Mapping[str, Mapping[str, Any]] = {}
        """Tables whose shrink waits for an operator; replaced, never changed."""
        self._rows: Mapping[str, int] = {}

    # -- see Decider

    def saw(self, close: Closing) -> None:
        """See Decider."""
        self._rows = {name: stats.num_rows for name, stats in close.stats.items()}
        self._advance(close.day, close.version)

    def acted(self, version: int, body: Body, replaying: bool) -> None:
        """See Decider."""
        if body["op"] == "day_tick":
            self._advance(int(body["to"]), version)
        elif body["op"] == "shrink" and body["delete_below"] is None and body["delete_after_days"] is None:
            self._settle(body["table"])

    def due(self, close: Closing, ordered: Sequence[Body]) -> list[dict[str, Any]]:
        """See Decider."""
        if not self._learn:
            return []
        logged = {body["table"] for body in ordered if body["op"] == "shrink"}
        found = []
        for table in sorted(self._wanted.keys() - logged):
            if close.stats[table].sweeping:  # what the shrink before took would be counted once more
                continue
            at_once = close.ended or self._small(table)
            survey = self._shards.survey(Shrink(table=table, at_once=at_once), Deadline.after(SURVEY_S))
            if survey is None:
                continue
            since = self._wanted.pop(table)
            if survey.fraction > self._tables()[table].max_shrink_fraction:
                self._hold(table, survey, since)
            elif survey.going:
                self._wanted[table] = since  # until it has acted
                found.append(_body(None, table, None, None, at_once))
        return found

    def wants_pass(self, ended: bool) -> bool:
        """See Decider."""
        return self._learn and bool(self._wanted)

    def state(self) -> dict[str, Any]:
        """See Decider."""
        return {"day": self._day, "wanted": dict(self._wanted), "held": dict(self._held)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See Decider."""
        self._day = int(state.get("day", 0))
        tables = self._tables()
        self._wanted = {name: since for name, since in state.get("wanted", {}).items() if name in tables}
        self._held = {name: facts for name, facts in state.get("held", {}).items() if name in tables}

    def status(self) -> dict[str, Any]:
        """See Decider: the tables that wait for an operator, with the command that lets them go on."""
        return {"held": dict(self._held), "counting": sorted(self._wanted)}

    def _advance(self, day: int, version: int) -> None:
        """Each day that begins, tables with a rule are to shrink; those that wait are counted anew."""
        if day <= self._day:
            return
        self._day = day
        for name, table in self._tables().items():
            if table.shrink == "daily" and has_rule(table):
                self._settle(name)
                self._wanted[name] = version

    def _settle(self, table: str) -> None:
        self._wanted.pop(table, None)
        self._held = {name: facts for name, facts in self._held.items() if name != table}

    def _small(self, table: str) -> bool:
        return self._rows.get(table, SMALL_ROWS) < SMALL_ROWS

    def _hold(self, table: str, survey: Survey, since: int) -> None:
        command = f"millrace shrink JOB.TOML --table {table} --allow"
        facts = {"rows": survey.rows, "going": survey.going, "fraction": survey.fraction, "since": since}
        self._held = {**self._held, table: {**facts, "command": command}}
        log.warning("table %s: %s; `%s` lets it go on", table, self._too_many(table, survey), command)

    def _too_many(self, table: str, survey: Survey) -> str:
        return (
            f"a shrink would take {survey.going:,} of {survey.rows:,} rows, {survey.fraction:.1%} and more than "
            f"max_shrink_fraction = {self._tables()[table].max_shrink_fraction:g}"
        )

    # -- what people ask for

    def asked(self, body: Body) -> dict[str, Any] | None:
        """See Decider: {"op": "shrink", "table", "delete_below", "delete_after_days", "allow"}."""
        if body.get("op") != "shrink":
            return None
        if not self._learn:
            raise SpecError(FROZEN, "train.learn")
        wished = self._checked(body)
        if body.get("allow") is not True:
            survey = self._count(wished)
            if survey.fraction > self._tables()[wished.table].max_shrink_fraction:
                raise TooMany(
                    f"table {wished.table}: {self._too_many(wished.table, survey)}; look with --dry-run at what would "
                    "go, and let it with --allow"
                )
        at_once = self._small(wished.table)
        return _body(body["id"], wished.table, wished.delete_below, wished.delete_after_days, at_once)

    def dry_run(self, request: Body) -> dict[str, Any]:
        """What a shrink would take now, by slot and reason; the request as in `asked`. Raises SpecError, NotYet."""
        wished = self._checked(request)
        survey = self._count(wished)
        return {
            "table": wished.table,
            "rows": survey.rows,
            "going": survey.going,
            "fraction": survey.fraction,
            "max_fraction": self._tables()[wished.table].max_shrink_fraction,
            "below": self._by_slot(survey.below),
            "unseen": self._by_slot(survey.unseen),
        }

    def _by_slot(self, counts: Mapping[int, int]) -> dict[str, int]:
        return {self._slots.get(group, f"group {group}"): count for group, count in sorted(counts.items()) if count}

    def _checked(self, body: Body) -> Shrink:
        tables, name = self._tables(), body.get("table")
        if not isinstance(name, str) or name not in tables:
            raise SpecError(f"there is no table {name!r}; {nearest(str(name), tables)}")
        below, days = body.get("delete_below"), body.get("delete_after_days")
        if below is not None and not _is_score(below):
            raise SpecError(f"delete_below is {below!r}: a score is finite, and 0 or more; at most {MAX_FLOAT32}")
        if days is not None and (not isinstance(days, int) or isinstance(days, bool) or not 0 <= days <= MAX_DAYS):
            raise SpecError(f"delete_after_days is {days!r}: days are from 0 to {MAX_DAYS:,}")
        if below is None and days is None and not has_rule(tables[name]):
            raise SpecError(
                f"table {name!r} has no rule by which rows go: give --delete-below or --delete-after-days, or set "
                f"tables.{name}.delete_below or .delete_after_days"
            )
        return Shrink(table=name, delete_below=None if below is None else float(below), delete_after_days=days)

    def _count(self, shrink: Shrink) -> Survey:
        survey = self._shards.survey(shrink, Deadline.after(SURVEY_S))
        if survey is None:
            raise NotYet(f"the rows of table {shrink.table} are being counted")
        return survey


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_FLOAT32


def _body(name: str | None, table: str, below: float | None, days: int | None, at_once: bool) -> dict[str, Any]:
    rule = {"delete_below": below, "delete_after_days": days}
    return {"op": "shrink", "id": name, "table": table, **rule, "at_once": at_once}
