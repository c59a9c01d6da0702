"""Progress and speed of the job, for its status. Clocks here decide nothing."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.process_usage import ProcessUsage
from headrace.traffic import Links
from headrace.trainer.job_status import Status
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.status.time_spent import StepClock, TimeSpent, advice, pipe_wait

RATE_WINDOW_S = 10.0
"""Rates cover the passes that closed within this time."""


SAVED = ("version", "num_positions", "num_events", "num_samples", "skipped_steps")
"""Counts that a commit holds."""


@dataclass(frozen=True, slots=True)
class PassReading:
    """Totals of what all ranks read in a pass."""

    num_events: int
    num_samples: int
    num_judged: int
    """The number of which `rejected` is a part."""
    rejected: Mapping[str, int]
    day: int | None
    """Median UTC day of the samples' event times; None without event time."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Events that were left out, by reason: see PassTally."""
    num_clicks: int = 0
    """Clicks that a join read."""
    first_of: Mapping[str, str] = field(default_factory=dict)
    """The first rejection of each reason, as text; empty if events may not be quoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTally:
    """The message of one rank to rank 0 at a close: its part of a PassReading, and its figures since the start."""

    num_events: int
    num_samples: int
    num_judged: int
    num_clicks: int
    rejected: Mapping[str, int]
    left_out: Mapping[str, int] = field(default_factory=dict)
    first_of: Mapping[str, str] = field(default_factory=dict)
    days: Mapping[int, int] = field(default_factory=dict)
    """UTC days of the samples' event times, with their counts."""
    signals: Sequence[str] = ()
    """Inputs of rows' statistics that the pass has (trainer.train.observer)."""
    dense: str = ""
    """Hash of the dense state."""
    times_s: tuple[float, float] | None = None
    """Lowest and highest event time; None without event time."""
    times: Mapping[str, Any] = field(default_factory=dict)
    """See EventTimes.message."""
    links: Links = field(default_factory=dict)
    spent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part of the loop's work."""
    pass_s: float = 0.0
    """Seconds that the pass took."""
    usage: ProcessUsage = ProcessUsage()


UNMATCHED = "click without an impression"
"""The reason why a join leaves out a click."""
RECENT_CLICKS, FEW_CLICKS = 100_000, 1_000
"""Clicks from which on older ones count half; fewest clicks of which a share is told."""


@dataclass(slots=True)
class RecentClicks:
    """How many of the last clicks of a join found no impression. It depends on closes alone."""

    num: int = 0
    num_unmatched: int = 0

    def add(self, reading: PassReading) -> None:
        """Count those of a pass."""
        self.num += reading.num_clicks
        self.num_unmatched += reading.left_out.get(UNMATCHED, 0)
        while self.num > RECENT_CLICKS:
            self.num, self.num_unmatched = self.num // 2, self.num_unmatched // 2

    @property
    def share_unmatched(self) -> float | None:
        """None where there are few."""
        return None if self.num < FEW_CLICKS else self.num_unmatched / self.num


class _Moment(NamedTuple):
    """The counts at a close."""

    at_s: float
    num_events: int
    num_samples: int
    spent_s: Mapping[str, float]
    """Seconds by part since the start."""


