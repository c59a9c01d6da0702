"""Samples of segments after the pipe, kept for the next time that the segments are read.

In memory for the epochs of one run; dataset.loader.kept_files keeps them in a folder, also for other jobs.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.stream.source import Segment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """The result of reading a segment, or its beginning: samples, rejections and counts."""

    end: int
    """The position after what was read; the rest of the segment, if any, is kept as a segment of its own."""
    num_events: int
    left_out: Mapping[str, int]
    outcome: PipeOutput
    bare: bool = False
    """Whether its rejections have neither detail nor event."""

    @classmethod
    def of(cls, work: PipeInput, outcome: PipeOutput) -> "KeptSegment":
        """The result of `work`; its times are those of a segment that costs nothing."""
        return cls(work.segment.end, work.num_events, work.left_out, replace(outcome, pipe_s=0.0, parse_s=0.0))

    def work(self, segment: Segment) -> PipeInput:
        """As it was given to the pipe, without its events."""
        return PipeInput(replace(segment, end=self.end), [], [], self.num_events, None, self.left_out)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, more or less."""
        counters, rejections = self.outcome.counters, self.outcome.rejections
        bad = sum(len(each.data or b"") + len(each.detail) for each in rejections)
        return (
            counters.sums_SK.nbytes
            + counters.registers_SR.nbytes
            + bad
            + sum(block.num_bytes for block in self.outcome.blocks)
        )


class KeptSegments(Protocol):
    """Keeps segments within a bound of bytes; beyond it, `keep` does nothing. Used by one thread."""

    def find(self, segment: Segment, *, again: bool) -> KeptSegment | None:
        """The result that was kept for exactly this segment, or for its beginning; None if it has to be read. `again`:
        see `keep`."""
        ...

    def keep(self, segment: Segment, part: KeptSegment, *, again: bool) -> None:
        """Keep the result of a segment, or of its beginning, if there is room. `again`: whether a later epoch of this
        run reads it again."""
        ...


class MemorySegments:
    """Kept in this process; see KeptSegments. The last epoch gives the memory back as it goes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._parts: dict[tuple[str, str, int, int], KeptSegment] = {}
        self._full = False

    def find(self, segment: Segment, *, again: bool) -> KeptSegment | None:
        if again:
            return self._parts.get(_key(segment))
        part = self._parts.pop(_key(segment), None)
        self.num_bytes -= 0 if part is None else part.num_bytes
        return part

    def keep(self, segment: Segment, part: KeptSegment, *, again: bool) -> None:
        if not again:
            return
        if self.num_bytes + part.num_bytes > self._max_bytes:
            if not self._full:
                log.warning(
                    "passes.keep is reached: %d bytes of samples are kept, others go through the pipe in each epoch",
                    self.num_bytes,
                )
            self._full = True
            return
        self._parts[_key(segment)] = part
        self.num_bytes += part.num_bytes


def _key(segment: Segment) -> tuple[str, str, int, int]:
    return segment.partition, segment.identity, segment.begin, segment.end
