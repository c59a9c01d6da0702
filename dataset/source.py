"""The protocol of sources: a stream of events in partitions, read by segments.

Files, Kafka, the simulated stream and the scripted twin for tests implement it, each in a module of its own; one
contract suite runs over all. A source holds no position: who reads says which segment, so reading again gives the
same events. Deciding which segments make a pass is trainer.plan's work.

Shapes: E events in a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataset.errors import SourceGap
from millrace.deadline import Deadline

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Positions `begin` to `end` (exclusive) of one partition; may hold fewer events than positions."""

    partition: str
    """Name of the partition: "topic/3", a file's path."""
    number: int
    """Number of the partition in the job."""
    begin: int
    end: int
    identity: str = ""
    """That of the partition when the segment was planned; where it is no longer so, reading raises SourceGap."""


@dataclass(frozen=True, slots=True)
class Partition:
    """What a source knows of one partition now."""

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
    """Nothing will come after `end`."""
    identity: str = ""
    """Changes when another partition hides behind the same name: a topic's id, a file's "device:inode". "": unknown."""
    stream: str = ""
    """Partitions of one stream are read one after another, by period and name; "": this one is a stream of its own."""
    period: tuple[str, ...] = ()
    """The time that the partition's name tells, compared part by part, digits as numbers; of all streams alike."""

    @property
    def stream_name(self) -> str:
        """The name of its stream."""
        return self.stream or self.name


@dataclass(frozen=True, slots=True)
class Events:
    """A block of events of one partition, in order of position; values lie in one buffer."""

    data: bytes | bytearray | memoryview
    """Values; `data[begin_E[i]:end_E[i]]` is event i, without a line feed."""
    begin_E: I64
    """-1 where the event has no value (a Kafka record with null)."""
    end_E: I64
    position_E: I64
    timestamp_ms_E: I64
    """The record's own time stamp; -1 where there is none."""
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Sequence[tuple[str, bytes]]] | None = None

    def __len__(self) -> int:
        return len(self.begin_E)

    def value(self, index: int) -> bytes | None:
        """The bytes of event `index`."""
        begin = int(self.begin_E[index])
        return None if begin < 0 else bytes(self.data[begin : int(self.end_E[index])])

    @classmethod
    def of(
        cls,
        values: Sequence[bytes | None],
        positions: Sequence[int] | I64,
        timestamps_ms: Sequence[int] | I64 | None = None,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Sequence[tuple[str, bytes]]] | None = None,
    ) -> "Events":
        """A block made of separate values."""
        length_E = np.fromiter((len(v) if v is not None else 0 for v in values), np.int64, len(values))
        end_E = np.cumsum(length_E)
        begin_E = end_E - length_E
        begin_E[[v is None for v in values]] = -1
        times = np.full(len(values), -1, np.int64) if timestamps_ms is None else np.asarray(timestamps_ms, np.int64)
        data = b"".join(v for v in values if v is not None)
        return cls(data, begin_E, end_E, np.asarray(positions, np.int64), times, keys, headers)


class Source(Protocol):
    """A stream of events in numbered partitions.

    One thread at a time may call it. `read` twice over one segment gives the same events. A call that cannot be
    answered by its deadline raises SourceUnavailable; a position that is gone or never was raises SourceGap.
    """

    bounded: bool
    """Whether the stream ends: every partition becomes final."""

    def resume(self, positions: Mapping[str, int]) -> None:
        """A job that was there before goes on from these positions, by partition name: so they have arrived."""
        ...

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """All partitions known now, by number; fresh ends. Cheap enough to call several times a second."""
        ...

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """The events of a segment, in order, in blocks; ends when the position reaches the segment's end."""
        ...

    def look_again(self, deadline: Deadline) -> None:
        """Of a bounded source: from here on `partitions` says what there is now, with what came since the opening."""
        ...

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int] | None:
        """By partition the position of its first record of this time stamp or later, where it has one.

        None: records have no time stamps here.
        """
        ...

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Tell lag tools how far the job is, by partition name. Nothing is ever read back from it by us."""
        ...

    def close(self) -> None:
        """Let go of files and connections. Harmless when called twice."""
        ...


def check_identity(name: str, was: str, now: str) -> None:
    """Raise SourceGap where what goes by the name of a partition is not what it was; "" says nothing."""
    if was and now and was != now:
        raise SourceGap(
            f"{name} is not what it was when the job began to read it (identity {was} then, {now} now): the topic was "
            f"deleted and made anew, or the file replaced, so positions no longer mean what they did. Bring the old "
            f"one back; or leave what is unread of an old file with `millrace skip`; or start anew with --fresh"
        )
