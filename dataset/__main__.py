"""`python -m headrace.dataset --spec job.toml --limit 20`: runs source and pipe alone, to try a generator.

Prints `--show` samples, the rejections with their reasons, figures of each slot, rates, and where the time is spent.
Reads only the sections of the spec that concern the stream, and at most `--limit` positions.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from headrace.config import Seed, load_toml, validate
from headrace.dataset.features.slot_rules import check_pipe_slots
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.loader.timing import format_timing, timing_hints
from headrace.dataset.samples.batch import Samples
from headrace.dataset.sources.kinds import AnySource, open_sources
from headrace.dataset.spec.config import AnyPipe, OnBadEvent, Opening, SampleSection, SourceSection
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet, check_sources
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.dataset.stream.source import Partition, Segment, Source
from headrace.deadline import Deadline
from headrace.errors import BadInput
from headrace.lifecycle import run_to_end
from headrace.logs import setup
from headrace.validation import naming_entries

OPEN_S = 60.0
"""Longest time for an answer of a source."""
WAIT_S, POLL_S = 5.0, 0.1
"""Longest wait for a stream with too few events, and the pause between two looks."""
MAX_WIDE_SLOTS = 10
"""With more slots, the table has a row for each slot and a column for each sample."""
SAMPLES_ACROSS = 6
SHOWN = 20
"""Samples printed by default."""
ONE_SOURCE = SourceSet.of(SourceSection())
PLAIN_WIDTH = 160
"""Columns if the output is not a terminal."""


class StreamSpec(SlotsSpec):
    """Source, pipe, slots and sample."""

    name: str = "job"
    """Name of the job."""
    seed: Seed = 1
    """Seed of all random choices."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)]
    """The stream: one source, or several by name."""
    pipe: AnyPipe
    """The command, or the keys of the slots, that turn events into samples."""
    sample: SampleSection = SampleSection()
    """Group and weight of samples."""


def read_stream(path: Path, overrides: Sequence[str] = ()) -> StreamSpec:
    """The source, pipe and slots of the spec at `path`. Raises SpecError."""
    raw = load_toml(path, overrides)
    with naming_entries(raw):
        stream = validate(StreamSpec, raw, only_known=True)
        check_sources(stream.sources)
    return stream


def first_segments(partitions: Sequence[Partition], limit: int) -> Iterator[Segment]:
    """Segments of the first `limit` positions, partition after partition."""
    for partition in partitions:
        begin = max(partition.start, partition.begin)
        end = min(partition.end, begin + limit)
        if end > begin:
            yield Segment(partition.name, partition.number, begin, end)
            limit -= end - begin


