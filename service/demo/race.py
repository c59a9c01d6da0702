"""The display of the demo: the job that learns, and its AUC beside the AUC of its frozen twin.

`race_line` and `render_race` are pure. Without a terminal, a line of text is printed now and then.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.printable import print_printable
from headrace.service.demo.demo_jobs import FREEZE_AFTER, LATE, NAME, TWIN
from headrace.service.monitor.display import REFRESH_PER_S, render
from headrace.service.monitor.lines import count, ratio
from headrace.service.monitor.shows import LINE_EVERY_S
from headrace.trainer.job_status import Measures, Status, numbers


@dataclass(frozen=True, slots=True)
class Standing:
    """The status of the jobs."""

    job: Status
    twin: Status | None = None
    """None: it has not started."""
    frozen: str = ""
    """The state at which the twin is frozen, in words."""
    lines: Sequence[str] = ()
    """The last lines of the workers' output."""
    late: Status | None = None
    """The job with late clicks."""

    @property
    def aucs(self) -> tuple[float | None, float | None]:
        """The window AUC of the first task: of the job and of its twin."""
        twin = None if self.twin is None else auc_of(self.twin.metrics.window)
        return auc_of(self.job.metrics.window), twin


def auc_of(window: Measures) -> float | None:
    """The window AUC of the first task; None where there is none yet."""
    return next((numbers(found).get("auc") for found in window.values()), None)


def ahead_of(aucs: tuple[float | None, float | None]) -> float | None:
    """The AUC of the job that learns minus that of its twin."""
    job, twin = aucs
    return None if job is None or twin is None else job - twin


def ahead_text(ahead: float | None) -> str:
    """A difference of AUCs with its sign, or a dash."""
    return "-" if ahead is None else f"{ahead:+.4f}"


def frozen_text(version: int, events: float | None) -> str:
    """The state at which the twin is frozen, in words."""
    return f"frozen after {count(version)} passes, {count(events)} events"


def race_line(standing: Standing) -> str:
    """Both jobs in one line."""
    job, twin = standing.job, standing.twin
    parts = [f"{NAME} {job.state}, {count(job.events)} events"]
    mine, theirs = standing.aucs
    parts.append(f"window AUC {ratio(mine)}")
    if twin is None:
        parts.append(f"{TWIN} begins after pass {FREEZE_AFTER}")
    else:
        parts.append(f"{TWIN} {ratio(theirs)} at {count(twin.events)}")
        parts.append(f"learning wins {ahead_text(ahead_of(standing.aucs))}")
    return "  ".join(parts)


def render_race(standing: Standing) -> RenderableType:
    """Both jobs side by side, for a terminal."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("", "window AUC", "events", "state"):
        table.add_column(heading, justify="left" if heading in ("", "state") else "right")
    mine, theirs = standing.aucs
    job, twin = standing.job, standing.twin or Status()
    state = twin.state if standing.twin else f"begins after pass {FREEZE_AFTER}"
    table.add_row(f"{NAME}: learns on", Text(ratio(mine), style="bold green"), count(job.events), "")
    table.add_row(f"{TWIN}: {standing.frozen or 'only predicts'}", ratio(theirs), count(twin.events), state)
    late = standing.late or Status()
    table.add_row(f"{LATE}: clicks come minutes later", ratio(auc_of(late.metrics.window)), count(late.events), "")
    table.add_row("learning from the stream wins", Text(ahead_text(ahead_of(standing.aucs)), style="bold"), "", "")
    return Panel(table, title="every prediction is made before its event is learnt", title_align="left")


@contextmanager
def show_race(standing: Callable[[], Standing], console: Console) -> Iterator[Callable[[], None]]:
    """Show `standing()` while the context lasts. The caller often calls the function that it yields."""
    if console.is_terminal:

        def picture() -> RenderableType:
            now = standing()
            return Group(render(now.job, now.lines), render_race(now))

        with Live(console=console, get_renderable=picture, refresh_per_second=REFRESH_PER_S):
            yield lambda: None
    else:
        ticker = _Lines(standing)
        yield ticker.tick


class _Lines:
    """Prints a line on standard error now and then, where it has changed."""

    def __init__(self, standing: Callable[[], Standing]) -> None:
        self._standing, self._at_s, self._last = standing, time.monotonic() + LINE_EVERY_S, ""

    def tick(self) -> None:
        if time.monotonic() < self._at_s:
            return
        self._at_s = time.monotonic() + LINE_EVERY_S
        if (line := race_line(self._standing())) != self._last:
            self._last = line
            print_printable(line, file=sys.stderr, flush=True)
