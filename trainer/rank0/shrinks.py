"""The decider for shrinks of tables. The rows to remove are counted first; some shrinks wait for an operator.

The tables' rule chooses and removes the rows (pserver.lifecycle.aging); this module decides when.
trainer.rank0.shrink_guard decides which daily shrinks wait; such a wait is logged as an operation of its own, a hold.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec import structs

from headrace.codec import plain, typed
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, NotYet, SpecError
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.protocol.table_operations import ShrinkRows, ShrinkSurvey
from headrace.pserver.server.commands import SurveyShrink
from headrace.trainer.job_status import HeldShrink, ShrinkingStatus
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    HoldOperation,
    SetOperation,
    ShrinkOperation,
    SlotOperation,
)
from headrace.trainer.rank0 import shrink_guard
from headrace.trainer.rank0.operations import ClosingPass, Decider
from headrace.trainer.rank0.requests import ONLY_PREDICTS, Request, shrink_requested
from headrace.trainer.rank0.shrink_guard import CLICK, SHOW, SLOT, DayAdvance, has_rule, rule_of, signal

SMALL_ROWS = 262_144
"""A smaller table is counted and swept at the close itself, the same in every run. A larger one is counted, and then
swept, while training continues."""
SURVEY_S = 60.0
"""Time limit to count rows at a close, or to fetch a count from the background."""

log = logging.getLogger(__name__)


class ShrinkTooLarge(HeadraceError):
    """A shrink would remove more of a table than `max_shrink_fraction`."""


@dataclass(frozen=True, slots=True)
class ShrinksState:
    """The state of the decider, as a commit holds it. The first Headrace had fewer fields."""

    day: int = 0
    days: tuple[int, int, int] = (0, 0, 0)
    """The day before, the skipped days, and the usual number of them: see DayAdvance."""
    ahead: tuple[int, ...] = ()
    rules: Mapping[str, shrink_guard.Rule] = field(default_factory=dict)
    """By table, the rule of its last shrink; before that, the rule when its first row came."""
    heard: Mapping[str, int] = field(default_factory=dict)
    """The last day of each signal (trainer.train.observer)."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Tables whose daily shrink is due, each with the version since when."""
    held: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables whose shrink waits for an operator."""


class Shrinks(Decider):
    """The decider for shrinks."""

    name: ClassVar[str] = "shrinking"

    def __init__(
        self, tables: Callable[[], Mapping[str, TableSection]], schema: Schema, shards: Shards, *, learn: bool = True
    ) -> None:
        """`tables` gives the sections in force. Without `learn` no table shrinks; due shrinks wait."""
        self._tables, self._schema, self._shards, self._learn = tables, schema, shards, learn
        self._slots = {slot.group: slot.name for slot in reversed(schema.sparse)}
        self._days = DayAdvance()
        self._rules: dict[str, shrink_guard.Rule] = {}
        """By table, the rule of its last shrink; before that, the rule when its first row came."""
        self._heard: dict[str, int] = {}
        """The last day of each signal (trainer.train.observer)."""
        self._due: dict[str, int] = {}
        """Tables whose daily shrink is due, each with the version since when."""
        self._held: Mapping[str, Mapping[str, Any]] = {}
        """Tables whose shrink waits for an operator; replaced, never changed."""
        self._rows: Mapping[str, int] = {}

    # -- see Decider

    def saw(self, close: ClosingPass) -> None:
        self._rows = {name: stats.num_rows for name, stats in close.stats.items()}
        for name, stats in close.stats.items():
            if name not in self._rules and name in self._tables() and stats.num_rows == stats.new_rows:
                self._rules[name] = rule_of(self._tables()[name])  # the table had no rows before
        self._heard |= dict.fromkeys(close.signals, close.day)
        self._days = self._days.learnt(close.days)
        self._advance(close.day, close.version)

    def acted(self, version: int, operation: ActingOperation, replaying: bool) -> None:
        match operation:
            case DayTickOperation(to=day):
                self._advance(day, version)
            case HoldOperation():
                self._hold(operation)
            case ShrinkOperation() if operation.by_own_rule:
                self._settle(operation.table)
                self._trust(operation)

    def due(self, close: ClosingPass, ordered: Sequence[ActingOperation]) -> list[ActingOperation]:
        if not self._learn:
            return []
        if any(isinstance(each, SetOperation) for each in ordered):  # rows are counted under the new settings
            return []
        logged = {each.table for each in ordered if isinstance(each, ShrinkOperation | HoldOperation)}
        logged = logged.union(*(each.swept for each in ordered if isinstance(each, SlotOperation)))  # counted after it
        found: list[ActingOperation] = []
        for table in sorted(self._due.keys() - logged):
            if close.stats[table].sweeping:  # rows of the shrink before would be counted again
                continue
            at_once = close.ended or self._small(table)
            survey = self._shards.call(SurveyShrink(ShrinkRows(table=table, at_once=at_once)), Deadline.after(SURVEY_S))
            if survey is None:
                continue
            rule = rule_of(self._tables()[table])
            if why := self._why(table, survey, rule):
                found.append(self._hold_operation(table, survey, why))
            elif survey.going or table in self._held or rule != self._rules.get(table):
                found.append(_operation(ShrinkRows(table=table, at_once=at_once), rule))
            else:
                del self._due[table]
        return found

    def _why(self, table: str, survey: ShrinkSurvey, rule: shrink_guard.Rule) -> str:
        """The reason why the daily shrink of a table waits; empty if it may act."""
        return shrink_guard.reason(
            survey,
            self._tables()[table].max_shrink_fraction,
            same_rule=rule == self._rules.get(table),
            days=self._days,
            broken=shrink_guard.silent(self._heard, self._days),
            table=table,
            schema=self._schema,
        )

    def wants_pass(self, ended: bool) -> bool:
        return self._learn and bool(self._due)

    def state(self) -> dict[str, Any]:
        now = self._days
        days = now.before, now.skipped, now.usual
        state = ShrinksState(now.day, days, now.ahead, self._rules, self._heard, self._due, self._held)
        found: dict[str, Any] = plain(state)
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        found, tables = typed(ShrinksState, state, "its state of shrinks"), self._tables()
        before, skipped, usual = found.days
        self._days = DayAdvance(before, found.day, skipped, usual, found.ahead)
        self._heard = dict(found.heard)
        self._rules = {name: rule for name, rule in found.rules.items() if name in tables}
        self._due = {name: since for name, since in found.wanted.items() if name in tables}
        self._held = {name: facts for name, facts in found.held.items() if name in tables}

    def status(self) -> ShrinkingStatus:
        """The tables that wait for an operator, with the command that allows their shrink."""
        held = {name: typed(HeldShrink, facts, "a held shrink") for name, facts in self._held.items()}
        return ShrinkingStatus(held=held, counting=sorted(self._due))

    def _advance(self, day: int, version: int) -> None:
        """A new day: tables with a rule are due for a shrink; held ones are counted again."""
        if day <= self._days.day:
            return
        self._days = self._days.advanced(day)
        for name, table in self._tables().items():
            if table.shrink == "daily" and has_rule(table):
                self._due[name] = version
            else:
                self._settle(name)

    def _settle(self, table: str) -> None:
        self._due.pop(table, None)
        self._held = {name: facts for name, facts in self._held.items() if name != table}

    def _trust(self, shrink: ShrinkOperation) -> None:
        """A table was shrunk by its own rule: the rule is steady from here on. An operator accepts broken signals."""
        name = shrink.table
        if name not in self._tables():
            return
        self._rules[name] = rule_of(self._tables()[name]) if shrink.rule is None else shrink.rule
        if shrink.id is not None:
            of_table = {signal(SLOT, slot.name) for slot in self._schema.sparse if slot.sparse.table == name}
            of_table |= {signal(SHOW, name), signal(CLICK, name)}
            for lost in of_table & shrink_guard.silent(self._heard, self._days).keys():
                del self._heard[lost]

    def _small(self, table: str) -> bool:
        return self._rows.get(table, SMALL_ROWS) < SMALL_ROWS

    def _hold_operation(self, table: str, survey: ShrinkSurvey, why: str) -> HoldOperation:
        """The operation for a table whose shrink waits."""
        log.warning("table %s: %s: %s; `%s` allows it", table, self._too_many(table, survey), why, _command(table))
        return HoldOperation(table=table, rows=survey.rows, going=survey.going, fraction=survey.fraction, why=why)

    def _hold(self, hold: HoldOperation) -> None:
        table = hold.table
        since = self._held[table]["since"] if table in self._held else self._due.get(table, 0)
        self._due.pop(table, None)
        facts = {"rows": hold.rows, "going": hold.going, "fraction": hold.fraction, "why": hold.why}
        self._held = {**self._held, table: {**facts, "since": since, "command": _command(table)}}

    def _too_many(self, table: str, survey: ShrinkSurvey) -> str:
        return (
            f"a shrink would remove {survey.going:,} of {survey.rows:,} rows, {survey.fraction:.1%} and more than "
            f"max_shrink_fraction = {self._tables()[table].max_shrink_fraction:g}"
        )

    # -- requests

    def asked(self, request: Request) -> ShrinkOperation | None:
        """{"op": "shrink", "table", "delete_below", "delete_after_days", "allow"}."""
        if request.get("op") != ShrinkOperation.op:
            return None
        if not self._learn:
            raise SpecError(ONLY_PREDICTS, "train.learn")
        shrink = shrink_requested(request, self._tables())
        if request.get("allow") is not True:
            survey = self._count(shrink)
            if survey.fraction > self._tables()[shrink.table].max_shrink_fraction:
                raise ShrinkTooLarge(
                    f"table {shrink.table}: {self._too_many(shrink.table, survey)}; --dry-run shows these rows, "
                    "--allow removes them"
                )
        shrink = structs.replace(shrink, at_once=self._small(shrink.table))
        return _operation(shrink, rule_of(self._tables()[shrink.table]), request["id"])

    def dry_run(self, request: Request) -> dict[str, Any]:
        """The rows that a shrink would remove now, by slot and reason; `request` as in `asked`.

        Raises SpecError, and NotYet while rows are being counted.
        """
        shrink = shrink_requested(request, self._tables())
        survey = self._count(shrink)
        return {
            "table": shrink.table,
            "rows": survey.rows,
            "going": survey.going,
            "fraction": survey.fraction,
            "max_fraction": self._tables()[shrink.table].max_shrink_fraction,
            "below": _by_slot(survey.below, self._slots),
            "unseen": _by_slot(survey.unseen, self._slots),
        }

    def _count(self, shrink: ShrinkRows) -> ShrinkSurvey:
        survey = self._shards.call(SurveyShrink(shrink), Deadline.after(SURVEY_S))
        if survey is None:
            raise NotYet(f"the rows of table {shrink.table} are being counted")
        return survey


def _by_slot(counts: Mapping[int, int], slots: Mapping[int, str]) -> dict[str, int]:
    return {slots.get(group, f"group {group}"): count for group, count in sorted(counts.items()) if count}


def _command(table: str) -> str:
    return f"headrace shrink JOB.TOML --table {table} --allow"


def _operation(shrink: ShrinkRows, rule: shrink_guard.Rule, id_: str | None = None) -> ShrinkOperation:
    """The operation for a shrink; `rule` is the table's own, logged where the shrink follows it."""
    found = ShrinkOperation(id=id_, **structs.asdict(shrink))
    return structs.replace(found, rule=rule) if found.by_own_rule else found
