"""The lines of a job's log for pages, while the job writes it.

Each record is read once, and becomes a line once. The newest lines stay in memory; of older ones the place in the log
stays, and a page of them is read again. A record's line stays as it is when the records before it are pruned.
"""

import threading
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.service.history.log_follower import LogFollower
from headrace.service.history.log_text import LogWording, RecordLine
from headrace.trainer.journal.log_file import AnyRecord, LogTooNew, RecordPlace, record_of

BLOCK_RECORDS = 128
"""Most records of a block. A page reads whole blocks."""
MAX_BLOCKS = 128
"""Most blocks whose lines are in memory; beyond that, the lines that came first are dropped."""


@dataclass(slots=True)
class _Block:
    """Consecutive records of one file."""

    place: RecordPlace
    first: int
    """Number of the first record."""
    before: LogWording
    """The state of the wording before the first record."""
    length: int = 0
    lines: list[RecordLine] | None = field(default_factory=list)

    @property
    def end(self) -> int:
        """Number after the last record."""
        return self.first + self.length


class LogPages:
    """The lines of the log in `folder`. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._follower, self._lock = LogFollower(folder), threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._wording = LogWording()
        self._blocks: list[_Block] = []
        self._in_memory: deque[_Block] = deque()

    def after(self, number: int, limit: int) -> list[RecordLine] | None:
        """At most `limit` lines after record `number`, oldest first; None if the log may be damaged."""
        with self._lock:
            return self._lines(number + 1, limit) if self._read_on() else None

    def newest(self, limit: int) -> list[RecordLine] | None:
        """The last `limit` lines, oldest first; None if the log may be damaged."""
        with self._lock:
            if not self._read_on():
                return None
            end = self._blocks[-1].end if self._blocks else 0
            return self._lines(end - limit, limit)

    def forget(self) -> None:
        """Read the log from its beginning next time: it was repaired."""
        with self._lock:
            self._follower = LogFollower(self._follower.folder)
            self._begin_anew()

    def _read_on(self) -> bool:
        """Take in the new records; return whether all is sound."""
        for record in self._follower.new_records():
            if record is None:
                self._begin_anew()
            else:
                self._add(record)
        present = set(self._follower.paths)
        num_pruned = next((n for n, block in enumerate(self._blocks) if block.place.path in present), len(self._blocks))
        del self._blocks[:num_pruned]
        return self._follower.is_sound

    def _add(self, record: AnyRecord) -> None:
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.length == BLOCK_RECORDS or block.place.path != record.place.path:
            block = _Block(record.place, record.number, replace(self._wording))
            self._blocks.append(block)
            self._keep(block)
        line = self._wording.line(record)
        block.length += 1
        if block.lines is not None:
            block.lines.append(line)

    def _keep(self, block: _Block) -> None:
        self._in_memory.append(block)
        if len(self._in_memory) > MAX_BLOCKS:
            self._in_memory.popleft().lines = None

    def _lines(self, begin: int, limit: int) -> list[RecordLine] | None:
        """At most `limit` lines from record `begin` on."""
        found = list[RecordLine]()
        for block in self._blocks[bisect_right(self._blocks, begin, key=lambda each: each.end) :]:
            lines = self._lines_of(block)
            if lines is None:
                return None
            found += lines[max(0, begin - block.first) :]
            if len(found) >= limit:
                break
        return found[:limit]

    def _lines_of(self, block: _Block) -> list[RecordLine] | None:
        """The lines of a block; None if its records are not what they were."""
        if block.lines is None:
            block.lines = _read(block)
            if block.lines is not None:
                self._keep(block)
        return block.lines


def _read(block: _Block) -> list[RecordLine] | None:
    wording, at, lines = replace(block.before), block.place.byte, list[RecordLine]()
    try:
        with block.place.path.open("rb") as file:
            file.seek(at)
            for number in range(block.first, block.end):
                text = file.readline()
                record = record_of(text, RecordPlace(block.place.path, at))
                if record is None or record.number != number:
                    return None
                lines.append(wording.line(record))
                at += len(text)
    except (OSError, LogTooNew):
        return None
    return lines
