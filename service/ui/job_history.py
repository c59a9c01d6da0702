"""The history of a job: commits and exports on a timeline and in lists, and its log."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from headrace.service.ui.action_buttons import Actions
from headrace.service.ui.api_client import ApiCaller, list_all
from headrace.service.ui.charts import COLORS, ChartMark, marks_chart
from headrace.service.ui.format import first_task, format_bytes, format_count, format_metric, format_time
from headrace.service.ui.frame import chart, panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row
from headrace.service.ui.job_learning import CloseHistory
from headrace.service.ui.job_stream import redraw
from headrace.service.ui.job_versions import Comparison, VersionSheet, figures_of_version, key_of
from headrace.service.ui.series import millis

LOG_LINES = 100
MEASURED = (Column("Window AUC", number=True), Column("Calibration", number=True))
COMMIT_COLUMNS = (
    Column("Version", number=True),
    Column("Commit"),
    Column("Made, UTC"),
    Column("Events", number=True),
    *MEASURED,
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
    *MEASURED,
    Column("Rows", number=True),
    Column("Deleted", number=True),
    Column("Size", number=True),
    Column("State", long=True),
)
LOG_COLUMNS = (Column("Number", number=True), Column("Kind"), Column("Description", long=True))
RED = "#c9504a"


def no_commit_text(job: Mapping[str, Any]) -> str:
    """Why there are no commits yet."""
    if (job["commit"] or {}).get("writing"):
        return "The first commit is being written."
    every = (job["spec"].get("commit") or {}).get("every")
    return f"There is no commit yet. The job commits every {every}." if every else (
        "There is no commit yet. commit.every of the job file sets how often the job commits."
    )  # fmt: skip


def no_export_text(job: Mapping[str, Any]) -> str:
    """Why there are no exports yet."""
    if making := [f"{stream}: {each['making']}" for stream, each in job["exports"].items() if each.get("making")]:
        return f"The first export is being made: {', '.join(making)}."
    if streams := job["spec"].get("exports"):
        return f"There is no export yet of {', '.join(streams)}. Export makes one now."
    return "This job makes no exports: its job file has no section [exports.NAME]."


ClosesByVersion = Mapping[tuple[str, int], Mapping[str, Any]]
"""The closes of a job by timeline and version."""


def closes_by_version(closes: Sequence[Mapping[str, Any]]) -> ClosesByVersion:
    """The closes by timeline and version."""
    return {(each["timeline"], each["version"]): each for each in closes}


def _close_of(entry: Mapping[str, Any], closes: ClosesByVersion) -> Mapping[str, Any] | None:
    """The close of the version of a commit or an export."""
    return closes.get((entry["timeline"], entry["version"]))


def _measured(entry: Mapping[str, Any], closes: ClosesByVersion) -> Sequence[GridCell]:
    close = _close_of(entry, closes)
    task, found = first_task({} if close is None else close["window"])
    tip = f"of task {task}" if task else ""
    return [GridCell(format_metric(found.get(key)), found.get(key), tip=tip) for key in ("auc", "calibration")]


def commit_rows(commits: Sequence[Mapping[str, Any]], closes: ClosesByVersion) -> list[Row]:
    """A row for each commit, newest first."""
    return [(key_of(each), _commit_cells(each, closes)) for each in reversed(commits)]


def _commit_cells(commit: Mapping[str, Any], closes: ClosesByVersion) -> Sequence[GridCell]:
    states = ["restart point"] if commit["next"] else []
    states += [f"kept for {', '.join(commit['held_by'])}"] if commit["held_by"] else []
    states += [f"damaged: {commit['damaged']}"] if commit["damaged"] else []
    return (
        GridCell(format_count(commit["version"]), commit["version"]),
        GridCell(commit["name"], opens=True),
        GridCell(format_time(commit["made_at"])),
        GridCell(format_count(commit["events"]), commit["events"]),
        *_measured(commit, closes),
        GridCell(format_count(commit["rows"]), commit["rows"]),
        GridCell(format_bytes(commit["bytes"]), commit["bytes"]),
        GridCell(format_bytes(commit["own_bytes"]), commit["own_bytes"], tip="files that no other commit shares"),
        GridCell("; ".join(states), tone="bad" if commit["damaged"] else ""),
    )


def export_rows(exports: Sequence[Mapping[str, Any]], closes: ClosesByVersion) -> list[Row]:
    """A row for each export, newest first."""
    return [(key_of(each), _export_cells(each, closes)) for each in reversed(exports)]


def _export_cells(export: Mapping[str, Any], closes: ClosesByVersion) -> Sequence[GridCell]:
    states = ["current"] if export["current"] else []
    states += [] if export["complete"] else ["not complete"]
    states += [f"failed its gates: {', '.join(export['failed_gates'])}"] if export["failed_gates"] else []
    states += [f"damaged: {export['damaged']}"] if export["damaged"] else []
    wrong = export["failed_gates"] or export["damaged"]
    return (
        GridCell(format_count(export["version"]), export["version"]),
        GridCell(export["stream"]),
        GridCell(export["name"], opens=export["complete"] and not export["damaged"]),
        GridCell(format_time(export["made_at"])),
        *_measured(export, closes),
        GridCell(format_count(export["rows"]), export["rows"]),
        GridCell(format_count(export["tombstones"]), export["tombstones"]),
        GridCell(format_bytes(export["bytes"]), export["bytes"]),
        GridCell("; ".join(states), tone="bad" if wrong else "good" if export["current"] else ""),
    )


def timeline_marks(
    commits: Sequence[Mapping[str, Any]], exports: Sequence[Mapping[str, Any]]
) -> tuple[list[ChartMark], list[str]]:
    """Commits and exports as marks of a timeline, and the timeline's rows."""
    marks = [
        ChartMark(
            at, "commits", f"{each['name']}, {format_count(each['rows'])} rows", RED if each["damaged"] else COLORS[0]
        )
        for each in commits
        if (at := millis(each["made_at"])) is not None
    ]
    for each in exports:
        if (at := millis(each["made_at"])) is not None:
            color = RED if each["failed_gates"] or each["damaged"] else COLORS[1 if each["kind"] == "base" else 2]
            marks.append(ChartMark(at, each["stream"], f"{each['stream']} {each['name']}", color))
    return marks, list(dict.fromkeys(["commits", *(each["stream"] for each in exports)]))


