"""Follows the closes in a job's log while the job writes it, so that figures over time need no second read of the log.

Closes stay in memory after the log is pruned. trainer.journal.log reads and checks the log as a whole; records that
cannot be read are left out here.
"""

import re
import sys
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.control.commit_store import NAME
from trainer.control.job_log import AnyRecord, Claim, LogTooNew, PassClose, RecordPlace, file_numbers, listed, record_of

MAX_KEPT = 50_000
"""Most closes kept of one job; beyond that, the oldest half is dropped."""
MAX_READ_BYTES = 4 << 20
"""Most bytes read of one file at a time."""
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

    number: int
    """Number of its record in the log."""
    timeline: str
    version: int
    body: Mapping[str, Any]

    @property
    def moment(self) -> TimelineVersion:
        """Its timeline and version."""
        return TimelineVersion(_number_of(self.timeline), self.version)


@dataclass(slots=True)
class _Read:
    """How far a file of the log is read."""

    path: Path
    head: bytes
    """Its first record, which differs from that of every other log."""
    byte: int = 0

    @classmethod
    def begun(cls, path: Path) -> "_Read":
        """At the beginning of the file at `path`."""
        return cls(path, _head(path))

    def is_replaced(self, paths: Sequence[Path]) -> bool:
        """Whether `paths` belong to another log than this file did. Pruning leaves newer files of the same log."""
        place = file_numbers(self.path) or ()
        later = [path for path in paths if (file_numbers(path) or ()) >= place]
        return not later or (later[0] == self.path and _head(self.path) not in (self.head, b""))


@dataclass(slots=True)
class Closes:
    """The closes of the log in `folder`. Any thread may call."""

    folder: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _at: _Read | None = None
    _timeline: str = ""
    _found: list[Close] = field(default_factory=list)
    _left: dict[int, list[Close]] = field(default_factory=dict)
    """By number of a timeline that was left: the closes that led to its end. A rewind may return to it."""
    _bases: dict[int, TimelineVersion] = field(default_factory=dict)
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
        """Read the new records. The claim of the next file says how long a file is; see trainer.journal.log_file."""
        paths = listed(self.folder)
        if self._at is not None and self._at.is_replaced(paths):  # the job was started afresh
            self._at, self._timeline, self._found, self._left, self._bases = None, "", [], {}, {}
        if self._at is None and paths:
            self._at = _Read.begun(paths[0])
        while self._at is not None:
            place = file_numbers(self._at.path)
            later = [path for path in paths if (number := file_numbers(path)) and place and number > place]
            if not self._take(self._at, _sealed_length(self._at.path, later[0]) if later else None) or not later:
                return
            self._at = _Read.begun(later[0])

    def _take(self, at: _Read, end: int | None) -> bool:
        """Read the complete records of a file up to byte `end`; return whether it is read to there."""
        try:
            with at.path.open("rb") as file:
                file.seek(at.byte)
                while content := file.read(MAX_READ_BYTES if end is None else min(MAX_READ_BYTES, end - at.byte)):
                    whole = content[: content.rfind(b"\n") + 1]
                    for line in whole.splitlines(keepends=True):
                        record = record_of(line, RecordPlace(at.path, at.byte))
                        if record is None:
                            return end is not None  # still being written, or damaged
                        self._add(record)
                        at.byte += len(line)
                    if not whole:
                        return end is not None
                    file.seek(at.byte)
        except FileNotFoundError:  # pruned
            return True
        except (OSError, LogTooNew):
            return False
        return True

    def _add(self, record: AnyRecord) -> None:
        match record.content:
            case Claim(timeline=str(timeline), base=base) if timeline != self._timeline:
                self._branch(timeline, base or "")
            case PassClose(number=version):
                if len(self._found) >= MAX_KEPT:
                    del self._found[: MAX_KEPT // 2]
                self._found.append(Close(record.number, self._timeline, version, record.body))

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


def _head(path: Path) -> bytes:
    """The first record of a file; empty if the file is gone. It is complete as soon as the file has its name."""
    try:
        with path.open("rb") as file:
            return file.readline()
    except OSError:
        return b""


def _sealed_length(path: Path, after: Path) -> int | None:
    """The valid length of a file, from the claim at the start of the file after it; None if the claim has none."""
    try:
        with after.open("rb") as file:
            record = record_of(file.readline(), RecordPlace(after, 0))
    except (OSError, LogTooNew):
        return None
    if record is None or not isinstance(record.content, Claim):
        return None
    return record.content.sealed.get(path.name)
