"""Decides whether an export of a stream is due at a close: its kind, its parent, and the reason in words.

Pure. The job's log keeps each decision, so none is made twice. trainer.exports.stream_state is the state of a stream.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.trainer.config import ExportSection
from headrace.trainer.exports.stream_state import ExportStreamState, Kind, LoggedExport


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInput:
    """Input of a decision beside settings and chain."""

    time_s: float | None
    """Time of the stream's clock in unix seconds; None: not known yet."""
    timeline: str
    arithmetic: str
    """Hash of the fingerprint."""
    shared: Mapping[str, Any]
    """Values of trainer.exports.stream_state.SHARED."""
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
    if chain.flight is not None or set(now.shared["tables"]) & set(now.sweeping):
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
    if changed := [name for name, value in now.shared.items() if newest.shared.get(name) != value]:
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
