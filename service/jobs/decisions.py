"""Decides the next action for a job, from its desired and its observed state. Pure; each decision has a reason.

service.jobs.launcher_process observes, service.jobs.supervisor acts. Times are seconds since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never

from headrace.lifecycle import ExitCode
from headrace.service.cluster import supervision
from headrace.service.cluster.supervision import Death, RestartLimits, RunOutcome
from headrace.service.jobs.errors import WrongPhase
from headrace.service.jobs.host import Action, Desired, Ending, Phase

DIED = "its launcher died"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The requests of users."""

    desired: Desired
    ask: int
    """Number of requests to start or restart the job."""
    asked_s: float
    """Time of the last change of either."""
    deaths: tuple[Death, ...] = ()
    """Deaths of launchers since the last such request that were followed by a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """The present state of the job."""

    alive: bool = False
    """Whether a launcher runs."""
    ask: int | None = None
    """The value of `Wanted.ask` that the present or last launcher was started for; None: none was started."""
    ending: Ending | None = None
    """How the job ended after the present start request."""
    paused: bool = False
    """Whether the store has the file that pauses a job."""
    draining: bool = False
    """Whether the running launcher was told to drain."""
    dead_since_s: float | None = None
    """When the supervisor first saw that no launcher runs."""
    broken: str = ""
    """Damage of the job's folder."""
    foreign: str = ""
    """Another user of the store, which prevents the start of a launcher."""


@dataclass(frozen=True, slots=True)
class StartLauncher:
    """Start a launcher."""

    reason: str
    death: Death | None = None
    """The death of the previous launcher, to be recorded."""


@dataclass(frozen=True, slots=True)
class DrainLauncher:
    """Tell the launcher to end after the present pass."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillLauncher:
    """Kill the launcher."""

    reason: str


@dataclass(frozen=True, slots=True)
class PauseJob:
    """Pause the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """Resume the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """Record that the job has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoAction:
    """Do nothing."""

    reason: str


Act = StartLauncher | DrainLauncher | KillLauncher | PauseJob | ResumeJob | FailJob | NoAction


def decide(wanted: DesiredState, observed: ObservedState, now_s: float, stop_s: float, limits: RestartLimits) -> Act:
    """The next action. `stop_s` is how long a stopping job may take to end."""
    if observed.broken:
        return NoAction(observed.broken)
    if observed.alive:
        return _decide_alive(wanted, observed, now_s, stop_s)
    if observed.ending is not None:
        return NoAction("it has ended")
    if wanted.desired in (Desired.DRAINED, Desired.STOPPED):
        return NoAction("it is not to run")
    if observed.foreign:
        return NoAction(observed.foreign)
    if observed.ask != wanted.ask:
        return StartLauncher("asked to begin")
    return _decide_dead(wanted, observed, now_s, limits)


def _decide_alive(wanted: DesiredState, observed: ObservedState, now_s: float, stop_s: float) -> Act:
    match wanted.desired:
        case _ if observed.ask != wanted.ask:
            return _end("asked to begin anew", observed, now_s - wanted.asked_s, stop_s)
        case Desired.STOPPED:
            return _end("asked to stop", observed, now_s - wanted.asked_s, stop_s)
        case Desired.DRAINED:
            return NoAction("it is ending") if observed.draining else DrainLauncher("asked to drain")
        case Desired.PAUSED:
            return NoAction("it is paused") if observed.paused else PauseJob("asked to pause")
        case Desired.RUNNING:
            return ResumeJob("asked to resume") if observed.paused else NoAction("it runs")
    assert_never(wanted.desired)


def _end(why: str, observed: ObservedState, waited_s: float, stop_s: float) -> Act:
    if waited_s >= stop_s:
        return KillLauncher(f"{why}, not ended after {stop_s:g} s")
    return NoAction("it is ending") if observed.draining else DrainLauncher(why)


