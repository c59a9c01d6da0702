"""Decides what to do when a worker ends, a stop is requested, or time runs out. Pure.

`Supervision.step` takes an event and the time and returns effects, each with its reason in words.
service.cluster.generation carries them out. Any death ends the generation; the second part of this module decides
whether another one follows.
"""

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from headrace.lifecycle import ExitCode
from headrace.retry import Backoff
from headrace.service.cluster.runtime import UNREACHABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingLimits:
    """Longest times for each kind of ending, in seconds."""

    drain_s: float = 300.0
    """From the request to stop to the end of the last trainer; then the job ends without finishing its pass."""
    finish_s: float = 60.0
    """From the orderly end of the first trainer to that of the last."""
    end_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    settle_s: float = 1.0
    """From an exit that may be a reaction to another worker's end, to SIGKILL: the cause may be reported later."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs."""

    worker: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker is gone: its exit code, or minus the number of the signal that killed it."""

    worker: str
    code: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not be started, or did not come up in time."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class NotStarted:
    """A reader has no place to run, or could not be started, and the others do without it."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A person or the system requests the end of the job."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Started | Exited | StartFailed | NotStarted | StopRequested | Tick


@dataclass(frozen=True, slots=True)
class DrainRankZero:
    """Send rank 0 a request to end after the pass in training."""

    reason: str


@dataclass(frozen=True, slots=True)
class TerminateWorkers:
    """Send SIGTERM to these workers."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """Send SIGKILL to the process groups of these workers."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartReaders:
    """Start those of these readers that have a place."""

    workers: tuple[str, ...]


Effect = DrainRankZero | TerminateWorkers | KillWorkers | StartReaders

READER_PAUSES = Backoff.doubling(1.0, 60.0)
"""Between the end of a reader and its next start, by the number of its ends."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a generation or of a job."""

    code: int
    """Exit code of the launcher."""
    reason: str
    first_dead: str | None = None
    """The worker whose death was the cause."""

    @property
    def may_pass(self) -> bool:
        """True if the cause may not come again, so that another generation may succeed."""
        return self.code in (ExitCode.BUG, ExitCode.RETRY)


MEANINGS: dict[int, str] = {
    ExitCode.BAD_CONFIG: " (bad configuration)",
    ExitCode.BUG: " (a bug)",
    ExitCode.RETRY: " (unavailable or out of time)",
}


def format_exit(code: int) -> str:
    """An exit code in words."""
    if code == UNREACHABLE:
        return "unreachable for longer than cluster.node_timeout"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}{MEANINGS.get(code, '')}"


def outcome_of_death(worker: str, code: int) -> RunOutcome:
    """The outcome where one worker ended first. An unexplained end, as by a signal, may pass."""
    known = (ExitCode.FAILED, ExitCode.BAD_CONFIG, ExitCode.RETRY)
    return RunOutcome(code if code in known else ExitCode.BUG, f"{worker} ended first: {format_exit(code)}", worker)