def log_rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each record of the log, newest first."""
    return [
        (str(line["number"]), (
            GridCell(format_count(line["number"]), line["number"]),
            GridCell(line["kind"], tone="bad" if line["kind"] == "damage" else ""),
            GridCell(f"{line['when']} {line['words']}".strip()),
        ))
        for line in reversed(lines)
    ]  # fmt: skip


class HistoryTab:
    def __init__(self, visitor: ApiCaller, name: str, actions: Actions) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._closes, sheet = CloseHistory(visitor, name), VersionSheet(visitor, name, actions)
        with panel("Timeline", "commits and exports: orange is a base, green a delta, red a failure; UTC"):
            self._chart = chart(marks_chart([], []), "Commits and exports over time", "chart low")
        self._comparison = Comparison()
        with panel("Commits", "press a name for its content, and for what can be done with it"):
            self._commits = Grid(COMMIT_COLUMNS, "", on_open=sheet.open)
        with panel("Exports", "press a name for its files, and to serve it"):
            self._exports = Grid(EXPORT_COLUMNS, "", on_open=sheet.open)
        with panel("Log", f"the last {LOG_LINES} records"):
            self._log = Grid(LOG_COLUMNS, "The log is empty: the job has not started.")
        self._shown: Any = None

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show the present lists."""
        commits = await list_all(self._visitor, f"{self._path}/commits")
        exports = await list_all(self._visitor, f"{self._path}/exports")
        log = (await self._visitor.get(f"{self._path}/log", last=LOG_LINES))["items"]
        await self._closes.follow()
        closes = closes_by_version(self._closes.closes)
        self._commits.show(commit_rows(commits, closes), no_commit_text(job))
        self._exports.show(export_rows(exports, closes), no_export_text(job))
        whole = [each for each in [*reversed(commits), *reversed(exports)] if each["made_at"] and not each["damaged"]]
        self._comparison.show({key_of(each): figures_of_version(each, _close_of(each, closes)) for each in whole})
        self._log.show(log_rows(log))
        marks, rows = timeline_marks(commits, exports)
        if (marks, rows) != self._shown:
            self._shown = marks, rows
            redraw(self._chart, marks_chart(marks, rows))
