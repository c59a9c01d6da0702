"""A source whose events are numbers: "number=7 click=1"."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from headrace.dataset.spec.config import Opening, SourceSection
from headrace.dataset.stream.source import Events, Partition, Segment
from headrace.deadline import Deadline


class RampSource(SourceSection):
    """Whole numbers from 0."""

    kind: Literal["ramp"]
    """Numbers."""
    events: int = Field(ge=1, le=1_000_000)
    """Number of events."""

    @property
    def ends(self) -> bool:
        return True

    def open(self, opening: Opening) -> "Ramp":
        return Ramp(self.events)


class Ramp:
    """The stream of such a source, in one partition."""

    bounded = True
    missing: Sequence[str] = ()

    def __init__(self, num_events: int) -> None:
        self._num_events = num_events

    def resume(self, positions: Mapping[str, int]) -> None:
        """The numbers are there."""

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        return [Partition("ramp", 0, 0, 0, self._num_events, final=True)]

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        positions = range(segment.begin, segment.end)
        yield Events.of([b"number=%d click=%d" % (n, n % 2) for n in positions], positions)

    def look_again(self, deadline: Deadline) -> None:
        """Nothing was added."""

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> None:
        """The numbers have no times."""

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Nobody looks at them."""

    def close(self) -> None:
        """Nothing is open."""
