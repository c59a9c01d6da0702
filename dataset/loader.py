"""Reads passes ahead of training: segments -> events -> pipe -> samples -> batches, in a thread, bounded.

The contract between dataset and trainer. Planning is trainer.plan's work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dataset.batch import Samples
from dataset.source import Segment
from millrace.deadline import Deadline

T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """What reading a pass gave, on one rank."""

    num_events: int = 0
    num_samples: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """Events (multislot: output lines) rejected, by reason."""


class Reader(Protocol):
    """Turns segments into samples."""

    def read(self, pass_number: int, segments: Sequence[Segment], tally: Tally) -> Iterator[Samples]:
        """Samples of the segments in order, in blocks; counts into `tally` as it goes."""
        ...

    def close(self) -> None:
        """End processes, close files."""
        ...


class Loader(Protocol[T]):
    """See module docstring. `submit` passes in order; then `batches(p)` to its end; then `tally(p)`."""

    def submit(self, pass_number: int, segments: Sequence[Segment]) -> None: ...

    def batches(self, pass_number: int) -> Iterator[T]: ...

    def tally(self, pass_number: int) -> Tally: ...

    def close(self, deadline: Deadline) -> None: ...
