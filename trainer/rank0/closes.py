"""The part of rank 0 in the close of a pass: it compares the ranks, sets the day, logs the close, reports figures.

trainer.train.close makes the close on all ranks; CloseDuties is the part of the ranks that decide nothing.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.codec import plain, typed
from headrace.dataset.loader.dead_letters import BadFraction
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import BadInput, HeadraceError
from headrace.pserver.config import LAST_DAY
from headrace.pserver.consistency.policy import FEATURES, Consistency
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.server.commands import CountRows, DigestFeatures, JobCounts
from headrace.trainer.config import TrainerJob
from headrace.trainer.job_status import Status, TableStatus
from headrace.trainer.journal.pass_plan import PassPlan, num_positions
from headrace.trainer.journal.records import PassClose
from headrace.trainer.rank0.operations import ClosingPass, RankUpdate
from headrace.trainer.rank0.parts import CLOSE_S, RankZero
from headrace.trainer.status.freshness import Freshness
from headrace.trainer.status.progress import PassReading, RankTally, TrainerProgress
from headrace.trainer.status.rank_figures import RankFigures

SECONDS_PER_DAY = 86_400
MAX_NAMED = 8
"""Most ranges of partitions that an error names."""
EPOCH = date(1970, 1, 1).toordinal()
FIGURES = ("auc", "gauc", "logloss", "calibration", "rmse", "index_recall", "popular_recall")
"""Measures that the log holds for each close."""


class RanksDiffer(HeadraceError):
    """Trainers have different dense parameters: a bug, or machines with different arithmetic."""


class DayJumps(BadInput):
    """The median event time of a pass is too many days ahead of the pass before: rows would age by wrong days.

    Or it is a day of the job that rows cannot store.
    """

    def __init__(self, plan: PassPlan, days: int, day: int, max_days: int, job_day: int) -> None:
        """`days` ahead, `max_days` allowed; `day` of the epoch, `job_day` of the job."""
        segments = [segment for rank in plan.segments for segment in rank]
        where = ", ".join(f"{s.partition} {s.begin}-{s.end}" for s in segments[:MAX_NAMED])
        more = f" and {len(segments) - MAX_NAMED} more" if len(segments) > MAX_NAMED else ""
        found = date.fromordinal(EPOCH + day) if 0 <= EPOCH + day <= date.max.toordinal() else f"day {day} of the epoch"
        why = f"passes.max_day_jump is {max_days}: rows must not age by wrong days"
        right = f"set passes.max_day_jump={days} for one run"
        if job_day > LAST_DAY:
            why = f"that is day {job_day:,} of the job, and rows store days up to {LAST_DAY:,}"
            right = "start a new job: its first pass is day 0"
        super().__init__(
            f"pass {plan.number}: half of its events are of {found} or later, {days} days after the day of the pass "
            f"before; {why}. It read {where}{more}. Probably a clock upstream is wrong: skip its events with "
            f"`headrace skip`; or, if the days are right, {right}"
        )


@dataclass(frozen=True, slots=True)
class AgreedPass:
    """The result of comparing the ranks, on every rank."""

    reading: PassReading
    day: int
    """The job's day."""
    times_s: tuple[float, float] | None
    """Lowest and highest event time of the pass; None without event time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedPass:
    """A pass that the shards have closed, on rank 0."""

    plan: PassPlan
    agreed: AgreedPass
    digests: Mapping[str, str]
    """Of the dense part, the pushes and the metrics."""
    metrics: Mapping[str, Any]
    """The report of trainer.metrics.meter; empty for a pass without events."""
    slots: SlotCounters | None
    """Counters of the slots in this pass, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosesState:
    """The state of rank 0's part, as a commit holds it."""

    day: int
    first_day: int | None
    seen_day: int | None = None
    """None: that of `day`; the first Headrace had none."""
    latest_s: float | None = None
    max_span_s: float | None = None
    bad: Sequence[tuple[int, Mapping[str, int]]]
    """See BadFraction."""