def await_segments(source: Source, limit: int, deadline: Deadline, sources: SourceSet = ONE_SOURCE) -> list[Segment]:
    """Segments of the first `limit` positions, as many of each source. Waits until the deadline for a stream with
    fewer."""
    of_each = -(-limit // len(sources.sections))
    while True:
        partitions = source.partitions(Deadline.after(OPEN_S))
        segments = [
            segment
            for name in sources.sections
            for segment in first_segments([each for each in partitions if sources.name_of(each.name) == name], of_each)
        ]
        available = sum(segment.end - segment.begin for segment in segments)
        if available >= limit or all(partition.final for partition in partitions) or deadline.passed():
            return segments
        time.sleep(POLL_S)


def cell(samples: Samples, name: str, row: int) -> str:
    """A slot's values in one sample, as text."""
    if name in samples.sparse:
        column = samples.sparse[name]
        begin, end = int(column.offset_B1[row]), int(column.offset_B1[row + 1])
        words = [str(sign) for sign in column.values_N[begin:end].tolist()]
        if column.weights_N is not None:
            words = [f"{word}:{w:g}" for word, w in zip(words, column.weights_N[begin:end].tolist(), strict=True)]
        return " ".join(words) or "-"
    if name in samples.dense:
        return " ".join(f"{value:g}" for value in samples.dense[name][row].tolist())
    value = samples.meta[name][row]
    return f"{value:g}" if isinstance(value, np.floating) else str(value)


def sample_tables(samples: Samples, schema: Schema, num_shown: int) -> Iterator[Table]:
    """The first samples: one row each, or one column each if there are many slots."""
    names = ["event", *(slot.name for slot in schema.slots)]
    rows = [
        [str(samples.event_B[row]), *(cell(samples, name, row) for name in names[1:])]
        for row in range(min(len(samples), num_shown))
    ]
    if len(names) <= MAX_WIDE_SLOTS + 1:
        table = Table(*names, title="samples")
        for values in rows:
            table.add_row(*values)
        yield table
        return
    for begin in range(0, len(rows), SAMPLES_ACROSS):
        block = rows[begin : begin + SAMPLES_ACROSS]
        table = Table("slot", *(f"sample {begin + number}" for number in range(1, len(block) + 1)))
        for index, name in enumerate(names):
            table.add_row(name, *(values[index] for values in block))
        yield table


def rejected_table(tally: PassTally) -> Table:
    """Number of rejections by reason, and the first of each."""
    table = Table("reason", "rejected", "first", title="rejected")
    for reason, count in sorted(tally.rejected.items(), key=lambda item: -item[1]):
        table.add_row(reason, str(count), tally.first_of.get(reason, ""))
    return table


def slot_table(tally: PassTally) -> Table:
    """Figures of each slot."""
    table = Table("slot", "empty", "mean count", "distinct", "padding", "cut", "non-finite", title="slots")
    for each in tally.slots.figures() if tally.slots is not None else ():
        sparse = (f"{each.empty_rate:.1%}", f"{each.mean_count:.2f}", f"~{each.distinct:.0f}")
        shown = sparse if each.sparse else ("", "", "")
        table.add_row(each.name, *shown, str(each.num_padding), str(each.num_cut), str(each.num_non_finite))
    return table


def try_stream(stream: StreamSpec, spec: Path, limit: int, console: Console, show: int = SHOWN) -> None:
    """Read `limit` events; print `show` samples and the figures. Raises BadInput if every event is rejected."""
    with naming_entries(stream.model_dump(mode="json")):
        check_pipe_slots(stream.pipe, stream.slots)
        schema = Schema.of(stream.slots)
        schema.check_sample(stream.sample)
    schema = schema.emitted
    # A bad event is shown and does not end the run; no dead letters are written.
    pipe = stream.pipe.model_copy(update={"on_bad_event": OnBadEvent.SKIP})
    deadline = Deadline.after(OPEN_S)
    opening = Opening(folder=spec.parent, job=stream.name, seed=stream.seed, deadline=deadline)
    source = open_sources(stream.sources, opening)
    sources = SourceSet(stream.sources)
    reader = SegmentReader(source, pipe, schema, sources, None, spec.parent, spec=spec)
    try:
        segments = await_segments(source, limit, Deadline.after(WAIT_S), sources)
        tally, started_s = PassTally(), time.monotonic()
        shown: list[Samples] = []
        for samples in reader.read(0, segments, tally):
            if (left := show - sum(len(block) for block in shown)) > 0:
                shown.append(samples.slice(0, min(left, len(samples))))
        took_s = time.monotonic() - started_s
    finally:
        reader.close()
    for table in sample_tables(Samples.concat(shown), schema, show) if shown else ():
        console.print(table)
    if tally.num_samples > show:
        console.print(f"... and {tally.num_samples - show:,} more samples (--show)")
    if tally.rejected:
        console.print(rejected_table(tally))
    console.print(slot_table(tally))
    console.print(
        f"{tally.num_events} events, {tally.num_samples} samples, {sum(tally.rejected.values())} rejected in "
        f"{took_s:.2f} s: {tally.num_events / took_s:,.0f} events/s, {tally.num_samples / took_s:,.0f} samples/s, "
        "including the start of the command"
    )
    for why, count in tally.left_out.items():
        console.print(f"{count} events left out: {why}")
    console.print(format_timing(tally, took_s, pipe.processes))
    for line in timing_hints(tally, took_s, pipe, next(iter(stream.sources.values())), os.cpu_count() or 1):
        console.print(line)
    if tally.rejected and not tally.num_samples:
        reason, where = next(iter(tally.first_of.items()))
        raise BadInput(f"no sample from {tally.num_events:,} events: all were rejected; the first: {where or reason}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.dataset", description="Run a job's source and pipe alone."
    )
    parser.add_argument("--spec", type=Path, required=True, help="the job spec, a TOML file")
    parser.add_argument("--limit", type=int, default=20, help="events to read, for the rates (default 20)")
    parser.add_argument("--show", type=int, default=SHOWN, help=f"samples to print (default {SHOWN})")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override a key of the spec")
    given = parser.parse_args(arguments)
    setup("dataset")
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    stream, console = read_stream(given.spec, given.set), Console(width=width)
    try_stream(stream, given.spec.resolve(), max(1, given.limit), console, max(0, given.show))


if __name__ == "__main__":
    run_to_end(main)
