"""The history of a job: commits and exports on a timeline and in lists, and its log."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from service.ui.asking import Asker, listed
from service.ui.charts import COLORS, Mark, marks_chart
from service.ui.frame import panel
from service.ui.grid import Cell, Column, Grid, Row
from service.ui.job_stream import redraw
from service.ui.series import millis
from service.ui.wording import moment, number, size

LOG_LINES = 100
COMMIT_COLUMNS = (
    Column("Version", number=True),
    Column("Commit"),
    Column("Made, UTC"),
    Column("Rows", number=True),
    Column("Size", number=True),
    Column("Own files", number=True),
    Column("State", long=True),
)
EXPORT_COLUMNS = (
    Column("Version", number=True),
    Column("Stream"),
    Column("Export"),
    Column("Made, UTC"),
    Column("Rows", number=True),
    Column("Deleted", number=True),
    Column("Size", number=True),
    Column("State", long=True),
)
LOG_COLUMNS = (Column("Number", number=True), Column("Kind"), Column("Description", long=True))
NO_COMMIT = "There is no commit yet. commit.every sets how often the job commits."
NO_EXPORT = "There is no export yet. A section [exports.NAME] of the spec configures them; Export makes one now."
RED = "#c9504a"


def commit_rows(commits: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each commit, newest first."""
    return [(each["name"], _commit_cells(each)) for each in reversed(commits)]


def _commit_cells(commit: Mapping[str, Any]) -> Sequence[Cell]:
    states = ["a restart begins here"] if commit["next"] else []
    states += [f"held by {', '.join(commit['held_by'])}"] if commit["held_by"] else []
    states += [f"damaged: {commit['damaged']}"] if commit["damaged"] else []
    return (
        Cell(number(commit["version"]), commit["version"]),
        Cell(commit["name"]),
        Cell(moment(commit["made_at"])),
        Cell(number(commit["rows"]), commit["rows"]),
        Cell(size(commit["bytes"]), commit["bytes"]),
        Cell(size(commit["own_bytes"]), commit["own_bytes"], tip="files that no other commit shares"),
        Cell("; ".join(states), tone="bad" if commit["damaged"] else ""),
    )


def export_rows(exports: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each export, newest first."""
    return [(f"{each['stream']}/{each['timeline']}/{each['name']}", _export_cells(each)) for each in reversed(exports)]


def _export_cells(export: Mapping[str, Any]) -> Sequence[Cell]:
    states = ["current"] if export["current"] else []
    states += [] if export["complete"] else ["not complete"]
    states += [f"failed its gates: {', '.join(export['failed_gates'])}"] if export["failed_gates"] else []
    states += [f"damaged: {export['damaged']}"] if export["damaged"] else []
    wrong = export["failed_gates"] or export["damaged"]
    return (
        Cell(number(export["version"]), export["version"]),
        Cell(export["stream"]),
        Cell(export["name"], tip=export["why"] or ""),
        Cell(moment(export["made_at"])),
        Cell(number(export["rows"]), export["rows"]),
        Cell(number(export["tombstones"]), export["tombstones"]),
        Cell(size(export["bytes"]), export["bytes"]),
        Cell("; ".join(states), tone="bad" if wrong else "good" if export["current"] else ""),
    )


def marks_of(
    commits: Sequence[Mapping[str, Any]], exports: Sequence[Mapping[str, Any]]
) -> tuple[list[Mark], list[str]]:
    """Commits and exports as marks of a timeline, and the timeline's rows."""
    marks = [
        Mark(at, "commits", f"{each['name']}, {number(each['rows'])} rows", RED if each["damaged"] else COLORS[0])
        for each in commits
        if (at := millis(each["made_at"])) is not None
    ]
    for each in exports:
        if (at := millis(each["made_at"])) is not None:
            color = RED if each["failed_gates"] or each["damaged"] else COLORS[1 if each["kind"] == "base" else 2]
            marks.append(Mark(at, each["stream"], f"{each['stream']} {each['name']}", color))
    return marks, list(dict.fromkeys(["commits", *(each["stream"] for each in exports)]))


def log_rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each record of the log, newest first."""
    return [
        (str(line["number"]), (
            Cell(number(line["number"]), line["number"]),
            Cell(line["kind"], tone="bad" if line["kind"] == "damage" else ""),
            Cell(f"{line['when']} {line['words']}".strip()),
        ))
        for line in reversed(lines)
    ]  # fmt: skip


class PastPart:
    """See module docstring."""

    def __init__(self, visitor: Asker, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        with panel("Timeline", "commits and exports: orange is a base, green a delta, red a failure; UTC"):
            self._chart = ui.echart(marks_chart([], [])).classes("chart low")
        with panel("Commits"):
            self._commits = Grid(COMMIT_COLUMNS, NO_COMMIT)
        with panel("Exports"):
            self._exports = Grid(EXPORT_COLUMNS, NO_EXPORT)
        with panel("Log", f"the last {LOG_LINES} records"):
            self._log = Grid(LOG_COLUMNS, "The log is empty: the job has not started.")
        self._shown: Any = None

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the present lists."""
        commits = await listed(self._visitor, f"{self._path}/commits")
        exports = await listed(self._visitor, f"{self._path}/exports")
        log = (await self._visitor.get(f"{self._path}/log", last=LOG_LINES))["items"]
        self._commits.show(commit_rows(commits))
        self._exports.show(export_rows(exports))
        self._log.show(log_rows(log))
        marks, rows = marks_of(commits, exports)
        if (marks, rows) != self._shown:
            self._shown = marks, rows
            redraw(self._chart, marks_chart(marks, rows))
