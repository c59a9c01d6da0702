"""What a launcher does when a worker ends, a person asks to stop, or time runs out: decisions only.

`Supervision.step` takes an event and the time and returns effects, each with its reason in words; it starts, signals
and asks nothing itself (service.launcher.local does). Restarting is not built yet: any death ends the job.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.lifecycle import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each kind of ending may take, in seconds."""

    drain_s: float = 300.0
    """From the request to stop to the end of the last trainer; then the job is ended without finishing its pass."""
    finish_s: float = 60.0
    """From the orderly end of the first trainer to that of the last."""
    end_s: float = 10.0
    """From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's process runs."""

    worker: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's process is gone: its exit code, or minus the number of the signal that killed it."""

    worker: str
    code: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not be started, or did not come up."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A person, or the system, asks the job to end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Started | Exited | StartFailed | StopAsked | Tick


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask the chief to end after the pass in training."""

    reason: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to these workers."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the process groups of these workers."""

    workers: tuple[str, ...]
    reason: str


Effect = Drain | Terminate | Kill


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """Exit code of the launcher."""
    reason: str
    first_dead: str | None = None
    """The worker whose death ended the job."""


def how_it_ended(code: int) -> str:
    """The end of a process in words."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    meaning = {ExitCode.BAD_CONFIG: " (bad configuration)", ExitCode.RETRY: " (unavailable or out of time)"}
    return f"exit code {code}{meaning.get(ExitCode(code), '') if code in list(ExitCode) else ''}"


class Supervision:
    """The state of one start of a job; `outcome` is set once no worker is left."""

    def __init__(self, shards: Sequence[str], trainers: Sequence[str], limits: Limits) -> None:
        self._limits = limits
        self._shards = frozenset(shards)
        self._to_finish = set(trainers)
        self._alive: dict[str, None] = {}  # in order of their start
        self._trainer_started = False
        self._verdict: Outcome | None = None
        self._late_at: tuple[float, str] | None = None
        self._kill_at: float | None = None
        self._stop_asked = False

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended, once every worker has."""
        return self._verdict if not self._alive else None

    @property
    def ending(self) -> bool:
        """Whether the job's end is decided: nothing more is to be started."""
        return self._verdict is not None

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take in `event` at `now_s`; what must be done now."""
        match event:
            case Started(worker):
                self._alive[worker] = None
                self._trainer_started |= worker not in self._shards
                return []
            case Exited(worker, code):
                return self._exited(worker, code, now_s)
            case StartFailed(worker, reason):
                return self._end(Outcome(ExitCode.BUG, f"{worker}: {reason}", worker), now_s)
            case StopAsked():
                return self._stop(now_s)
            case Tick():
                return self._tick(now_s)

    def _exited(self, worker: str, code: int, now_s: float) -> list[Effect]:
        self._alive.pop(worker, None)
        if self._verdict is not None:
            return []
        if worker in self._shards or code != 0:
            asked = code if code in (ExitCode.BAD_CONFIG, ExitCode.RETRY) else ExitCode.BUG
            return self._end(Outcome(asked, f"{worker} ended first: {how_it_ended(code)}", worker), now_s)
        self._to_finish.discard(worker)
        if self._to_finish:
            self._late(
                now_s + self._limits.finish_s, f"{worker} has finished, {', '.join(sorted(self._to_finish))} not"
            )
            return []
        reason = "stopped after the pass in training" if self._stop_asked else "the stream is drained"
        return self._end(Outcome(ExitCode.DRAINED, reason), now_s)

    def _stop(self, now_s: float) -> list[Effect]:
        everybody = tuple(self._alive)
        if self._stop_asked:
            if self._verdict is None:
                self._verdict = Outcome(ExitCode.BUG, "stopped at the second request, in the middle of a pass")
            return [Kill(everybody, "asked to stop a second time")] if everybody else []
        self._stop_asked = True
        if self._verdict is not None:
            return []
        if not self._trainer_started:
            return self._end(Outcome(ExitCode.DRAINED, "stopped before training began"), now_s)
        self._late(now_s + self._limits.drain_s, f"asked to stop, not ended after {self._limits.drain_s:g} s")
        return [Drain("asked to stop")]

    def _late(self, at_s: float, reason: str) -> None:
        if self._late_at is None or at_s < self._late_at[0]:
            self._late_at = (at_s, reason)

    def _tick(self, now_s: float) -> list[Effect]:
        if self._verdict is None and self._late_at is not None and now_s >= self._late_at[0]:
            return self._end(Outcome(ExitCode.BUG, self._late_at[1]), now_s)
        if self._kill_at is not None and now_s >= self._kill_at:
            self._kill_at = now_s + self._limits.end_s
            return [Kill(tuple(self._alive), f"still there {self._limits.end_s:g} s after SIGTERM")]
        return []

    def _end(self, verdict: Outcome, now_s: float) -> list[Effect]:
        """Decide the end; workers that are left get SIGTERM now and SIGKILL at the deadline."""
        if self._verdict is not None:
            return []
        self._verdict = verdict
        if not self._alive:
            return []
        self._kill_at = now_s + self._limits.end_s
        return [Terminate(tuple(self._alive), verdict.reason)]
