"""The size of a job for so many events a day: rows, memory, disk, wire, cores, and a proposal with its reasons. Pure.

It scales what a sample showed (service.planning.stream_facts, service.planning.training_facts). Rows follow the law of
service.planning.stream_facts; everything else grows in proportion to rows, events or steps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.printable import counted
from headrace.pserver.config import TableSection
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.table_rows import MAX_ROWS, START_ROWS, index_slots, row_bytes_of
from headrace.service.planning.stream_facts import (
    MOST_DOUBT,
    SlotIds,
    StreamFacts,
    backtest,
    factor_of_doubt,
    sample_for,
)
from headrace.service.planning.training_facts import PIPE, TrainingFacts
from headrace.service.spec.job import JobFile
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.value_types import VALUE_TYPES

DAY_S = 86_400
MAX_WORKERS = 64
"""Trainers, and shards, of a job at most."""
MESSAGE_CORE_S, MEGABYTE_CORE_S = 138e-6, 0.73e-3
"""CPU of a message and of a megabyte at both ends together, as measured by tests/bench/growth.py (docs/growth.md)."""
PAIR_MESSAGES = 4
"""Of a trainer and a shard in a step: announcement, exchange, and a reply to each."""
COPY_BYTES = 8 + 4 * HEAD
"""Of a row in a commit or a store, beside its floats."""
PARAMETER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load of a job, and the limits of its machines."""

    events_a_day: float
    days: float
    """Days after which the size is told: without ageing, tables grow for ever."""
    ids: float | None = None
    """Rows of all tables together; None: by the law."""
    peak: float = 2.0
    """The busiest hour's rate, as a multiple of the average."""
    use: float = 0.7
    """Share of a core's time that a process may need in that hour."""
    machine_bytes: int = 64 << 30
    """Memory that one shard may have."""
    headroom: float = 1.3
    """Memory for rows, times this: copies that wait for a commit, and growth."""


@dataclass(frozen=True, slots=True)
class TableNeed:
    """One table."""

    table: str
    rows: float
    low: float
    high: float
    """Rows between which the true number is expected to be."""
    row_bytes: int
    """Memory of a row, without the index."""
    memory_bytes: float
    """Of all shards together: rows and index."""
    commit_bytes: float
    """Of one whole commit."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Bytes and seconds; "_second" is in the busiest hour."""

    demand: Demand
    tables: tuple[TableNeed, ...]
    trainers: int
    shards: int
    pipe_processes: int
    """Of each trainer."""
    events_a_second: float
    samples_a_second: float
    steps_a_second: float
    cores: Mapping[str, float]
    """Of all trainers, all shards, all pipes."""
    trainer_bytes: float
    """Memory of one trainer with its pipe."""
    shard_bytes: float
    """Memory of one shard, with headroom."""
    commit_bytes: float
    disk_bytes: float
    """Of commits that are kept, at most, and the log of one day."""
    log_day_bytes: float
    export_bytes: float
    """Of all exports that are kept; 0 without exports."""
    push_bytes_step: float
    """From one trainer to all shards in a step."""
    pull_bytes_step: float
    dense_bytes_step: float
    """That one trainer sends to others in a step."""
    trainer_bytes_second: float
    """Through the link of one trainer, both ways."""
    shard_bytes_second: float
    message_cores: float
    """Of all ends, for messages between more workers than were measured."""
    events_sampled: int
    backtest: float | None
    reasons: tuple[str, ...]


