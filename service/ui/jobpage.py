"""One job's page: what it does now, and below, by choice, its stream and learning, its rows, its past, its output."""

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from nicegui import ui

from service.ui.actions import Actions
from service.ui.asking import Visitor, listed
from service.ui.frame import Chip, Figure, Ticking, Trouble, panel
from service.ui.job_learning import LearningPart
from service.ui.job_operations import OperationsPart
from service.ui.job_output import LettersPart, OutputPart
from service.ui.job_past import PastPart
from service.ui.job_stream import StreamPart
from service.ui.job_tables import TablesPart
from service.ui.recording import Recorder
from service.ui.wording import GRAVE, ago, first_task, measure, number, outcome_words, rate, tone

JOBS_EVERY = 10
"""Ticks between two looks at which other jobs there are."""
SLOW_EVERY = 3
"""Ticks between two looks at lists."""
NOW = "Learning and stream"
TABS = (NOW, "Tables", "Commits and exports", "Output", "Dead letters", "Operations")


class Part(Protocol):
    """What is below a tab."""

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show what it is now. Raises Refused."""
        ...


class NowPart:
    """Learning and stream: what a newcomer should see."""

    def __init__(self, visitor: Visitor, name: str, recorder: Recorder) -> None:
        self._visitor, self._looks = visitor, 0
        self._learning, self._stream = LearningPart(visitor, name), StreamPart(name, recorder)

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """See Part."""
        if self._looks % JOBS_EVERY == 0:
            self._learning.others([each["name"] for each in await listed(self._visitor, "/jobs")])
        self._looks += 1
        self._stream.refresh(job)
        await self._learning.refresh(job)


class Head:
    """What a job does now, in figures and words."""

    def __init__(self, name: str) -> None:
        with panel(""):
            with ui.element("div").classes("line") as self.line:
                ui.label(name).classes("name")
                self._phase = Chip()
                self._wanted = ui.label().classes("hint")
            self._alarms = ui.element("div")
            with ui.element("div").classes("figures"):
                self._figures = {key: Figure(title, tip) for key, (title, tip) in FIGURES.items()}
        self._told: tuple[tuple[str, str], ...] = ()

    def show(self, job: Mapping[str, Any]) -> None:
        """Show it."""
        self._phase.show(job["phase"], tone(job["phase"]))
        wanted = {"running": "", "paused": "is to pause", "drained": "is to end", "stopped": "is to stop"}
        settled = job["desired"] == job["phase"] or job["phase"] in ("ended", "failed", "broken", "stopped")
        self._wanted.set_text("" if settled else wanted[job["desired"]])
        for key, (value, more, colour) in head_figures(job).items():
            self._figures[key].show(value, more, colour)
        told = tuple(notes_of(job))
        if told != self._told:
            self._told = told
            self._alarms.clear()
            with self._alarms:
                for colour, text in told:
                    ui.label(text).classes(f"note {colour}")


FIGURES = {
    "events_per_s": ("Events/s", "events trained on, a second"),
    "lag": ("Lag, events", "events that wait, over all partitions"),
    "auc": ("Window AUC", "of predictions made before their samples were learnt"),
    "logloss": ("Window log loss", ""),
    "freshness": ("Freshness", "from an event's time to its being learnt"),
    "events": ("Events", "events trained on, in all"),
    "rows": ("Rows", "rows of all tables"),
    "committed": ("Committed", "the version that a restart goes on from"),
    "restarts": ("Restarts", "of the workers since the launcher was started"),
}


def head_figures(job: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """A job's figures: by key of FIGURES, what is shown, a remark, and its colour."""
    lag, rows = job["lag"], job["table_rows"]
    task, window = first_task(job["metrics"]["window"])
    _, life = first_task(job["metrics"]["life"])
    commit = job["commit"] or {}
    rejected = sum(job["rejected"].values())
    writing = "writing the next" if commit.get("writing") else f"{ago(commit.get('age_s'))} ago"
    return {
        "events_per_s": (rate(job["events_per_s"]), f"{rate(job['samples_per_s'])} samples/s", ""),
        "lag": (number(sum(lag.values()) if lag else None), f"{len(lag)} partitions" if lag else "", ""),
        "auc": (measure(window.get("auc")), f"life {measure(life.get('auc'))}" if life else "", ""),
        "logloss": (measure(window.get("logloss")), task, ""),
        "freshness": (ago(job["freshness_s"]), "", ""),
        "events": (number(job["events"]), f"{number(rejected)} rejected", ""),
        "rows": (number(sum(rows.values()) if rows else None), f"{len(rows)} tables" if len(rows) > 1 else "", ""),
        "committed": (number(commit.get("version")), writing if commit else "", "bad" if commit.get("failing") else ""),
        "restarts": (number(job["restarts"]), "", "warn" if job["restarts"] else ""),
    }


def notes_of(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader should know before all else: colour and text."""
    notes = [("bad" if name in GRAVE else "warn", text) for name, text in job["alarms"].items()]
    if words := outcome_words(job):
        notes.append(("bad" if job["phase"] in ("failed", "broken") else "", words))
    if (outcome := job["outcome"]) is not None and outcome["code"] != 0 and outcome["lines"]:
        notes.append(("", "\n".join(["Last lines of output:", *outcome["lines"]])))
    if job["restarts"] and job["last_death"]:
        notes.append(("warn", f"The workers were started again, last because: {job['last_death']}"))
    if not job["learning"]:
        notes.append(("", "This job only predicts: it learns nothing any more."))
    return notes


class JobPage:
    """See module docstring."""

    def __init__(self, visitor: Visitor, name: str, recorder: Recorder) -> None:
        self._visitor, self._name, self._ticks, self._shown = visitor, name, 0, NOW
        self._path = f"/jobs/{quote(name, safe='')}"
        with ui.element("main").classes("page"):
            self._trouble = Trouble()
            self._head = Head(name)
            with self._head.line:
                self._actions = Actions(visitor, name)
            self._parts = self._below(recorder)
        Ticking(self.refresh, self._trouble)

    def _below(self, recorder: Recorder) -> dict[str, Part]:
        with ui.tabs(on_change=self._turned).props("dense align=left no-caps inline-label") as tabs:
            for title in TABS:
                ui.tab(title)
        with ui.tab_panels(tabs, value=NOW, animated=False, keep_alive=False):
            return {title: self._part(title, recorder) for title in TABS}

    def _part(self, title: str, recorder: Recorder) -> Part:
        with ui.tab_panel(title):
            match title:
                case "Tables":
                    return TablesPart(self._visitor, self._name, recorder)
                case "Commits and exports":
                    return PastPart(self._visitor, self._name)
                case "Output":
                    return OutputPart(self._visitor, self._name)
                case "Dead letters":
                    return LettersPart(self._visitor, self._name)
                case "Operations":
                    return OperationsPart(self._visitor, self._name)
                case _:
                    return NowPart(self._visitor, self._name, recorder)

    async def _turned(self, event: Any) -> None:
        self._shown, self._ticks = str(event.value), 0

    async def refresh(self) -> None:
        """Show what it does now."""
        job = await self._visitor.get(self._path)
        self._head.show(job)
        self._actions.show(job)
        slow = self._shown != NOW
        if not slow or self._ticks % SLOW_EVERY == 0:
            await self._parts[self._shown].refresh(job)
        self._ticks += 1
