"""A job's settings: those changed while it ran, changes of its file that wait for a restart, and all of them."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.ui.api_client import ApiCaller
from headrace.service.ui.format import NONE
from headrace.service.ui.frame import panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

ORIGINS = {"set": "set while it ran", "chosen": "chosen at its begin", "file": "job file", "default": "default"}
COLUMNS = (
    Column("Key", long=True),
    Column("In force", long=True),
    Column("In the job file", long=True),
    Column("From"),
)
WAITING_COLUMNS = (
    Column("Key", long=True),
    Column("Run", long=True),
    Column("Job file", long=True),
    Column("What takes it", long=True),
)
NOTHING_SET = "Nothing was changed while the job ran."
NOTHING_WAITS = "The run has the job file as it is."


def setting_rows(settings: Sequence[Mapping[str, Any]], text: str = "") -> list[Row]:
    """A row for each setting whose key or value has the text."""
    wanted = text.strip().lower()
    return [
        (each["key"], (
            GridCell(each["key"]),
            GridCell(each["now"], raw=True),
            GridCell(NONE if each["file"] is None else each["file"], raw=True),
            GridCell(ORIGINS.get(each["origin"], each["origin"]), tone="warn" if each["origin"] == "set" else ""),
        ))
        for each in settings
        if wanted in each["key"].lower() or wanted in each["now"].lower()
    ]  # fmt: skip


def waiting_rows(changes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each change of the job file that the run has not taken."""
    return [
        (each["key"], (
            GridCell(each["key"]),
            GridCell(each["was"], raw=True),
            GridCell(each["now"], raw=True),
            GridCell(f"{each['to_do']}{f' ({note})' if (note := each['note']) else ''}"),
        ))
        for each in changes
    ]  # fmt: skip


class SettingsPart:
    """The part of a job's page about its settings."""

    def __init__(self, visitor: ApiCaller, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}/settings"
        self._settings: Sequence[Mapping[str, Any]] = ()
        with panel("Changed while it ran", "also after a restart, until the job file has another value of the key"):
            self._set = Grid(COLUMNS, NOTHING_SET)
        with panel("Changes of the job file that the run has not taken"):
            self._waiting = Grid(WAITING_COLUMNS, NOTHING_WAITS)
        with panel("All settings", "values as JSON"):
            self._text = ui.input("Search", on_change=self._draw).props("dense outlined clearable debounce=300")
            self._all = Grid(COLUMNS, "No setting has this text.")

    async def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show the present settings."""
        found = await self._visitor.get(self._path)
        self._settings = found["settings"]
        self._set.show(setting_rows([each for each in self._settings if each["origin"] == "set"]))
        self._waiting.show(waiting_rows(found["waiting"]))
        self._draw()

    def _draw(self) -> None:
        self._all.show(setting_rows(self._settings, self._text.value or ""))
