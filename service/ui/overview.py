"""The first page: a table of all jobs."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.ui.api_client import ApiCaller, RequestRefused, list_all
from headrace.service.ui.format import (
    GRAVE,
    cause_words,
    first_task,
    format_count,
    format_duration,
    format_metric,
    format_rate,
    state_colour,
)
from headrace.service.ui.frame import ErrorLine, PageTimer, heading
from headrace.service.ui.grid import Column, Grid, GridCell, Row

AT_ONCE = 12
"""Jobs whose figures are updated in one tick."""
COLUMNS = (
    Column("Job"),
    Column("Phase"),
    Column("Events/s", number=True),
    Column("Lag, events", number=True),
    Column("Window AUC", number=True),
    Column("Freshness", number=True),
    Column("Events", number=True),
    Column("Committed", number=True),
    Column("What is wrong", long=True),
)
NO_JOB = (
    "There is no job yet. `headrace submit job.toml --url ADDRESS` or `POST /v1/jobs` creates one; "
    "deploy/examples/clicks is a job to begin with."
)


def job_link(name: str) -> str:
    """The address of a job's page, below the root of all pages: NiceGUI adds that to links."""
    return f"/jobs/{quote(name, safe='')}"


def row_of(job: Mapping[str, Any], figures: Mapping[str, Any] | None) -> Row:
    """A job's row; `figures` is None where the job does not answer."""
    known = figures or {}
    lag = known.get("lag") or {}
    total = sum(lag.values()) if lag else None
    task, window = first_task((known.get("metrics") or {}).get("window", {}))
    commit = known.get("commit") or {}
    alarms = [text for text in (known.get("alarms") or {}).values() if text != cause_words(job, known)]
    wrong = [*filter(None, [cause_words(job, known)]), *alarms]
    cells = (
        GridCell(job["name"], link=job_link(job["name"])),
        GridCell(job["phase"], tone=state_colour(job["phase"]), chip=True),
        _figure(format_rate, known.get("events_per_s")),
        _figure(format_count, total),
        GridCell(format_metric(window.get("auc")), window.get("auc"), tip=f"of task {task}" if task else ""),
        _figure(format_duration, known.get("freshness_s")),
        _figure(format_count, known.get("events")),
        GridCell(
            format_count(commit.get("version")),
            commit.get("version"),
            tip=f"the version that a restart continues from; made {format_duration(commit.get('age_s'))} ago"
            if commit
            else "",
        ),
        GridCell("; ".join(wrong) or str(known.get("step") or ""), tone=_tone(job, known) if wrong else ""),
    )
    return job["name"], cells


def _tone(job: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    cause = figures.get("cause")
    grave = any(name in GRAVE for name in figures.get("alarms") or {})
    return "bad" if grave else state_colour(cause["kind"] if cause else job["phase"]) or "warn"


def _figure(words: Any, value: float | None) -> GridCell:
    return GridCell(words(value), value)


class JobsOverview:
    def __init__(self, visitor: ApiCaller) -> None:
        self._visitor, self._turn = visitor, 0
        self._figures: dict[str, Mapping[str, Any]] = {}
        with ui.element("div").classes("page"):
            heading("Jobs", 1).classes("name")
            self._trouble = ErrorLine()
            with ui.element("section").classes("panel"):
                self._grid = Grid(COLUMNS, NO_JOB)
        PageTimer(self.refresh, self._trouble)

    async def refresh(self) -> None:
        """Show the present figures; with many jobs, some are updated at a time."""
        jobs = await list_all(self._visitor, "/jobs")
        names = [job["name"] for job in jobs]
        self._figures = {name: figures for name, figures in self._figures.items() if name in names}
        for name in in_turn(names, self._turn, AT_ONCE):
            try:
                self._figures[name] = await self._visitor.get(f"/jobs/{quote(name, safe='')}")
            except RequestRefused:  # it was deleted, or does not answer
                self._figures.pop(name, None)
        self._turn += 1
        self._grid.show([row_of(job, self._figures.get(job["name"])) for job in jobs])


def in_turn(names: Sequence[str], turn: int, most: int) -> list[str]:
    """At most `most` of the names, in rotation."""
    if len(names) <= most:
        return list(names)
    begin = turn * most % len(names)
    return [*names[begin:], *names[:begin]][:most]
