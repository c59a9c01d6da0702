"""The output of a job's processes, and its rejected events."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.monitor.lines import labelled
from headrace.service.ui.api_client import ApiCaller, list_all
from headrace.service.ui.format import format_bytes, format_count, format_time
from headrace.service.ui.frame import panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

TAIL = 200
"""Lines that are shown."""
ALL = ""
SAYS_WHEN = re.compile(r"\d\d:\d\d:\d\d ")
LETTER_COLUMNS = (
    Column("Pass", number=True),
    Column("File"),
    Column("Rank", number=True),
    Column("Size", number=True),
    Column("Written, UTC"),
)
NO_LINE = "There is no output yet. A foreground run prints to its own terminal."


def download_link(job: str, file: str) -> str:
    """The link by which a browser session downloads a file of dead letters, relative to the root of all pages."""
    return f"/deadletters/{quote(job, safe='')}/{quote(file, safe='')}"


def no_letter_text(rejected: Mapping[str, Any]) -> str:
    """Why there are no dead letters."""
    if not (number := sum(rejected.values())):
        return "No event was rejected."
    return (
        f"{format_count(number)} events were rejected, but none of their files is left: "
        "pipe.dead_letters of the job file says how many are kept."
    )


def letter_rows(job: str, files: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each file of dead letters, newest first."""
    return [
        (each["name"], (
            GridCell(format_count(each["pass_number"]), each["pass_number"]),
            GridCell(each["name"], link=download_link(job, each["name"])),
            GridCell(format_count(each["rank"]), each["rank"]),
            GridCell(format_bytes(each["bytes"]), each["bytes"]),
            GridCell(format_time(each["written"])),
        ))
        for each in reversed(files)
    ]  # fmt: skip


def output_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines of output as text, newest first, each with time and worker unless the line has them itself."""
    return "\n".join(
        line["text"]
        if SAYS_WHEN.match(line["text"])
        else f"{line['at'][11:19]} {labelled(line['worker'], line['text'])}"
        for line in reversed(lines)
    )


class OutputPart:
    """The part of a job's page about its output."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._text: str | None = None
        with panel("Output", f"the last {TAIL} lines, newest first; UTC"):
            with ui.element("div").classes("line"):
                self._worker = ui.select({ALL: "all processes"}, label="Process", value=ALL).props(
                    "dense outlined options-dense"
                )
            self._lines = ui.label(NO_LINE).classes("output")

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the last lines."""
        chosen = str(self._worker.value or ALL)
        page = await self._visitor.get(f"{self._path}/output", worker=chosen or None, last=True, limit=TAIL)
        lines = page["items"]
        workers = {ALL, *self._worker.options, *(line["worker"] for line in lines)}
        if workers != set(self._worker.options):
            names = {ALL: "all processes", **{each: each for each in sorted(workers - {ALL})}}
            self._worker.set_options(names, value=chosen)
        self._lines.set_text(output_text(lines) or NO_LINE)


class LettersPart:
    """The part of a job's page about dead letters."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._name = visitor, name
        self._may = visitor.may("listDeadLetters")
        with panel("Dead letters", "rejected events: a JSON line each, with partition, position and reason"):
            if self._may:
                self._grid = Grid(LETTER_COLUMNS, "")
            else:
                ui.label("Dead letters contain the data of events, so only operators may read them.").classes("hint")
        with panel("Rejected", "by reason"):
            self._reasons = Grid((Column("Reason"), Column("Events", number=True)), "No event was rejected.")

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show the present files and counts."""
        rejected = job["rejected"].items()
        self._reasons.show(
            [(reason, (GridCell(reason), GridCell(format_count(count), count))) for reason, count in rejected]
        )
        if self._may:
            files = await list_all(self._visitor, f"/jobs/{quote(self._name, safe='')}/deadletters")
            self._grid.show(letter_rows(self._name, files), no_letter_text(job["rejected"]))
