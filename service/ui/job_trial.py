"""A job's predictions of pasted events: its samples, their features, and the rows that are missing."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx
from nicegui import ui

from headrace.service.predict.event_trials import trial_words
from headrace.service.ui.api_client import ApiCaller, RequestRefused
from headrace.service.ui.format import format_count, format_metric
from headrace.service.ui.frame import panel, titled_panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

TRY = "tryEvents"
NOT_ALLOWED = "Only an operator may try events. Sign in with such a token."
TRIES, AGAIN_S = 10, 1.0
"""How often the same is asked of a process that gets ready, and the pause between."""
BUSY = "It is being predicted. The first answer takes some seconds."
NO_EVENT = "Insert a recent event and change it, or paste one: a line as it comes from the job's source."
READING = "It is being read. The first answer takes some seconds."
INSERTED = "The first event of the newest pass. Change it as you like, then press Predict."
NO_EXAMPLE = "No recent event can be shown as a line of text now. Paste one, as it comes from the job's source."
SAMPLE_COLUMNS = (
    Column("Sample"),
    Column("Prediction", number=True),
    Column("Ids without a row", number=True),
)
SLOT_COLUMNS = (
    Column("Slot"),
    Column("Kind"),
    Column("Values", long=True),
    Column("Without a row", long=True),
)


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each sample, by its number."""
    several = len(samples[0]["predictions"]) > 1 if samples else False
    return [
        (str(number), (
            GridCell(f"{number + 1}, of event {each['event'] + 1}", number, opens=True),
            GridCell(_predictions(each["predictions"], several), next(iter(each["predictions"].values()), None)),
            GridCell(format_count(missing := sum(len(slot["missing"]) for slot in each["slots"])), missing),
        ))
        for number, each in enumerate(samples)
    ]  # fmt: skip


def _predictions(found: Mapping[str, float | None], several: bool) -> str:
    return ", ".join(
        f"{task} {format_metric(value)}" if several else format_metric(value) for task, value in found.items()
    )


def slot_rows(slots: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each slot of a sample."""
    return [
        (slot["name"], (
            GridCell(slot["name"]),
            GridCell(slot["kind"]),
            GridCell(", ".join(slot["values"]) + (f", and {slot['more']:,} more" if slot["more"] else ""), raw=True),
            GridCell(", ".join(slot["missing"]), tone="warn" if slot["missing"] else "", raw=True),
        ))
        for slot in slots
    ]  # fmt: skip


class TrialPart:
    """The part of a job's page that tries events."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._name, self._samples = visitor, name, list[Mapping[str, Any]]()
        self._ready = False
        with panel("Try an event", "the newest commit predicts it; nothing is learnt or stored"):
            if not visitor.may(TRY):
                ui.label(NOT_ALLOWED).classes("hint")
                return
            self._events = ui.textarea("Events, one a line").props("outlined dense rows=5 spellcheck=false")
            self._events.classes("code").on("focus", self._prepare, [])
            with ui.element("div").classes("line"):
                self._go = ui.button("Predict", on_click=self._ask).props("unelevated no-caps").mark("try")
                self._insert_one = ui.button("Insert a recent event", color=None, on_click=self._insert)
                self._insert_one.props("outline no-caps").mark("example")
            self._said = ui.label(NO_EVENT).classes("hint output").props("role=status")
            self._grid = Grid(SAMPLE_COLUMNS, "", on_open=self._open)
        self._box, self._which = titled_panel("", "texts of the event stand for the ids that are their hashes")
        with self._box:
            self._slots = Grid(SLOT_COLUMNS, "")
        self._box.set_visibility(False)

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Nothing to do: an answer stays until the next one."""

    async def _prepare(self) -> None:
        """Have the process begin while an event is being pasted."""
        if not self._ready:
            self._ready = True
            await self._answer("")

    async def _insert(self) -> None:
        """Put a recent event of the job in the field, below what is there."""
        self._say(READING)
        self._insert_one.disable()
        try:
            found = await self._answer("", example=True)
        finally:
            self._insert_one.enable()
        if found is None:
            return
        if found["example"] is not None:
            kept = str(self._events.value or "").strip("\n")
            self._events.set_value(f"{kept}\n{found['example']}" if kept else found["example"])
        self._say(NO_EXAMPLE if found["example"] is None else INSERTED)

    async def _ask(self) -> None:
        events = str(self._events.value or "")
        if not events.strip():
            self._say(NO_EVENT)
            return
        self._say(BUSY)
        self._go.disable()
        try:
            found = await self._answer(events)
        finally:
            self._go.enable()
        if found is None:
            return
        self._samples = found["samples"]
        self._grid.show(sample_rows(self._samples))
        self._say("\n".join(trial_words(found)))
        self._box.set_visibility(bool(self._samples))
        if self._samples:
            self._open("0")

    async def _answer(self, events: str, *, example: bool = False) -> Any:
        """The answer, or None after its error is shown. While the process gets ready, it is asked again."""
        for again in reversed(range(TRIES)):
            try:
                return await self._visitor.call(TRY, {"job": self._name}, {"events": events, "example": example})
            except (RequestRefused, httpx.HTTPError) as error:
                if not again or getattr(error, "status", None) != HTTPStatus.SERVICE_UNAVAILABLE:
                    self._say(str(error) or f"the service does not answer: {type(error).__name__}", "bad-text")
                    return None
                await asyncio.sleep(AGAIN_S)
        return None

    def _open(self, number: str) -> None:
        self._which.set_text(f"Features of sample {int(number) + 1}")
        self._slots.show(slot_rows(self._samples[int(number)]["slots"]))

    def _say(self, text: str, tone: str = "hint") -> None:
        self._said.set_text(text)
        self._said.classes(replace=f"output {tone}")