class TrainerProgress:
    """Counts of one rank; those of rank 0 are the job's status. Written by the loop, read by any thread."""

    def __init__(self, job: str, *, learning: bool = True, max_step_s: float = math.inf) -> None:
        """`learning`: whether the job learns, until the first pass begins; then the current pass tells.

        A step that takes longer than `max_step_s` is reported as stalled.
        """
        self._job = job
        self.step = StepClock(max_step_s)
        """The clock of the current step."""
        self._lock = threading.Lock()
        self._begin_s = time.monotonic()
        self._idle_since_s: float | None = None
        self.spent = TimeSpent()
        """Time that the loop spends on each part of its work."""
        self.step.goes_on = self.spent.goes_on
        self._closes = deque([_Moment(self._begin_s, 0, 0, {})])
        self._closed = Status()
        """Figures of the last close."""
        self.state = "starting"
        self.current = 0
        """The pass in progress, or the last one."""
        self.version = 0
        """The last closed pass."""
        self.num_positions = 0
        """Positions of all closed passes."""
        self.last_planned = 0
        """Highest number that a plan has used."""
        self.planned_positions: dict[str, int] = {}
        self.num_planned = 0
        """Positions of all planned passes."""
        self.positions: dict[str, int] = {}
        self.with_more: Callable[[Status], Status] = lambda status: status
        """Adds the figures of other parts to a status; called at each one."""
        self.num_events = self.num_samples = self.skipped_steps = 0
        self.rejected: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        self.clicks = RecentClicks()
        self.first_of: dict[str, str] = {}
        """See PassReading.first_of; since the start of this process."""
        self.learning = learning

    def planned(self, plan: PassPlan) -> None:
        """A pass is planned."""
        self.used(plan.number)
        self.planned_positions |= plan.positions()
        self.num_planned += plan.num_positions

    def opened(self, plan: PassPlan, state: str) -> None:
        """A pass begins."""
        self.current, self.state, self.learning = plan.number, state, plan.learn
        self._idle_since_s = None

    def idle(self, paused: bool) -> None:
        """No pass is known: the job is paused, or waits for events."""
        if self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
        if paused:
            self.state = "paused"
        elif self.state == "paused" or (self.state == "starting" and self.version):  # it goes on, as after a resize
            self.state = "training"

    def used(self, number: int) -> None:
        """Mark the numbers up to this one as used by plans, which may be void: they are not used again."""
        self.last_planned = max(self.last_planned, number)

    def closed(self, plan: PassPlan, reading: PassReading, figures: Status) -> None:
        """A pass is closed. `figures`: a status with those of the close."""
        with self._lock:
            self.version = plan.number
            self.num_positions += plan.num_positions
            self.positions |= plan.positions()
            self.num_events += reading.num_events
            self.num_samples += reading.num_samples
            for reason, count in reading.rejected.items():
                self.rejected[reason] = self.rejected.get(reason, 0) + count
            for reason, count in reading.left_out.items():
                self.left_out[reason] = self.left_out.get(reason, 0) + count
            self.clicks.add(reading)
            self.first_of = {**reading.first_of, **self.first_of}
            self._closed = figures
            now_s = time.monotonic()
            self._closes.append(_Moment(now_s, self.num_events, self.num_samples, self.spent.seconds()))
            while len(self._closes) > 2 and self._closes[0].at_s < now_s - RATE_WINDOW_S:
                self._closes.popleft()

    def saved(self) -> dict[str, Any]:
        """The state that a commit holds."""
        counts = {"positions": dict(self.positions), "rejected": dict(self.rejected)}
        more: dict[str, Any] = {"left_out": dict(self.left_out)} if self.left_out else {}  # as commits before had none
        more |= {"clicks": [self.clicks.num, self.clicks.num_unmatched]} if self.clicks.num else {}
        return {name: getattr(self, name) for name in SAVED} | counts | more

    def load_saved(self, state: Mapping[str, Any]) -> None:
        """Continue from a commit."""
        with self._lock:
            for name in SAVED:
                setattr(self, name, int(state[name]))
            self.positions, self.rejected = dict(state["positions"]), dict(state["rejected"])
            self.left_out = dict(state.get("left_out", {}))
            self.clicks = RecentClicks(*state.get("clicks", ()))
            self.last_planned, self.num_planned = self.version, self.num_positions
            self.planned_positions = dict(self.positions)
            self._closes = deque([_Moment(time.monotonic(), self.num_events, self.num_samples, self.spent.seconds())])

    def ended(self, *, resizes: bool = False) -> None:
        """The job has ended; or, with `resizes`, this generation of its workers."""
        self.state = "restarting" if resizes else "done"

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin_s

    def status(self) -> Status:
        """The status that the Role service answers."""
        with self._lock:
            first, last = self._closes[0], self._closes[-1]
            elapsed_s = max(last.at_s - first.at_s, 1e-9)
            spent_s = self.spent.seconds()
            moving = last is not first and time.monotonic() - last.at_s < 2 * RATE_WINDOW_S
            waited = pipe_wait(first.spent_s, last.spent_s) if moving else None
            status = replace(
                self._closed,
                job=self._job,
                state=self.state,
                pass_number=self.current,
                version=self.version,
                learning=self.learning,
                events=self.num_events,
                samples=self.num_samples,
                rejected=dict(self.rejected),
                left_out=dict(self.left_out),
                clicks_unmatched=self.clicks.share_unmatched,
                skipped_steps=self.skipped_steps,
                events_per_s=(last.num_events - first.num_events) / elapsed_s if moving else 0.0,
                samples_per_s=(last.num_samples - first.num_samples) / elapsed_s if moving else 0.0,
                positions=dict(self.positions),
                wall_s=self.wall_s,
                idle_s=None if self._idle_since_s is None else time.monotonic() - self._idle_since_s,
                stalled=self.step.stalled(),
                time_s=spent_s,
                pipe_wait=waited,
                advice=advice(spent_s, waited) or None,
            )
            return self.with_more(status)