class CloseDuties:
    """Those of a rank other than 0: none."""

    day = 0
    """The job's day; rows age by it."""
    memory_waits = False
    """Whether a commit is due, because uncommitted rows have used most of a table's limit."""
    latest_event_s: float | None = None
    """Time of the newest learnt event, unix seconds; None without event time."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections and calls that shards had refused at the last close, by reason."""
        return {}

    def event_times(self, version: int) -> Mapping[str, Any] | None:
        """Event times of the pass of a version, as EventTimes.message; None unless it is the newest version."""
        return None

    def agree(self, plan: PassPlan, tallies: Sequence[RankTally]) -> AgreedPass:
        """Compare the ranks, and set the day. Raises RanksDiffer, DayJumps and TooManyBadEvents."""
        raise AssertionError("rank 0 gathers the messages")

    def count_slots(self, parts: Sequence[Mapping[str, NDArray[Any]]]) -> SlotCounters:
        """The counters by slot of a pass over all ranks, added to those of the job's life."""
        raise AssertionError("rank 0 gathers the counters")

    def log(self, closed: ClosedPass) -> RankUpdate:
        """Log the close, and have its operations act."""
        raise AssertionError("rank 0 logs the close")

    def acted(self) -> None:
        """All ranks have taken in the changes by operations."""

    def status(self, shown: Status, plan: PassPlan, agreed: AgreedPass, waited_s: NDArray[Any]) -> Status:
        """The status with the figures of rank 0 after a close; an empty pass changes only some of them."""
        return shown

    def state(self) -> dict[str, Any]:
        """The state for a commit, as JSON-able data; see also `arrays`."""
        return {}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the counters by slot."""
        return {}

    def load_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a commit."""


