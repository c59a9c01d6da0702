"""State of a stream of exports: the newest complete export, the one in progress, what happened since.

A pure fold over the closes of passes and the job's log ("export" and "exported" operations), so a replay gives the same
state. Its fields are keys of a commit's state. trainer.exports.schedule decides what is due.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.codec import typed
from headrace.trainer.job_status import ExportStatus, LastExport

Body = Mapping[str, Any]
Kind = Literal["base", "delta"]
SHARED = ("address", "tables", "dtype", "base_threshold", "delta_threshold", "delta_keep_days")
"""Fields of an "export" operation that must be equal in a delta and its parent."""


@dataclass(frozen=True, slots=True)
class LoggedExport:
    """One export as it was logged."""

    name: str
    version: int
    kind: Kind
    timeline: str
    shared: Mapping[str, Any]
    """See SHARED."""
    arithmetic: str
    """Hash of the fingerprint of libraries and hardware at the time."""
    id: str | None
    """Of the request of a person, if there was one."""

    @classmethod
    def of(cls, body: Body) -> "LoggedExport":
        """The export of an "export" operation."""
        plain = {name: body[name] for name in ("name", "version", "timeline", "arithmetic", "id")}
        return cls(**plain, kind=body["type"], shared={name: body[name] for name in SHARED})

    @property
    def path(self) -> str:
        """Below the job's folder at the destination."""
        return f"{self.timeline}/{self.name}"


@dataclass
class ExportStreamState:
    """One stream. Times are unix seconds of the stream's clock; times of ends are wall time."""

    newest: LoggedExport | None = None
    """The newest complete export: the parent of the next delta."""
    flight: LoggedExport | None = None
    """The export that is logged and has not ended."""
    cut: dict[str, Any] | None = None
    """The operation of the export in flight."""
    facts: dict[str, Any] | None = None
    """Facts of the version of the export in flight: see trainer.exports.export_settings."""
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

    def ordered(self, body: Body, facts: Mapping[str, Any], *, tracks: bool) -> None:
        """Note that an export of this stream is cut. `tracks`: whether commits from here on record what changes."""
        self.flight, self.cut, self.facts = LoggedExport.of(body), dict(body), dict(facts)
        self.last_s, self.fresh, self.redo = body["at_s"], False, False
        self.low_since_cut_s = None
        if self.flight.kind == "base":
            self.last_base_s, self.forked, self.tracked = body["at_s"], False, tracks
            self.other_slots = False

    def over(self, body: Body) -> None:
        """Note that the export in flight ended: complete, or failed for good."""
        flight = self.flight
        if flight is None or (flight.name, flight.timeline) != (body["name"], body["timeline"]):
            return
        self.drop()
        self.ended = {**body, "id": flight.id}
        if body["outcome"] == "complete":
            self.newest, self.failed, self.failed_base, self.failed_since_s = flight, "", False, None
            self.low_s, self.ended_complete_s = self.low_since_cut_s, body.get("at_s")
            return
        if not self.failed:
            self.failed_since_s = body.get("at_s")
        self.failed = f"{flight.name}: {body.get('error') or 'it failed'}"
        self.failed_base |= flight.kind == "base"
        self.redo = bool(body.get("final")) and flight.kind == "delta"

    def drop(self) -> None:
        """Forget the export in flight."""
        self.flight = self.cut = self.facts = None

    def touched(self) -> None:
        """Note that an operation changed tables."""
        self.fresh = True

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