def size_job(job: JobFile, stream: StreamFacts, training: TrainingFacts, demand: Demand) -> JobSize:
    """The size of `job`."""
    tables = table_needs(job, stream, training, demand, shards=1)
    per_event = stream.samples / stream.events
    events_s = demand.events_a_day / DAY_S * demand.peak
    samples_s = events_s * per_event
    costs = {part: cost.core_s for part, cost in training.costs.items()} | {PIPE: stream.pipe_core_s}
    cores = {part: core_s * samples_s for part, core_s in costs.items()}
    shards, why_shards = num_shards(tables, cores["shard-0"], demand)
    trainers, why_trainers = num_trainers(cores["trainer-0"], demand)
    tables = table_needs(job, stream, training, demand, shards=shards)
    pipe_processes = max(1, math.ceil(cores[PIPE] / demand.use / trainers))
    batch = job.train.batch_size
    steps_s = samples_s / (batch * trainers)
    push, pull = training.sent_bytes * batch, training.received_bytes * batch
    dense = 2 * (trainers - 1) / trainers * PARAMETER_BYTES * training.dense_parameters
    commit = sum(each.commit_bytes for each in tables) + training.commit_other_bytes
    passes_day = demand.events_a_day / pass_events(job, demand.events_a_day / DAY_S)
    log_day = training.log_pass_bytes * passes_day
    resident = {part: cost.resident_bytes for part, cost in training.costs.items()}
    measured = sum(training.row_memory_bytes.values())
    rows_bytes = sum(each.memory_bytes for each in tables)
    return JobSize(
        demand=demand,
        tables=tables,
        trainers=trainers,
        shards=shards,
        pipe_processes=pipe_processes,
        events_a_second=events_s,
        samples_a_second=samples_s,
        steps_a_second=steps_s,
        cores=cores,
        trainer_bytes=resident["trainer-0"] + resident.get(PIPE, 0) * pipe_processes,
        shard_bytes=max(0, resident["shard-0"] - measured) + rows_bytes / shards * demand.headroom,
        commit_bytes=commit,
        disk_bytes=commit * (job.commit.keep + 1) + log_day,
        log_day_bytes=log_day,
        export_bytes=export_bytes(job, tables),
        push_bytes_step=push,
        pull_bytes_step=pull,
        dense_bytes_step=dense,
        trainer_bytes_second=(push + pull + 2 * dense) * steps_s,
        shard_bytes_second=(push + pull) * steps_s * trainers / shards,
        message_cores=PAIR_MESSAGES * (trainers * shards - trainers) * MESSAGE_CORE_S * steps_s,
        events_sampled=stream.events,
        backtest=backtest([each.curve for each in stream.slots]),
        reasons=(*why_shards, *why_trainers, *_of_messages(push + pull, shards), *_of_sample(training)),
    )


def table_needs(
    job: JobFile, stream: StreamFacts, training: TrainingFacts, demand: Demand, *, shards: int
) -> tuple[TableNeed, ...]:
    """Rows and bytes of each table."""
    rows = {id(each): slot_rows(each, demand) for each in stream.slots}
    total = sum(count for count, _, _ in rows.values())
    scale = 1.0 if demand.ids is None or not total else demand.ids / total
    ratio = backtest([each.curve for each in stream.slots])
    sections, found = tables_on_shards(job.tables, job.dense, job.slots), []
    growth = total / max(1.0, sum(each.curve.ids[-1] for each in stream.slots))
    for name in dict.fromkeys([*(each.table for each in stream.slots), *training.rows]):
        mine = [each for each in stream.slots if each.table == name]
        counted = sum(rows[id(each)][0] for each in mine) if mine else training.rows[name] * growth
        count = counted * scale
        reach = max((rows[id(each)][1] for each in mine), default=demand.events_a_day * demand.days)
        doubt = 1.0 if demand.ids is not None else factor_of_doubt(ratio, stream.events, reach)
        section = sections[name]
        least, most = _possible(mine, count, training.rows.get(name, 0), {id(each): rows[id(each)][1] for each in mine})
        low, high = (count, count) if demand.ids is not None else (max(least, count / doubt), min(most, count * doubt))
        row_bytes = row_bytes_of(width_of(section))
        index = 4 * index_slots(max(START_ROWS, math.ceil(count / shards))) * shards
        memory = count * row_bytes + index
        notes = tuple(dict.fromkeys(note for each in mine for note in rows[id(each)][2]))
        notes = notes if mine else ("its ids are not counted: rows grow as those of all other tables together",)
        if section.memory is not None and memory > section.memory * shards:
            memory = float(section.memory * shards)
            notes = (*notes, "memory is bounded: the other rows are on disk alone")
        per_row = training.commit_row_bytes.get(name, 0.0)
        found.append(TableNeed(name, count, low, high, row_bytes, memory, count * per_row, notes))
    return tuple(found)


def _possible(slots: Sequence[SlotIds], rows: float, there: int, events: Mapping[int, float]) -> tuple[float, float]:
    """The fewest and the most rows that a table can have: those of the sample, and a new one for every later value.

    `there`: rows of the sample in a table whose ids are not counted, `events` by slot. Of such a table, and of a slot
    whose values are not counted, the most is not known, and told as infinite.
    """
    least = min(rows, sum(each.curve.ids[-1] for each in slots) if slots else float(there))
    most = 0.0 if slots else math.inf
    for each in slots:
        sample, ids = each.curve.events[-1], each.curve.ids[-1]
        later = max(0.0, events[id(each)] - sample)
        most += ids + (math.inf if each.values is None else each.values / sample * later)
    return least, max(rows, most)


