"""How well a job predicts events before it learns them: over time and by slice, beside another job."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.ui.api_client import ApiCaller, RequestRefused
from headrace.service.ui.charts import COLORS, ChartLine, lines_chart, reliability_chart
from headrace.service.ui.format import format_count, format_metric
from headrace.service.ui.frame import chart, panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row
from headrace.service.ui.job_stream import TimeSpan, redraw
from headrace.service.ui.series import append_closes, has_event_time, metric_line, tasks_of, within_range

SPANS = {"window": "window", "life": "whole life"}
COLUMNS = (
    Column("Value"),
    Column("Samples", number=True),
    Column("AUC", number=True),
    Column("AUC of the other job", number=True),
    Column("Log loss", number=True),
    Column("Calibration", number=True),
)
Slices = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Measures by task, slot and value."""


def no_slice_text(spec: Mapping[str, Any]) -> str:
    """Why there are no metrics by slice."""
    if slots := (spec.get("metrics") or {}).get("slices"):
        return f"No values yet. They come with the first pass that has labels, by {', '.join(map(str, slots))}."
    return "This job has no metrics by slice. To get them, name slots in metrics.slices of its job file."


def no_close_text(job: Mapping[str, Any]) -> str:
    """Why there are no charts yet."""
    match job["phase"]:
        case "starting" | "tuning" | "restarting":
            return f"{job['step'] or 'The launcher starts.'} {NO_CLOSE}"
        case "training" | "replaying":
            return f"The first pass is in training: {format_count(job['events'] or 0)} events so far. {NO_CLOSE}"
        case phase:
            return f"The job is {phase}, and has closed no pass. {NO_CLOSE}"


def choices_of(slices: Slices) -> list[str]:
    """The choices of the reader: "task, by slot"."""
    return [f"{task}, by {slot}" for task, slots in slices.items() for slot in slots]


def slice_rows(ours: Slices, theirs: Slices, choice: str) -> list[Row]:
    """A row for each value with samples."""
    task, _, slot = choice.partition(", by ")
    beside = theirs.get(task, {}).get(slot, {})
    return [
        (value, (
            GridCell(value, value.rjust(20) if value.isdecimal() else value),
            *(
                GridCell(words(found.get(key)), found.get(key))
                for words, key in ((format_count, "count"), (format_metric, "auc"))
            ),
            GridCell(format_metric(beside.get(value, {}).get("auc")), beside.get(value, {}).get("auc")),
            *(GridCell(format_metric(found.get(key)), found.get(key)) for key in ("logloss", "calibration")),
        ))
        for value, found in ours.get(task, {}).get(slot, {}).items()
        if found.get("count")
    ]  # fmt: skip


class SlicesPart:
    """The part of a job's page about metrics by slice."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._name = visitor, name
        with panel("By slice", "present values"):
            with ui.element("div").classes("line"):
                self._span = ui.select(SPANS, label="Over", value="window").props("dense outlined options-dense")
                self._choice = ui.select([], label="Task and slot").props("dense outlined options-dense")
            self._choosable(False)
            with ui.element("div").classes("short"):
                self._grid = Grid(COLUMNS, "", sort=1, descending=True)

    async def refresh(self, other: str, spec: Mapping[str, Any]) -> None:
        """Show the present measures."""
        ours = await self._slices(self._name)
        theirs: Slices = {}
        if other:
            try:
                theirs = await self._slices(other)
            except RequestRefused:  # the learning part says why
                theirs = {}
        choices = choices_of(ours)
        if choices != self._choice.options:
            self._choice.set_options(choices, value=choices[0] if choices else None)
        self._choosable(bool(choices))
        self._grid.show(slice_rows(ours, theirs, str(self._choice.value or "")), no_slice_text(spec))

    def _choosable(self, any_choice: bool) -> None:
        self._choice.set_visibility(any_choice)
        self._span.set_visibility(any_choice)

    async def _slices(self, job: str) -> Slices:
        metrics = await self._visitor.get(f"/jobs/{quote(job, safe='')}/metrics")
        found: Slices = metrics["slices"].get(self._span.value, {})
        return found


def reliability_lines(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[ChartLine]:
    """The observed share over the predicted one, of each task."""
    return [
        ChartLine(task, [(each["prediction"], each["label"]) for each in tenths], COLORS[at % len(COLORS)])
        for at, (task, tenths) in enumerate(found.items())
        if tenths
    ]


MAX_LAST = 2_000
"""Closes that are loaded at the beginning."""
MAX_NEWS = 500
METRICS = {
    "auc": ("Window AUC", "higher is better; 0.5 is a guess"),
    "logloss": ("Window log loss", "lower is better"),
    "calibration": ("Calibration", "mean prediction divided by mean label; 1 is right"),
}
RECALL_TITLE = "Window recall of the index"
RECALLS = {"index": "index_recall", "most clicked": "popular_recall"}
NO_CLOSE = "The charts begin with the first pass that has predictions."
NOBODY = ""
"""The choice of no other job."""


def twin_of(name: str, jobs: Sequence[str]) -> str:
    """The default job to compare with: the one named `<job>-frozen`, or none."""
    return twin if (twin := f"{name}-frozen") in jobs else NOBODY


class CloseHistory:
    """The closes of a job, kept up to date."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}/metrics/history"
        self.closes: list[Mapping[str, Any]] = []

    async def follow(self) -> bool:
        """Load new closes; whether there were any. Raises Refused."""
        if not self.closes:
            more = (await self._visitor.get(self._path, last=MAX_LAST))["items"]
        else:
            since = self.closes[-1]
            more = (await self._visitor.get(self._path, last=MAX_NEWS, since=max(since["version"] - 1, 0)))["items"]
            if not more or more[0]["version"] != since["version"] or more[0]["timeline"] != since["timeline"]:
                more = (await self._visitor.get(self._path, last=MAX_LAST))["items"]  # rewound, or far ahead
                self.closes = []
            elif len(more) == 1:
                return False
        self.closes = append_closes(self.closes, more)
        return bool(more)


