"""Measures a sample of a job's stream, without training: events, samples, and how its distinct ids grow, by table.

The sample goes through the job's own source and pipe. Rules of admission are applied to the ids that are counted;
ageing is not, since a sample is short: service.planning.job_size takes the ids of a shorter stream for it.
"""

import math
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.features.pair_columns import pair_column
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import OnBadEvent, Opening
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Partition, Segment, Source
from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError
from headrace.key_kernels import keys_of
from headrace.pserver.admission_entries import AdmissionEntry
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.histories import counters_table_of, table_of
from headrace.service.planning.training_facts import use_of_children
from headrace.service.spec.job import LoadedJob
from headrace.trainer.rank0.stream_excerpts import await_events, newest_plans
from headrace.trainer.spec.class_rules import masks_of

# How the number of distinct ids grows with the stream: Heaps' law, fitted to counts of a sample. Pure.
#
# The law: after n events there are K * n ** b distinct ids, with b between 0 (nothing new comes) and 1 (all are new).
# Source: Heaps, "Information Retrieval: Computational and Theoretical Aspects" (1978), for words of a text. It is not
# known to hold for a stream of events, so its error is measured on the sample itself, and grows with the distance.

FITTED = 2.5
"""The law is fitted to the last part of the sample, from 1 / FITTED of its events on. So a slot whose ids are complete
early is seen to be complete. On two real streams, fits to longer parts were further off."""
TESTED = 4.0
"""The error is that of the law fitted to the first 1 / TESTED of the sample, at the sample's end."""
LEAST_ERROR = 1.15
"""Taken as the error of the test where it was less."""
MOST_DOUBT = 10.0
"""Bounds that are this many times above and below a number say nothing about it."""


@dataclass(frozen=True, slots=True)
class IdCurve:
    """Distinct ids after so many events of a sample."""

    events: tuple[int, ...]
    """Ascending, at least one."""
    ids: tuple[float, ...]
    """As many; never descending. Not whole where ids are admitted by chance."""

    def exponent(self, first: int = 0) -> float:
        """The law's b, by least squares of logarithms over the last part of the first points.

        `first`: how many points; 0: all.
        """
        events, ids = self._part(first)
        some = [n for n, count in enumerate(ids) if count]
        if len(some) < 2:
            return 1.0 if some else 0.0
        chosen = some[min(len(some) - 2, sum(events[n] * FITTED < events[-1] for n in some)) :]
        x, y = np.log([events[n] for n in chosen]), np.log([ids[n] for n in chosen])
        slope = float(np.polyfit(x, y, 1)[0])
        return min(1.0, max(0.0, slope))

    def at(self, events: float, first: int = 0) -> float:
        """Distinct ids after so many events: measured ones interpolated, beyond the sample by the law."""
        known, ids = self._part(first)
        if events <= known[-1]:
            return float(np.interp(events, (0, *known), (0.0, *ids)))
        return float(ids[-1] * (events / known[-1]) ** self.exponent(first))

    def _part(self, first: int) -> tuple[Sequence[int], Sequence[float]]:
        return (self.events[:first], self.ids[:first]) if first else (self.events, self.ids)


def backtest(curves: Sequence[IdCurve]) -> float | None:
    """Ids that the law, fitted to the first part of the sample, expects at its end, divided by those counted there.

    For all curves together, which have the same events. None where the sample is too short for the test.
    """
    if not curves:
        return None
    events = curves[0].events
    first = sum(at * TESTED <= events[-1] for at in events)
    measured = sum(curve.ids[-1] for curve in curves)
    if first < 3 or not measured:
        return None
    return sum(curve.at(events[-1], first) for curve in curves) / measured


def factor_of_doubt(ratio: float | None, sample: float, events: float) -> float:
    """By what the true number may be larger or smaller than the law's, at least 1; infinite without a test.

    The error of the test is taken to repeat each time that the stream grows as much as in the test.
    """
    if events <= sample:
        return 1.0
    if not ratio:
        return math.inf
    power = math.log(events / sample) / math.log(TESTED) * math.log(_once(ratio))
    return math.exp(power) if power < math.log(sys.float_info.max) else math.inf


