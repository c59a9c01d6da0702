"""How well a job predicts by slice: values of one slot, now, beside another job's."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from nicegui import ui

from service.ui.asking import Asker, Refused
from service.ui.frame import panel
from service.ui.grid import Cell, Column, Grid, Row
from service.ui.wording import measure, number

SPANS = {"window": "window", "life": "whole life"}
NO_SLICE = "Nothing is measured by slice: metrics.slices names the slots that are."
COLUMNS = (
    Column("Value"),
    Column("Samples", number=True),
    Column("AUC", number=True),
    Column("AUC beside", number=True),
    Column("Log loss", number=True),
    Column("Calibration", number=True),
)
Slices = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""By task, slot, value: measures."""


def choices_of(slices: Slices) -> list[str]:
    """What may be looked at: "task, by slot"."""
    return [f"{task}, by {slot}" for task, slots in slices.items() for slot in slots]


def slice_rows(ours: Slices, theirs: Slices, choice: str) -> list[Row]:
    """A row for each value that anything was seen of."""
    task, _, slot = choice.partition(", by ")
    beside = theirs.get(task, {}).get(slot, {})
    return [
        (value, (
            Cell(value, value.rjust(20) if value.isdecimal() else value),
            *(Cell(words(found.get(key)), found.get(key)) for words, key in ((number, "count"), (measure, "auc"))),
            Cell(measure(beside.get(value, {}).get("auc")), beside.get(value, {}).get("auc")),
            *(Cell(measure(found.get(key)), found.get(key)) for key in ("logloss", "calibration")),
        ))
        for value, found in ours.get(task, {}).get(slot, {}).items()
        if found.get("count")
    ]  # fmt: skip


class SlicesPart:
    """See module docstring."""

    def __init__(self, visitor: Asker, name: str) -> None:
        self._visitor, self._name = visitor, name
        with panel("By slice", "as measured now"):
            with ui.element("div").classes("line"):
                self._span = ui.select(SPANS, value="window").props("dense outlined options-dense")
                self._choice = ui.select([]).props("dense outlined options-dense")
            self._choosable(False)
            with ui.element("div").classes("short"):
                self._grid = Grid(COLUMNS, NO_SLICE, sort=1, descending=True)

    async def refresh(self, other: str) -> None:
        """Show what is measured now."""
        ours = await self._slices(self._name)
        theirs: Slices = {}
        if other:
            try:
                theirs = await self._slices(other)
            except Refused:  # the learning part says why
                theirs = {}
        choices = choices_of(ours)
        if choices != self._choice.options:
            self._choice.set_options(choices, value=choices[0] if choices else None)
        self._choosable(bool(choices))
        self._grid.show(slice_rows(ours, theirs, str(self._choice.value or "")))

    def _choosable(self, any_choice: bool) -> None:
        self._choice.set_visibility(any_choice)
        self._span.set_visibility(any_choice)

    async def _slices(self, job: str) -> Slices:
        told = await self._visitor.get(f"/jobs/{quote(job, safe='')}/metrics")
        found: Slices = told["slices"].get(self._span.value, {})
        return found
