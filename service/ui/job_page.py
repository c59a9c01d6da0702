"""The page of one job: present figures, and tabs for learning, tables, guards, history, output and operations."""

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from nicegui import ui

from headrace.printable import counted
from headrace.service.api.forms import RUNS
from headrace.service.monitor.lines import crosses_text, pair_lines, tried_lines, tuning_text
from headrace.service.ui.action_buttons import Actions
from headrace.service.ui.api_client import Visitor, list_all
from headrace.service.ui.format import (
    GRAVE,
    first_task,
    format_count,
    format_duration,
    format_metric,
    format_rate,
    outcome_words,
    state_colour,
)
from headrace.service.ui.frame import CauseBox, Chip, ErrorLine, Figure, PageTimer, heading
from headrace.service.ui.job_guards import GuardsPart
from headrace.service.ui.job_history import HistoryTab
from headrace.service.ui.job_learning import LearningPart
from headrace.service.ui.job_operations import OperationsPart
from headrace.service.ui.job_output import LettersPart, OutputPart
from headrace.service.ui.job_rows import RowsPart
from headrace.service.ui.job_settings import SettingsPart
from headrace.service.ui.job_stream import StreamPart, TimeSpan
from headrace.service.ui.job_tables import TablesPart
from headrace.service.ui.job_trial import TrialPart
from headrace.service.ui.job_workers import WorkersPart
from headrace.service.ui.overview import job_link
from headrace.service.ui.page_access import ROOT
from headrace.service.ui.recorder import Recorder
from headrace.service.ui.tab_names import NOW, TABS
from headrace.trainer.job_status import read
from headrace.trainer.tuning_status import TuningStatus

JOBS_EVERY = 10
"""Ticks between two updates of the list of other jobs."""
SPEC_EVERY = 30
"""Ticks between two looks at the spec, which a new job file of the same name changes."""
SLOW_EVERY = 3
"""Ticks between two updates of lists."""
BACK = "headrace_back"
"""The browser's event of going back or forward, with the name of the tab."""
FOLLOW_BACK = f"""<script>addEventListener("popstate", () =>
  emitEvent("{BACK}", new URL(location.href).searchParams.get("tab") || "{NOW}"))</script>"""


