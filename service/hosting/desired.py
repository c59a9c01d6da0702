"""What is to be done about a job, given what is wanted and what is seen: pure decisions, each with its reason in words.

Looking is service.hosting.observing's, carrying out service.hosting.supervisor's. Times are seconds since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never

from millrace.lifecycle import ExitCode
from service.hosting.errors import NotNow
from service.hosting.host import Action, Desired, Ending, Phase
from service.launcher import restarts
from service.launcher.restarts import Death, RestartLimits
from service.launcher.supervision import Outcome

DIED = "its launcher died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What people asked for."""

    desired: Desired
    ask: int
    """How often the job was asked to begin, or to begin anew."""
    asked_s: float
    """When either changed last."""
    deaths: tuple[Death, ...] = ()
    """Of launchers since the last ask, that were followed by another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What is seen of the job now."""

    alive: bool = False
    """Whether a launcher runs."""
    ask: int | None = None
    """The ask that the living, or the last, launcher was started for; None: none ever was."""
    ending: Ending | None = None
    """How the job ended after the present ask."""
    paused: bool = False
    """Whether the store has the file that pauses a job."""
    draining: bool = False
    """Whether the living launcher was asked to end."""
    dead_since_s: float | None = None
    """When it was first seen that no launcher runs."""
    broken: str = ""
    """What is wrong with the job's folder."""
    foreign: str = ""
    """Who else uses the store, so that no launcher can be started now."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a launcher."""

    reason: str
    death: Death | None = None
    """Of the one before, which is to be remembered."""


@dataclass(frozen=True, slots=True)
class AskToDrain:
    """Ask the launcher to end after the pass in training."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the launcher."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Have the job pause."""

    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Have the job go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Write down that the job has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """Leave it as it is."""

    reason: str


Act = Start | AskToDrain | Kill | Hold | LetGo | GiveUp | Nothing


def decide(wanted: Wanted, observed: Observed, now_s: float, stop_s: float, limits: RestartLimits) -> Act:
    """The next thing to do; `stop_s`: how long a job that is stopped may take to end."""
    if observed.broken:
        return Nothing(observed.broken)
    if observed.alive:
        return _of_a_living_one(wanted, observed, now_s, stop_s)
    if observed.ending is not None:
        return Nothing("it has ended")
    if wanted.desired in (Desired.DRAINED, Desired.STOPPED):
        return Nothing("it is not to run")
    if observed.foreign:
        return Nothing(observed.foreign)
    if observed.ask != wanted.ask:
        return Start("asked to begin")
    return _of_a_dead_one(wanted, observed, now_s, limits)


def _of_a_living_one(wanted: Wanted, observed: Observed, now_s: float, stop_s: float) -> Act:
    match wanted.desired:
        case _ if observed.ask != wanted.ask:
            return _end("asked to begin anew", observed, now_s - wanted.asked_s, stop_s)
        case Desired.STOPPED:
            return _end("asked to stop", observed, now_s - wanted.asked_s, stop_s)
        case Desired.DRAINED:
            return Nothing("it is ending") if observed.draining else AskToDrain("asked to drain")
        case Desired.PAUSED:
            return Nothing("it is paused") if observed.paused else Hold("asked to pause")
        case Desired.RUNNING:
            return LetGo("asked to resume") if observed.paused else Nothing("it runs")
    assert_never(wanted.desired)


def _end(why: str, observed: Observed, waited_s: float, stop_s: float) -> Act:
    if waited_s >= stop_s:
        return Kill(f"{why}, not ended after {stop_s:g} s")
    return Nothing("it is ending") if observed.draining else AskToDrain(why)


def _of_a_dead_one(wanted: Wanted, observed: Observed, now_s: float, limits: RestartLimits) -> Act:
    """Its launcher died without a word: start another one, after a pause, unless too many died."""
    died_s = now_s if observed.dead_since_s is None else observed.dead_since_s
    died = Outcome(ExitCode.BUG, DIED)
    decision = restarts.decide(died, wanted.deaths, died_s, limits)
    if isinstance(decision, restarts.End):
        times = sum(died_s - death.at_s < limits.window_s for death in wanted.deaths) + 1
        return GiveUp(f"{DIED} {times} times within {limits.window_s:g} s; `restart` begins it again where it was")
    if now_s < died_s + decision.after_s:
        return Nothing(decision.reason)
    return Start(decision.reason, Death(died_s, DIED))


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
"""By the state that a living launcher tells: of an end, until how it ended is written down, it puts things away."""


def phase_of(wanted: Wanted, observed: Observed, state: str) -> Phase:
    """Where the job stands, by what its launcher says is its `state`."""
    if observed.broken:
        return Phase.BROKEN
    ends = wanted.desired in (Desired.DRAINED, Desired.STOPPED)
    if observed.alive:
        if observed.ending is not None:  # its launcher puts things away
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


def asked(wanted: Wanted, observed: Observed, action: Action, now: datetime) -> dict[str, Any]:
    """What of the job's record `action` changes; nothing, where it was asked for already. Raises NotNow."""
    ended = observed.ending is not None
    over = ended or wanted.desired in (Desired.DRAINED, Desired.STOPPED)
    anew = {"desired": Desired.RUNNING, "ask": wanted.ask + 1, "asked_at": now, "deaths": ()}
    match action:
        case Action.PAUSE:
            if over:
                raise NotNow("it has ended, or is to end, so there is nothing to pause; `resume` begins it again")
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


def _unless(wanted: Wanted, desired: Desired, now: datetime) -> dict[str, Any]:
    return {} if wanted.desired is desired else {"desired": desired, "asked_at": now}