class Supervision:
    """The state of one generation. `outcome` is set once no worker is left.

    A reader that dies ends it only where it is the last one, or no trainer runs yet: its parts go to the others until
    it is started again.
    """

    def __init__(
        self, shards: Sequence[str], trainers: Sequence[str], limits: EndingLimits, readers: Sequence[str] = ()
    ) -> None:
        self._limits = limits
        self._readers = frozenset(readers)
        self._servers = self._readers | frozenset(shards)
        self.lost: dict[str, str] = {}
        """The readers that do not run, and that the generation goes on without, with the reason."""
        self._losses: Counter[str] = Counter()
        self._start_at: dict[str, float] = {}  # by reader that does not run
        self._to_finish = set(trainers)
        self._alive: dict[str, None] = {}  # in order of their start
        self._trainer_started = False
        self._verdict: RunOutcome | None = None
        self._late_at: tuple[float, str] | None = None
        self._kill_at: float | None = None
        self._stop_asked = False
        self._settling = False  # the first death may be a reaction to one that is not reported yet

    @property
    def outcome(self) -> RunOutcome | None:
        """The outcome, once every worker has ended."""
        return self._verdict if not self._alive else None

    @property
    def ending(self) -> bool:
        """True if the end is decided: no worker is started any more."""
        return self._verdict is not None

    @property
    def stop_asked(self) -> bool:
        """True if a stop was requested."""
        return self._stop_asked

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take `event` at `now_s`; the effects to carry out now."""
        match event:
            case Started(worker):
                self._alive[worker] = None
                self.lost = {name: why for name, why in self.lost.items() if name != worker}
                self._trainer_started |= worker not in self._servers
                return []
            case Exited(worker, code):
                return self._exited(worker, code, now_s)
            case StartFailed(worker, reason):
                return self._end(RunOutcome(ExitCode.RETRY, f"{worker}: {reason}", worker), now_s)
            case NotStarted(worker, reason):
                return self._do_without(worker, reason, now_s)
            case StopRequested():
                return self._stop(now_s)
            case Tick():
                return self._tick(now_s)

    def _exited(self, worker: str, code: int, now_s: float) -> list[Effect]:
        self._alive.pop(worker, None)
        if self._verdict is not None:
            # An end that may pass settles before anybody is killed: a signal then is the cause, reported late.
            is_cause = code in (ExitCode.FAILED, ExitCode.BAD_CONFIG) or (code < 0 and self._verdict.may_pass)
            if self._settling and is_cause:
                self._verdict, self._settling = outcome_of_death(worker, code), False
            return []
        if worker in self._readers and self._goes_on_without(worker, code):
            return self._do_without(worker, format_exit(code), now_s)
        if worker in self._servers or code != 0:
            self._settling = code > 0
            return self._end(outcome_of_death(worker, code), now_s)
        self._to_finish.discard(worker)
        if self._to_finish:
            self._late(
                now_s + self._limits.finish_s, f"{worker} has finished, {', '.join(sorted(self._to_finish))} has not"
            )
            return []
        reason = "stopped after the pass in training" if self._stop_asked else "the stream is drained"
        return self._end(RunOutcome(ExitCode.DRAINED, reason), now_s)

    def _do_without(self, reader: str, why: str, now_s: float) -> list[Effect]:
        self.lost = {**self.lost, reader: why}
        self._losses[reader] += 1
        self._start_at[reader] = now_s + READER_PAUSES.pause_s(self._losses[reader])
        return []

    def _goes_on_without(self, reader: str, code: int) -> bool:
        """Whether another reader is left, and this one did not find what all of them would find.

        One that was started later may be on another machine, whose files are its own.
        """
        known = code in (ExitCode.FAILED, ExitCode.BAD_CONFIG) and not self._losses[reader]
        return self._trainer_started and not known and any(name in self._readers for name in self._alive)

    def _stop(self, now_s: float) -> list[Effect]:
        everyone = tuple(self._alive)
        if self._stop_asked:
            if self._verdict is None:
                self._verdict = RunOutcome(ExitCode.FAILED, "stopped at the second request, in the middle of a pass")
            return [KillWorkers(everyone, "asked to stop a second time")] if everyone else []
        self._stop_asked = True
        if self._verdict is not None:
            return []
        if not self._trainer_started:
            return self._end(RunOutcome(ExitCode.DRAINED, "stopped before training began"), now_s)
        self._late(now_s + self._limits.drain_s, f"asked to stop, not ended after {self._limits.drain_s:g} s")
        return [DrainRankZero("asked to stop")]

    def _late(self, at_s: float, reason: str) -> None:
        if self._late_at is None or at_s < self._late_at[0]:
            self._late_at = (at_s, reason)

    def _tick(self, now_s: float) -> list[Effect]:
        if self._verdict is None and self._late_at is not None and now_s >= self._late_at[0]:
            code = ExitCode.FAILED if self._stop_asked else ExitCode.BUG
            return self._end(RunOutcome(code, self._late_at[1]), now_s)
        if self._kill_at is not None and now_s >= self._kill_at:
            self._kill_at, self._settling = now_s + self._limits.end_s, False
            return [KillWorkers(tuple(self._alive), f"still running: {self._verdict.reason if self._verdict else ''}")]
        if self._verdict is None and self._trainer_started and not self._stop_asked:
            due = tuple(name for name in self.lost if now_s >= self._start_at[name])
            return [StartReaders(due)] if due else []
        return []

    def _end(self, verdict: RunOutcome, now_s: float) -> list[Effect]:
        """Decide the end. Workers that still run get SIGTERM now and SIGKILL at the deadline.

        Where another generation may follow, they get SIGKILL only: a store must be usable after a death at any time.
        """
        if self._verdict is not None:
            return []
        self._verdict = verdict
        if not self._alive:
            return []
        if not verdict.may_pass:
            self._kill_at = now_s + self._limits.end_s
            return [TerminateWorkers(tuple(self._alive), verdict.reason)]
        if self._settling:
            self._kill_at = now_s + self._limits.settle_s
            return []
        self._kill_at = now_s + self._limits.end_s
        return [KillWorkers(tuple(self._alive), verdict.reason)]


# Decides whether a generation that died is followed by another one, and bounds the number of restarts. Pure.
#
# The end of a generation is judged above; the next one is started by service.cluster.job_runner.

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""The first death without progress is followed by a restart at once, the second after the first pause. Each further
one in a row doubles the pause, up to the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """The most restarts within a time."""

    max_restarts: int = 5
    """Most restarts within `window_s`; 0: none."""
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Death:
    """A generation that was followed by another one."""

    at_s: float
    reason: str
    progress: bool = False
    """True if it closed a pass that no generation before it had closed."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start another generation after a pause."""

    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The job has ended."""

    outcome: RunOutcome


def decide(
    outcome: RunOutcome,
    past: Sequence[Death],
    now_s: float,
    limits: RestartLimits,
    *,
    progress: bool = False,
    stop_asked: bool = False,
) -> Restart | End:
    """The decision after a generation that ended with `outcome`, at `now_s`. `past`: the deaths before it.

    `progress`: whether it closed a new pass. `stop_asked`: whether a stop of the job was requested.
    """
    if not outcome.may_pass or limits.max_restarts == 0:
        return End(outcome)
    if stop_asked:
        return End(replace(outcome, reason=f"{outcome.reason}; not restarted, for the job was asked to stop"))
    recent = [death for death in past if now_s - death.at_s < limits.window_s]
    if len(recent) >= limits.max_restarts:
        return End(replace(outcome, reason=_too_many([*(death.reason for death in recent), outcome.reason], limits)))
    in_vain = 0 if progress else sum(1 for _ in takewhile(lambda death: not death.progress, reversed(recent)))
    pause_s = Backoff.doubling(FIRST_PAUSE_S, MAX_PAUSE_S).pause_s(in_vain) if in_vain else 0.0
    after = f" in {pause_s:g} s" if pause_s else ""
    return Restart(pause_s, f"{outcome.reason}; restarting{after}, {len(recent) + 1} of {limits.max_restarts}")


def _too_many(reasons: list[str], limits: RestartLimits) -> str:
    deaths = "; ".join(f"{reason} ({times} x)" for reason, times in Counter(reasons).items())
    return (
        f"the workers died {len(reasons)} times within {limits.window_s:g} s, "
        f"more than cluster.max_restarts = {limits.max_restarts} allows: {deaths}"
    )