def slot_rows(slot: SlotIds, demand: Demand) -> tuple[float, float, tuple[str, ...]]:
    """Rows of one slot group; the events that made them; notes."""
    notes = [f"{rule} removes or spares more than is told here" for rule in slot.unmodelled]
    days = demand.days
    if slot.delete_after_days is not None and slot.delete_after_days + 1 < days:
        days = slot.delete_after_days + 1
        notes.append(f"ids of the last {days:g} days: delete_after_days")
    events = demand.events_a_day * days
    return slot.curve.at(events), events, tuple(notes)


def width_of(section: TableSection) -> int:
    """Floats of a row: weights and the optimizer's state."""
    return len(RowSettings.of(section.model_copy(update={"slots": {}}), {}).start_W)


def pass_events(job: JobFile, events_a_second: float) -> float:
    """Events of a pass: max_events, or those that come while a pass waits for more."""
    return max(1.0, min(float(job.passes.max_events), events_a_second * job.passes.wait))


def num_shards(tables: tuple[TableNeed, ...], cores: float, demand: Demand) -> tuple[int, tuple[str, ...]]:
    """The fewest shards that suffice, and why."""
    bytes_needed = sum(each.memory_bytes for each in tables) * demand.headroom
    needs = {
        f"rows take {bytes_needed / (1 << 30):,.1f} GiB with headroom, and a shard may have "
        f"{demand.machine_bytes / (1 << 30):,.0f} GiB": bytes_needed / demand.machine_bytes,
        f"shards need {cores:,.1f} cores at the peak, and each may use {demand.use:g} of one": cores / demand.use,
        f"a table may have {MAX_ROWS:,} rows on a shard": max((each.rows for each in tables), default=0) / MAX_ROWS,
    }
    return _bounded("shards", needs, "give each more memory, delete rows earlier, or bound tables with `memory`")


def num_trainers(cores: float, demand: Demand) -> tuple[int, tuple[str, ...]]:
    """The fewest trainers that suffice, and why."""
    why = f"trainers need {cores:,.1f} cores at the peak, and each may use {demand.use:g} of one"
    return _bounded("trainers", {why: cores / demand.use}, "make batches larger, or the model smaller, or use GPUs")


def _bounded(what: str, needs: Mapping[str, float], otherwise: str) -> tuple[int, tuple[str, ...]]:
    reason = max(needs, key=needs.__getitem__)
    number = max(1, math.ceil(needs[reason]))
    said = f"{number} {what if number > 1 else what.removesuffix('s')}: {reason}"
    if number > MAX_WORKERS:
        return MAX_WORKERS, (f"{said}. A job has at most {MAX_WORKERS}: {otherwise}",)
    return number, (said,)


def _of_messages(bytes_step: float, shards: int) -> tuple[str, ...]:
    """A warning where messages cost more than what is in them."""
    messages_s, content_s = PAIR_MESSAGES * shards * MESSAGE_CORE_S, bytes_step / 1e6 * MEGABYTE_CORE_S
    if messages_s <= content_s or shards == 1:
        return ()
    return (
        f"a step's messages to {shards} shards cost {messages_s / content_s:.1f} times what is in them: "
        "larger batches (train.batch_size), or fewer shards with more memory, cost less",
    )


def _of_sample(training: TrainingFacts) -> tuple[str, ...]:
    too_short = "the sample is short: the cores have the start of the processes in them; give a larger --sample"
    return (too_short,) if training.with_start else ()


def export_bytes(job: JobFile, tables: tuple[TableNeed, ...]) -> float:
    """Of the bases that are kept, each with all rows, uncompressed: key and weights."""
    total = 0.0
    for export in job.exports.values():
        kind = VALUE_TYPES.load(export.dtype)
        for each in tables:
            if each.table in job.tables and (not export.tables or each.table in export.tables):
                section = job.tables[each.table]
                total += each.rows * (8 + kind.vector_bytes(section.num_weights)) * export.keep
    return total


# The size of a job for people, as lines, and for programs, as JSON.