class RankZeroCloses(CloseDuties):
    """Those of rank 0."""

    def __init__(
        self,
        job: TrainerJob,
        schema: Schema,
        policy: Consistency,
        rank0: RankZero,
        progress: TrainerProgress,
        report: Callable[[], Mapping[str, Any]],
        *,
        world: int,
        replay: bool,
    ) -> None:
        """`report` gives the present metrics; `replay`: whether old events are no sign of delay, see Freshness."""
        self._schema, self._policy, self._progress, self._report = schema, policy, progress, report
        self._has_features = bool(schema.histories or schema.counters or job.join)
        self._shards, self._operator = rank0.shards, rank0.operator
        self._planner, self._replay_log = rank0.planner, rank0.replay_log
        self._max_day_jump, self._bad = job.passes.max_day_jump, BadFraction(job.pipe.max_bad_fraction)
        self._freshness = Freshness(time.time() if replay else -math.inf)
        self._slots = SlotCounters(schema)
        self._first_day: int | None = None
        self._seen_day = 0
        """The day of the newest pass, even if that was not learnt."""
        self._max_span_s: float | None = None
        """Largest span of event times in one pass."""
        self._days: Sequence[int] = ()
        self._signals: Sequence[str] = ()
        """See ClosingPass.days and .signals."""
        self._metrics: Mapping[str, Any] = {}
        """The metrics of the last pass that had events."""
        self._tallies: Sequence[RankTally] = ()
        """Of all ranks at the last close."""
        self._figures = RankFigures(world)
        self._dirty_rows: Mapping[str, int] = {}
        self._counts = JobCounts({}, (), {})

    @property
    def refused(self) -> Mapping[str, int]:
        return self._counts.refused

    def event_times(self, version: int) -> Mapping[str, Any] | None:
        return self._freshness.of(version)

    def agree(self, plan: PassPlan, tallies: Sequence[RankTally]) -> AgreedPass:
        if len({each.dense for each in tallies}) > 1:
            raise RanksDiffer(
                f"pass {plan.number}: trainers differ in their dense parameters; the forward pass of a model may "
                "change registered buffers, but no parameters"
            )
        self._tallies = tallies
        if self._planner is not None and not self._policy.meets_in_steps:
            counts = [num_positions(segments) for segments in plan.segments]
            self._planner.speeds.trained(counts, [each.pass_s for each in tallies])
        reading = merge_tallies(tallies)
        if plan.num_positions:
            self._bad.add(reading.num_judged, reading.rejected, reading.first_of)
        days = advanced(plan, self._seen_day, self._first_day, reading.day, self._max_day_jump)
        self._seen_day, self._first_day = days
        first_day = self._first_day or 0
        self._days = sorted({day - first_day for each in tallies for day in each.days})
        self._signals = sorted({name for each in tallies for name in each.signals})
        if reading.day is not None and plan.learn:
            self.day = max(self.day, self._seen_day)
        is_new = plan.learn and self._replay_log.operations(plan.number) is None
        self._freshness.read(plan.number, [each.times for each in tallies], counts=is_new)
        return AgreedPass(reading, self.day, merge_times([each.times_s for each in tallies]))

    def count_slots(self, parts: Sequence[Mapping[str, NDArray[Any]]]) -> SlotCounters:
        of_pass = SlotCounters(self._schema)
        for each in parts:
            part = SlotCounters(self._schema)
            part.sums_SK[:] = each["sums"].reshape(part.sums_SK.shape)
            part.registers_SR[:] = each["registers"].reshape(part.registers_SR.shape)
            part.buckets_SK[:] = each["buckets"].reshape(part.buckets_SK.shape)
            of_pass.merge(part)
        self._slots.merge(of_pass)
        return of_pass

    def log(self, closed: ClosedPass) -> RankUpdate:
        plan, reading, times_s = closed.plan, closed.agreed.reading, closed.agreed.times_s
        self._count_rows()
        if times_s is not None:
            before_s = self.latest_event_s
            self.latest_event_s = times_s[1] if before_s is None else max(before_s, times_s[1])
        closing = ClosingPass(
            version=plan.number,
            day=self.day,
            event_time_s=self.latest_event_s,
            pass_times_s=times_s,
            day_end_s=None if self._first_day is None else (self._first_day + self._seen_day + 1.0) * SECONDS_PER_DAY,
            wall_s=time.time(),
            stats=self._counts.tables,
            positions=self._progress.positions | plan.positions(),
            metrics=closed.metrics or self._metrics or self._report(),  # the restored ones, if there are no new ones
            num_samples=reading.num_samples,
            ended=plan.last,
            days=self._days,
            signals=self._signals,
            slots=closed.slots,
        )
        close = PassClose(
            number=plan.number,
            day=self.day,
            events=reading.num_events,
            samples=reading.num_samples,
            rejected=dict(reading.rejected),
            digests=self._policy.promised({**closed.digests, **self._features()}),
            event_time_s=self.latest_event_s,
            window=figures_of(closed.metrics.get("window", {})),
            of_pass=figures_of(closed.metrics.get("pass", {})),
            left_out=dict(sorted(reading.left_out.items())) or None,
        )
        update = self._operator.close(closing, close)
        if update.acted:
            self._counts = self._shards.call(CountRows(), Deadline.after(CLOSE_S))
        if plan.num_positions:
            self._metrics = closed.metrics
        return update

    def _features(self) -> dict[str, str]:
        """The digest of histories, counters and the join, where that of all pushes is not promised."""
        if self._policy.repeatable or not self._has_features:
            return {}
        return {FEATURES: self._shards.call(DigestFeatures(), Deadline.after(CLOSE_S))}

    def acted(self) -> None:
        self.day = self._operator.job.day

    def status(self, shown: Status, plan: PassPlan, agreed: AgreedPass, waited_s: NDArray[Any]) -> Status:
        tables = {name: self._table_status(name, stats) for name, stats in self._counts.tables.items()}
        shown = replace(shown, day=self.day, tables=tables)
        if plan.num_positions:
            times_s, now_s = agreed.times_s, time.time()
            shown = replace(
                shown,
                slots={each.name: asdict(each) for each in self._slots.figures() if each.sparse},
                freshness_s=None if times_s is None else self._freshness.age_s(times_s[1], now_s),
                event_span_s=self._span(times_s),
                learning_delay=self._freshness.closed(now_s),
            )
        if self._planner is not None:
            shown = replace(
                shown,
                lag=self._planner.lag(self._progress.positions | plan.positions()),
                jumped=self._planner.jumped,
                late=self._planner.num_late,
            )
        links, spent_s = [each.links for each in self._tallies], [each.spent_s for each in self._tallies]
        usage = [each.usage for each in self._tallies]
        return self._figures.closed(shown, links, spent_s, waited_s, self._counts.figures, usage)

    def _table_status(self, name: str, stats: TableStats) -> TableStatus:
        """Slots that share rows have the same number of them."""
        slots = [slot for slot in self._schema.sparse if slot.sparse.table == name]
        rows, device = {slot.name: stats.rows_by_group.get(slot.group, 0) for slot in slots}, stats.device
        return TableStatus(
            rows=stats.num_rows,
            bytes=stats.num_bytes,
            new_rows=stats.new_rows,
            unadmitted=stats.unadmitted,
            dirty_rows=stats.dirty_rows,
            device_rows=None if device is None else device.num_rows,
            device_bytes=None if device is None else device.num_bytes,
            device_apart=None if device is None else device.num_apart / max(1, device.num_read),
            rows_by_slot=rows,
            bytes_by_slot={slot: stats.num_bytes * num // max(1, stats.num_rows) for slot, num in rows.items()},
            frozen=[slot.name for slot in slots if slot.group in stats.frozen_groups],
        )

    def _span(self, times_s: tuple[float, float] | None) -> dict[str, float]:
        """Span of event times in the pass, and the largest in any pass; {} without event time."""
        if times_s is None:
            return {}
        span_s = times_s[1] - times_s[0]
        self._max_span_s = max(span_s, self._max_span_s or 0.0)
        return {"last": span_s, "max": self._max_span_s}

    def _count_rows(self) -> None:
        """Read counts of the tables; check whether another such pass may reach a limit."""
        self._counts = self._shards.call(CountRows(), Deadline.after(CLOSE_S))
        stats = self._counts.tables
        before, self._dirty_rows = self._dirty_rows, {name: each.dirty_rows for name, each in stats.items()}
        self.memory_waits = any(
            each.max_dirty_rows is not None and would_fill(each.dirty_rows, before.get(name, 0), each.max_dirty_rows)
            for name, each in stats.items()
        )

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = plain(
            ClosesState(
                day=self.day,
                first_day=self._first_day,
                seen_day=self._seen_day,
                latest_s=self.latest_event_s,
                max_span_s=self._max_span_s,
                bad=[(num_events, rejected) for num_events, rejected in self._bad.state()],
            )
        )
        return state

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"sums": self._slots.sums_SK.copy(), "registers": self._slots.registers_SR.copy()}

    def load_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        found = typed(ClosesState, state, "the commit's state of closes")
        self.day, self._first_day = found.day, found.first_day
        self._seen_day = found.day if found.seen_day is None else found.seen_day
        self.latest_event_s, self._max_span_s = found.latest_s, found.max_span_s
        self._bad.load_state(found.bad)
        self._slots.sums_SK[:], self._slots.registers_SR[:] = arrays["sums"], arrays["registers"]


