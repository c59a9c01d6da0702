"""The close of a pass: ranks agree on what was read, the day is set, metrics are reduced, dense state is compared."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.codec import typed
from headrace.dataset.loader.batch_loader import Loader, PassTally
from headrace.dataset.loader.dead_letters import BadFraction, DeadLetters
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.deadline import Deadline
from headrace.errors import BadInput, HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.config import LAST_DAY
from headrace.pserver.protocol.shards import TableStats
from headrace.pserver.rows.digest import add
from headrace.pserver.server.commands import CountRows, JobCounts
from headrace.trainer.collectives.ranks import gather_messages, on_rank_0
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.job_status import MetricsStatus, Status, TableStatus
from headrace.trainer.journal.pass_plan import PassPlan, num_positions
from headrace.trainer.journal.records import PassClose
from headrace.trainer.rank0.operations import ClosingPass, RankUpdate
from headrace.trainer.rank0.parts import CLOSE_S, RankZero
from headrace.trainer.status.freshness import Freshness
from headrace.trainer.status.progress import PassReading
from headrace.trainer.status.rank_figures import RankFigures
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.observer import SECONDS_PER_DAY, Observer, figures_of
from headrace.trainer.train.trainer_setup import Setup

MAX_NAMED = 8
"""Most ranges of partitions that an error names."""
EPOCH = date(1970, 1, 1).toordinal()


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


TOTALS = ("num_events", "num_samples", "num_judged", "num_clicks")


def merge_tallies(messages: Sequence[Mapping[str, Any]]) -> PassReading:
    """The sum of the ranks' readings."""
    rejected: dict[str, int] = {}
    left_out: dict[str, int] = {}
    first_of: dict[str, str] = {}
    days: dict[int, int] = {}
    for message in messages:
        first_of = {**message["first_of"], **first_of}
        for name, counts in (("rejected", rejected), ("left_out", left_out)):
            for reason, count in message[name].items():
                counts[reason] = counts.get(reason, 0) + count
        for day, count in message["days"].items():
            days[int(day)] = days.get(int(day), 0) + count
    totals = {name: sum(message[name] for message in messages) for name in TOTALS}
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


