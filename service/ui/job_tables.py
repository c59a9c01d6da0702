"""A job's tables: rows, memory, statistics by slot, rows by shard."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.ui.api_client import ApiCaller, list_all
from headrace.service.ui.charts import COLORS, ChartLine, bars_chart, lines_chart
from headrace.service.ui.format import format_bytes, format_count, format_metric, format_percentage
from headrace.service.ui.frame import Figure, chart, panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row
from headrace.service.ui.job_stream import redraw
from headrace.service.ui.recorder import Recorder

COLUMNS = (
    Column("Slot"),
    Column("Table"),
    Column("Rows", number=True),
    Column("Memory", number=True),
    Column("Samples", number=True),
    Column("Distinct values (estimate)", number=True),
    Column("Values per sample", number=True),
    Column("Empty", number=True),
    Column("Cut off", number=True),
    Column("Not finite", number=True),
    Column("Drift", number=True),
)
NO_SLOT = "There are no figures of slots yet; they appear with the first pass."


def slot_rows(tables: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each slot of every table."""
    return [
        (f"{table['name']}/{slot}", (
            GridCell(slot),
            GridCell(table["name"]),
            _cell(format_count, figures, "rows"),
            _cell(format_bytes, figures, "bytes"),
            _cell(format_count, figures, "num_samples"),
            _cell(format_count, figures, "distinct"),
            _cell(format_metric, figures, "mean_count"),
            _cell(format_percentage, figures, "empty_rate"),
            _cell(format_count, figures, "num_cut"),
            _cell(format_count, figures, "num_non_finite"),
            _cell(format_metric, figures, "drift"),
        ))
        for table in tables
        for slot, figures in table["slots"].items()
    ]  # fmt: skip


def _cell(words: Any, figures: Mapping[str, Any], key: str) -> GridCell:
    return GridCell(words(figures.get(key)), figures.get(key))


def rows_by_shard(commit: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Names of the shards, and their rows in a commit."""
    parts = commit["parts"]
    return [str(part["folder"]) for part in parts], [sum(part["rows"].values()) for part in parts]


def held_words(table: Mapping[str, Any]) -> str:
    """A note about a shrink that waits for an operator; empty if none does."""
    held = table["held"]
    if not held:
        return ""
    why = f", because {held['why']}" if held.get("why") else ""
    return (
        f"A shrink of table {table['name']} would delete {format_count(held.get('going'))} of "
        f"{format_count(held.get('rows'))} "
        f"rows, and waits{why}. Danger, Delete old rows, deletes them if more than max_shrink_fraction is allowed."
    )


class TablesPart:
    def __init__(self, visitor: ApiCaller, name: str, recorder: Recorder) -> None:
        self._visitor, self._name, self._recorder = visitor, name, recorder
        self._path = f"/jobs/{quote(name, safe='')}"
        self._commit = ""
        self._figures: dict[str, Figure] = {}
        self._held = ui.label().classes("note warn")
        with panel("Tables", "rows; memory of rows and their index over all shards"):
            self._tables = ui.element("div").classes("figures wide")
        with ui.element("div").classes("side"):
            with panel("Rows over time", "all tables, since the start of the service"):
                self._rows = chart(lines_chart([], by_time=True), "Rows of all tables over time", "chart low")
            with panel("Rows by shard"):
                self._as_of = ui.label(
                    "There is no commit yet; the rows of each shard are read from a commit."
                ).classes("hint")
                self._shards = chart(bars_chart([], []), "Rows by shard", "chart low")
        with panel("Slots", "over the job's life"):
            self._grid = Grid(COLUMNS, NO_SLOT)

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the present tables."""
        tables = await list_all(self._visitor, f"{self._path}/tables")
        for table in tables:
            self._show(table)
        held = "\n".join(filter(None, map(held_words, tables)))
        self._held.set_text(held)
        self._held.set_visibility(bool(held))
        self._grid.show(slot_rows(tables))
        points = [(each.at_ms, each.rows) for each in self._recorder.moments(self._name)]
        redraw(self._rows, lines_chart([ChartLine("rows", points, COLORS[2])], by_time=True))
        await self._show_shards()

    def _show(self, table: Mapping[str, Any]) -> None:
        name = table["name"]
        if name not in self._figures:
            with self._tables:
                self._figures[name] = Figure(name, f"vectors of {table['dim']} numbers")
        new = table["new_rows"]
        more = format_bytes(table["bytes"])
        if new is not None:
            unadmitted = format_count(table["unadmitted"])
            more += f"; in the newest pass {format_count(new)} new, {unadmitted} records not admitted"
        if table["frozen"]:
            more += f"; frozen: {', '.join(table['frozen'])}"
        self._figures[name].show(format_count(table["rows"]), more)

    async def _show_shards(self) -> None:
        commits = await list_all(self._visitor, f"{self._path}/commits")
        if not commits or commits[-1]["name"] == self._commit:
            return
        self._commit = commits[-1]["name"]
        newest = await self._visitor.get(f"{self._path}/commits/{quote(self._commit, safe='')}")
        self._as_of.set_text(
            f"in commit {self._commit}: {format_bytes(newest['bytes'])} on disk "
            f"in {format_count(newest['files'])} files"
        )
        redraw(self._shards, bars_chart(*rows_by_shard(newest), color=COLORS[5]))
