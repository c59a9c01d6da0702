"""The operations on a job: their progress and results, and a button to cancel them."""

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from headrace.service.ui.action_buttons import OVER, progress_text
from headrace.service.ui.action_catalog import outcome_lines
from headrace.service.ui.api_client import ApiCaller, RequestRefused
from headrace.service.ui.format import format_time, state_colour
from headrace.service.ui.frame import panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

LAST = 50
COLUMNS = (
    Column("Begun, UTC"),
    Column("What"),
    Column("By"),
    Column("State"),
    Column("Ended, UTC"),
    Column("Result", long=True),
)
NOTHING = "There are no operations yet. Commits, exports, shrinks and settings are listed here for 7 days."


def operation_rows(operations: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each operation."""
    return [(each["id"], _cells(each)) for each in operations]


def _cells(operation: Mapping[str, Any]) -> Sequence[GridCell]:
    over = operation["state"] in OVER
    text = "\n".join(outcome_lines(operation)) if over else progress_text(operation)
    return (
        GridCell(format_time(operation["created"])),
        GridCell(operation["kind"]),
        GridCell(operation["who"]),
        GridCell(operation["state"], tone=state_colour(operation["state"]), chip=True),
        GridCell(format_time(operation["ended"])),
        GridCell(text, tone="bad" if operation["state"] == "failed" else "", raw="\n" in text),
    )


class OperationsPart:
    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._name = visitor, name
        self._may = visitor.may("cancelOperation")
        self._live: list[str] = []
        with panel("Operations", "newest first"):
            self._cancelling = ui.element("div")
            self._grid = Grid(COLUMNS, NOTHING)

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the present operations."""
        operations = (await self._visitor.get("/operations", job=self._name, limit=LAST))["items"]
        self._grid.show(operation_rows(operations))
        live = [each for each in operations if each["state"] not in OVER] if self._may else []
        if [each["id"] for each in live] != self._live:
            self._live = [each["id"] for each in live]
            self._cancelling.clear()
            with self._cancelling:
                for each in live:
                    self._line(each)

    def _line(self, operation: Mapping[str, Any]) -> None:
        async def cancel() -> None:
            try:
                await self._visitor.call("cancelOperation", {"id": operation["id"]})
                ui.notify(
                    f"The {operation['kind']} is being cancelled. Requests that reached the job are still carried out."
                )
            except RequestRefused as refused:
                ui.notify(str(refused), type="negative")

        with ui.element("div").classes("line"):
            ui.label(f"{operation['kind']} by {operation['who']} is not finished.").classes("hint")
            ui.button("Cancel it", color=None, on_click=cancel).props("flat dense no-caps")