def merge_times(messages: Sequence[Sequence[float] | None]) -> tuple[float, float] | None:
    """Lowest and highest event time over all ranks; None without event time."""
    known = [times_s for times_s in messages if times_s is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def would_fill(dirty: int, dirty_before: int, max_dirty: int) -> bool:
    """True if uncommitted rows are above half of their limit, or would exceed it after one more such pass."""
    grown = dirty - dirty_before if dirty >= dirty_before else dirty
    return 2 * dirty > max_dirty or dirty + grown > max_dirty


class PassCloser:
    """Closes passes: every rank calls `close` at the end of each pass."""

    def __init__(
        self,
        setup: Setup,
        loader: Loader[TrainingBatch],
        dense: DenseStrategy,
        rate: LearningRate,
        observer: Observer,
        rank0: RankZero | None,
        dead_letters: DeadLetters,
        *,
        bounded: bool,
    ) -> None:
        """`bounded`: whether the source has an end; see Freshness."""
        job, ranks, schema = setup.job, setup.ranks, setup.schema
        self._ranks, self._policy, self._shards, self._progress = ranks, setup.policy, setup.shards, setup.progress
        self._loader, self._dense, self._rate, self._observer = loader, dense, rate, observer
        self._max_day_jump, self._close_s = job.passes.max_day_jump, CLOSE_S
        self._planner = None if rank0 is None else rank0.planner
        self._operator = None if rank0 is None else rank0.operator
        self._replay_log = None if rank0 is None else rank0.replay_log
        live_from_s = time.time() if bounded else -math.inf
        self.freshness = Freshness(live_from_s)
        """Rank 0: when events were learnt."""
        self._bad, self._dead_letters = BadFraction(job.pipe.max_bad_fraction), dead_letters
        self._schema, self._slots = schema, SlotCounters(schema)
        self._first_day: int | None = None
        self._day = 0
        """The job's day; rows age by it."""
        self._seen_day = 0
        """Rank 0: the day of the newest pass, even if that was not learnt."""
        self._latest_s: float | None = None
        """Rank 0: highest event time of all passes."""
        self._max_span_s: float | None = None
        """Rank 0: largest span of event times in one pass."""
        self._pass_days: Sequence[int] = ()
        self._pass_signals: Sequence[str] = ()
        """Rank 0: see ClosingPass.days and .signals."""
        self._shown = Status()
        """The status, with the figures of the last close."""
        self._metrics: Mapping[str, Any] = {}
        """The metrics of the last pass that had events."""
        self._heard: Sequence[Mapping[str, Any]] = ()
        """Rank 0: messages of all ranks at the last close."""
        self._figures = RankFigures(ranks.world)
        self.memory_waits = False
        """Rank 0: whether a commit is due, because uncommitted rows have used most of a table's limit."""
        self._dirty_rows: Mapping[str, int] = {}
        self._counts = JobCounts({}, (), {})

    def close(self, plan: PassPlan, commit_is_due: Callable[[int], bool]) -> bool:
        """Make version `plan.number`; returns, on every rank, whether it is to be committed now.

        `commit_is_due` says so of a version. It is called on rank 0 alone, after step 4.

        1. Publish dead letters, so that they can be read if step 2 finds too many.
        2. Rank 0's buffers replace those of the other ranks. Ranks send rank 0 their counts and the hash of their dense
           state. Rank 0 compares the hashes, checks the limit of rejected samples, and sends the day, which does not
           advance in a pass without learning.
        3. Shards close: no push is in flight, the day advances. Reduce metrics, and gather the counters of slots.
        4. Log and sync the close; in a replay, compare it with the logged one. Operations act. Rank 0 sends their
           changes to all ranks.
        5. Publish the status. Nothing of the pass is published before.
        """
        failpoint(Failpoint.BEFORE_CLOSE)
        deadline = Deadline.after(self._close_s)
        tally = self._loader.tally(plan.number)
        self._dead_letters.publish(plan.number)
        day_before = self._day
        self._dense.buffers.broadcast()
        reading, dense, times_s = self._agree(plan, tally)
        pushes = add(int(digest, 16) for digest in self._shards.close_pass(self._day, deadline).values())
        metrics = self._observer.close_pass(self._ranks, again=plan.epoch > 1) if plan.num_positions else {}
        digests = {"dense": dense, "pushes": f"{pushes:032x}"}
        slots = self._count_slots(tally)
        write = partial(self._log_close, plan, reading, digests, times_s, metrics, self._day - day_before, slots)
        word = on_rank_0(self._ranks, write)  # may wait for a full disk
        committed = self._apply(word, commit=word is not None and commit_is_due(plan.number))
        self._progress.closed(plan, reading, self._status(plan, reading, metrics, times_s))
        return committed

    def _status(
        self,
        plan: PassPlan,
        reading: PassReading,
        metrics: Mapping[str, Any],
        times_s: tuple[float, float] | None,
    ) -> Status:
        """The status with the figures of the close; an empty pass changes only some of them."""
        tables = {name: self._table_status(name, stats) for name, stats in self._counts.tables.items()}
        shown = replace(self._shown, day=self._day, dense_lr=self._rate.value, tables=tables)
        if plan.num_positions:
            self._metrics = metrics
            shown = replace(
                shown,
                metrics=typed(MetricsStatus, metrics, "the metrics of a pass"),
                loss=metrics["tensors"]["pass"]["loss"]["mean"] if metrics and reading.num_samples else None,
                slots=self._slots_of_life() if self._operator is not None else {},
                freshness_s=None if times_s is None else self.freshness.age_s(times_s[1], time.time()),
                event_span_s=self._span(times_s),
                learning_delay=self.freshness.closed(time.time()),
            )
        if self._planner is not None:
            shown = replace(
                shown,
                lag=self._planner.lag(self._progress.positions | plan.positions()),
                jumped=self._planner.jumped,
                late=self._planner.num_late,
            )
        if self._heard:
            shown = self._figures.closed(shown, self._heard, self._ranks.waited_s(), self._counts.figures)
        self._shown = shown
        return shown

    def _table_status(self, name: str, stats: TableStats) -> TableStatus:
        rows = self._rows_by_slot(name, stats)
        return TableStatus(
            rows=stats.num_rows,
            bytes=stats.num_bytes,
            new_rows=stats.new_rows,
            unadmitted=stats.unadmitted,
            dirty_rows=stats.dirty_rows,
            rows_by_slot=rows,
            bytes_by_slot={slot: stats.num_bytes * num // max(1, stats.num_rows) for slot, num in rows.items()},
        )

    def _span(self, times_s: tuple[float, float] | None) -> dict[str, float]:
        """Rank 0: span of event times in the pass, and the largest in any pass; {} without event time."""
        if times_s is None:
            return {}
        span_s = times_s[1] - times_s[0]
        self._max_span_s = max(span_s, self._max_span_s or 0.0)
        return {"last": span_s, "max": self._max_span_s}

    def _rows_by_slot(self, table: str, stats: TableStats) -> dict[str, int]:
        """Number of rows by slot; slots that share rows have the same number."""
        slots = (slot for slot in self._schema.sparse if slot.sparse.table == table)
        return {slot.name: stats.rows_by_group.get(slot.group, 0) for slot in slots}

    def _log_close(
        self,
        plan: PassPlan,
        reading: PassReading,
        digests: Mapping[str, str],
        times_s: tuple[float, float] | None,
        metrics: Mapping[str, Any],
        ticks: int,
        slots: SlotCounters | None,
    ) -> RankUpdate:
        """Rank 0: log the close, and have its operations act."""
        assert self._operator is not None, "on rank 0"
        self._take_stats(Deadline.after(self._close_s))
        if times_s is not None:
            self._latest_s = times_s[1] if self._latest_s is None else max(self._latest_s, times_s[1])
        measured = self._observer.fingerprints() if plan.num_positions else {"metrics": ""}
        closing = ClosingPass(
            version=plan.number,
            day=self._day,
            ticks=ticks,
            event_time_s=self._latest_s,
            pass_times_s=times_s,
            day_end_s=None if self._first_day is None else (self._first_day + self._seen_day + 1.0) * SECONDS_PER_DAY,
            wall_s=time.time(),
            stats=self._counts.tables,
            positions=self._progress.positions | plan.positions(),
            metrics=metrics or self._metrics or self._observer.report(),  # the restored ones, if there are no new ones
            num_samples=reading.num_samples,
            ended=plan.last,
            days=self._pass_days,
            signals=self._pass_signals,
            slots=slots,
        )
        close = PassClose(
            number=plan.number,
            day=self._day,
            events=reading.num_events,
            samples=reading.num_samples,
            rejected=dict(reading.rejected),
            digests=self._policy.promised({**digests, **measured}),
            event_time_s=self._latest_s,
            window=figures_of(metrics.get("window", {})),
            of_pass=figures_of(metrics.get("pass", {})),
            left_out=dict(sorted(reading.left_out.items())) or None,
        )
        word = self._operator.close(closing, close)
        if word.acted:
            self._counts = self._shards.call(CountRows(), Deadline.after(self._close_s))
        return word

    def _apply(self, word: RankUpdate | None, *, commit: bool) -> bool:
        """Apply changes by operations on every rank; `word` is rank 0's. Returns `commit` of rank 0."""
        said = self._ranks.broadcast(None if word is None else {**word._asdict(), "commit": commit})
        commit = bool(said.pop("commit"))
        heard = RankUpdate(**said)
        self._rate.set(heard.dense_lr, heard.schedule)
        if self._operator is not None:
            self._day = self._operator.day
        return commit

    def begin(self, word: RankUpdate | None) -> None:
        """On every rank, before the first pass: apply overrides; `word` is rank 0's."""
        self._apply(word, commit=False)

    @property
    def day(self) -> int:
        """The job's day."""
        return self._day

    @property
    def refused(self) -> Mapping[str, int]:
        """Rank 0: connections and calls that shards had refused at the last close, by reason."""
        return self._counts.refused

    @property
    def latest_event_s(self) -> float | None:
        """Rank 0: time of the newest learnt event, unix seconds; None without event time."""
        return self._latest_s

    def _take_stats(self, deadline: Deadline) -> None:
        """Rank 0: read counts of the tables; check whether another such pass may reach a limit."""
        self._counts = self._shards.call(CountRows(), deadline)
        stats = self._counts.tables
        before, self._dirty_rows = self._dirty_rows, {name: each.dirty_rows for name, each in stats.items()}
        self.memory_waits = any(
            each.max_dirty_rows is not None and would_fill(each.dirty_rows, before.get(name, 0), each.max_dirty_rows)
            for name, each in stats.items()
        )

    # -- commits

    def state(self) -> dict[str, Any]:
        """The state for a commit, as JSON-able data; see also `arrays`."""
        return {
            "day": self._day,
            "first_day": self._first_day,
            "seen_day": self._seen_day,
            "latest_s": self._latest_s,
            "max_span_s": self._max_span_s,
            "bad": self._bad.state(),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the counters by slot."""
        return {"sums": self._slots.sums_SK.copy(), "registers": self._slots.registers_SR.copy()}

    def load_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a commit."""
        self._day, self._first_day = int(state["day"]), state["first_day"]
        self._seen_day = int(state.get("seen_day", self._day))
        self._latest_s, self._max_span_s = state.get("latest_s"), state.get("max_span_s")
        self._bad.load_state(state["bad"])
        self._slots.sums_SK[:], self._slots.registers_SR[:] = arrays["sums"], arrays["registers"]

    def _slots_of_life(self) -> dict[str, Any]:
        """Rank 0: the figures of the sparse slots over the job's life."""
        return {each.name: asdict(each) for each in self._slots.figures() if each.sparse}

    def _count_slots(self, tally: PassTally) -> SlotCounters | None:
        """On rank 0: the counters by slot of the pass over all ranks, added to those of the job's life; else None."""
        counters = tally.slots or SlotCounters(self._schema)
        heard = self._ranks.gather(
            {
                "sums": counters.sums_SK.reshape(-1),
                "registers": counters.registers_SR.reshape(-1),
                "buckets": counters.buckets_SK.reshape(-1),
            }
        )
        if heard is None:
            return None
        of_pass = SlotCounters(self._schema)
        for each in heard:
            part = SlotCounters(self._schema)
            part.sums_SK[:] = each["sums"].reshape(part.sums_SK.shape)
            part.registers_SR[:] = each["registers"].reshape(part.registers_SR.shape)
            part.buckets_SK[:] = each["buckets"].reshape(part.buckets_SK.shape)
            of_pass.merge(part)
        self._slots.merge(of_pass)
        return of_pass

    def _agree(self, plan: PassPlan, tally: PassTally) -> tuple[PassReading, str, tuple[float, float] | None]:
        """The counts of all ranks, the hash of the dense state, and the pass's event times; the same on all ranks."""
        message = {
            "num_events": tally.num_events,
            "num_samples": tally.num_samples,
            "num_judged": tally.num_judged,
            "num_clicks": tally.num_clicks,
            "rejected": tally.rejected,
            "left_out": tally.left_out,
            "first_of": tally.first_of if self._dead_letters.keeps_bytes else {},
            "days": {int(day): int(count) for day, count in self._observer.take_days().items()},
            "signals": self._observer.take_signals(),
            "dense": self._rate.digest(self._dense.digest()),
            "times_s": self._observer.take_times_s(),
            "times": self._observer.take_times().message(),
            "links": {**self._ranks.links(), **self._shards.links()},
            "spent_s": self._progress.spent.seconds(),
            "pass_s": self._progress.step.pass_s,
        }
        heard = gather_messages(self._ranks, message)
        if heard is not None:
            if len({each["dense"] for each in heard}) > 1:
                raise RanksDiffer(
                    f"pass {plan.number}: trainers differ in their dense parameters; the forward pass of a model may "
                    "change registered buffers, but no parameters"
                )
            self._heard = heard
            if self._planner is not None and not self._policy.meets_in_steps:
                counts = [num_positions(segments) for segments in plan.segments]
                self._planner.speeds.trained(counts, [each["pass_s"] for each in heard])
            reading = merge_tallies(heard)
            if plan.num_positions:
                self._bad.add(reading.num_judged, reading.rejected, reading.first_of)
            days = advanced(plan, self._seen_day, self._first_day, reading.day, self._max_day_jump)
            self._seen_day, self._first_day = days
            first_day = self._first_day or 0
            self._pass_days = sorted({int(day) - first_day for each in heard for day in each["days"]})
            self._pass_signals = sorted({name for each in heard for name in each["signals"]})
            if reading.day is not None and plan.learn:
                self._day = max(self._day, self._seen_day)
            times_s = merge_times([each["times_s"] for each in heard])
            is_new = plan.learn and (self._replay_log is None or self._replay_log.operations(plan.number) is None)
            self.freshness.read(plan.number, [each["times"] for each in heard], counts=is_new)
            answer: dict[str, Any] | None = asdict(reading) | {"day": self._day, "times_s": times_s}
        else:
            answer = None
        said = dict(self._ranks.broadcast(answer))
        times_s = said.pop("times_s")
        self._day = int(said["day"])
        return PassReading(**said), str(message["dense"]), None if times_s is None else (times_s[0], times_s[1])
