"""Where reading a stream takes its time, in words, and what would make it faster. Pure."""

from collections.abc import Iterator

from dataset.config import FilesSource, PipeSection, Protocol, SourceSection
from dataset.loader import Tally

MIN_EVENTS = 1_000
"""With fewer events the time is that of starting the command."""
DOMINATES = 0.5
"""A part that takes more than this share of the time is what to make faster."""


def breakdown(tally: Tally, took_s: float, processes: int) -> str:
    """One line: seconds of source, pipe and parser."""
    side = "" if processes == 1 else f" in {processes} processes side by side"
    return (
        f"time: {tally.source_s:.2f} s reading the source, {tally.pipe_s:.2f} s waiting for the pipe command and "
        f"{tally.parse_s:.2f} s feeding and parsing{side}; {took_s:.2f} s in all, since they overlap"
    )


def advice(tally: Tally, took_s: float, pipe: PipeSection, source: SourceSection, num_cores: int) -> Iterator[str]:
    """What to change where one part takes most of the time; nothing for a short try, or one without a sample."""
    if tally.num_events < MIN_EVENTS or not tally.num_samples:
        return
    most = DOMINATES * took_s
    if tally.pipe_s / pipe.processes > most:
        yield "hint: most of the time is the pipe command's. " + _of_pipe(pipe, num_cores)
    elif tally.parse_s / pipe.processes > most:
        if pipe.protocol is Protocol.MULTISLOT:
            yield 'hint: most of the time is parsing text; protocol = "arrow" is parsed faster'
        elif pipe.processes < num_cores:
            yield f"hint: most of the time is parsing; pipe.processes = {num_cores} has it done side by side"
    elif tally.source_s > most:
        files = isinstance(source, FilesSource)
        yield "hint: most of the time is reading the source" + ("; plain files are read faster than gzip" * files)


def _of_pipe(pipe: PipeSection, num_cores: int) -> str:
    columns = "a generator in Python is several times as fast where it defines generate_columns"
    arrow = ' and speaks protocol = "arrow"' if pipe.protocol is Protocol.MULTISLOT else ""
    more = f"; pipe.processes = {num_cores} runs as many side by side" if pipe.processes < num_cores else ""
    return columns + arrow + more
