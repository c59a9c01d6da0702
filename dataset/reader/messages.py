"""The messages of reader.proto: parts that are asked for, and pieces of them as Arrow files of samples.

A piece carries all that the trainer counts, judges and quotes, so it goes on as after a pipe of its own.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace import codec
from headrace.dataset.pipe.label_bounds import LabelBounds
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.proto import reader_pb2 as pb
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Rejection
from headrace.dataset.samples.sample_columns import columns_of, file_of, samples_of
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.errors import BadEvent, PipeFailed, SourceGap, SourceUnavailable
from headrace.dataset.stream.source import Events, Segment
from headrace.errors import BadInput, DeadlineExceeded, HeadraceError, Refused, SpecError, Unavailable

FORMAT = 1
"""Version of the messages; both ends must have the same."""
SERVICE = pb.DESCRIPTOR.services_by_name["Reader"]
CHUNK_BYTES = 1 << 20
"""Most bytes of a piece in one message."""
FACTS = b"facts"
"""Key, in the schema of a piece, of all that is beside its samples."""
FAILURES: dict[str, type[HeadraceError]] = {
    each.__name__: each
    for each in (PipeFailed, BadEvent, SourceGap, SourceUnavailable, BadInput, DeadlineExceeded, Refused, Unavailable)
}
"""The errors that a trainer raises as the reader did."""


@dataclass(frozen=True, slots=True)
class PieceFacts:
    """All that is beside the samples of a piece."""

    begin: int
    end: int
    num_events: int
    left_out: Mapping[str, int]
    num_judged: int
    rejections: Sequence[Rejection]
    sums: NDArray[np.int64]
    registers: bytes
    """Packed by zlib: those of few signs are mostly 0."""
    buckets: NDArray[np.int64]
    source_s: float
    pipe_s: float
    parse_s: float
    quoted: Mapping[int, bytes]
    """Events that the trainer may have to quote, by position."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ends a call."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: HeadraceError) -> "Failure":
        """An error of the source or the pipe."""
        known = next((each.__name__ for each in type(error).__mro__ if each.__name__ in FAILURES), "")
        return cls("SpecError" if isinstance(error, SpecError) else known, str(error))

    def error(self) -> HeadraceError:
        """The error at the trainer."""
        return SpecError(self.text) if self.kind == "SpecError" else FAILURES.get(self.kind, HeadraceError)(self.text)


def piece_of(
    work: PipeInput, outcome: PipeOutput, source_s: float, labels: Sequence[LabelBounds], *, traced: bool
) -> bytes:
    """The result of a piece of a part as an Arrow file. `labels`: events with others are quoted."""
    blocks = [block for block in outcome.blocks if len(block)]
    counters = outcome.counters
    facts = PieceFacts(
        begin=work.segment.begin,
        end=work.segment.end,
        num_events=work.num_events,
        left_out=work.left_out,
        num_judged=outcome.num_judged,
        rejections=outcome.rejections,
        sums=counters.sums_SK,
        registers=zlib.compress(counters.registers_SR.tobytes(), 1),
        buckets=counters.buckets_SK,
        source_s=source_s,
        pipe_s=outcome.pipe_s,
        parse_s=outcome.parse_s,
        quoted=_quoted(work, blocks, labels) if traced else _first(work, blocks),
    )
    columns = columns_of(Samples.concat(blocks), narrow=True) if blocks else {}
    return file_of(columns, {FACTS: codec.packed(facts)}, packed=True)


def read_piece(data: bytes, segment: Segment, schema: Schema) -> tuple[PipeInput, PipeOutput, float]:
    """The piece in `data`, with which `segment` begins, and the seconds of reading its events. The inverse of
    `piece_of`, but that of the events only the quoted ones are there. Raises HeadraceError."""
    try:
        with pa.ipc.open_file(pa.py_buffer(data)) as reader:
            batch = reader.get_batch(0)
            batch.validate(full=True)  # kernels trust its offsets
            facts = codec.unpacked(PieceFacts, reader.schema.metadata[FACTS], "a piece of a reader")
            blocks = [samples_of(batch, schema)] if batch.num_rows else []
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise HeadraceError(f"a reader's piece of {segment.partition} cannot be read: {error!r}") from error
    if not facts.begin == segment.begin <= facts.end <= segment.end:
        raise HeadraceError(
            f"a reader's piece of {segment.partition} has positions {facts.begin} to {facts.end}, where "
            f"{segment.begin} to {segment.end} are missing"
        )
    counters = SlotCounters(schema)
    counters.sums_SK[:] = facts.sums.reshape(counters.sums_SK.shape)
    counters.buckets_SK[:] = facts.buckets.reshape(counters.buckets_SK.shape)
    registers = np.frombuffer(zlib.decompress(facts.registers), np.uint8)
    counters.registers_SR[:] = registers.reshape(counters.registers_SR.shape)
    quoted = [Events.of(list(facts.quoted.values()), list(facts.quoted))] if facts.quoted else []
    work = PipeInput(
        replace(segment, begin=facts.begin, end=facts.end), quoted, [], facts.num_events, None, facts.left_out
    )
    outcome = PipeOutput(counters, blocks, list(facts.rejections), facts.num_judged, facts.pipe_s, facts.parse_s)
    return work, outcome, facts.source_s


def _quoted(work: PipeInput, blocks: Sequence[Samples], labels: Sequence[LabelBounds]) -> dict[int, bytes]:
    """The events with labels that are rejected, and those of `_first`."""
    found = _first(work, blocks)
    wrong = [block.event_B[each.outside(block)] for each in labels for block in blocks]
    positions = np.unique(np.concatenate(wrong)) if wrong else np.empty(0, np.int64)
    for events in work.blocks if len(positions) else ():
        for at in np.flatnonzero(np.isin(events.position_E, positions)).tolist():
            found[int(events.position_E[at])] = events.value(at) or b""
    return dict(sorted(found.items()))


def _first(work: PipeInput, blocks: Sequence[Samples]) -> dict[int, bytes]:
    """The first event, if some sample has no time: a warning says which fields it has."""
    if not any(np.isnan(block.time_s_B).any() for block in blocks):
        return {}
    first = next((block for block in work.blocks if len(block)), None)
    return {} if first is None else {int(first.position_E[0]): first.value(0) or b""}