TOTALS = ("num_events", "num_samples", "num_judged", "num_clicks")


def merge_tallies(tallies: Sequence[RankTally]) -> PassReading:
    """The sum of the ranks' readings."""
    rejected: dict[str, int] = {}
    left_out: dict[str, int] = {}
    first_of: dict[str, str] = {}
    days: dict[int, int] = {}
    for each in tallies:
        first_of = {**each.first_of, **first_of}
        for counts, total in ((each.rejected, rejected), (each.left_out, left_out)):
            for reason, count in counts.items():
                total[reason] = total.get(reason, 0) + count
        for day, count in each.days.items():
            days[day] = days.get(day, 0) + count
    totals = {name: sum(getattr(each, name) for each in tallies) for name in TOTALS}
    return PassReading(**totals, rejected=rejected, day=median_day(days), left_out=left_out, first_of=first_of)


def median_day(days: Mapping[int, int]) -> int | None:
    """The lower median of days, weighted by their counts."""
    middle, seen = (sum(days.values()) + 1) // 2, 0
    for day in sorted(days):
        seen += days[day]
        if seen >= middle:
            return day
    return None


def advanced(
    plan: PassPlan, day: int, first_day: int | None, found: int | None, max_jump: int
) -> tuple[int, int | None]:
    """The job's day after a pass, and the day of the epoch that is day 0. `found`: the pass's median day of the epoch.

    Raises DayJumps.
    """
    if found is None:
        return day, first_day
    first_day = found if first_day is None else first_day
    job_day = found - first_day
    if job_day - day > max_jump or job_day > LAST_DAY:
        raise DayJumps(plan, job_day - day, found, max_jump, job_day)
    return max(day, job_day), first_day


def merge_times(ranges_s: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Lowest and highest event time over all ranks; None without event time."""
    known = [each for each in ranges_s if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def would_fill(dirty: int, dirty_before: int, max_dirty: int) -> bool:
    """True if uncommitted rows are above half of their limit, or would exceed it after one more such pass."""
    grown = dirty - dirty_before if dirty >= dirty_before else dirty
    return 2 * dirty > max_dirty or dirty + grown > max_dirty


def figures_of(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The part of a report that the log holds for a close: FIGURES by task, if they are finite."""
    return {
        task: {name: found[name] for name in FIGURES if (value := found.get(name)) is not None and math.isfinite(value)}
        for task, found in tasks.items()
    }
