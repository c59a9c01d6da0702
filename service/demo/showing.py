"""What a newcomer sees of the demo on a terminal: the job that learns, and its AUC beside its frozen twin's.

`race_line` and `render_race` are pure; elsewhere than on a terminal there is a line of text each while.
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

from millrace.printable import say
from service.demo.plan import FREEZE_AFTER, NAME, TWIN
from service.display import REFRESH_PER_S, render
from service.lines import count, ratio
from service.running import LINE_EVERY_S
from service.status import Status


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the two stand."""

    job: Status
    twin: Status | None = None
    """None: it has not begun."""
    frozen: str = ""
    """What the twin knows, in words."""
    lines: Sequence[str] = ()
    """The last lines that workers printed."""

    @property
    def aucs(self) -> tuple[float | None, float | None]:
        """The window's AUC of the first task: the job's, and its twin's."""
        return auc_of(self.job), None if self.twin is None else auc_of(self.twin)


def auc_of(status: Status) -> float | None:
    """The window's AUC of the first task; None where there is none yet."""
    return next((figures.get("auc") for figures in status.metrics("window").values()), None)


def ahead_of(aucs: tuple[float | None, float | None]) -> float | None:
    """By how much the job that learns is better."""
    job, twin = aucs
    return None if job is None or twin is None else job - twin


def ahead_text(ahead: float | None) -> str:
    """A difference of AUCs with its sign, or a dash."""
    return "-" if ahead is None else f"{ahead:+.4f}"


def frozen_text(version: int, events: float | None) -> str:
    """What the twin knows."""
    return f"frozen after {count(version)} passes, {count(events)} events"


def race_line(standing: Standing) -> str:
    """One line: the two side by side."""
    job, twin = standing.job, standing.twin
    parts = [f"{NAME} {job.text('state', 'starting')}, {count(job.number('events'))} events"]
    mine, theirs = standing.aucs
    parts.append(f"window AUC {ratio(mine)}")
    if twin is None:
        parts.append(f"{TWIN} begins after pass {FREEZE_AFTER}")
    else:
        parts.append(f"{TWIN} {ratio(theirs)} at {count(twin.number('events'))}")
        parts.append(f"learning wins {ahead_text(ahead_of(standing.aucs))}")
    return "  ".join(parts)


def render_race(standing: Standing) -> RenderableType:
    """The two side by side, as a picture."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("", "window AUC", "events", "state"):
        table.add_column(heading, justify="left" if heading in ("", "state") else "right")
    mine, theirs = standing.aucs
    job, twin = standing.job, standing.twin or Status({})
    state = twin.text("state", "starting") if standing.twin else f"begins after pass {FREEZE_AFTER}"
    table.add_row(f"{NAME}: learns on", Text(ratio(mine), style="bold green"), count(job.number("events")), "")
    table.add_row(f"{TWIN}: {standing.frozen or 'only predicts'}", ratio(theirs), count(twin.number("events")), state)
    table.add_row("learning from the stream wins", Text(ahead_text(ahead_of(standing.aucs)), style="bold"), "", "")
    return Panel(table, title="every prediction is made before its event is learnt", title_align="left")


Look = Callable[[], Standing]


@contextmanager
def shown(look: Look, console: Console) -> Iterator[Callable[[], None]]:
    """Show what `look` answers as long as the context lasts; what it yields is to be called often meanwhile."""
    if console.is_terminal:

        def picture() -> RenderableType:
            standing = look()
            return Group(render(standing.job, standing.lines), render_race(standing))

        with Live(console=console, get_renderable=picture, refresh_per_second=REFRESH_PER_S):
            yield lambda: None
    else:
        ticker = _Lines(look)
        yield ticker.tick


class _Lines:
    """Prints a line on standard error each while, where it has changed."""

    def __init__(self, look: Look) -> None:
        self._look, self._at_s, self._last = look, time.monotonic() + LINE_EVERY_S, ""

    def tick(self) -> None:
        if time.monotonic() < self._at_s:
            return
        self._at_s = time.monotonic() + LINE_EVERY_S
        if (line := race_line(self._look())) != self._last:
            self._last = line
            say(line, file=sys.stderr, flush=True)
