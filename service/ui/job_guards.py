"""The evaluator's scores, signs of trouble with a job's slots, and the price of a served version's age."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.history.version_ages import band_text
from headrace.service.ui.api_client import ApiCaller, RequestRefused
from headrace.service.ui.format import NONE, format_bytes, format_count, format_metric, format_percentage, format_time
from headrace.service.ui.frame import panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

SLOT_COLUMNS = (
    Column("Slot"),
    Column("Signs of trouble", long=True),
    *(Column(title, number=True) for title in ("Drift", "Coverage", "New rows", "Rows", "Bytes", "Weight")),
)
SLOT_WORDS = (
    "Drift: population stability index of the newest pass against those before; 0 is no change. Coverage: samples with "
    "a value of the slot. New rows: its values that made a new row. Weight: mean size of its first-order weights, "
    "of a commit with at most 200,000 rows."
)
SCORE_COLUMNS = (
    Column("Task"),
    *(Column(title, number=True) for title in ("AUC", "GAUC", "Log loss", "Calibration")),
)
AGE_COLUMNS = (
    Column("Task"),
    Column("Metric"),
    *(Column(title, number=True) for title in ("Age", "Passes", "Fresh", "Of that age", "Difference", "p")),
)
NO_COMMIT = "There is no commit yet; slots are read from one."
NOT_MEASURED = "Not measured yet: `headrace freshness` does so, on the job's machine."
NO_EVALUATOR = "The job file has no section [evaluator]."
NO_SCORE = "No version is scored yet."
NO_GUARDS = "No figures of passes: the job file has no section [guards]."


def diagnosis_rows(slots: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each slot."""
    return [
        (slot["slot"], (
            GridCell(slot["slot"]),
            GridCell("; ".join(slot["signs"]) or slot["drifted"] or NONE, tone="warn" if slot["signs"] else ""),
            *(
                GridCell(words(slot[key]), slot[key])
                for words, key in (
                    (format_metric, "drift"), (format_percentage, "coverage"), (format_percentage, "new_rows"),
                    (format_count, "rows"), (format_bytes, "num_bytes"), (format_metric, "weight"),
                )
            ),
        ))
        for slot in slots
    ]  # fmt: skip


def age_rows(ages: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each task, metric and age."""
    return [
        (f"{each['task']}/{each['metric']}/{each['from_s']}", (
            GridCell(each["task"]),
            GridCell(each["metric"]),
            GridCell(band_text(each["from_s"], each["to_s"]), each["from_s"]),
            GridCell(format_count(each["parts"]), each["parts"]),
            *(GridCell(format_metric(each[key]), each[key]) for key in ("job", "frozen")),
            GridCell(NONE if each["difference"] is None else f"{each['difference']:+.4f}", each["difference"]),
            GridCell(format_metric(each["p"]), each["p"]),
        ))
        for each in ages
    ]  # fmt: skip


def score_rows(evaluator: Mapping[str, Any] | None) -> list[Row]:
    """A row for each task of the newest score."""
    return [
        (task, (
            GridCell(task),
            *(GridCell(format_metric(found.get(key)), found.get(key))
              for key in ("auc", "gauc", "logloss", "calibration")),
        ))
        for task, found in (evaluator or {}).get("tasks", {}).items()
    ]  # fmt: skip


def scored_text(evaluator: Mapping[str, Any] | None) -> str:
    """Which version was scored, when, and on how much."""
    if evaluator is None or evaluator["version"] is None:
        return NO_EVALUATOR if evaluator is None else NO_SCORE
    version = f"Version {evaluator['version']:,}, at {format_time(evaluator['at'])} UTC"
    if evaluator["error"]:
        return f"{version}: it cannot be scored: {evaluator['error']}"
    return f"{version}, on {format_count(evaluator['samples'])} samples; versions scored: {evaluator['scored']:,}."


class GuardsPart:
    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        with panel("Evaluator", "the newest version that was measured on the evaluator's own events"):
            self._scored = ui.label(NO_EVALUATOR).classes("hint")
            self._scores = Grid(SCORE_COLUMNS, "")
        with panel("Cost of serving an older model", "old versions against the job itself, over the same events"):
            self._measured = ui.label(NOT_MEASURED).classes("hint")
            self._ages = Grid(AGE_COLUMNS, "")
            ui.label(f"as JSON: GET /v1{self._path}/freshness").classes("hint")
        with panel("Slots", "at the newest commit, the greatest shift first, as `headrace doctor` prints them"):
            self._said = ui.label(NO_COMMIT).classes("hint")
            self._slots = Grid(SLOT_COLUMNS, "")
            ui.label(SLOT_WORDS).classes("hint")
            ui.label(f"as JSON: GET /v1{self._path}/doctor").classes("hint")

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show the last results."""
        self._scored.set_text(scored_text(job.get("evaluator")))
        self._scores.show(score_rows(job.get("evaluator")))
        ages = await self._visitor.get(f"{self._path}/freshness")
        self._measured.set_text(measured_text(ages))
        self._ages.show(age_rows(ages["ages"]))
        try:
            found = await self._visitor.get(f"{self._path}/doctor")
        except RequestRefused as refused:  # a commit in an object store, or one that is damaged
            self._said.set_text(str(refused))
            self._slots.show([])
            return
        guards = "" if found["guarded"] else f" {NO_GUARDS}"
        self._said.set_text(NO_COMMIT if found["commit"] is None else f"Of commit {found['commit']}.{guards}")
        self._slots.show(diagnosis_rows(found["slots"]))


def measured_text(ages: Mapping[str, Any]) -> str:
    """When the ages were measured, and of which versions."""
    if ages["measured_at"] is None:
        return NOT_MEASURED
    versions = ", ".join(map(str, ages["versions"]))
    when = f"{format_time(ages['measured_at'])} UTC, when the job had closed pass {ages['passes']:,}"
    return f"Measured {when}. Versions {versions} never learnt after their commit; the job learns each pass."
