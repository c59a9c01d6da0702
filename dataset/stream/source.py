"""The protocol of sources: a stream of events in partitions, read by segments.

A source has no position: the caller names the segment, so a second read gives the same events. One contract suite runs
over all sources. trainer.journal.pass_plan decides which segments make a pass. Shapes: E events in a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.stream.errors import SourceGap
from headrace.deadline import Deadline

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Positions `begin` to `end` (exclusive) of one partition. There may be fewer events than positions."""

    partition: str
    """Name of the partition: "topic/3", a file's path."""
    number: int
    """Number of the partition in the job."""
    begin: int
    end: int
    identity: str = ""
    """Identity of the partition when the segment was planned; if it has changed, reading raises SourceGap."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The present state of one partition."""

    name: str
    number: int
    """0, 1, ... in the source's fixed order; a partition found later comes last."""
    start: int
    """Position where a new job starts."""
    begin: int
    """First position that can still be read."""
    end: int
    """Position after the last event that can be read now."""
    final: bool
    """Whether nothing will be added after `end`."""
    identity: str = ""
    """Differs if the partition was replaced under the same name: a topic's id, what a file begins with. "": unknown."""
    stream: str = ""
    """Partitions of one stream are read one after another, by period and name; "": it is a stream of its own."""
    period: tuple[str, ...] = ()
    """The time in the partition's name, compared part by part, digits as numbers; comparable across streams."""
    bounded: bool | None = None
    """Whether its source ends, where the stream has several; None: as the stream does."""

    @property
    def stream_name(self) -> str:
        """The name of its stream."""
        return self.stream or self.name


@dataclass(frozen=True, slots=True)
class Events:
    """A block of events of one partition, in order of position; the values are in one buffer."""

    data: bytes | bytearray | memoryview
    """The values; `data[begin_E[i]:end_E[i]]` is event i, without a line feed."""
    begin_E: I64
    """-1 if the event has no value (a Kafka record with null)."""
    end_E: I64
    position_E: I64
    timestamp_ms_E: I64
    """The record's time stamp; -1 if there is none."""
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Sequence[tuple[str, bytes]]] | None = None
    faults: Sequence[str | None] | None = None
    """Of each event, why the source cannot give it as it is, so that it is rejected; None: it can."""

    def __len__(self) -> int:
        return len(self.begin_E)

    @property
    def length_E(self) -> I64:
        """(E,) bytes of each value; 0 for null."""
        return np.where(self.begin_E < 0, 0, self.end_E - self.begin_E)

    def value(self, index: int) -> bytes | None:
        """The bytes of event `index`; None if it has no value."""
        begin = int(self.begin_E[index])
        return None if begin < 0 else bytes(self.data[begin : int(self.end_E[index])])

    def slice(self, begin: int, end: int) -> "Events":
        """Events `begin` to `end` (exclusive), on the same buffer."""
        if end - begin == len(self):
            return self
        cut = slice(begin, end)
        return Events(
            self.data,
            self.begin_E[cut],
            self.end_E[cut],
            self.position_E[cut],
            self.timestamp_ms_E[cut],
            self.keys and self.keys[cut],
            self.headers and self.headers[cut],
            self.faults and self.faults[cut],
        )

    @classmethod
    def of(
        cls,
        values: Sequence[bytes | None],
        positions: Sequence[int] | I64,
        timestamps_ms: Sequence[int] | I64 | None = None,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Sequence[tuple[str, bytes]]] | None = None,
    ) -> "Events":
        """Make a block of separate values. In its buffer they are lines, so that a pipe can be given the buffer."""
        present = [value for value in values if value is not None]
        length_E = np.fromiter([0 if value is None else len(value) + 1 for value in values], np.int64, len(values))
        begin_E = np.cumsum(length_E) - length_E
        end_E = begin_E + np.maximum(length_E - 1, 0)
        begin_E[length_E == 0] = -1
        times = np.full(len(values), -1, np.int64) if timestamps_ms is None else np.asarray(timestamps_ms, np.int64)
        data = b"\n".join([*present, b""]) if present else b""
        return cls(data, begin_E, end_E, np.asarray(positions, np.int64), times, keys, headers)


class Source(Protocol):
    """A stream of events in numbered partitions.

    One thread at a time may call it. Two calls of `read` for a segment give the same events. A call without an answer
    at its deadline raises SourceUnavailable; a position that no longer exists, or never did, raises SourceGap.
    """

    bounded: bool
    """Whether the stream ends, that is, every partition becomes final."""
    missing: Sequence[str]
    """Words for what was not found so far: of files, each pattern that has matched none. Any thread."""

    def resume(self, positions: Mapping[str, int]) -> None:
        """A restarted job continues from these positions, by partition name; events before them have arrived."""
        ...

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """All partitions known now, by number, with fresh ends. Cheap enough to call several times a second."""
        ...

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """The events of a segment, in order, in blocks. Ends when the position reaches the segment's end."""
        ...

    def look_again(self, deadline: Deadline) -> None:
        """For a bounded source: `partitions` then includes all that was added since the opening."""
        ...

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int] | None:
        """By partition: the position of its first record with this time stamp or later, if it has one.

        None if the records have no time stamps.
        """
        ...

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Publish the job's positions for lag tools, by partition name. They are never read back."""
        ...

    def close(self) -> None:
        """Close files and connections. May be called twice."""
        ...


CONTENT = "content:"
"""Begins the identity of a file: digests of its first bytes, of which a longer file has more."""


def is_same(was: str, now: str) -> bool:
    """Whether two identities may be of one partition. "" is unknown; so is a file's in a log of earlier programs."""
    of_content = [each.startswith(CONTENT) for each in (was, now)]
    if all(of_content):
        return was.startswith(now) or now.startswith(was)
    return not was or not now or any(of_content) or was == now


def check_identity(name: str, was: str, now: str) -> None:
    """Raise SourceGap if the identity of a partition has changed."""
    if not is_same(was, now):
        raise SourceGap(
            f"{name} is not what it was when the job began to read it (identity {was} then, {now} now): the topic was "
            f"deleted and created again, or the file was replaced, so positions have another meaning. Restore the old "
            f"one; or skip the unread part of an old file with `headrace skip`; or start again with --fresh"
        )
