"""What the log's records mean, taken together: the present timeline, its passes, its operations, the spec in force.

A pure fold for whoever reads the log. A timeline that branches off a commit inherits what led to that commit, and
nothing that came after it: those versions are another timeline's.
"""

import re
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, assert_never

from millrace.errors import MillraceError
from trainer.log_file import CLOSED, Kind, Record

_COMMIT = re.compile(r"(?P<timeline>.+)-(?P<version>\d{10,})-g\d+")


class HistoryMissing(MillraceError):
    """Records that a replay needs were pruned, or never came to this folder."""

    def __init__(self, version: int, what: str) -> None:
        rewind = ", or `millrace rewind` to this one, which trains what came after it again on a new timeline"
        super().__init__(
            f"version {version} cannot be continued: the log has no {what} any more; start from a newer commit"
            + (rewind if version else "")
        )
        self.version = version


class Pass(NamedTuple):
    """One logged pass of a replay."""

    plan: Mapping[str, Any]
    close: Mapping[str, Any] | None
    """None where it was not over."""
    record: int
    """The number of the close's record, or of the plan's where there is none."""


@dataclass
class History:
    """What happened on the present timeline, its forebears included. Passes are by number, operations in log order."""

    timeline: str = ""
    base: str | None = None
    """The name of the commit that the timeline began from; None where it began with the job."""
    closed: int = 0
    """The last closed version, whether or not its close is still in the log."""
    plans: dict[int, Record] = field(default_factory=dict)
    """Those that were not withdrawn."""
    voids: dict[int, Record] = field(default_factory=dict)
    closes: dict[int, Record] = field(default_factory=dict)
    operations: list[Record] = field(default_factory=list)
    generation: int = 0
    claim: Mapping[str, Any] = field(default_factory=dict)
    """The body of the newest claim."""
    begin: int = 1
    """The number of the oldest record that is still in the log."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> "History":
        """The history that `records` tell, in the log's order."""
        present, timelines, begin = cls(), dict[str, History](), 0
        for record in records:
            begin = begin or record.number
            if record.kind is Kind.CLAIM and record.body.get("timeline", present.timeline) != present.timeline:
                timelines[present.timeline] = present
                present = _branched(timelines, record.body["timeline"], record.body.get("base"))
            present.add(record)
        present.begin = begin or 1
        return present

    def add(self, record: Record) -> None:
        """Take in what came next; no claim of another timeline, which only `of` understands."""
        match record.kind:
            case Kind.CLAIM:
                self.generation, self.claim = record.body["generation"], record.body
                self.closed = record.body.get(CLOSED, self.closed)
            case Kind.PLAN:
                self.plans[record.body["number"]] = record
                self.voids.pop(record.body["number"], None)  # early logs gave some numbers again
            case Kind.VOID:
                self.voids[record.body["number"]] = record
                self.plans.pop(record.body["number"], None)
            case Kind.CLOSE:
                self.closed = record.body["number"]
                self.closes[self.closed] = record
            case Kind.OPERATION:
                self.operations.append(record)
            case _:
                assert_never(record.kind)

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The spec in force, by the last operation that said so; None where the log has none."""
        said = (record.body["spec"] for record in reversed(self.operations) if record.body["op"] == "spec")
        return next(said, None)

    @property
    def begins_late(self) -> bool:
        """Whether records before the oldest one were pruned."""
        return self.begin > 1

    @property
    def last_number(self) -> int:
        """The highest number that a pass of this timeline has had, closed or not, withdrawn or not."""
        return max(chain([self.closed], self.plans, self.voids))

    def unclosed(self) -> list[Record]:
        """The plans that stand and are not closed, in order."""
        return [plan for number, plan in sorted(self.plans.items()) if number > self.closed]

    def operations_by_version(self) -> dict[int | None, list[Record]]:
        """The operations by the version at whose close they acted, in order; None: at the next close."""
        versions = sorted(self.closes)
        closed_at = [self.closes[version].number for version in versions]
        found: dict[int | None, list[Record]] = {}
        for record in self.operations:
            index = bisect(closed_at, record.number)
            found.setdefault(versions[index] if index < len(versions) else None, []).append(record)
        return found

    def operations_at(self, version: int) -> list[Record]:
        """The operations that acted at the close of `version`, in order."""
        return self.operations_by_version().get(version, [])

    def waiting(self) -> list[Record]:
        """The operations that act at the next close, in order."""
        return self.operations_by_version().get(None, [])

    def after(self, version: int) -> list[Pass]:
        """What leads on from a commit of `version`, in order: closed passes, then those that are not.

        Raises HistoryMissing where a plan or a close of it is not in the log.
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
            passes.append(Pass(plan.body, close.body if close else None, (close or plan).number))
        return passes

    def upto(self, version: int) -> "History":
        """What led to `version`."""

        def early(records: dict[int, Record]) -> dict[int, Record]:
            return {number: record for number, record in records.items() if number <= version}

        acted = {r.number for at, rs in self.operations_by_version().items() if at and at <= version for r in rs}
        return History(
            closed=version,
            plans=early(self.plans),
            voids=early(self.voids),
            closes=early(self.closes),
            operations=[record for record in self.operations if record.number in acted],
        )


def _branched(timelines: Mapping[str, History], timeline: str, base: str | None) -> History:
    """A new timeline as it begins at the commit `base`."""
    named = _COMMIT.fullmatch(base or "")
    if named is None:
        return History(timeline)
    version = int(named["version"])
    begun = timelines.get(named["timeline"], History()).upto(version)
    begun.timeline, begun.base = timeline, base
    return begun
