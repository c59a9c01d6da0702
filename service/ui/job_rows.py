"""The rows of a job: one of them looked up, those with most shows, and rows and memory by slot."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from nicegui import ui

from headrace.service.tables.row import GONE, names_of_days, ranking_words
from headrace.service.ui.action_buttons import Actions
from headrace.service.ui.api_client import ApiCaller, RequestRefused, list_all
from headrace.service.ui.charts import COLORS, Options, bars_chart
from headrace.service.ui.format import format_count
from headrace.service.ui.frame import chart, panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row
from headrace.service.ui.job_stream import redraw

FORGET = "forgetValue"
MAX_BARS = 40
"""Most slots of a chart, those with most."""
MIB = 1 << 20
RANKED_COLUMNS = (
    Column("Slot"),
    Column("Feature id"),
    Column("Shows", number=True),
    Column("Clicks", number=True),
    Column("Days unseen", number=True),
)
NOT_RANKED = "Choose a table. All of its rows in memory are looked at, while the job trains on."


def slot_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The table of each slot."""
    return {slot: table["name"] for table in tables for slot in table["slots"]}


def slot_bars(tables: Sequence[Mapping[str, Any]], key: str, unit: float, color: str) -> Options:
    """A chart of a figure by slot, the greatest first."""
    known = [(slot, figures.get(key)) for table in tables for slot, figures in table["slots"].items()]
    found = sorted(((slot, value / unit) for slot, value in known if value is not None), key=lambda each: -each[1])
    return bars_chart([slot for slot, _ in found[:MAX_BARS]], [value for _, value in found[:MAX_BARS]], color)


class RowLookup:
    """The panel that looks a row up."""

    def __init__(self, visitor: ApiCaller, name: str, actions: Actions) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._actions, self._tables = actions, dict[str, str]()
        self._forget = next((act for act in actions.permitted if act.id == FORGET), None)
        with panel("Look a row up", "where it is, its values, when it is deleted, which exports contain it"):
            with ui.element("div").classes("line"):
                self._slot = ui.select([], label="Slot").props("dense outlined options-dense")
                self._value = ui.input("Value: a feature id, or its text").props("dense outlined").classes("wide")
                self._value.on("keydown.enter", self._look, [])
                ui.button("Look up", color=None, on_click=self._look).props("outline no-caps").mark("look-up")
            self._lines = ui.label("Choose a slot, and give one of its values.").classes("hint output")
            if self._forget is not None:
                self._delete = ui.button(self._forget.form.label, color=None, on_click=self._ask).props("flat no-caps")
                self._delete.set_visibility(False)

    def show(self, tables: dict[str, str]) -> None:
        """Offer these slots, each of a table."""
        if tables != self._tables:
            self._tables, slots = tables, list(tables)
            kept = self._slot.value if self._slot.value in tables else next(iter(slots), None)
            self._slot.set_options(slots, value=kept)

    async def _look(self) -> None:
        slot, value = str(self._slot.value or ""), str(self._value.value or "")
        if slot not in self._tables or not value:
            self._say("Choose a slot, and give one of its values.")
            return
        path = f"{self._path}/tables/{quote(self._tables[slot], safe='')}/explain"
        try:
            found = await self._visitor.get(path, slot=slot, sign=value)
        except (RequestRefused, httpx.HTTPError) as error:
            self._say(str(error), "bad-text")
            return
        self._say("\n".join(found["lines"]))
        if self._forget is not None:
            self._delete.set_visibility(bool(found["known"].get("row")) and self._actions.possible(self._forget))

    def _say(self, text: str, tone: str = "") -> None:
        self._lines.set_text(text)
        self._lines.classes(replace=f"output {tone}")
        if self._forget is not None:
            self._delete.set_visibility(False)

    async def _ask(self) -> None:
        if self._forget is not None:
            await self._actions.open(self._forget, slot=self._slot.value, value=self._value.value)


def ranked_rows(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each of the rows with most shows."""
    return [
        (f"{number} {each['slot']} {each['sign']}", (
            GridCell(each["slot"] or GONE),
            GridCell(each["sign"]),
            GridCell(format_count(each["show"]), each["show"]),
            GridCell(format_count(each["click"]), each["click"]),
            GridCell(format_count(each["unseen_days"]), each["unseen_days"]),
        ))
        for number, each in enumerate(found)
    ]  # fmt: skip


def unseen_bars(parts: Sequence[Mapping[str, Any]]) -> Options:
    """A chart of rows by the days since they were seen."""
    return bars_chart(names_of_days(parts), [each["rows"] for each in parts], COLORS[0])


class Ranking:
    """The panels with the rows of a table that have most shows, and the days since rows were seen."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        with ui.element("div").classes("side"):
            with panel("Rows with most shows", "of one table; shows and clicks decay"):
                with ui.element("div").classes("line"):
                    self._table = ui.select([], label="Table").props("dense outlined options-dense")
                    self._go = ui.button("Show", color=None, on_click=self._look).props("outline no-caps").mark("rank")
                self._said = ui.label(NOT_RANKED).classes("hint output").props("role=status")
                self._grid = Grid(RANKED_COLUMNS, "", sort=2, descending=True)
            with panel("Days since rows were seen", "rows of the same table") as self._days:
                self._unseen = chart(bars_chart([], []), "Rows by days since they were seen")
        self._days.set_visibility(False)

    def show(self, tables: Sequence[str]) -> None:
        """Offer these tables."""
        if list(tables) != self._table.options:
            kept = self._table.value if self._table.value in tables else next(iter(tables), None)
            self._table.set_options(list(tables), value=kept)

    async def _look(self) -> None:
        if (table := self._table.value) is None:
            return
        self._go.disable()
        try:
            found = await self._visitor.get(f"{self._path}/tables/{quote(table, safe='')}/ranking")
        except (RequestRefused, httpx.HTTPError) as error:
            self._said.set_text(str(error) or f"the service does not answer: {type(error).__name__}")
            return
        finally:
            self._go.enable()
        self._said.set_text(f"{ranking_words(found)}.")
        self._grid.show(ranked_rows(found["rows"]))
        self._days.set_visibility(True)
        redraw(self._unseen, unseen_bars(found["unseen"]))


class RowsPart:
    """The part of a job's page about its rows."""

    def __init__(self, visitor: ApiCaller, name: str, actions: Actions) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._lookup, self._ranking = RowLookup(visitor, name, actions), Ranking(visitor, name)
        with ui.element("div").classes("side"):
            with panel("Rows by slot", "slots that share rows have the same ones"):
                self._rows = chart(bars_chart([], []), "Rows by slot")
            with panel("Memory by slot", "MiB: a slot's share of its table's memory, by rows"):
                self._bytes = chart(bars_chart([], []), "Memory by slot, in MiB")

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the present sizes."""
        tables = await list_all(self._visitor, f"{self._path}/tables")
        self._lookup.show(slot_tables(tables))
        self._ranking.show([each["name"] for each in tables if each["slots"]])
        redraw(self._rows, slot_bars(tables, "rows", 1, COLORS[0]))
        redraw(self._bytes, slot_bars(tables, "bytes", MIB, COLORS[2]))
