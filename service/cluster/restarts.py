"""Decides whether a generation that died is followed by another one, and bounds the number of restarts. Pure.

The end of a generation is judged in service.cluster.supervision; the next one is started by service.cluster.job_runner.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from headrace.retry import Backoff
from headrace.service.cluster.supervision import RunOutcome

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