def sample_for(ratio: float | None, events: float) -> float | None:
    """Events of a sample whose bounds would say something, if its test had the same error; None without a test."""
    return None if not ratio else events / TESTED ** (math.log(MOST_DOUBT) / math.log(_once(ratio)))


def _once(ratio: float) -> float:
    return max(ratio, 1 / ratio, LEAST_ERROR)


OPEN_S = 60.0
"""Longest time for an answer of a source."""
STEP = math.sqrt(2)
"""Ids are counted each time that the events have grown by this factor."""
FIRST_EVENTS = 256
NEWEST_BLOCKS = 8
"""Blocks of the newest events."""
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotIds:
    """The ids of one slot group, as rows of its table."""

    table: str
    slot: str
    """The first slot of the group."""
    curve: IdCurve
    delete_after_days: int | None
    unmodelled: tuple[str, ...]
    """Rules of the table that are not applied: there are fewer rows than the curve says."""
    values: int | None = None
    """Values of the sample, with repeats; None: not known."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """Figures of a sample of the stream."""

    events: int
    samples: int
    rejected: int
    pipe_core_s: float
    """CPU seconds for each sample: the pipe command, and reading what it answers."""
    slots: tuple[SlotIds, ...]


@dataclass
class _ReadingClock:
    """CPU time of reading: that of this process without its counting, and of its children. The first block, in which
    the command starts, is left out where there are more."""

    counting_s: float = 0.0
    looks: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context whose time on this thread is no part of reading."""
        begin_s = time.thread_time()
        yield
        self.counting_s += time.thread_time() - begin_s

    def look(self, num_samples: int) -> None:
        """After a block."""
        used_s = time.process_time() - self.counting_s + use_of_children(os.getpid()).core_s
        self.looks.append((num_samples, used_s))

    def sample_core_s(self) -> float:
        """For each sample."""
        (begin, before_s), (end, after_s) = self.looks[1 if len(self.looks) > 2 else 0], self.looks[-1]
        return max(0.0, after_s - before_s) / max(1, end - begin)


@dataclass
class _Counter:
    """Counts the ids of one slot group."""

    table: str
    slot: str
    admission: Sequence[AdmissionEntry]
    delete_after_days: int | None
    unmodelled: tuple[str, ...]
    keys_U: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    count_U: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    pending: list[U64] = field(default_factory=list)
    points: list[tuple[int, float]] = field(default_factory=list)

    def count(self, events: int) -> None:
        """Merge what is pending, and add a point to the curve."""
        all_N = np.concatenate([self.keys_U, *self.pending])
        ones = np.ones(len(all_N) - len(self.keys_U), np.int64)
        weight_N = np.concatenate([self.count_U, ones])
        order_N = np.argsort(all_N, kind="stable")
        sorted_N = all_N[order_N]
        first_U = np.flatnonzero(np.r_[True, sorted_N[1:] != sorted_N[:-1]][: len(sorted_N)])
        self.keys_U = sorted_N[first_U]
        self.count_U = np.add.reduceat(weight_N[order_N], first_U) if len(first_U) else self.count_U
        self.pending = []
        self.points.append((events, admitted(self.count_U, self.admission)))

    def ids(self) -> SlotIds:
        """Its curve."""
        events, ids = zip(*self.points, strict=True)
        values, curve = int(self.count_U.sum()), IdCurve(events, ids)
        return SlotIds(self.table, self.slot, curve, self.delete_after_days, self.unmodelled, values)