MAX_SAMPLE = 10_000_000
"""Most events that are measured."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_size(size: JobSize) -> Iterator[str]:
    """Lines of text."""
    demand = size.demand
    yield (
        f"for {demand.events_a_day:,.0f} events a day after {demand.days:g} days, at {demand.peak:g} times the average "
        f"rate in the busiest hour: {few(size.events_a_second)} events/s, {few(size.samples_a_second)} samples/s"
    )
    yield ""
    yield "table                     rows      between          and     memory     commit"
    for each in size.tables:
        bounds = f"{each.low:12,.0f} {each.high:12,.0f}" if math.isfinite(each.high) else f"{each.low:12,.0f} {'?':>12}"
        yield (
            f"{each.table:16} {each.rows:13,.0f} {bounds} {in_bytes(each.memory_bytes):>10} "
            f"{in_bytes(each.commit_bytes):>10}"
        )
        yield from (f"    {note}" for note in each.notes)
    yield f"  {how_sure(size)}"
    yield ""
    pipes = f", {size.pipe_processes} pipe processes each" if size.pipe_processes > 1 else ""
    trainers, shards = counted(size.trainers, "trainer"), counted(size.shards, "shard")
    yield f"proposal   {trainers}{pipes}, {shards}"
    yield from (f"           {reason}" for reason in size.reasons)
    parts = ", ".join(f"{part.removesuffix('-0')} {few(cores)}" for part, cores in size.cores.items())
    yield f"cores      {parts}; for more messages between them {few(size.message_cores)}"
    yield f"memory     {in_bytes(size.trainer_bytes)} for each trainer, {in_bytes(size.shard_bytes)} for each shard"
    exports = f"; exports {in_bytes(size.export_bytes)}" if size.export_bytes else ""
    yield (
        f"disk       {in_bytes(size.disk_bytes)} at most: commits of {in_bytes(size.commit_bytes)}, and a day of the "
        f"log, {in_bytes(size.log_day_bytes)}{exports}"
    )
    yield (
        f"wire       a step, for each trainer: {in_bytes(size.push_bytes_step)} to shards, "
        f"{in_bytes(size.pull_bytes_step)} from them, {in_bytes(size.dense_bytes_step)} to trainers"
    )
    yield (
        f"           a second: {in_bytes(size.trainer_bytes_second)} at each trainer, "
        f"{in_bytes(size.shard_bytes_second)} at each shard; {few(size.steps_a_second)} steps"
    )


def how_sure(size: JobSize) -> str:
    """A sentence about the rows: how they were found, and how well the law did in its test."""
    reach = size.demand.events_a_day * size.demand.days / size.events_sampled
    if size.demand.ids is not None:
        return f"rows as given; the sample has {size.events_sampled:,} events"
    if reach <= 1:
        return f"rows as measured in {size.events_sampled:,} events"
    fitted = f"rows by Heaps' law, fitted to {size.events_sampled:,} events and continued {reach:,.0f}-fold"
    tested = "; the sample is too short to test it"
    if size.backtest is not None:
        tested = f"; fitted to the first quarter, it told {size.backtest:.2f} times the sample's rows"
    events = size.demand.events_a_day * size.demand.days
    if factor_of_doubt(size.backtest, size.events_sampled, events) <= MOST_DOUBT:
        return fitted + tested
    needed = sample_for(size.backtest, events)
    some = "a larger --sample" if needed is None or needed > MAX_SAMPLE else f"--sample of {needed:,.0f} or more"
    return f"{fitted}{tested}. The sample is too small to tell the rows of so many events: give {some}, or --ids"


def few(number: float) -> str:
    """A number in two digits at least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def in_bytes(number: float) -> str:
    """A size, with the unit that suits it."""
    power = min(len(UNITS) - 1, int(math.log2(number) / 10)) if number >= 1 else 0
    number, unit = number / 1024**power, UNITS[power]
    return f"{number:,.0f} {unit}" if number >= 100 or unit == "B" else f"{number:,.1f} {unit}"


def size_message(size: JobSize, training: TrainingFacts) -> dict[str, Any]:
    """As JSON, with what was measured; a bound that is not known is null."""
    tables = [asdict(each) | {"high": each.high if math.isfinite(each.high) else None} for each in size.tables]
    return {**asdict(size), "tables": tables, "measured": asdict(training)}
