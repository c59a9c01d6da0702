"""The meaning of the log's records together: the present timeline, its passes, its operations, the spec in force.

A pure fold over the log. A timeline that branches off a commit inherits the records that led to that commit. Later
versions belong to the other timeline.
"""

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar, assert_never

from headrace.errors import HeadraceError
from headrace.trainer.journal.log_file import AnyRecord, LogRecord
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import Claim, MatmulOperation, Operation, PassClose, SpecOperation, Void

RecordT = TypeVar("RecordT", bound=AnyRecord)
_COMMIT = re.compile(r"(?P<timeline>.+)-(?P<version>\d{10,})-g\d+")


class HistoryMissing(HeadraceError):
    """A replay needs records that were pruned, or that were never copied to this folder."""

    def __init__(self, version: int, what: str) -> None:
        rewind = ", or `headrace rewind` to this one, which trains everything after it again on a new timeline"
        super().__init__(
            f"version {version} cannot be continued: the log has no {what} any more; start from a newer commit"
            + (rewind if version else "")
        )
        self.version = version


class LoggedPass(NamedTuple):
    """One logged pass of a replay."""

    plan: PassPlan
    close: PassClose | None
    """None: it was planned and never closed."""
    record: int
    """Number of the close's record; without a close, of the plan's."""


@dataclass(frozen=True, slots=True)
class ReplayedPass:
    """A pass of the log, to replay."""

    plan: PassPlan
    planned_at: int
    """Record number of the plan."""
    close: PassClose | None
    """None: it was planned and never closed."""
    closed_at: int = 0
    """Record number of the close."""
    operations: Sequence[Operation] = ()
    """Operations that acted at its close, in order."""


@dataclass
class JobHistory:
    """The present timeline and the timelines before it. Passes are by number, operations in log order."""

    timeline: str = ""
    base: str | None = None
    """Name of the commit that the timeline began from; None: it began with the job."""
    closed: int = 0
    """The last closed version; its close may be pruned."""
    plans: dict[int, LogRecord[PassPlan]] = field(default_factory=dict)
    """Without those that were withdrawn."""
    voids: dict[int, LogRecord[Void]] = field(default_factory=dict)
    closes: dict[int, LogRecord[PassClose]] = field(default_factory=dict)
    operations: list[LogRecord[Operation]] = field(default_factory=list)
    generation: int = 0
    claim: Claim | None = None
    """The newest claim."""
    begin: int = 1
    """Number of the oldest record that is still in the log."""

    @classmethod
    def of(cls, records: Iterable[AnyRecord]) -> "JobHistory":
        """The history of `records`, which are in the log's order."""
        present, timelines, begin = cls(), dict[str, JobHistory](), 0
        for record in records:
            begin = begin or record.number
            match record.content:
                case Claim(timeline=str(timeline), base=base) if timeline != present.timeline:
                    timelines[present.timeline] = present
                    present = _branched(timelines, timeline, base)
            present.add(record)
        present.begin = begin or 1
        return present

    def add(self, record: AnyRecord) -> None:
        """Take in the next record. A claim of another timeline is not for this method but for `of`."""
        number, content, place = record.number, record.content, record.place
        if isinstance(content, Operation):
            self.operations.append(LogRecord(number, content, place))
            return
        match content:
            case Claim(generation=generation, closed=closed):
                self.generation, self.claim = generation, content
                self.closed = self.closed if closed is None else closed
            case PassPlan():
                self.plans[content.number] = LogRecord(number, content, place)
                self.voids.pop(content.number, None)  # early logs used some numbers twice
            case Void():
                self.voids[content.number] = LogRecord(number, content, place)
                self.plans.pop(content.number, None)
            case PassClose():
                self.closed = content.number
                self.closes[self.closed] = LogRecord(number, content, place)
            case _:
                assert_never(content)

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The spec in force by the last operation that sets it; None where the log has none."""
        specs = self.specs()
        return specs[-1][1] if specs else None

    def specs(self, before: int | None = None) -> list[tuple[int, Mapping[str, Any]]]:
        """Every logged spec with the number of its record; `before`: only of records with a lower number."""
        return [
            (record.number, record.content.spec)
            for record in self.operations
            if isinstance(record.content, SpecOperation) and (before is None or record.number < before)
        ]

    def matmuls(self) -> list[tuple[int, MatmulOperation]]:
        """Every logged table of kernels, in order, with the first pass that it holds for."""
        return [
            (version or self.closed + 1, record.content)
            for version, records in self.operations_by_version().items()
            for record in records
            if isinstance(record.content, MatmulOperation)
        ]

    @property
    def last_number(self) -> int:
        """The highest number of any pass of this timeline, closed or not, withdrawn or not."""
        return max(chain([self.closed], self.plans, self.voids))

    def unclosed(self) -> list[LogRecord[PassPlan]]:
        """The plans without a close that were not withdrawn, in order."""
        return [plan for number, plan in sorted(self.plans.items()) if number > self.closed]

    def operations_by_version(self) -> dict[int | None, list[LogRecord[Operation]]]:
        """The operations by the version at whose close they act, in order; None: the next close."""
        versions = sorted(self.closes)
        closed_at = [self.closes[version].number for version in versions]
        found: dict[int | None, list[LogRecord[Operation]]] = {}
        for record in self.operations:
            index = bisect(closed_at, record.number)
            found.setdefault(versions[index] if index < len(versions) else None, []).append(record)
        return found

    def waiting(self) -> list[LogRecord[Operation]]:
        """The operations that act at the next close, in order."""
        return self.operations_by_version().get(None, [])

    def after(self, version: int) -> list[LoggedPass]:
        """The passes after a commit of `version`, in order: first those with a close, then those without.

        Raises HistoryMissing where the log lacks a plan or a close of them.
        """
        passes = []
        for number in range(version + 1, self.last_number + 1):
            if number in self.voids:
                continue
            if number not in self.plans:
                raise HistoryMissing(version, f"plan {number}")
            if number <= self.closed and number not in self.closes:
                raise HistoryMissing(version, f"close {number}")
            plan, close = self.plans[number], self.closes.get(number)
            passes.append(LoggedPass(plan.content, close.content if close else None, (close or plan).number))
        return passes

    def upto(self, version: int) -> "JobHistory":
        """The records that led to `version`."""

        def early(records: dict[int, RecordT]) -> dict[int, RecordT]:
            return {number: record for number, record in records.items() if number <= version}

        acted = {r.number for at, rs in self.operations_by_version().items() if at and at <= version for r in rs}
        return JobHistory(
            closed=version,
            plans=early(self.plans),
            voids=early(self.voids),
            closes=early(self.closes),
            operations=[record for record in self.operations if record.number in acted],
        )


def _branched(timelines: Mapping[str, JobHistory], timeline: str, base: str | None) -> JobHistory:
    """A new timeline at its beginning: the commit `base`."""
    named = _COMMIT.fullmatch(base or "")
    if named is None:
        return JobHistory(timeline)
    version = int(named["version"])
    begun = timelines.get(named["timeline"], JobHistory()).upto(version)
    begun.timeline, begun.base = timeline, base
    return begun
