"""Parts of segments through source and pipe: the work whose results make the samples of a pass.

`PartsHere` does it in this process; dataset.reader does the same work on other machines.

Shapes: N positions of a part, E events.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.missing_columns import MissingColumns
from headrace.dataset.pipe.arrow_runner import ArrowRunner
from headrace.dataset.pipe.columns_runner import ColumnsRunner
from headrace.dataset.pipe.command import Command, prepare_command
from headrace.dataset.pipe.multislot_runner import MultiSlotRunner
from headrace.dataset.pipe.pool import PipePool
from headrace.dataset.pipe.segment_work import (
    PipeInput,
    PipeOutput,
    PipeRunner,
    SkippedValues,
    cut_events,
    reject_early,
)
from headrace.dataset.pipe.time_window import TimeWindow
from headrace.dataset.spec.config import AnyPipe, ColumnsPipe, EventTime, PipeSection
from headrace.dataset.spec.config import Protocol as PipeProtocol
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.event_values import take_events
from headrace.dataset.stream.source import Events, Segment, Source
from headrace.deadline import Deadline
from headrace.timeline import Span, span

READ_S = 30.0
"""Longest silence of a source before it counts as unavailable."""
AWAY_WAIT_S = 1.0
"""Pause before an unavailable source is tried again."""

PARTS_OF_MEMORY = 8
"""Share of the memory that the events of the parts in the pipe take: their samples, and copies on the way, need more.
The pool holds one part for each process, and one more."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """A part of a segment of a pass."""

    segment: Segment
    own_N: NDArray[np.bool_] | None = None
    """(N,) the positions whose events are read; None: all."""

    def own(self, events: Events) -> Events:
        """Those of some events of the segment that are read."""
        if self.own_N is None:
            return events
        return take_events(events, np.flatnonzero(self.own_N[events.position_E - self.segment.begin]))


class Parts(Protocol):
    """Runs parts of segments through source and pipe. Call `run` from one thread, `close` from any."""

    def run(
        self, pass_number: int, parts: Sequence[SegmentPart], tally: PassTally
    ) -> Iterator[tuple[PipeInput, PipeOutput]]:
        """The results of the parts in order, each in pieces of limited bytes, which are a pure function of the part.

        Adds the seconds of reading to `tally`. Raises PipeFailed, SourceGap, SourceUnavailable.
        """
        ...

    def close(self) -> None:
        """End processes; a `run` in progress raises."""
        ...


class SourceEvents:
    """Reads the events of segments from a source, and waits while that is unavailable."""

    def __init__(self, source: Source, max_outage_s: float, stopping: threading.Event) -> None:
        self._source, self._max_outage_s, self._stopping = source, max_outage_s, stopping

    def read(self, pass_number: int, segment: Segment) -> Iterator[Events]:
        """The events of a segment. Waits while the source is unavailable, and logs it."""
        away_since_s: float | None = None
        while segment.begin < segment.end:
            try:
                for events in self._source.read(segment, Deadline.after(READ_S)):
                    if away_since_s is not None:
                        log.info("%s is back after %.0f s", segment.partition, time.monotonic() - away_since_s)
                        away_since_s = None
                    if len(events):
                        segment = replace(segment, begin=int(events.position_E[-1]) + 1)
                    yield events
                return
            except SourceGap as error:
                raise SourceGap(
                    f"pass {pass_number} is planned with positions {segment.begin} to {segment.end} of "
                    f"{segment.partition}, and they cannot be read: {error}. If they are lost, skip them with "
                    f"`headrace skip`"
                ) from error
            except SourceUnavailable as error:
                now_s = time.monotonic()
                away_since_s = now_s if away_since_s is None else away_since_s
                if now_s - away_since_s >= self._max_outage_s or self._stopping.wait(AWAY_WAIT_S):
                    raise
                log.warning("waiting for %s: %s", segment.partition, error)


class EventCuts:
    """The events of parts in pieces of limited bytes, ready for the pipe. One thread at a time."""

    def __init__(self, sections: SourceSet, pipe: AnyPipe, schema: Schema, memory: int) -> None:
        """`memory`: about the most bytes of events and samples in the pipe of one trainer."""
        self._sections, self._traced = sections, pipe.traced
        self._windows = {name: TimeWindow.of(section) for name, section in sections.sections.items()}
        self._max_piece_bytes = max(1, memory // PARTS_OF_MEMORY // (pipe.processes + 1))
        self._missing = MissingColumns(pipe, schema)

    def works(
        self, events: SourceEvents, pass_number: int, parts: Sequence[SegmentPart], tally: PassTally
    ) -> Iterator[PipeInput]:
        """The pieces of the parts in order; counts the seconds of reading."""
        for part in parts:
            works = self._works_of(events, pass_number, part)
            while True:
                begin_s = time.monotonic()
                with span(Span.READING):
                    work = next(works, None)
                tally.source_s += time.monotonic() - begin_s
                if work is None:
                    break
                yield work

    def _works_of(self, events: SourceEvents, pass_number: int, part: SegmentPart) -> Iterator[PipeInput]:
        name = self._sections.name_of(part.segment.partition)
        section = self._sections.sections[name]
        own = (part.own(block) for block in events.read(pass_number, part.segment))
        for piece, blocks in cut_events(part.segment, own, self._max_piece_bytes):
            work = reject_early(
                piece,
                blocks,
                section.max_event_bytes,
                lines=not self._traced,
                window=self._windows[name],
                event_time=section.event_time,
                skipped=SkippedValues.of(section),
            )
            self._missing.look(name, section, work)
            yield work


class PartsHere:
    """Parts through a source and pipe of this process; the source stays its owner's. See Parts."""

    def __init__(self, events: SourceEvents, cuts: EventCuts, pool: PipePool, max_in_memory: int | None = None) -> None:
        """`max_in_memory`: see PipePool.run."""
        self._events, self._cuts, self._pool, self._max_in_memory = events, cuts, pool, max_in_memory

    def run(
        self, pass_number: int, parts: Sequence[SegmentPart], tally: PassTally
    ) -> Iterator[tuple[PipeInput, PipeOutput]]:
        works = self._cuts.works(self._events, pass_number, parts, tally)
        return self._pool.run(works, self._max_in_memory)

    def close(self) -> None:
        self._pool.close()


def make_runner(
    command: Command, pipe: PipeSection, schema: Schema, event_time: EventTime, masks: Mapping[str, str]
) -> PipeRunner:
    """A runner of the protocol that the spec names."""
    match pipe.protocol:
        case PipeProtocol.MULTISLOT:
            return MultiSlotRunner(command, pipe.deadline, schema, event_time, masks)
        case PipeProtocol.ARROW:
            extra = pipe.extra == "drop"
            return ArrowRunner(command, pipe.deadline, schema, event_time, masks, pipe.batch_events, extra)
        case _:
            assert_never(pipe.protocol)


def make_pool(
    pipe: AnyPipe,
    schema: Schema,
    sections: SourceSet,
    masks: Mapping[str, str],
    folder: Path,
    spec: Path | None,
    max_outage_s: float,
) -> PipePool:
    """The runners of a pipe. Raises SpecError."""
    event_time = next(iter(sections.sections.values())).event_time  # else that of the segment's source
    if isinstance(pipe, ColumnsPipe):
        runner = partial(ColumnsRunner, pipe, schema, event_time, masks, folder, max_outage_s)
        return PipePool(None, runner, pipe.processes, 1)
    command = prepare_command(pipe, schema, folder, spec)
    return PipePool(command, partial(make_runner, command, pipe, schema, event_time, masks), pipe.processes, pipe.tries)
