"""The first page: a table of all jobs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.api.forms import RUNS
from headrace.service.ui.api_client import ApiCaller, RequestRefused, list_all
from headrace.service.ui.charts import spark_points
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
from headrace.service.ui.frame import ErrorLine, Figure, PageTimer, heading, panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row
from headrace.service.ui.recorder import AlarmChange, FigureRecord, Recorder

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
ALARM_COLUMNS = (Column("When"), Column("Job"), Column("Change"), Column("Alarm", long=True))
TILES = {
    "jobs": ("Jobs", ""),
    "rate": ("Events/s", "events trained on per second, by all jobs"),
    "freshness": ("Worst freshness", "the longest time from an event until a job trains on it"),
    "wrong": ("Jobs with something wrong", "jobs that failed, restart or wait, or have an alarm"),
}
EVERY_PHASE = ""
"""The choice of every phase."""
NO_JOB = (
    "There is no job yet. New job, above, creates one for those who may; so does `headrace submit job.toml --url "
    "ADDRESS`, or `POST /v1/jobs`."
)


def job_link(name: str) -> str:
    """The address of a job's page, below the root of all pages: NiceGUI adds that to links."""
    return f"/jobs/{quote(name, safe='')}"


def row_of(job: Mapping[str, Any], figures: Mapping[str, Any] | None, moments: Sequence[FigureRecord] = ()) -> Row:
    """A job's row; `figures` is None where the job does not answer. `moments`: its recent figures."""
    known = figures or {}
    lag = known.get("lag") or {}
    total = sum(lag.values()) if lag else None
    task, window = first_task((known.get("metrics") or {}).get("window", {}))
    commit = known.get("commit") or {}
    rate = known.get("events_per_s") if job["phase"] in RUNS else None
    now = (known.get("alarms") or {}) if job["phase"] in RUNS else {}
    alarms = [text for text in now.values() if text != cause_words(job, known)]
    wrong = [*filter(None, [cause_words(job, known)]), *alarms]
    cells = (
        GridCell(job["name"], link=job_link(job["name"])),
        GridCell(job["phase"], tone=state_colour(job["phase"]), chip=True),
        GridCell(
            format_rate(rate),
            rate,
            spark=spark_points([each.events_per_s for each in moments]),
        ),
        _figure(format_count, total),
        GridCell(
            format_metric(window.get("auc")),
            window.get("auc"),
            tip=f"of task {task}" if task else "",
            spark=spark_points([each.auc for each in moments]),
        ),
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


def tiles_of(
    jobs: Sequence[Mapping[str, Any]], figures: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, str, str]]:
    """The figures of all jobs by key of TILES: value, remark and colour."""
    running = [figures[job["name"]] for job in jobs if job["phase"] in RUNS and job["name"] in figures]
    phases = Counter(str(job["phase"]) for job in jobs)
    fresh = max(((each.get("freshness_s") or 0.0, str(each.get("name", ""))) for each in running), default=(0.0, ""))
    wrong = [name for name, each in figures.items() if each.get("alarms") or each.get("cause")]
    rates = [each["events_per_s"] for each in running if each.get("events_per_s") is not None]
    failed = any(state_colour(phase) == "bad" for phase in phases)
    return {
        "jobs": (format_count(len(jobs)), ", ".join(f"{number} {phase}" for phase, number in phases.most_common()), ""),
        "rate": (format_rate(sum(rates) if rates else None), "", ""),
        "freshness": (format_duration(fresh[0] or None), fresh[1] if fresh[0] else "", ""),
        "wrong": (format_count(len(wrong)), ", ".join(wrong[:3]), "bad" if failed else "warn" if wrong else "good"),
    }


def matches(job: Mapping[str, Any], text: str, phase: str) -> bool:
    """Whether a job is shown for this search text and phase."""
    return text.strip().lower() in job["name"].lower() and phase in (EVERY_PHASE, job["phase"])


def alarm_rows(changes: Sequence[AlarmChange]) -> list[Row]:
    """A row for each change of an alarm."""
    return [
        (f"{each.at_ms}/{each.job}/{each.text}/{each.began}", (
            GridCell(f"{datetime.fromtimestamp(each.at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"),
            GridCell(each.job, link=job_link(each.job)),
            GridCell("began" if each.began else "over", tone="warn" if each.began else "good", chip=True),
            GridCell(each.text),
        ))
        for each in changes
    ]  # fmt: skip


class JobsOverview:
    """The first page: figures of all jobs, the list with a search, and the alarms that began and ended."""

    def __init__(self, visitor: ApiCaller, recorder: Recorder) -> None:
        self._visitor, self._recorder, self._turn = visitor, recorder, 0
        self._jobs: list[dict[str, Any]] = []
        self._phases = {EVERY_PHASE: "every phase"}
        self._figures: dict[str, Mapping[str, Any]] = {}
        with ui.element("div").classes("page"):
            with ui.element("div").classes("line"):
                heading("Jobs", 1).classes("name")
                if visitor.may("createJob"):
                    ui.link("New job", "/new").classes("act")
            self._trouble = ErrorLine()
            with ui.element("section").classes("panel tiles figures").props('aria-label="All jobs"'):
                self._tiles = {key: Figure(title, tip) for key, (title, tip) in TILES.items()}
            with ui.element("section").classes("panel"):
                with ui.element("div").classes("line"):
                    self._text = ui.input("Search by name", on_change=self._draw).props("dense outlined clearable")
                    self._phase = ui.select(self._phases, label="Phase", value=EVERY_PHASE, on_change=self._draw).props(
                        "dense outlined options-dense"
                    )
                self._grid = Grid(COLUMNS, NO_JOB)
            with panel("Alarm history", "since the service started, newest first; UTC"):
                self._alarms = Grid(ALARM_COLUMNS, "No alarm has begun since the service started.")
        PageTimer(self.refresh, self._trouble)

    async def refresh(self) -> None:
        """Show the present figures; with many jobs, some are updated at a time."""
        self._jobs = jobs = await list_all(self._visitor, "/jobs")
        names = [job["name"] for job in jobs]
        self._figures = {name: figures for name, figures in self._figures.items() if name in names}
        for name in in_turn(names, self._turn, AT_ONCE):
            try:
                self._figures[name] = await self._visitor.get(f"/jobs/{quote(name, safe='')}")
            except RequestRefused:  # it was deleted, or does not answer
                self._figures.pop(name, None)
        self._turn += 1
        phases = {each: each for each in sorted({str(job["phase"]) for job in jobs})}
        if phases.keys() - self._phases.keys():  # a phase that was chosen stays, also while no job is in it
            self._phases |= phases
            self._phase.set_options(self._phases)
        for key, (value, more, colour) in tiles_of(jobs, self._figures).items():
            self._tiles[key].show(value, more, colour)
        self._alarms.show(alarm_rows(self._recorder.alarm_changes()))
        self._draw()

    def _draw(self) -> None:
        text, phase = str(self._text.value or ""), str(self._phase.value)
        self._grid.show(
            [
                row_of(job, self._figures.get(job["name"]), self._recorder.moments(job["name"]))
                for job in self._jobs
                if matches(job, text, phase)
            ],
            "No job matches the search." if self._jobs else NO_JOB,
        )


def in_turn(names: Sequence[str], turn: int, most: int) -> list[str]:
    """At most `most` of the names, in rotation."""
    if len(names) <= most:
        return list(names)
    begin = turn * most % len(names)
    return [*names[begin:], *names[:begin]][:most]
