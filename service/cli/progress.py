"""The progress of a command on standard error: a bar on a terminal, lines of text elsewhere.

A run of a job has a display of its own: service.monitor.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.printable import print_printable, printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 2.0
"""Least time between two lines of counts where there is no terminal."""


class WorkProgress:
    """Takes the steps and counts of a command that works. Any thread."""

    def __init__(self, unit: str, bars: "Progress | None" = None, task: "TaskID | None" = None) -> None:
        self._unit, self._bars, self._task = unit, bars, task
        self._began_s = self._printed_s = time.monotonic()

    def __call__(self, share: float | None, text: str) -> None:
        """Show a step of the work. `share`: how much is done, 0 to 1; None: not known."""
        if self._bars is None:
            print_printable(text, file=sys.stderr, flush=True)
        elif self._task is not None:
            total = None if share is None else 1.0
            self._bars.update(self._task, total=total, completed=share or 0.0, text=printable(text), rate="")

    def count(self, done: int, total: int | None) -> None:
        """Show how many units are done, of how many if that is known, and the units a second."""
        now_s = time.monotonic()
        whole = "" if total is None else f" of {total:,}"
        text, rate = f"{done:,}{whole} {self._unit}", _rate(done, now_s - self._began_s, self._unit)
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=total, completed=done, text=text, rate=rate)
        elif self._bars is None and now_s - self._printed_s >= LINE_EVERY_S:
            self._printed_s = now_s
            print_printable(f"{text}, {rate}", file=sys.stderr, flush=True)


@contextmanager
def work_progress(title: str, unit: str = "steps") -> Iterator[WorkProgress]:
    """Show the progress of what the context does. The bar is removed at the end. `unit`: a noun in the plural.

    Without a terminal a step is a line, and counts are a line every LINE_EVERY_S at most.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield WorkProgress(unit)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeftColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[text]}", markup=False), TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(), TextColumn("left"), TimeLeftColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        yield WorkProgress(unit, bars, bars.add_task(title, total=None, text="", rate=""))


@contextmanager
def counted(title: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    """As `work_progress`, for work that only counts."""
    with work_progress(title, unit) as progress:
        yield progress.count


def _rate(done: int, spent_s: float, unit: str) -> str:
    rate = done / spent_s if spent_s > 0 else 0.0
    return f"{rate:,.0f} {unit}/s" if rate >= 10 or not done else f"{rate:.2g} {unit}/s"