def admitted(count_U: I64, admission: Sequence[AdmissionEntry]) -> float:
    """How many ids have a row that were seen so often each: every entry must admit them. A key is drawn once, so the
    smallest `admits_below` decides. Entries that need clicks are taken to admit all."""
    chance_U = np.full(len(count_U), min((entry.admits_below for entry in admission), default=1.0))
    for entry in admission:
        chance_U *= entry.expected(count_U)
    return float(chance_U.sum())


def read_stream_facts(job: LoadedJob, num_events: int) -> StreamFacts:
    """Read the first events of the job's stream. Raises SpecError, BadInput where there is none, and as a source."""
    spec = job.spec
    if spec.join is not None:
        raise SpecError("headrace size does not measure joins yet; remove the section to size the job without", "join")
    schema = Schema.of(spec.slots)
    counters = _counters(schema, spec.tables)
    tally, clock = PassTally(), _ReadingClock()
    with closing(read_blocks(job, num_events, tally)) as blocks:
        for block in blocks:
            for samples in block:
                _add(counters, schema, samples)
            with clock.counting():
                _count(counters, tally.num_events)
            clock.look(tally.num_samples)
    if not tally.num_samples:
        raise BadInput(
            f"the stream gave no sample: {tally.num_events:,} events, {sum(tally.rejected.values())} rejected"
        )
    found = tuple(counter.ids() for counter in counters.values())
    return StreamFacts(tally.num_events, tally.num_samples, sum(tally.rejected.values()), clock.sample_core_s(), found)


def read_blocks(
    job: LoadedJob, num_events: int, tally: PassTally, *, newest: bool = False, waits: bool = True
) -> Generator[Iterator[Samples]]:
    """The samples of the first events of the job's stream, without slots that the job fills, in blocks that grow.

    `newest`: the last events in place of the first, as the job would read them; its sources have Kafka groups of their
    own (service.spec.side_groups). `waits`: for events that a stream without an end has not yet. Raises SpecError,
    BadInput, and as a source. The job's own positions stay as they are.
    """
    spec, schema = job.spec, Schema.of(job.spec.slots)
    pipe = spec.pipe.model_copy(update={"on_bad_event": OnBadEvent.SKIP})

    def open_source() -> Source:
        opening = Opening(folder=job.folder, job=spec.name, seed=spec.seed, deadline=Deadline.after(OPEN_S))
        return open_sources(spec.sources, opening)

    plans = newest_plans(open_source, spec, num_events, NEWEST_BLOCKS) if newest else []
    source = open_source()
    reader = SegmentReader(
        source, pipe, schema.emitted, SourceSet(spec.sources), None, job.folder, masks=masks_of(spec)
    )
    try:
        if newest:
            blocks: Iterable[Sequence[Segment]] = (each.segments[0] for each in plans)
        else:
            there = await_events(source, num_events) if waits else source.partitions(Deadline.after(OPEN_S))
            blocks = _blocks(there, num_events)
        for number, segments in enumerate(blocks):
            yield reader.read(number, segments, tally)
    finally:
        reader.close()


def gathered(blocks: Iterable[Iterable[Samples]], max_samples: int, max_values: int) -> Samples | None:
    """The samples of blocks, up to the block that reaches a bound, their events numbered through; None: no sample."""
    parts, num_events, num_samples, num_values = list[Samples](), 0, 0, 0
    for block in blocks:
        for part in block:
            if len(part):
                event_B = num_events + np.cumsum(np.append(0, np.diff(part.event_B) != 0))
                parts.append(replace(part, event_B=event_B))
                num_events = int(event_B[-1]) + 1
                num_samples += len(part)
                num_values += sum(len(each.values_N) for each in part.sparse.values())
                num_values += sum(each.size for each in part.dense.values())
        if num_samples >= max_samples or num_values >= max_values:
            break
    return Samples.concat(parts) if parts else None


