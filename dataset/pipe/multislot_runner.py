"""Runs the MultiSlot protocol: one process per segment, one line per event in, one line per sample out."""

from collections.abc import Iterator, Mapping

from headrace.dataset.formats.multislot_parser import BadLine, MultiSlotParser
from headrace.dataset.pipe.command import Command
from headrace.dataset.pipe.process import Chunk, PipeProcess
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput, slot_times
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.dataset.samples.slot_counters import SlotCounters, SlotSum
from headrace.dataset.samples.trim import trim
from headrace.dataset.spec.config import EventTime
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.event_values import LINE_FEED, as_lines, concat_values
from headrace.dataset.stream.source import Events
from headrace.logs import RepeatedLines

PARSE_BYTES = 1 << 20
"""Approximate size of the chunks in which output is parsed."""
MAX_LINE_BYTES = 16 << 20
"""Longest line of output; beyond it, the try fails."""
OUTPUT_BYTES, OUTPUT_FACTOR = 64 << 20, 1024
"""Largest output of a segment: bytes, plus a factor times its input; beyond it, the try fails."""


class MultiSlotRunner:
    """A `dataset.pipe.segment_work.PipeRunner` of the MultiSlot protocol."""

    def __init__(
        self, command: Command, idle_s: float, schema: Schema, event_time: EventTime, masks: Mapping[str, str]
    ) -> None:
        self._command, self._idle_s, self._schema, self._event_time = command, idle_s, schema, event_time
        self._parser = MultiSlotParser(schema, masks)
        self._child: PipeProcess | None = None
        self._closed = False
        self._repeats = RepeatedLines()

    def run(self, work: PipeInput) -> PipeOutput:
        """Run one segment."""
        outcome = PipeOutput(SlotCounters(self._schema), rejections=list(work.rejections))
        outcome.num_judged = len(work.rejections)
        self._child = child = PipeProcess(self._command, self._idle_s, self._repeats)
        if self._closed:  # closed meanwhile
            child.kill()
        try:
            limit = OUTPUT_BYTES + OUTPUT_FACTOR * work.num_bytes
            child.send((lines_of(block) for block in work.blocks), max_output_bytes=limit, close=True)
            for data in whole_lines(child):
                self._take(data, work, outcome)
            child.finish()
        finally:
            child.close()
        outcome.pipe_s = child.waited_s
        return outcome

    def _take(self, data: bytes, work: PipeInput, outcome: PipeOutput) -> None:
        """Parse lines and add the samples to `outcome`. The last line may lack its line feed."""
        half = b""
        if not data.endswith(b"\n"):
            cut = data.rfind(b"\n") + 1
            data, half = data[:cut], data[cut:]
        num_before = outcome.num_judged - len(work.rejections)
        samples, bad_lines = self._parser.parse(data, num_before)
        if half:
            number = num_before + data.count(b"\n") + 1
            bad_lines.append(BadLine(number, Reason.HALF, "the last line has no line feed", half, None))
        outcome.num_judged += len(samples) + len(bad_lines)
        for bad in bad_lines:
            segment = work.segment
            outcome.rejections.append(
                Rejection(segment.partition, segment.begin, bad.reason, bad.detail, bad.data, bad.line)
            )
            if bad.slot is not None and bad.reason is Reason.NON_FINITE:
                outcome.counters.add(bad.slot, SlotSum.NON_FINITE, 1)
        samples = trim(samples, self._schema, outcome.counters)
        times = slot_times(work.event_time or self._event_time, samples)
        samples = Samples(samples.sparse, samples.dense, samples.meta, samples.event_B, times)
        outcome.counters.observe(samples)
        outcome.blocks.append(samples)

    def reset(self) -> None:
        """Do nothing: a try leaves nothing behind."""

    def close(self) -> None:
        """Kill the running process."""
        self._closed = True
        if self._child is not None:
            self._child.kill()


def lines_of(events: Events) -> Chunk:
    """Events as lines: the buffer itself if it already contains them as lines, else a copy."""
    whole = as_lines(events)
    return (concat_values(events, LINE_FEED) if whole is None else whole).data


def whole_lines(child: PipeProcess) -> Iterator[bytes]:
    """A child's output in chunks of whole lines; only the last chunk may end inside a line."""
    held: list[bytes | memoryview] = []
    num_held = 0
    while data := child.read():
        held.append(data)
        num_held += len(data)
        if num_held < PARSE_BYTES or b"\n" not in data:
            if num_held > MAX_LINE_BYTES and not any(b"\n" in part for part in held):
                raise child.failure(f"printed a line longer than {MAX_LINE_BYTES >> 20} MiB")
            continue
        cut = data.rfind(b"\n") + 1
        held[-1] = memoryview(data)[:cut]
        yield b"".join(held)
        held = [data[cut:]] if cut < len(data) else []
        num_held = len(data) - cut
    if num_held:
        yield b"".join(held)