def learning_lines(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], names: tuple[str, str], metric: str
) -> list[ChartLine]:
    """A metric of every task, and that of the other job over the same time."""
    by_time = has_event_time(ours)
    lines = []
    for index, task in enumerate(tasks_of(ours)):
        color = COLORS[(2 * index) % len(COLORS)]
        points = metric_line(ours, task, metric, by_time)
        suffix = f" {task}" if len(tasks_of(ours)) > 1 else ""
        lines.append(ChartLine(f"{names[0]}{suffix}", points, color))
        beside = within_range(metric_line(theirs, task, metric, by_time), points)
        if beside:
            lines.append(ChartLine(f"{names[1]}{suffix}", beside, COLORS[(2 * index + 1) % len(COLORS)], dashed=True))
    return lines


def recall_lines(closes: Sequence[Mapping[str, Any]]) -> list[ChartLine]:
    """The recall of the index of items and that of the most clicked ones; none in a job that does not measure them."""
    by_time, lines = has_event_time(closes), []
    for task in tasks_of(closes):
        for color, (name, metric) in zip(COLORS, RECALLS.items(), strict=False):
            if points := metric_line(closes, task, metric, by_time):
                lines.append(ChartLine(name, points, color, dashed=metric != "index_recall"))
    return lines


class LearningPart:
    """The part of a job's page about what it learns."""

    def __init__(self, visitor: ApiCaller, name: str, span: TimeSpan, choices: ui.element) -> None:
        """`choices` is where its choices stand."""
        self._visitor, self._name, self._other, self._span = visitor, name, NOBODY, span
        self._drawn_ms = 0.0
        self._ours, self._theirs = CloseHistory(visitor, name), CloseHistory(visitor, NOBODY)
        self._chosen = False
        with choices:
            self._choice = ui.select(
                {NOBODY: "no other job"}, label="Compare with", value=NOBODY, on_change=self._choose
            )
            self._choice.props("dense outlined options-dense").classes("beside")
            self._said = ui.label().classes("hint")
        self._charts = {}
        with ui.element("div").classes("side") as self._boxes:
            for metric, (title, hint) in METRICS.items():
                with panel(title, hint):
                    self._charts[metric] = chart(lines_chart([], by_time=True), title)
            with panel("Reliability", "observed over predicted share, by tenths of the predictions in the window"):
                self._reliability = chart(reliability_chart([]), "Reliability: observed over predicted share")
            with panel(
                RECALL_TITLE, "of items that were clicked, before they are learnt: higher is better"
            ) as self._found:
                self._recall = chart(lines_chart([], by_time=True), RECALL_TITLE)
            self._slices = SlicesPart(visitor, name)

        self._found.set_visibility(False)
        self._boxes.set_visibility(False)

    def others(self, jobs: Sequence[str]) -> None:
        """Set the jobs to choose from."""
        names = [each for each in jobs if each != self._name]
        options = {NOBODY: "no other job", **{each: each for each in names}}
        if options != self._choice.options:
            self._choice.set_options(options, value=self._other if self._other in options else NOBODY)
        if not self._chosen and (twin := twin_of(self._name, names)):
            self._chosen = True
            self._choice.set_value(twin)

    def _choose(self) -> None:
        self._other = str(self._choice.value or NOBODY)
        self._theirs = CloseHistory(self._visitor, self._other)
        self._ours.closes = []

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show new closes."""
        news = await self._ours.follow()
        if self._other:
            try:
                news = await self._theirs.follow() or news
            except RequestRefused as refused:
                self._said.set_text(str(refused))
        self._boxes.set_visibility(bool(self._ours.closes))
        if not self._ours.closes:
            self._said.set_text(no_close_text(job))
        if not news and self._drawn_ms == self._span.length_ms:
            return
        self._drawn_ms = self._span.length_ms
        await self._slices.refresh(self._other, job["spec"])
        found = (await self._visitor.get(f"/jobs/{quote(self._name, safe='')}/metrics"))["reliability"]
        redraw(self._reliability, reliability_chart(reliability_lines(found.get("window", {}))))
        by_time = has_event_time(self._ours.closes)
        axis = "over the events' own time, UTC" if by_time else "over versions"
        self._said.set_text(f"{axis}; Shift with the wheel zooms, dragging moves")
        names = self._name, self._other
        for metric, drawn in self._charts.items():
            lines = learning_lines(self._ours.closes, self._theirs.closes if self._other else [], names, metric)
            redraw(drawn, lines_chart(self._span.of(lines) if by_time else lines, by_time=by_time))
        lines = recall_lines(self._ours.closes)
        self._found.set_visibility(bool(lines))
        redraw(self._recall, lines_chart(self._span.of(lines) if by_time else lines, by_time=by_time))
