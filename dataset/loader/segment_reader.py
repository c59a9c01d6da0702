"""Takes the segments of a pass, yields blocks of samples.

`dataset.loader.segment_parts` gives events of the source to the pipe, here or elsewhere. This module handles rejected
events as the spec says, and counts everything. The trainer decides which segments make a pass.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import numpy as np

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.kept_segments import KeptSegment, KeptSegments
from headrace.dataset.loader.pass_shuffle import PassShuffle, RankShare
from headrace.dataset.loader.segment_parts import EventCuts, Parts, PartsHere, SegmentPart, SourceEvents, make_pool
from headrace.dataset.pipe.label_bounds import LabelBounds, reject_labels
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput, split_segment
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import RejectedSample, Rejection
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.sources.event_time import untimed_words
from headrace.dataset.spec.config import (
    READ_AHEAD_BYTES,
    AnyPipe,
    OnBadEvent,
    SourceSection,
)
from headrace.dataset.spec.epochs import split_epoch
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet, check_event_time
from headrace.dataset.stream.errors import BadEvent, SourceGap
from headrace.dataset.stream.source import Segment, Source

log = logging.getLogger(__name__)


class SegmentReader:
    """Reads segments through the pipe; a `dataset.loader.batch_loader.PassReader`. It owns the source and closes it.

    `masks` maps a label that may be absent to the meta slot that is 0 then, or to "" if it may always be absent.
    Raises SpecError if the pipe command cannot be started or there is no event time.
    """

    def __init__(
        self,
        source: Source,
        pipe: AnyPipe,
        schema: Schema,
        source_config: SourceSection | SourceSet,
        dead_letters: DeadLetters | None,
        folder: Path,
        *,
        spec: Path | None = None,
        masks: Mapping[str, str] | None = None,
        max_outage_s: float = 600.0,
        memory: int = READ_AHEAD_BYTES,
        kept: KeptSegments | None = None,
        shuffles: RankShare | None = None,
        labels: Sequence[LabelBounds] = (),
        parts: Parts | None = None,
    ) -> None:
        """`memory`: about the most bytes of events and samples in the pipe. `kept`: takes samples that are read again.
        `shuffles`: each pass is shuffled, `read` gets the segments of all
        trainers, and this trainer takes its share. `labels`: events with others are rejected. `parts`: run the pipe
        elsewhere."""
        self._sections = SourceSet.of(source_config)
        for name, section in self._sections.sections.items():
            path = f"sources.{name}.event_time" if name else "event_time"
            check_event_time(section.event_time, pipe.traced, schema, path)
        self._source, self._pipe, self._schema, self._dead_letters = source, pipe, schema, dead_letters
        self._kept, self._shuffles, self._labels = kept, shuffles, labels
        self._num_timed = self._num_untimed = 0
        self._tell_untimed_at = 1
        self._blocks: list[tuple[Segment, int]] = []
        """Of the last pass that was read and not shuffled: the segment of each block, and the lines before it."""
        self._stopping = threading.Event()
        self._events = SourceEvents(source, max_outage_s, self._stopping)
        if parts is None:
            pool = make_pool(pipe, schema, self._sections, masks or {}, folder, spec, max_outage_s)
            parts = PartsHere(self._events, EventCuts(self._sections, pipe, schema, memory), pool)
        self._parts = parts

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """Samples of the segments in order. Raises PipeFailed, BadEvent, and what the source raises."""
        tally.slots = SlotCounters(self._schema)
        if self._dead_letters is not None:
            self._dead_letters.begin(pass_number)
        again = {name: again for name, again in map(self._occasion, segments)}
        segments = [replace(each, partition=self._occasion(each)[0]) for each in segments]
        if self._shuffles is not None:
            yield from self._read_shuffled(
                pass_number, PassShuffle(self._shuffles, pass_number, segments), again, tally
            )
            return
        num_lines, self._blocks = 0, []
        for work, outcome in self._outcomes(pass_number, segments, again, tally, None):
            self._count(pass_number, work, outcome, tally)
            for samples in outcome.blocks:
                self._blocks.append((work.segment, num_lines))
                if not self._pipe.traced:  # from line numbers in the segment to numbers in the pass
                    samples = replace(samples, event_B=samples.event_B + num_lines)
                yield samples
            num_lines += outcome.num_judged

    def partitions(self) -> Sequence[str]:
        return [segment.partition for segment, _ in self._blocks]

    def reject(self, pass_number: int, samples: Sequence[RejectedSample], tally: PassTally) -> None:
        """The events are read from the source again for their bytes, if these are kept."""
        first = {(each.block, each.event): each for each in reversed(samples)}  # one rejection for each event
        chosen = [first[place] for place in sorted(first)]
        events: dict[tuple[str, int], bytes] = {}
        if self._pipe.traced and self._keeps_bytes:
            events = self._events_again(pass_number, chosen)
        rejections = []
        for each in chosen:
            segment, num_lines = self._blocks[each.block]
            if self._pipe.traced:
                data = events.get((segment.partition, each.event))
                found = Rejection(segment.partition, each.event, each.reason, each.detail, data)
            else:
                line = each.event - num_lines + 1
                found = Rejection(segment.partition, segment.begin, each.reason, each.detail, None, line)
            tally.reject(found.reason, str(found))
            rejections.append(found)
        self._handle_rejections(pass_number, rejections, tally)

    @property
    def _keeps_bytes(self) -> bool:
        """Whether rejected events become dead letters with their bytes."""
        letters = self._dead_letters if self._pipe.on_bad_event is OnBadEvent.DEAD_LETTER else None
        return letters is not None and letters.keeps_bytes

    def _events_again(self, pass_number: int, samples: Sequence[RejectedSample]) -> dict[tuple[str, int], bytes]:
        """The events of samples, by partition and position, as far as the source still has them."""
        wanted: dict[Segment, list[int]] = {}
        for each in samples:
            wanted.setdefault(self._blocks[each.block][0], []).append(each.event)
        found = {}
        for segment, positions in wanted.items():
            part = replace(segment, begin=min(positions), end=max(positions) + 1)
            try:
                for events in self._events.read(pass_number, part):
                    at_E = np.flatnonzero(np.isin(events.position_E, positions)).tolist()
                    values = ((int(events.position_E[at]), events.value(at)) for at in at_E)
                    found.update({(part.partition, at): data for at, data in values if data is not None})
            except SourceGap as error:
                log.warning("dead letters of pass %d have no bytes: %s", pass_number, error)
        return found

    def _occasion(self, segment: Segment) -> tuple[str, bool]:
        """The name of a segment's partition in its source, without an epoch; and whether a later epoch reads it."""
        section = self._sections.section_of(segment.partition)
        name, epoch = split_epoch(segment.partition) if section.epochs > 1 else (segment.partition, 1)
        return name, epoch < section.epochs

    def _read_shuffled(
        self, pass_number: int, shuffle: PassShuffle, again: Mapping[str, bool], tally: PassTally
    ) -> Iterator[Samples]:
        """This trainer's samples of a pass in shuffled order; they are in memory at a time."""
        placed: list[Samples] = []
        for work, outcome in self._outcomes(pass_number, shuffle.segments, again, tally, shuffle):
            self._count(pass_number, work, outcome, tally)
            placed += [shuffle.placed(work.segment, samples) for samples in outcome.blocks]
        yield from shuffle.in_order(placed)

    def _outcomes(
        self,
        pass_number: int,
        segments: Sequence[Segment],
        again: Mapping[str, bool],
        tally: PassTally,
        shuffle: PassShuffle | None,
    ) -> Iterator[tuple[PipeInput, PipeOutput]]:
        """The results of the segments in order, in parts of them: as they were kept, or through the pipe."""
        parts = [part for segment in segments for part in split_segment(segment, self._pipe.processes)]
        if self._kept is None or (shuffle is not None and not shuffle.is_whole):
            own = [SegmentPart(part, None if shuffle is None else shuffle.own(part)) for part in parts]
            yield from self._parts.run(pass_number, own, tally)
            return
        waiting: list[Segment] = []
        for part in parts:
            while (found := self._kept.find(part, again=again[part.partition])) is not None:
                yield from self._fresh(pass_number, waiting, again, tally, self._kept)
                waiting = []
                if found.bare and found.outcome.rejections and self._pipe.traced and self._keeps_bytes:
                    found.outcome.rejections = self._rejected_again(pass_number, part, found.outcome.rejections)
                yield found.work(part), found.outcome
                part = replace(part, begin=found.end)
                if part.begin == part.end:
                    break
            else:
                waiting.append(part)
        yield from self._fresh(pass_number, waiting, again, tally, self._kept)

    def _rejected_again(self, pass_number: int, segment: Segment, rejections: Sequence[Rejection]) -> list[Rejection]:
        """Rejections with details and events: of the rejected events alone, through the pipe again."""
        positions = [each.offset for each in rejections]
        part = replace(segment, begin=min(positions), end=max(positions) + 1)
        own_N = np.isin(np.arange(part.begin, part.end), positions)
        try:
            outcomes = list(self._parts.run(pass_number, [SegmentPart(part, own_N)], PassTally()))
        except SourceGap as error:
            log.warning("dead letters of pass %d have no bytes: %s", pass_number, error)
            return list(rejections)
        return [rejection for _, outcome in outcomes for rejection in outcome.rejections]

    def _fresh(
        self,
        pass_number: int,
        parts: Sequence[Segment],
        again: Mapping[str, bool],
        tally: PassTally,
        kept: KeptSegments,
    ) -> Iterator[tuple[PipeInput, PipeOutput]]:
        """The results of parts through the pipe, which are then kept."""
        left = deque(parts)
        for work, outcome in self._parts.run(pass_number, [SegmentPart(part) for part in parts], tally):
            segment = replace(work.segment, end=left[0].end)
            kept.keep(segment, KeptSegment.of(work, outcome), again=again[segment.partition])
            yield work, outcome
            if work.segment.end == segment.end:
                left.popleft()

    def close(self) -> None:
        """End the processes, the source, and a `read` in progress. May be called twice."""
        self._stopping.set()
        self._parts.close()
        self._source.close()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _count(self, pass_number: int, work: PipeInput, outcome: PipeOutput, tally: PassTally) -> None:
        self._tell_untimed(work, outcome)
        reject_labels(work, outcome, self._labels, traced=self._pipe.traced)
        tally.num_events += work.num_events
        for reason, count in work.left_out.items():
            tally.left_out[reason] = tally.left_out.get(reason, 0) + count
        tally.num_samples += outcome.num_samples
        tally.num_judged += outcome.num_judged
        tally.pipe_s += outcome.pipe_s
        tally.parse_s += outcome.parse_s
        assert tally.slots is not None
        tally.slots.merge(outcome.counters)
        for rejection in outcome.rejections:
            tally.reject(rejection.reason, str(rejection))
        self._handle_rejections(pass_number, outcome.rejections, tally)

    def _tell_untimed(self, work: PipeInput, outcome: PipeOutput) -> None:
        """Log samples without an event time: the first, and then each time that their number is ten times as large."""
        config = self._sections.section_of(work.segment.partition).event_time
        if config.kind == "none" or config.slot is not None:
            return
        self._num_timed += sum(int(np.isfinite(block.time_s_B).sum()) for block in outcome.blocks)
        self._num_untimed += sum(int(np.isnan(block.time_s_B).sum()) for block in outcome.blocks)
        if self._num_untimed >= self._tell_untimed_at:
            log.warning(
                "%d samples have no event time, of %d so far: %s. Windows of counters, days and rates by time do not "
                "see them",
                self._num_untimed,
                self._num_timed + self._num_untimed,
                untimed_words(config, work.blocks),
            )
            self._tell_untimed_at = 10 ** len(str(self._num_untimed))

    def _handle_rejections(self, pass_number: int, rejections: Iterable[Rejection], tally: PassTally) -> None:
        match self._pipe.on_bad_event:
            case OnBadEvent.SKIP:
                pass
            case OnBadEvent.DEAD_LETTER:
                if self._dead_letters is not None:
                    tally.num_dead_letters += self._dead_letters.add(pass_number, rejections)
            case OnBadEvent.FAIL:
                for rejection in rejections:
                    raise BadEvent(
                        f'{rejection}; pipe.on_bad_event = "fail" stops here: repair the stream or the pipe command, '
                        'or set it to "dead_letter"'
                    )
            case _:
                assert_never(self._pipe.on_bad_event)