def _blocks(partitions: Sequence[Partition], num_events: int) -> Iterator[list[Segment]]:
    """Segments of the first events from all partitions in turn: each time as many as let them grow by STEP."""
    at = {each.name: max(each.start, each.begin) for each in partitions}
    done = 0
    while done < num_events:
        wanted = min(num_events, max(FIRST_EVENTS, math.ceil(done * STEP))) - done
        segments = []
        for number, each in enumerate(partitions):
            share = -(-wanted // (len(partitions) - number))
            end = min(each.end, at[each.name] + share)
            if end > at[each.name]:
                segments.append(Segment(each.name, each.number, at[each.name], end))
                wanted, done = wanted - (end - at[each.name]), done + end - at[each.name]
                at[each.name] = end
        if not segments:
            return
        yield segments


def _counters(schema: Schema, tables: dict[str, TableSection]) -> dict[tuple[str, int], _Counter]:
    """By table and slot group; the histories and counters of a slot have a table of their own, and group -1."""
    found: dict[tuple[str, int], _Counter] = {}
    for slot in schema.sparse:
        name, table = slot.sparse.table, tables[slot.sparse.table]
        own = table.slots.get(slot.name)
        admission = table.admission if own is None or own.admission is None else own.admission
        days = table.delete_after_days if own is None or own.delete_after_days is None else own.delete_after_days
        rules = list(dict.fromkeys(entry.kind for entry in admission if entry.needs_clicks))
        rules += [key for key in ("delete_below", "extend_at") if getattr(table, key) is not None]
        found.setdefault((name, slot.group), _Counter(name, slot.name, admission, days, tuple(rules)))
    for slot in schema.histories:
        name = table_of(slot.name)
        found[name, -1] = _Counter(name, "", (), slot.history.delete_after_days, ())
    for slot in schema.counters:
        name = counters_table_of(slot.name)
        found[name, -1] = _Counter(name, "", (), slot.counters.delete_after_days, ())
    return found


def _add(counters: dict[tuple[str, int], _Counter], schema: Schema, samples: Samples) -> None:
    for slot in schema.emitted.sparse:
        counters[slot.sparse.table, slot.group].pending.append(samples.sparse[slot.name].values_N)
    for slot in schema.crossed:
        counters[slot.sparse.table, slot.group].pending.append(pair_column(samples.sparse, slot).values_N)
    for slot in schema.histories:
        history = slot.history
        keep_B = np.ones(len(samples), np.bool_)
        if history.when is not None:
            keep_B = np.nan_to_num(samples.meta[history.when].astype(np.float64)) != 0
        counters[table_of(slot.name), -1].pending.append(_keys(samples, [schema.by_name[history.key]], keep_B))
        remembered = _kept(samples, schema.by_name[history.of], keep_B)
        counters[slot.sparse.table, slot.group].pending.append(remembered)
    for slot in schema.counters:
        keys = _keys(samples, [schema.by_name[name] for name in slot.counters.keys], np.ones(len(samples), np.bool_))
        counters[counters_table_of(slot.name), -1].pending.append(keys)


def _kept(samples: Samples, slot: Slot, keep_B: NDArray[np.bool_]) -> U64:
    """The signs of the samples that are kept."""
    column = samples.sparse[slot.name]
    return column.values_N[np.repeat(keep_B, np.diff(column.offset_B1))]


def _keys(samples: Samples, slots: Sequence[Slot], keep_B: NDArray[np.bool_]) -> U64:
    """The keys of the samples that are kept and have all of the slots: of their first signs together."""
    columns = [samples.sparse[slot.name] for slot in slots]
    keyed_K = np.flatnonzero(np.logical_and.reduce([keep_B, *(np.diff(each.offset_B1) > 0 for each in columns)]))
    key_K = np.zeros(len(keyed_K), np.uint64)
    for slot, column in zip(slots, columns, strict=True):
        keys_of(column.values_N[column.offset_B1[keyed_K]] ^ key_K, slot.group, key_K)
    return key_K


def _count(counters: dict[tuple[str, int], _Counter], events: int) -> None:
    for counter in counters.values():
        if not counter.points or counter.points[-1][0] < events:
            counter.count(events)
