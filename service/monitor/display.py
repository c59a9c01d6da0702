"""The live display of a run on a terminal: figures above, the workers' last lines below.

`render` is pure; `LiveShow` draws it repeatedly. service.monitor.lines makes plain text.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.printable import printable
from headrace.service.monitor.alarms import alarms
from headrace.service.monitor.lines import (
    age,
    count,
    evaluator_line,
    export_line,
    labelled,
    left_text,
    ratio,
    restarts_text,
    time_text,
    total,
    tuning_text,
)
from headrace.service.monitor.shows import PlainShow, Show
from headrace.trainer.job_status import CommitStatus, MirrorStatus, Status

REFRESH_PER_S = 4
LOG_LINES = 8
"""Lines of output shown; older ones are dropped."""

STYLES = {
    "training": "green",
    "replaying": "yellow",
    "paused": "yellow",
    "draining": "yellow",
    "done": "green",
    "restarting": "yellow",
    "tuning": "yellow",
    "failed": "red",
}


def render(status: Status, log_lines: Sequence[str], *, ends: bool = False) -> RenderableType:
    """The display of a run at one moment. `ends`: its stream does, so a bar shows how much is done."""
    state = status.state
    learning = "" if status.learning else " · predicts only"
    title = f"[bold]{status.job}[/] · [{STYLES.get(state, 'cyan')}]{state}[/]{learning}"
    lines = [Text(line, no_wrap=True, overflow="ellipsis", style="dim") for line in log_lines]
    parts: list[RenderableType] = [_figures(status)]
    if ends and (left := left_text(status)):
        bar, done = Table.grid(padding=(0, 2)), status.events or 0
        bar.add_row(ProgressBar(total=done + (total(status.lag) or 0), completed=done, width=40), Text(left))
        parts.append(bar)
    if metrics := _metrics(status):
        parts.append(metrics)
    if spent := time_text(status.time_s):
        parts.append(Text(f"time: {spent}", style="dim"))
    if status.straggler is not None:
        parts.append(Text(status.straggler.text, style="yellow"))
    parts += [Text(export_line(stream, export), style="dim") for stream, export in status.exports.items()]
    if status.evaluator is not None:
        parts.append(Text(evaluator_line(status.evaluator), style="dim"))
    for alarm, text in alarms(status).items():
        parts.append(Text(text, style="bold red" if alarm.grave else "yellow"))
    if tuning := tuning_text(status.tuning):
        parts.append(Text(tuning, style="dim"))
    if restarts := restarts_text(status):
        parts.append(Text(restarts, style="yellow"))
    return Group(Panel(Group(*parts), title=title, title_align="left"), *lines)


def _figures(status: Status) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(4):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)

    grid.add_row(
        *("events/s", count(status.events_per_s), "events", count(status.events)),
        *("pass", count(status.pass_number), "lag", count(total(status.lag))),
    )
    grid.add_row(
        *("samples/s", count(status.samples_per_s), "samples", count(status.samples)),
        *("version", count(status.version), "fresh", age(status.freshness_s)),
    )
    grid.add_row(
        *("loss", ratio(status.loss), "rejected", count(sum(status.rejected.values()))),
        *("rows", count(sum(status.table_rows.values())), "partitions", count(len(status.positions))),
    )
    commit, mirror = status.commit or CommitStatus(), status.mirror or MirrorStatus()
    grid.add_row(
        *("committed", count(commit.version), "ago", age(commit.age_s)),
        *("mirrored", count(mirror.version), "generation", count(status.generation)),
    )
    return grid


def _metrics(status: Status) -> Table | None:
    """AUC and log loss of each task, over the window and over the job's life."""
    window, life = status.measures("window"), status.measures("life")
    if not window and not life:
        return None
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("task")
    for heading in ("window AUC", "life AUC", "window GAUC", "window logloss"):
        table.add_column(heading, justify="right")
    for task in dict.fromkeys([*window, *life]):
        now, ever = window.get(task, {}), life.get(task, {})
        table.add_row(
            Text(task),
            Text(ratio(now.get("auc")), style="bold green"),
            *(ratio(value) for value in (ever.get("auc"), now.get("gauc"), now.get("logloss"))),
        )
    return table


class LiveShow:
    """A display that is redrawn in place on a terminal."""

    def __init__(self, console: Console, *, ends: bool = False) -> None:
        """`ends`: the stream does, so the time that is left is known."""
        self._console, self._ends = console, ends
        self._lines: deque[str] = deque(maxlen=LOG_LINES)

    def on_line(self, worker: str, text: str) -> None:
        """Keep a worker's line for the next drawing."""
        self._lines.append(printable(labelled(worker, text)))

    @contextmanager
    def watching(self, status: Callable[[], Status]) -> Iterator[None]:
        """Draw until the context ends; the last drawing stays."""

        def picture() -> RenderableType:
            return render(status(), tuple(self._lines), ends=self._ends)

        with Live(console=self._console, get_renderable=picture, refresh_per_second=REFRESH_PER_S):
            yield


def choose_show(*, ends: bool = False) -> Show:
    """A live display on a terminal, lines of text elsewhere. `ends`: the stream does, so show what is left of it."""
    console = Console()
    return LiveShow(console, ends=ends) if console.is_terminal else PlainShow(ends=ends)