class TabContent(Protocol):
    """The content of a tab."""

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show the present data. Raises Refused."""
        ...


class NowPart:
    """The first tab: learning and stream."""

    def __init__(self, visitor: Visitor, name: str, recorder: Recorder) -> None:
        self._visitor, self._looks = visitor, 0
        with ui.element("div").classes("line choices") as choices:
            span = TimeSpan()
        self._learning, self._stream = LearningPart(visitor, name, span, choices), StreamPart(name, recorder, span)

    async def refresh(self, job: Mapping[str, Any]) -> None:
        if self._looks % JOBS_EVERY == 0:
            self._learning.others([each["name"] for each in await list_all(self._visitor, "/jobs")])
        self._looks += 1
        self._stream.refresh(job)
        await self._learning.refresh(job)


class JobHead:
    """The head of the page: phase, figures and notes."""

    def __init__(self, name: str) -> None:
        with ui.element("section").classes("panel head") as self.box:
            with ui.element("div").classes("line"):
                heading(name, 1).classes("name")
                self._phase = Chip()
                self._wanted = ui.label().classes("hint")
            self._cause = CauseBox()
            self._alarms = ui.element("div")
            with ui.element("div").classes("figures"):
                self._figures = {key: Figure(title, tip) for key, (title, tip) in FIGURES.items()}
        self._notes: tuple[tuple[str, str], ...] = ()

    def show(self, job: Mapping[str, Any]) -> None:
        """Show it."""
        self._phase.show(job["phase"], state_colour(job["phase"]))
        wanted = {"running": "", "paused": "pausing", "drained": "draining", "stopped": "stopping"}
        settled = job["desired"] == job["phase"] or job["phase"] in ("ended", "failed", "broken", "stopped")
        self._wanted.set_text("" if settled else wanted[job["desired"]])
        for key, (value, more, colour) in head_figures(job).items():
            self._figures[key].show(value, more, colour)
        self._cause.show(job["cause"])
        notes = tuple(notes_of(job))
        if notes != self._notes:
            self._notes = notes
            self._alarms.clear()
            with self._alarms:
                for colour, text in notes:
                    ui.label(text).classes(f"note {colour}")


FIGURES = {
    "events_per_s": ("Events/s", "events trained on per second"),
    "lag": ("Lag, events", "events not yet read, in all partitions"),
    "auc": ("Window AUC", "of predictions made before training on the samples"),
    "logloss": ("Window log loss", "of the same predictions; lower is better"),
    "freshness": (
        "Freshness",
        "time from an event until the job trains on it; none where events have no time, or a made-up one",
    ),
    "events": ("Events", "all events trained on"),
    "rows": ("Rows", "rows of all tables"),
    "committed": ("Committed", "the version that a restart continues from"),
    "restarts": ("Restarts", "restarts of the workers since the launcher started"),
}


def head_figures(job: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """A job's figures by key of FIGURES: value, remark and colour."""
    lag, rows = job["lag"], job["table_rows"]
    task, window = first_task(job["metrics"]["window"])
    _, life = first_task(job["metrics"]["life"])
    commit = job["commit"] or {}
    rejected = sum(job["rejected"].values())
    committed = commit.get("version") or None  # version 0 is before the first commit
    made = f"{format_duration(commit.get('age_s'))} ago" if committed else "none yet"
    runs = job["phase"] in RUNS
    events, samples = (format_rate(job[key] if runs else None) for key in ("events_per_s", "samples_per_s"))
    writing = f"writing the {'next' if committed else 'first'}" if runs and commit.get("writing") else made
    return {
        "events_per_s": (events, f"{samples} samples/s" if runs else "", ""),
        "lag": (format_count(sum(lag.values()) if lag else None), f"{len(lag)} partitions" if lag else "", ""),
        "auc": (format_metric(window.get("auc")), f"life {format_metric(life.get('auc'))}" if life else "", ""),
        "logloss": (format_metric(window.get("logloss")), task, ""),
        "freshness": (format_duration(job["freshness_s"]), "", ""),
        "events": (format_count(job["events"]), f"{format_count(rejected)} rejected", ""),
        "rows": (
            format_count(sum(rows.values()) if rows else None),
            f"{len(rows)} tables" if len(rows) > 1 else "",
            "",
        ),
        "committed": (
            format_count(committed),
            writing if commit else "",
            "bad" if commit.get("failing") else "",
        ),
        "restarts": (format_count(job["restarts"]), "", "warn" if job["restarts"] else ""),
    }


