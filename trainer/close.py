"""The close of a pass: everybody agrees on what was read, the day is set, metrics are reduced, state is compared."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from numpy.typing import NDArray

from dataset.dead_letters import BadFraction, DeadLetters
from dataset.loader import Loader, Tally
from dataset.schema import Schema
from dataset.slot_counters import SlotCounters
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.points import Point, reach
from pserver.client import Shards, TableStats
from pserver.digest import add
from trainer.batches import Batch
from trainer.chronicle import Chronicle
from trainer.dense import DensePart
from trainer.observe import Observer
from trainer.plan import Plan
from trainer.planner import Planner
from trainer.progress import Progress, Reading
from trainer.ranks import Ranks, by_chief, gather_messages


class RanksDiffer(MillraceError):
    """Trainers hold different dense parameters: a bug, or arithmetic that differs between machines."""


def merge_tallies(messages: Sequence[Mapping[str, Any]]) -> Reading:
    """One reading of what the ranks say."""
    rejected: dict[str, int] = {}
    days: dict[int, int] = {}
    for message in messages:
        for reason, count in message["rejected"].items():
            rejected[reason] = rejected.get(reason, 0) + count
        for day, count in message["days"].items():
            days[int(day)] = days.get(int(day), 0) + count
    counts = {name: sum(message[name] for message in messages) for name in ("num_events", "num_samples", "num_judged")}
    return Reading(**counts, rejected=rejected, day=median_day(days))


def median_day(days: Mapping[int, int]) -> int | None:
    """The lower median of days with their counts."""
    middle, seen = (sum(days.values()) + 1) // 2, 0
    for day in sorted(days):
        seen += days[day]
        if seen >= middle:
            return day
    return None


def fills(dirty: int, dirty_before: int, max_dirty: int) -> bool:
    """Whether rows that wait for a commit are half of those that may, or would be all after one more such pass."""
    grown = dirty - dirty_before if dirty >= dirty_before else dirty
    return 2 * dirty > max_dirty or dirty + grown > max_dirty


class PassCloser:
    """See module docstring. Every rank calls `close` at the end of each pass."""

    def __init__(
        self,
        ranks: Ranks,
        shards: Shards,
        loader: Loader[Batch],
        dense: DensePart,
        observer: Observer,
        progress: Progress,
        planner: Planner | None,
        chronicle: Chronicle | None,
        bad: BadFraction,
        dead_letters: DeadLetters,
        schema: Schema,
        close_s: float,
    ) -> None:
        self._ranks, self._shards, self._loader, self._dense = ranks, shards, loader, dense
        self._observer, self._progress, self._planner = observer, progress, planner
        self._chronicle = chronicle
        self._bad, self._dead_letters, self._close_s = bad, dead_letters, close_s
        self._schema, self._slots = schema, SlotCounters(schema)
        self._first_day: int | None = None
        self._day = 0
        self.memory_waits = False
        """Chief: whether a commit should come soon, for rows that wait for one fill most of what a table may hold."""
        self._dirty_rows: Mapping[str, int] = {}

    def close(self, plan: Plan) -> None:
        """Make version `plan.number`.

        1. Dead letters are published, so that they are there to look at if step 2 finds too many.
        2. Ranks tell the chief what they read, and the hash of their dense state. The chief compares, counts what was
           rejected against the limit, and tells the day.
        3. Shards close: no push is in flight. Metrics are reduced.
        4. The close is logged and synced, or, at a replay, compared with the one in the log.
        5. The status is told: nothing of the pass was, until here.
        """
        reach(Point.BEFORE_CLOSE)
        deadline = Deadline.after(self._close_s)
        tally = self._loader.tally(plan.number)
        self._dead_letters.publish(plan.number)
        reading, dense = self._agree(plan, tally)
        pushes = add(int(digest, 16) for digest in self._shards.close_pass(self._day, deadline).values())
        latest_s = self._observer.take_latest_s()
        metrics = self._observer.close_pass(self._ranks)
        digests = {"dense": dense, "pushes": f"{pushes:032x}"}
        by_chief(self._ranks, partial(self._write_down, plan, reading, digests))  # a full disk may keep it waiting
        said = {
            "metrics": metrics,
            "loss": metrics["tensors"]["pass"]["loss"]["mean"] if metrics and reading.num_samples else None,
            "slots": self._count_slots(tally),
            "day": self._day,
            "freshness_s": None if latest_s is None else time.time() - latest_s,
            "tables": {
                name: {"rows": stats.num_rows, "bytes": stats.num_bytes, "new_rows": stats.new_rows}
                for name, stats in self._take_stats(deadline).items()
            },
        }
        if self._planner is not None:
            said["lag"] = self._planner.lag(self._progress.positions | plan.positions())
            said["jumped"] = self._planner.jumped
        self._progress.closed(plan, reading, said)

    def _write_down(self, plan: Plan, reading: Reading, digests: Mapping[str, str]) -> None:
        """Chief: the close in the log."""
        assert self._chronicle is not None, "the chief's"
        self._chronicle.close(
            {
                "number": plan.number,
                "day": self._day,
                "events": reading.num_events,
                "samples": reading.num_samples,
                "rejected": dict(reading.rejected),
                "digests": dict(digests) | {"metrics": self._observer.fingerprint()},
            }
        )

    def _take_stats(self, deadline: Deadline) -> Mapping[str, TableStats]:
        """Chief: counts of the tables, and whether the next pass, if it is like this one, may find a bound filled."""
        stats = self._shards.stats(deadline) if self._ranks.rank == 0 else {}
        before, self._dirty_rows = self._dirty_rows, {name: each.dirty_rows for name, each in stats.items()}
        self.memory_waits = any(
            each.max_dirty_rows is not None and fills(each.dirty_rows, before.get(name, 0), each.max_dirty_rows)
            for name, each in stats.items()
        )
        return stats

    # -- commits

    def state(self) -> dict[str, Any]:
        """What a commit holds of it, as JSON-able data; `arrays` beside it."""
        return {"day": self._day, "first_day": self._first_day, "bad": self._bad.state()}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the counters by slot."""
        return {"sums": self._slots.sums_SK.copy(), "registers": self._slots.registers_SR.copy()}

    def load_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a commit."""
        self._day, self._first_day = int(state["day"]), state["first_day"]
        self._bad.load_state(state["bad"])
        self._slots.sums_SK[:], self._slots.registers_SR[:] = arrays["sums"], arrays["registers"]

    def _count_slots(self, tally: Tally) -> dict[str, Any]:
        """Counters by slot over all ranks and the job's life; on the chief."""
        counters = tally.slots or SlotCounters(self._schema)
        heard = self._ranks.gather(
            {"sums": counters.sums_SK.reshape(-1), "registers": counters.registers_SR.reshape(-1)}
        )
        for columns in heard or ():
            part = SlotCounters(self._schema)
            part.sums_SK[:] = columns["sums"].reshape(part.sums_SK.shape)
            part.registers_SR[:] = columns["registers"].reshape(part.registers_SR.shape)
            self._slots.merge(part)
        return (
            {figures.name: asdict(figures) for figures in self._slots.figures() if figures.sparse}
            if heard is not None
            else {}
        )

    def _agree(self, plan: Plan, tally: Tally) -> tuple[Reading, str]:
        """What all ranks read, and the hash of the dense state, alike on all."""
        message = {
            "num_events": tally.num_events,
            "num_samples": tally.num_samples,
            "num_judged": tally.num_judged,
            "rejected": tally.rejected,
            "days": {int(day): int(count) for day, count in self._observer.take_days().items()},
            "dense": self._dense.digest(),
        }
        heard = gather_messages(self._ranks, message)
        if heard is not None:
            if len({each["dense"] for each in heard}) > 1:
                raise RanksDiffer(f"pass {plan.number}: trainers differ in their dense parameters")
            reading = merge_tallies(heard)
            self._bad.add(reading.num_judged, reading.rejected)
            if reading.day is not None:
                self._first_day = reading.day if self._first_day is None else self._first_day
                self._day = max(self._day, reading.day - self._first_day)
            answer: dict[str, Any] | None = asdict(reading) | {"day": self._day}
        else:
            answer = None
        said = Reading(**self._ranks.broadcast(answer))
        assert said.day is not None, "the chief names a day"
        self._day = said.day
        return said, str(message["dense"])
