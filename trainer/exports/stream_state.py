"""State of a stream of exports, and the export that is due at a close: its kind, its parent, the reason in words. Pure.

The state is a fold over the closes of passes and the job's log ("export" and "exported" operations), so a replay gives
the same state. The log keeps each decision, so none is made twice. Fields of states are keys of a commit.
"""

import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from headrace.codec import typed
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.rollback import RollbackState, value_of
from headrace.trainer.job_status import ExportStatus, LastExport
from headrace.trainer.journal.records import ExportedOperation, ExportOperation, RecordKind, decode, encode

if TYPE_CHECKING:
    from headrace.trainer.rank0.operations import ClosingPass

Kind = Literal["base", "delta"]


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """Settings that are equal in a delta and its parent; also fields of ExportOperation."""

    address: str
    tables: list[str]
    """Ascending."""
    dtype: str
    base_threshold: float
    delta_threshold: float
    delta_keep_days: int | None

    @classmethod
    def of(cls, source: ExportOperation | ExportSection, **others: Any) -> "ChainSettings":
        """Those of an operation; or of a section, with the `others` that it leaves open."""
        own = {each.name: getattr(source, each.name) for each in fields(cls) if each.name not in others}
        return cls(**own | others)

    def message(self) -> dict[str, Any]:
        """By name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def changed(self, now: "ChainSettings") -> list[str]:
        """The names of those that differ."""
        then = self.message()
        return [name for name, value in now.message().items() if then[name] != value]


@dataclass(frozen=True, slots=True)
class LoggedExport:
    """One export as it was logged."""

    name: str
    version: int
    kind: Kind
    timeline: str
    shared: ChainSettings
    arithmetic: str
    """Hash of the fingerprint of libraries and hardware at the time."""
    id: str | None
    """Of the request of a person, if there was one."""

    @classmethod
    def of(cls, cut: ExportOperation) -> "LoggedExport":
        """The export of an operation."""
        shared = ChainSettings.of(cut, tables=list(cut.tables))
        return cls(cut.name, cut.version, cut.type, cut.timeline, shared, cut.arithmetic, cut.id)

    @property
    def path(self) -> str:
        """Below the job's folder at the destination."""
        return f"{self.timeline}/{self.name}"


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """Facts that are known only while a version is the present one."""

    manifest: dict[str, Any]
    """For the manifest."""
    tables: dict[str, dict[str, Any]]
    """The sections in force, of the exported tables."""


@dataclass
class ExportStreamState:
    """One stream. Times are unix seconds of the stream's clock; times of ends are wall time."""

    newest: LoggedExport | None = None
    """The newest complete export: the parent of the next delta."""
    flight: LoggedExport | None = None
    """The export that is logged and has not ended."""
    cut: dict[str, Any] | None = None
    """The operation of the export in flight, as the log has it."""
    facts: ExportFacts | None = None
    """Of the version of the export in flight."""
    failed: str = ""
    """Error of the last export that failed for good, if none was complete since: the next delta takes all rows."""
    failed_since_s: float | None = None
    failed_base: bool = False
    """Whether a base is among those that failed since; the next export is then a base."""
    redo: bool = False
    """Whether a base must follow at once, since a delta cannot be made."""
    begun_s: float | None = None
    """When the stream began: start of the intervals before the first export."""
    last_s: float | None = None
    """Time of the last export, complete or not."""
    last_base_s: float | None = None
    fresh: bool = False
    """Whether tables changed since the last export was cut."""
    forked: bool = False
    """Whether the job forked since the last base was cut."""
    other_slots: bool = False
    """Whether the slots changed since the last base was cut."""
    tracked: bool = False
    """Whether all commits since the newest export recorded what changed."""
    low_s: float | None = None
    """Lowest event time since the newest complete export was cut; the export in flight covers the time from here."""
    low_since_cut_s: float | None = None
    """Lowest event time since the last export was cut, complete or not."""
    ended: dict[str, Any] = field(default_factory=dict)
    """The last "exported" operation, for the status."""
    ended_complete_s: float | None = None
    """When the newest complete export was complete."""

    # -- events

    def saw(self, time_s: float | None, pass_times_s: tuple[float, float] | None, num_samples: int) -> None:
        """Note that a pass closed at `time_s` of the stream's clock."""
        if self.begun_s is None:
            self.begun_s = time_s
        self.fresh |= num_samples > 0
        if pass_times_s is not None:
            self.low_s = _least(self.low_s, pass_times_s[0])
            self.low_since_cut_s = _least(self.low_since_cut_s, pass_times_s[0])

    def ordered(self, cut: ExportOperation, facts: ExportFacts, *, tracks: bool) -> None:
        """Note that an export of this stream is cut. `tracks`: whether commits from here on record what changes."""
        self.flight, self.cut, self.facts = LoggedExport.of(cut), encode(cut), facts
        self.last_s, self.fresh, self.redo = cut.at_s, False, False
        self.low_since_cut_s = None
        if cut.type == "base":
            self.last_base_s, self.forked, self.tracked = cut.at_s, False, tracks
            self.other_slots = False

    def over(self, end: ExportedOperation) -> None:
        """Note that the export in flight ended: complete, or failed for good."""
        flight = self.flight
        if flight is None or (flight.name, flight.timeline) != (end.name, end.timeline):
            return
        self.drop()
        self.ended = {**encode(end), "id": flight.id}
        if end.outcome == "complete":
            self.newest, self.failed, self.failed_base, self.failed_since_s = flight, "", False, None
            self.low_s, self.ended_complete_s = self.low_since_cut_s, end.at_s
            return
        if not self.failed:
            self.failed_since_s = end.at_s
        self.failed = f"{flight.name}: {end.error or 'it failed'}"
        self.failed_base |= flight.kind == "base"
        self.redo = end.final and flight.kind == "delta"

    def drop(self) -> None:
        """Forget the export in flight."""
        self.flight = self.cut = self.facts = None

    def touched(self) -> None:
        """Note that an operation changed tables."""
        self.fresh = True

    @property
    def operation(self) -> ExportOperation:
        """The operation of the export in flight."""
        assert self.cut is not None, "in flight"
        found = decode(RecordKind.OPERATION, self.cut)
        assert isinstance(found, ExportOperation)
        return found

    # -- for commits

    def needs_since(self, timeline: str) -> int | None:
        """The version since which the next delta needs changes; None: the next export is a base."""
        parent = self.flight if self.flight is not None and self.flight.kind == "base" else self.newest
        return parent.version if parent is not None and self.tracked and parent.timeline == timeline else None