def notes_of(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Important notes about a job, each with colour and text."""
    said = "" if job["cause"] is None else job["cause"]["text"]
    notes = [("bad" if name in GRAVE else "warn", text) for name, text in job["alarms"].items() if text != said]
    if (words := outcome_words(job)) and words != said:
        notes.append(("", words))
    if (outcome := job["outcome"]) is not None and outcome["code"] != 0 and outcome["lines"]:
        notes.append(("", "\n".join(["Last lines of output:", *outcome["lines"]])))
    if job["restarts"] and job["last_death"]:
        why = f"{job['last_death']}: {job['last_error']}" if job["last_error"] else job["last_death"]
        notes.append(("", f"The workers were restarted {counted(job['restarts'], 'time')}. Last reason: {why}"))
    if (resize := job["resizing"]) is not None:
        moved = "" if resize["moved"] is None else f", the rows of version {resize['moved']:,} are moved"
        numbers = f"{counted(resize['trainers'], 'trainer')} and {counted(resize['shards'], 'shard')}"
        notes.append(("", f"This job is resized to {numbers}. Its new workers: {resize['state']}{moved}."))
    if (elastic := job["elastic"]) is not None:
        bounds = f"{elastic['min']} to {elastic['max']}"
        waits = f" For {elastic['for_s']:.0f} s: {elastic['waits']}." if elastic["waits"] else ""
        stand_by = "stands by" if elastic["spares"] == 1 else "stand by"
        spares = f", and {counted(elastic['spares'], 'worker')} {stand_by}" if elastic["spares"] else ""
        notes.append(("", f"This job has {counted(elastic['present'], 'trainer')}, of {bounds}{spares}.{waits}"))
    if (tuning := job["tuning"]) is not None:
        found = read(TuningStatus, tuning)
        if found.tried:
            chosen = [f"This job has chosen its settings: {found.tried[0].name}.", *tried_lines(found.tried)]
            notes.append(("", "\n".join(chosen)))
        if found.crosses is not None:
            crosses = [f"Crosses of its slots: {crosses_text(found.crosses)}.", *pair_lines(found.crosses)]
            notes.append(("", "\n".join(crosses)))
        if words := tuning_text(found):
            notes.append(("warn", words))
    if not job["learning"]:
        notes.append(("", "This job only predicts. It does not learn."))
    return notes


class JobPage:
    """The page of one job."""

    def __init__(self, visitor: Visitor, name: str, recorder: Recorder, tab: str) -> None:
        """Begin with this tab."""
        self._visitor, self._name, self._ticks = visitor, name, 0
        self._shown = tab if tab in TABS else NOW
        self._path, self._spec = f"/jobs/{quote(name, safe='')}", dict[str, Any]()
        with ui.element("div").classes("page"):
            self._trouble = ErrorLine()
            self._head = JobHead(name)
            with self._head.box:
                self._actions = Actions(visitor, name)
            self._parts = self._below(recorder)
        ui.add_head_html(FOLLOW_BACK)
        ui.on(BACK, self._went_back)
        PageTimer(self.refresh, self._trouble)

    def _below(self, recorder: Recorder) -> dict[str, TabContent]:
        with ui.tabs(on_change=self._turned).props(
            "dense align=left no-caps inline-label outside-arrows mobile-arrows"
        ) as tabs:
            for tab, title in TABS.items():
                ui.tab(tab, title)
        self._tabs = tabs
        with ui.tab_panels(tabs, value=self._shown, animated=False, keep_alive=False):
            return {tab: self._part(tab, recorder) for tab in TABS}

    def _part(self, tab: str, recorder: Recorder) -> TabContent:
        with ui.tab_panel(tab):
            match tab:
                case "tables":
                    return TablesPart(self._visitor, self._name, recorder)
                case "rows":
                    return RowsPart(self._visitor, self._name, self._actions)
                case "try":
                    return TrialPart(self._visitor, self._name)
                case "workers":
                    return WorkersPart(self._visitor, self._name, self._actions)
                case "settings":
                    return SettingsPart(self._visitor, self._name)
                case "guards":
                    return GuardsPart(self._visitor, self._name)
                case "versions":
                    return HistoryTab(self._visitor, self._name, self._actions)
                case "output":
                    return OutputPart(self._visitor, self._name)
                case "deadletters":
                    return LettersPart(self._visitor, self._name)
                case "operations":
                    return OperationsPart(self._visitor, self._name)
                case _:
                    return NowPart(self._visitor, self._name, recorder)

    def _turned(self, event: Any) -> None:
        if str(event.value) != self._shown:  # not by Back, which has changed the address itself
            self._shown, self._ticks = str(event.value), 0
            ui.navigate.history.push(f"{ROOT}{job_link(self._name)}?tab={self._shown}")

    def _went_back(self, event: Any) -> None:
        tab = str(event.args)
        if tab in TABS:
            self._shown, self._ticks = tab, 0
            self._tabs.set_value(tab)

    async def refresh(self) -> None:
        """Show the present state."""
        job = await self._visitor.get(self._path)
        if self._ticks % SPEC_EVERY == 0:
            self._spec = (await self._visitor.get(f"{self._path}/spec"))["spec"]
        job["spec"] = self._spec
        self._head.show(job)
        self._actions.show(job)
        slow = self._shown != NOW
        if not slow or self._ticks % SLOW_EVERY == 0:
            await self._parts[self._shown].refresh(job)
        self._ticks += 1
