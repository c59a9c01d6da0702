"""The output of a job's processes, and its rejected events."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.jobs.host import LEVELS
from headrace.service.monitor.lines import labelled
from headrace.service.ui.api_client import ApiCaller, list_all
from headrace.service.ui.format import NONE, format_bytes, format_count, format_percentage, format_time
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
NO_LINE = (
    "There is no output yet. Here come the lines that the workers log, and those that your pipe command writes to "
    "stderr: few, while all is well. A run in the foreground prints to its own terminal."
)


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


LEVEL_CHOICES = {ALL: "all levels"} | {str(level): f"{level.capitalize()} and above" for level in LEVELS[2:4]}
FOUND_NONE = "No line is of this choice."


class OutputPart:
    """The part of a job's page about its output."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._asked: tuple[Any, ...] | None = None
        with panel("Output", f"the last {TAIL} lines, newest first; UTC"):
            with ui.element("div").classes("line"):
                self._text = ui.input("Search").props("dense outlined clearable debounce=400 type=search")
                self._worker = self._choice({ALL: "all processes"}, "Process")
                self._level = self._choice(LEVEL_CHOICES, "Level")
                self._follow = ui.switch("Follow", value=True)
            self._lines = ui.label(NO_LINE).classes("output").props("tabindex=0 role=log aria-live=off")

    def _choice(self, choices: Mapping[str, str], label: str) -> ui.select:
        return ui.select(dict(choices), label=label, value=ALL).props("dense outlined options-dense")

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the last lines; while they are not followed, only after another choice."""
        worker, level, text = str(self._worker.value or ALL), str(self._level.value or ALL), self._text.value or ""
        asked = worker, level, text
        if asked == self._asked and not self._follow.value:
            return
        self._asked = asked
        chosen = {"worker": worker or None, "level": level or None, "text": text or None}
        page = await self._visitor.get(f"{self._path}/output", last=True, limit=TAIL, **chosen)
        lines = page["items"]
        workers = {ALL, *self._worker.options, *(line["worker"] for line in lines)}
        if workers != set(self._worker.options):
            names = {ALL: "all processes", **{each: each for each in sorted(workers - {ALL})}}
            self._worker.set_options(names, value=worker)
        self._lines.set_text(output_text(lines) or (FOUND_NONE if any(chosen.values()) else NO_LINE))


NEWEST = 50
"""Rejected events that are shown."""
EVENT_COLUMNS = (
    Column("Pass", number=True),
    Column("Partition"),
    Column("Position", number=True),
    Column("Reason"),
    Column("What is wrong", long=True),
    Column("Event", long=True),
)
NOT_KEPT = "not kept: pipe.dead_letters.keep_bytes is false"


def rejected_rows(events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each rejected event, newest first."""
    return [
        (f"{each['pass_number']}/{each['rank']}/{each['partition']}/{each['position']}/{number}", (
            GridCell(format_count(each["pass_number"]), each["pass_number"]),
            GridCell(each["partition"]),
            GridCell(format_count(each["position"]), each["position"]),
            GridCell(each["reason"]),
            GridCell(each["detail"]),
            GridCell(NOT_KEPT if each["text"] is None else each["text"], raw=each["text"] is not None),
        ))
        for number, each in enumerate(events)
    ]  # fmt: skip


def reason_rows(rejected: Mapping[str, int], events: int) -> list[Row]:
    """A row for each reason, with its share of all events."""
    return [
        (reason, (
            GridCell(reason),
            GridCell(format_count(count), count),
            GridCell(format_percentage(count / events) if events else NONE, count),
        ))
        for reason, count in sorted(rejected.items(), key=lambda each: -each[1])
    ]  # fmt: skip


class LettersPart:
    """The part of a job's page about dead letters."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path, self._name = visitor, f"/jobs/{quote(name, safe='')}", name
        self._may = visitor.may("listRejected")
        with panel("Rejected", "events that gave no sample, by reason, over the job's life"):
            columns = Column("Reason"), Column("Events", number=True), Column("Of all events", number=True)
            self._reasons = Grid(columns, "No event was rejected.")
        with panel("Newest rejected events", "as they came, as text"):
            if not self._may:
                ui.label("Dead letters contain the data of events, so only operators may read them.").classes("hint")
                return
            with ui.element("div").classes("line") as self._choices:
                self._reason = ui.select({ALL: "all reasons"}, label="Reason", value=ALL)
                self._reason.props("dense outlined options-dense")
            self._events = Grid(EVENT_COLUMNS, "")
        with panel("Files", "of a pass and a rank each: a JSON line for each event, with its bytes"):
            self._grid = Grid(LETTER_COLUMNS, "")

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show the present files and counts."""
        rejected = job["rejected"]
        self._reasons.show(reason_rows(rejected, job["events"] or 0))
        if not self._may:
            return
        self._choices.set_visibility(bool(rejected))
        reasons = {ALL: "all reasons", **{each: each for each in sorted(rejected)}}
        chosen = str(self._reason.value or ALL)
        if reasons != self._reason.options:
            self._reason.set_options(reasons, value=chosen if chosen in reasons else ALL)
        found = await self._visitor.get(f"{self._path}/rejected", last=NEWEST, reason=chosen or None)
        self._events.show(rejected_rows(found["items"]), no_letter_text(rejected))
        files = await list_all(self._visitor, f"{self._path}/deadletters")
        self._grid.show(letter_rows(self._name, files), no_letter_text(rejected))
