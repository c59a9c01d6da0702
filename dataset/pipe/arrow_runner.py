"""Runs the Arrow protocol: a persistent process; one IPC stream per segment each way, one answer batch per request."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from headrace.dataset.formats.arrow_columns import REQUEST, BadAnswer, check_answer_schema, request_batch
from headrace.dataset.pipe.answer_samples import AnswerSamples, rebatch
from headrace.dataset.pipe.command import Command
from headrace.dataset.pipe.process import PipeProcess
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import EventTime
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Events
from headrace.logs import RepeatedLines

CONTINUATION = b"\xff\xff\xff\xff"
"""First bytes of every message in an IPC stream."""
LAST_WORDS_S = 0.5
"""Time for a command that ends its answers too early to print the reason on stderr."""
OUTPUT_BYTES, OUTPUT_FACTOR = 256 << 20, 1024
"""Largest answers of a segment: bytes, plus a factor times the bytes of its events; beyond it, the try fails."""


class AnswerStream:
    """A child's output as a file from which pyarrow reads an IPC stream."""

    closed = False

    def __init__(self, child: PipeProcess) -> None:
        self.child, self._held, self._at = child, b"", 0
        self._begun = False

    def read(self, num_bytes: int) -> bytes:
        """Exactly `num_bytes`. Raises PipeProcessFailed if the output ends before."""
        parts, num = [], 0
        while num < num_bytes:
            if self._at == len(self._held):
                self._held, self._at = self.child.read(), 0
                if not self._held:
                    self.child.finish()
                    raise self.child.failure("ended in the middle of a segment")
            part = self._held[self._at : self._at + num_bytes - num]
            self._at += len(part)
            parts.append(part)
            num += len(part)
            self._look(part)
        return b"".join(parts)

    def _look(self, part: bytes) -> None:
        if not self._begun and not part.startswith(CONTINUATION[: len(part)]):
            shown = (part + self._held[self._at : self._at + 80])[:80]
            raise self.child.failure(f"printed something that is not an Arrow stream: {shown!r}")
        self._begun = True

    def rest(self) -> bytes:
        """Bytes read and not used yet."""
        return self._held[self._at :]

    def close(self) -> None:
        """Do nothing: the child belongs to the runner."""


class ArrowRunner:
    """A `dataset.pipe.segment_work.PipeRunner` of the Arrow protocol."""

    def __init__(
        self,
        command: Command,
        idle_s: float,
        schema: Schema,
        event_time: EventTime,
        masks: Mapping[str, str],
        batch_events: int,
        drop_extra: bool = False,
    ) -> None:
        self._command, self._idle_s, self._schema = command, idle_s, schema
        self._batch_events, self._drop_extra = batch_events, drop_extra
        self._answers = AnswerSamples(schema, event_time, masks)
        self._child: PipeProcess | None = None
        self._closed = False
        self._repeats = RepeatedLines()

    def run(self, work: PipeInput) -> PipeOutput:
        """Run one segment."""
        outcome = PipeOutput(SlotCounters(self._schema), rejections=list(work.rejections))
        outcome.num_judged = work.num_events
        requests = list(rebatch(work.blocks, self._batch_events))
        if not requests:
            return outcome
        if self._child is None:
            self._child = PipeProcess(self._command, self._idle_s, self._repeats)
            if self._closed:  # closed meanwhile
                self._child.kill()
        child = self._child
        before_s = child.waited_s
        limit = OUTPUT_BYTES + OUTPUT_FACTOR * work.num_bytes
        child.send([memoryview(request_stream(work, requests))], max_output_bytes=limit, close=False)
        try:
            self._converse(AnswerStream(child), work, requests, outcome)
        except BadAnswer as error:
            raise child.failure(str(error)) from error
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # of bytes that are not a message or a name
            raise child.failure(f"printed a broken Arrow stream: {error}") from error
        outcome.pipe_s = child.waited_s - before_s
        outcome.rejections.sort(key=lambda rejection: rejection.offset)
        return outcome

    def _converse(self, answers: AnswerStream, work: PipeInput, requests: list[Events], outcome: PipeOutput) -> None:
        with pa.ipc.open_stream(pa.PythonFile(answers, mode="r")) as stream:
            check_answer_schema(self._schema, stream.schema, drop_extra=self._drop_extra)
            for number, events in enumerate(requests):
                try:
                    answer = stream.read_next_batch()
                except StopIteration:
                    answers.child.ends_within(LAST_WORDS_S)
                    raise BadAnswer(f"answered {number} batches instead of {len(requests)}") from None
                answer.validate(full=True)
                self._answers.take(answer, work, events, outcome)
            try:
                stream.read_next_batch()
            except StopIteration:
                pass
            else:
                raise BadAnswer(f"answered more than {len(requests)} batches")
        if rest := answers.rest():
            raise BadAnswer(f"printed {rest[:80]!r} after the end of its Arrow stream")

    def reset(self) -> None:
        """Close the process after a failure; the next segment starts a new one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """Kill the process."""
        self._closed = True
        if self._child is not None:
            self._child.kill()


def request_stream(work: PipeInput, requests: list[Events]) -> pa.Buffer:
    """The IPC stream of a segment's requests."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, REQUEST) as writer:
        for events in requests:
            values = np.frombuffer(events.data, np.uint8) if len(events.data) else np.empty(0, np.uint8)
            writer.write_batch(request_batch(work.segment, events, values))
    return sink.getvalue()
