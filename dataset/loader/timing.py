"""Reports where reading a stream spends its time, and what would make it faster. Pure."""

from collections.abc import Iterator

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.spec.config import AnyPipe, ColumnsPipe, PipeSection, Protocol, SourceSection

MIN_EVENTS = 1_000
"""With fewer events, most of the time is the start of the command."""
DOMINATES = 0.5
"""A part with more than this share of the time is worth making faster."""


def format_timing(tally: PassTally, took_s: float, processes: int) -> str:
    """One line with the seconds of source, pipe and parser."""
    side = "" if processes == 1 else f" in {processes} parallel processes"
    return (
        f"time: {tally.source_s:.2f} s reading the source, {tally.pipe_s:.2f} s waiting for the pipe command and "
        f"{tally.parse_s:.2f} s feeding and parsing{side}; {took_s:.2f} s in all, because they overlap"
    )


def timing_hints(
    tally: PassTally, took_s: float, pipe: AnyPipe, source: SourceSection, num_cores: int
) -> Iterator[str]:
    """Hints if one part takes most of the time; none for a short try, or one without samples."""
    if tally.num_events < MIN_EVENTS or not tally.num_samples:
        return
    most = DOMINATES * took_s
    if isinstance(pipe, ColumnsPipe):
        if tally.pipe_s / pipe.processes > most and pipe.processes < num_cores:
            yield f"hint: most of the time is spent making features; pipe.processes = {num_cores} threads share them"
            return
    elif tally.pipe_s / pipe.processes > most:
        yield "hint: most of the time is spent in the pipe command. " + _of_pipe(pipe, num_cores)
        return
    if tally.parse_s / pipe.processes > most:
        if isinstance(pipe, PipeSection) and pipe.protocol is Protocol.MULTISLOT:
            yield 'hint: most of the time is spent parsing text; protocol = "arrow" is faster to parse'
        elif pipe.processes < num_cores:
            yield f"hint: most of the time is spent parsing; pipe.processes = {num_cores} parses in parallel"
    elif tally.source_s > most:
        yield "; ".join(filter(None, ("hint: most of the time is spent reading the source", source.faster)))


def _of_pipe(pipe: PipeSection, num_cores: int) -> str:
    columns = "a generator in Python is several times as fast if it defines generate_columns"
    arrow = ' and uses protocol = "arrow"' if pipe.protocol is Protocol.MULTISLOT else ""
    more = f"; pipe.processes = {num_cores} runs that many in parallel" if pipe.processes < num_cores else ""
    return columns + arrow + more
