"""The in-memory twin of a stream, for tests: partitions are lists, and faults are data.

Everything that a real source may do is a value here: positions without an event (`Gap`), records without a value
(None), retention (`drop_before`), a recreated partition (`recreate`), a call that fails at a given moment
(`ScriptedFault`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.source import Events, Partition, Segment, check_identity
from headrace.deadline import Deadline

BLOCK_EVENTS = 256


@dataclass(frozen=True, slots=True)
class ScriptedGap:
    """Positions without an event, as compaction and aborted transactions leave them."""

    positions: int = 1


@dataclass(frozen=True, slots=True)
class ScriptedRecord:
    """An event with time stamp, key and headers."""

    value: bytes | None
    timestamp_ms: int = -1
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """The `on_read`-th call of `read` (from 1) raises after `after_events` events."""

    on_read: int
    after_events: int = 0
    error: Exception = SourceUnavailable("scripted: the source does not answer")


Entry = bytes | None | ScriptedGap | ScriptedRecord


class MemorySource:
    """A source in lists; partition i is named "memory/i".

    A bounded one never grows; otherwise `append` adds events and `finish` makes every partition final.
    """

    missing: Sequence[str] = ()
    """See Source."""

    def __init__(
        self, partitions: Sequence[Sequence[Entry]], *, bounded: bool = True, faults: Sequence[ScriptedFault] = ()
    ) -> None:
        self.bounded = bounded
        self.committed: dict[str, int] = {}
        """The positions passed to `commit`, for assertions."""
        self.num_reads = 0
        self.num_time_lookups = 0
        self.closed = False
        self._final = bounded
        self._faults = {fault.on_read: fault for fault in faults}
        self._records: list[dict[int, ScriptedRecord]] = []
        self._begin: list[int] = []
        self._end: list[int] = []
        self._made: list[int] = []
        for values in partitions:
            self.add_partition(values)

    def add_partition(self, values: Sequence[Entry] = ()) -> int:
        """Add a partition; return its number."""
        self._records.append({})
        self._begin.append(0)
        self._end.append(0)
        self._made.append(1)
        self.append(len(self._records) - 1, values)
        return len(self._records) - 1

    def append(self, partition: int, values: Sequence[Entry]) -> None:
        """Add events at the end of a partition."""
        for value in values:
            if isinstance(value, ScriptedGap):
                self._end[partition] += value.positions
                continue
            record = value if isinstance(value, ScriptedRecord) else ScriptedRecord(value)
            self._records[partition][self._end[partition]] = record
            self._end[partition] += 1

    def drop_before(self, partition: int, position: int) -> None:
        """Delete everything before `position`, as retention does."""
        self._begin[partition] = position

    def recreate(self, partition: int, values: Sequence[Entry] = ()) -> None:
        """Replace a partition by a new one of the same name."""
        self._records[partition], self._begin[partition], self._end[partition] = {}, 0, 0
        self._made[partition] += 1
        self.append(partition, values)

    def finish(self) -> None:
        """Make every partition final."""
        self._final = True

    def resume(self, positions: Mapping[str, int]) -> None:
        """Nothing to do."""

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        return [
            Partition(f"memory/{n}", n, 0, self._begin[n], self._end[n], self._final, self._identity(n))
            for n in range(len(self._records))
        ]

    def look_again(self, deadline: Deadline) -> None:
        """Nothing to do, `partitions` is always fresh."""

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int] | None:
        """None if no record has a time stamp."""
        self.num_time_lookups += 1
        if all(record.timestamp_ms < 0 for records in self._records for record in records.values()):
            return None
        records = {name: self._records[int(name.removeprefix("memory/"))] for name in times_ms}
        found = {
            name: min((p for p, r in records[name].items() if r.timestamp_ms >= ms), default=None)
            for name, ms in times_ms.items()
        }
        return {name: position for name, position in found.items() if position is not None}

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """Blocks of at most BLOCK_EVENTS events, cut at a fault."""
        number = self._number(segment)
        self.num_reads += 1
        fault = self._faults.get(self.num_reads)
        positions = [p for p in range(segment.begin, segment.end) if p in self._records[number]]
        if fault is not None:
            positions = positions[: fault.after_events]
        for first in range(0, len(positions), BLOCK_EVENTS):
            yield self._block(number, positions[first : first + BLOCK_EVENTS])
        if fault is not None:
            raise fault.error

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        self.committed.update(positions)

    def close(self) -> None:
        self.closed = True

    def _identity(self, number: int) -> str:
        return f"{number}.{self._made[number]}"

    def _number(self, segment: Segment) -> int:
        number = int(segment.partition.removeprefix("memory/"))
        if not 0 <= number < len(self._records):
            raise SourceGap(f"there is no partition {segment.partition!r}")
        check_identity(segment.partition, segment.identity, self._identity(number))
        begin, end = self._begin[number], self._end[number]
        if segment.begin < begin or segment.end > end:
            raise SourceGap(
                f"{segment.partition}: {segment.begin} to {segment.end} were requested, {begin} to {end} exist"
            )
        return number

    def _block(self, number: int, positions: Sequence[int]) -> Events:
        records = [self._records[number][position] for position in positions]
        return Events.of(
            [record.value for record in records],
            np.array(positions, np.int64),
            [record.timestamp_ms for record in records],
            [record.key for record in records],
            [record.headers for record in records],
        )
