"""The size of a job for people, as lines, and for programs, as JSON."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from headrace.service.sizing.id_growth import MOST_DOUBT, factor_of_doubt, sample_for
from headrace.service.sizing.job_size import JobSize
from headrace.service.sizing.training_facts import TrainingFacts

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


def counted(number: int, what: str) -> str:
    """A number of workers."""
    return f"{number} {what}{'' if number == 1 else 's'}"


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