def _decide_dead(wanted: DesiredState, observed: ObservedState, now_s: float, limits: RestartLimits) -> Act:
    """The launcher died without an outcome: start another one after a pause, unless too many died."""
    died_s = now_s if observed.dead_since_s is None else observed.dead_since_s
    died = RunOutcome(ExitCode.BUG, DIED)
    decision = supervision.decide(died, wanted.deaths, died_s, limits)
    if isinstance(decision, supervision.End):
        times = sum(died_s - death.at_s < limits.window_s for death in wanted.deaths) + 1
        return FailJob(f"{DIED} {times} times within {limits.window_s:g} s; `restart` begins it again where it was")
    if now_s < died_s + decision.after_s:
        return NoAction(decision.reason)
    return StartLauncher(decision.reason, Death(died_s, DIED))


STATES: Mapping[str, Phase] = {
    "starting": Phase.STARTING,
    "replaying": Phase.REPLAYING,
    "training": Phase.TRAINING,
    "paused": Phase.PAUSED,
    "draining": Phase.DRAINING,
    "restarting": Phase.RESTARTING,
    "done": Phase.DRAINING,
    "failed": Phase.DRAINING,
}
"""By the state that a running launcher reports. After an end it drains until it has written its outcome."""


def phase_of(wanted: DesiredState, observed: ObservedState, state: str) -> Phase:
    """The phase of the job, given the `state` that its launcher reports."""
    if observed.broken:
        return Phase.BROKEN
    ends = wanted.desired in (Desired.DRAINED, Desired.STOPPED)
    if observed.alive:
        if observed.ending is not None:  # its launcher is cleaning up
            return Phase.DRAINING
        if observed.ask != wanted.ask:
            return Phase.DRAINING if ends else Phase.RESTARTING
        return Phase.DRAINING if ends else STATES.get(state, Phase.STARTING)
    if observed.ending is not None:
        if observed.ending.code != ExitCode.DRAINED:
            return Phase.FAILED
        return Phase.STOPPED if wanted.desired is Desired.STOPPED else Phase.ENDED
    if ends:
        return Phase.STOPPED
    if observed.foreign:
        return Phase.BROKEN
    return Phase.RESTARTING if observed.ask == wanted.ask else Phase.STARTING


def requested_changes(wanted: DesiredState, observed: ObservedState, action: Action, now: datetime) -> dict[str, Any]:
    """Changes of the job's record for `action`; none if it was requested already. Raises WrongPhase."""
    ended = observed.ending is not None
    over = ended or wanted.desired in (Desired.DRAINED, Desired.STOPPED)
    anew = {"desired": Desired.RUNNING, "ask": wanted.ask + 1, "asked_at": now, "deaths": ()}
    match action:
        case Action.PAUSE:
            if over:
                raise WrongPhase("the job has ended or is ending, so it cannot be paused; `resume` starts it again")
            return _unless(wanted, Desired.PAUSED, now)
        case Action.RESUME:
            return anew if over else _unless(wanted, Desired.RUNNING, now)
        case Action.DRAIN:
            return {} if over else _unless(wanted, Desired.DRAINED, now)
        case Action.STOP:
            return {} if ended else _unless(wanted, Desired.STOPPED, now)
        case Action.RESTART:
            begun_anew = observed.alive and observed.ask != wanted.ask and wanted.desired is Desired.RUNNING
            return {} if begun_anew else anew
    assert_never(action)


def requested_move(wanted: DesiredState, observed: ObservedState, build: str, now: datetime) -> dict[str, Any]:
    """Changes of the job's record for a move to another build: it ends at a close and starts again, if it is to run."""
    over = observed.ending is not None or wanted.desired in (Desired.DRAINED, Desired.STOPPED)
    return {"build": build} if over else {"build": build, "ask": wanted.ask + 1, "asked_at": now, "deaths": ()}


def _unless(wanted: DesiredState, desired: Desired, now: datetime) -> dict[str, Any]:
    return {} if wanted.desired is desired else {"desired": desired, "asked_at": now}