def _least(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def arithmetic_of(fingerprint: Mapping[str, str]) -> str:
    """A short hash of libraries and hardware."""
    return hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInput:
    """Input of a decision beside settings and chain."""

    time_s: float | None
    """Time of the stream's clock in unix seconds; None: not known yet."""
    timeline: str
    arithmetic: str
    """Hash of the fingerprint."""
    shared: ChainSettings
    """Those of the present settings."""
    ended: bool = False
    """Whether the stream of events is at its end."""
    requested: Kind | None = None
    """Kind that a person requested."""
    sweeping: Collection[str] = ()
    """Tables whose rows a shrink has yet to remove."""
    parent_gone: bool = False
    """Whether the newest complete export does not exist any more."""


@dataclass(frozen=True, slots=True)
class DueExport:
    """The export to cut."""

    kind: Kind
    parent: LoggedExport | None
    """Parent of a delta."""
    all: bool
    """Whether to ignore delta_threshold, since the export before failed."""
    why: str


def decide(section: ExportSection, chain: ExportStreamState, now: ScheduleInput) -> DueExport | None:
    """The export that is due now, if any. None while another one is in progress or a table is swept."""
    if chain.flight is not None or set(now.shared.tables) & set(now.sweeping):
        return None
    called = _called(section, chain, now)
    if called is None:
        return None
    kind, occasion = called
    if kind == "base":
        return DueExport("base", None, False, occasion)
    hindrance = delta_hindrance(section, chain, now)
    if hindrance:
        return DueExport("base", None, False, f"{occasion}; a base, for {hindrance}")
    return DueExport("delta", chain.newest, bool(chain.failed), occasion)


def _called(section: ExportSection, chain: ExportStreamState, now: ScheduleInput) -> tuple[Kind, str] | None:
    """The kind of export that is due, and the reason."""
    if now.requested is not None:
        return now.requested, "asked for"
    if chain.redo:
        return "base", f"at once, for {chain.failed}"
    something = chain.fresh or bool(chain.failed)
    if something and interval_began(section.base, chain.last_base_s, chain.begun_s, now.time_s):
        return "base", f"each {_length(section.base)}"
    if something and interval_began(section.delta, chain.last_s, chain.begun_s, now.time_s):
        return "delta", f"each {_length(section.delta)}"
    if at_end(section, chain, ended=now.ended):
        return default_kind(section), "the end of the stream"
    return None


def interval_began(interval_s: float | None, last_s: float | None, begun_s: float | None, now_s: float | None) -> bool:
    """Whether another interval began since the last export. Intervals are counted from the epoch, UTC.

    True also where the clock was set back by more than an interval, so that exports do not stop until it has caught up.
    """
    since_s = begun_s if last_s is None else last_s
    if interval_s is None or since_s is None or now_s is None:
        return False
    if now_s < since_s - interval_s:
        return True
    return math.floor(now_s / interval_s) > math.floor(since_s / interval_s)


def at_end(section: ExportSection, chain: ExportStreamState, *, ended: bool) -> bool:
    """Whether the end of the stream makes one more export."""
    return ended and section.at_end and (chain.fresh or chain.redo)


def default_kind(section: ExportSection) -> Kind:
    """The kind of an export where nothing else decides it."""
    return "base" if section.delta is None else "delta"


def delta_hindrance(section: ExportSection, chain: ExportStreamState, now: ScheduleInput) -> str:
    """Why the next export cannot be a delta; "" where it can."""
    newest = chain.newest
    if chain.failed_base:
        return f"a base failed ({chain.failed})"
    if newest is None:
        return "it is the stream's first"
    if newest.timeline != now.timeline:
        return f"it is the first of timeline {now.timeline}"
    if chain.forked:
        return "passes gave other results when they were trained again"
    if chain.other_slots:
        return "the slots changed"
    if newest.arithmetic != now.arithmetic:
        return "libraries or hardware changed"
    if changed := newest.shared.changed(now.shared):
        return f"{' and '.join(changed)} changed"
    if not chain.tracked:
        return f"commits did not record what changed since {newest.name}"
    if now.parent_gone:
        return f"its parent {newest.name} is gone"
    return ""


def _length(interval_s: float | None) -> str:
    """An interval as in a job file."""
    assert interval_s is not None, "it was entered"
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if interval_s >= length_s and interval_s % length_s == 0:
            return f"{interval_s / length_s:g}{unit}"
    return f"{interval_s:g}s"


@dataclass
class RunningStream:
    """All that rank 0 knows of one stream."""

    section: ExportSection
    by_event: bool
    """Whether the stream's clock is that of events."""
    chain: ExportStreamState = field(default_factory=ExportStreamState)
    rollback: RollbackState = field(default_factory=RollbackState)
    requested: tuple[Kind, str] | None = None
    """Kind and id of an export that a person requested."""
    ends: dict[tuple[str, str], ExportedOperation] = field(default_factory=dict)
    """Logged ends that have not acted yet, by timeline and name of the export."""

    num_forks: int = 0
    """How many passes gave another result when they were trained again, as far as noticed."""

    def time_s(self, close: "ClosingPass | None", clock_s: float | None) -> float | None:
        """The time of the stream's clock at a close; `clock_s`: the clock of events."""
        if close is None:
            return None
        return clock_s if self.by_event else close.wall_s

    def noticed_forks(self, num_forks: int) -> None:
        """Note how many passes gave another result so far."""
        self.chain.forked |= num_forks > self.num_forks
        self.num_forks = num_forks

    def saw(self, close: "ClosingPass", clock_s: float | None, num_forks: int) -> None:
        """Note that a pass closed."""
        self.noticed_forks(num_forks)
        self.chain.saw(self.time_s(close, clock_s), close.pass_times_s, close.num_samples)
        if (watched := self.section.rollback) is not None and close.num_samples:
            self.rollback.saw(watched, close.version, value_of(watched, close.metrics))

    def noted(self, end: ExportedOperation) -> None:
        """Note a logged end, which acts at a later close."""
        self.ends[end.timeline, end.name] = end

    def over(self, end: ExportedOperation, timeline: str) -> None:
        """Note that an end acted, on the job's `timeline`."""
        self.ends.pop((end.timeline, end.name), None)
        self.chain.over(end)
        if end.current and end.timeline == timeline:
            self.rollback.was_promoted(f"{end.timeline}/{end.name}", end.version)

    def view(self) -> ExportStreamState:
        """The chain as it will be at the next close, once the logged ends have acted."""
        chain = replace(self.chain)
        if chain.flight is not None and (end := self.ends.get((chain.flight.timeline, chain.flight.name))):
            chain.over(end)
        return chain

    @property
    def flight(self) -> LoggedExport | None:
        """The export that is logged and has no logged end."""
        return self.view().flight

    def restore(
        self, chain: ExportStreamState, rollback: RollbackState | None, timeline: str, *, other_slots: bool
    ) -> None:
        """Continue from a commit's state; an export in flight on another timeline is dropped."""
        self.chain = chain
        chain.tracked &= self.section.delta is not None
        chain.other_slots |= other_slots
        if chain.flight is not None and chain.flight.timeline != timeline:
            chain.drop()
            chain.touched()
        if rollback is not None and self.section.rollback is not None:
            self.rollback = rollback.on_timeline(timeline)


def status_of(chain: ExportStreamState, failing: tuple[float, str] | None, now_s: float) -> ExportStatus:
    """The stream's exports as the status shows them.

    `failing`: an export that will be tried again: since when on the monotonic clock, and its error.
    """
    newest, flight, ended = chain.newest, chain.flight, chain.ended
    tried_s = None if failing is None else time.monotonic() - failing[0]
    given_up_s = 0.0 if chain.failed_since_s is None else max(0.0, now_s - chain.failed_since_s)
    return ExportStatus(
        version=None if newest is None else newest.version,
        name=None if newest is None else newest.name,
        kind=None if newest is None else newest.kind,
        age_s=None if chain.ended_complete_s is None else max(0.0, now_s - chain.ended_complete_s),
        making=None if flight is None else flight.name,
        failing=chain.failed or None if failing is None else failing[1],
        failing_s=given_up_s if tried_s is None else tried_s,
        failed_gates=list(ended.get("failed_gates", ())),
        command_error=ended.get("command_error"),
        last=typed(LastExport, ended, "the end of an export") if ended else None,
    )
