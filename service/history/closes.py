"""Follows the closes in a job's log while the job writes it, so that figures over time need no second read of the log.

Closes stay in memory after the log is pruned. service.history.log_follower reads the log.
"""

import re
import sys
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.service.history.log_follower import LogFollower
from headrace.trainer.checkpoint.commits import NAME
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.log_file import AnyRecord

MAX_KEPT = 50_000
"""Most closes kept of one job; beyond that, the oldest half is dropped."""
_MOMENT = re.compile(r"(?:t([0-9]{1,9})-)?([0-9]{1,15})")


class TimelineVersion(NamedTuple):
    """A version on a timeline. A later one compares greater."""

    timeline: int
    """Its number; 0: the present timeline."""
    version: int

    @classmethod
    def of(cls, text: str) -> "TimelineVersion | None":
        """Parse the result of `str`, or a version alone; None if `text` is neither."""
        found = _MOMENT.fullmatch(text)
        return None if found is None else cls(int(found[1] or 0), int(found[2]))

    def __str__(self) -> str:
        return f"t{self.timeline}-{self.version}" if self.timeline else str(self.version)


@dataclass(frozen=True, slots=True)
class Close:
    """A closed pass."""

    timeline: str
    content: log_records.PassClose

    @property
    def version(self) -> int:
        """The version that it made."""
        return self.content.number

    @property
    def moment(self) -> TimelineVersion:
        """Its timeline and version."""
        return TimelineVersion(_number_of(self.timeline), self.version)


class Closes:
    """The closes of the log in `folder`. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._follower = LogFollower(folder)
        self._lock = threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._timeline = ""
        self._found: list[Close] = []
        self._left: dict[int, list[Close]] = {}
        """By number of a timeline that was left: the closes that led to its end. A rewind may return to it."""
        self._bases: dict[int, TimelineVersion] = {}
        """By number of a timeline: where it began."""

    def placed(self, moment: TimelineVersion) -> TimelineVersion:
        """The last version up to `moment` that led to the present, on the present timeline.

        This is the version of `moment`, or of the commit rewound to since; 0 if the timeline is unknown.
        """
        with self._lock:
            self._read_on()
            present = _number_of(self._timeline)
            ends, (timeline, version) = self._ends(present), moment
            while timeline and timeline not in ends:
                base = self._bases.get(timeline, TimelineVersion(0, 0))
                timeline, version = base.timeline, min(version, base.version)
            return TimelineVersion(present, min(version, ends.get(timeline, version)))

    def after(self, version: int, limit: int) -> Sequence[Close]:
        """At most `limit` closes after `version` that led to the present, oldest first."""
        with self._lock:
            self._read_on()
            begin = bisect_right(self._found, version, key=lambda close: close.version)
            return self._found[begin : begin + limit]

    def newest(self, limit: int, behind: int = 0) -> Sequence[Close]:
        """The last `limit` closes after version `behind`, oldest first."""
        with self._lock:
            self._read_on()
            begin = bisect_right(self._found, behind, key=lambda close: close.version)
            return self._found[max(begin, len(self._found) - limit) :]

    def _read_on(self) -> None:
        for record in self._follower.new_records():
            if record is None:
                self._begin_anew()
            else:
                self._add(record)

    def _add(self, record: AnyRecord) -> None:
        match record.content:
            case log_records.Claim(timeline=str(timeline), base=base) if timeline != self._timeline:
                self._branch(timeline, base or "")
            case log_records.PassClose() as content:
                if len(self._found) >= MAX_KEPT:
                    del self._found[: MAX_KEPT // 2]
                self._found.append(Close(self._timeline, content))

    def _branch(self, timeline: str, base: str) -> None:
        """Start a new timeline at the commit `base`, or at the initial state."""
        self._left[_number_of(self._timeline)] = self._found
        self._timeline, self._found = timeline, []
        commit = NAME.fullmatch(base)
        if commit is not None and int(commit[1]) < _number_of(timeline):
            begun = self._bases[_number_of(timeline)] = TimelineVersion(int(commit[1]), int(commit[2]))
            self._found = [close for close in self._left.get(begun.timeline, []) if close.version <= begun.version]

    def _ends(self, present: int) -> dict[int, int]:
        """By number of each timeline that led to the present: its last version that did."""
        ends = {present: sys.maxsize}
        while present in self._bases:
            end, base = ends[present], self._bases[present]
            present = base.timeline
            ends[present] = min(end, base.version)
        return ends


def _number_of(timeline: str) -> int:
    return int(re.sub(r"\D", "", timeline) or 0)
