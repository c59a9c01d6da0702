"""A dialog before anything is done: what will happen, what must be filled in, and then what came of it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
from nicegui import ui

from service.ui.acts import Act, Field, Job, Kind, Known, ended_words, outcome_lines, request_of
from service.ui.asking import Asker, Refused
from service.ui.wording import share

ASK_S = 0.7
"""How often an operation is asked how it goes."""
OVER = ("done", "failed", "cancelled", "interrupted")


class Confirmation:
    """One dialog for one act."""

    def __init__(self, visitor: Asker, act: Act, known: Known, done: Callable[[], Awaitable[Job]]) -> None:
        """`done` is called once the act was asked for; it gives the job as it is then."""
        self._visitor, self._act, self._known, self._done = visitor, act, known, done
        self._fields: dict[str, Any] = {}
        with ui.dialog().props("persistent") as self._dialog, ui.element("div").classes("sheet"):
            ui.label(f"{act.label}: {known.job['name']}?").classes("title")
            ui.label(act.words).classes("hint words")
            for each in act.fields:
                self._fields[each.name] = _filled_in(each, known)
            self._said = ui.label().classes("note")
            self._said.set_visibility(False)
            self._progress = ui.linear_progress(0, show_value=False).props("instant-feedback")
            self._progress.set_visibility(False)
            with ui.element("div").classes("buttons"):
                self._leave = ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                self._go = ui.button(act.label, on_click=self._ask).props("unelevated no-caps")
                self._go.props(f"color={'negative' if act.grave else 'primary'}").mark("confirm")
        self._dialog.on_value_change(lambda event: None if event.value else self._dialog.delete())

    def open(self) -> None:
        """Show it."""
        self._dialog.open()

    async def _ask(self) -> None:
        self._go.disable()
        job = self._known.job
        try:
            names, body = request_of(self._act, self._filled())
            etag = f'"{job["revision"]}"' if self._act.tagged else None
            told = await self._visitor.call(self._act.operation, {"job": job["name"], **names}, body, etag)
            self._known = replace(self._known, job=await self._done())
            if "progress" not in told:  # no operation: it is asked for, and the phase will follow
                ui.notify(f"{self._act.label} is asked for: {job['name']} is to be {told['desired']}.")
                self._dialog.close()
            else:
                await self._follow(told)
        except (Refused, ValueError) as refused:
            self._say(str(refused), "bad")
            self._go.enable()
        except httpx.HTTPError as error:
            self._say(f"the service does not answer: {type(error).__name__}", "bad")
            self._go.enable()

    async def _follow(self, operation: Mapping[str, Any]) -> None:
        self._go.set_visibility(False)
        self._leave.set_text("Close")
        self._progress.set_visibility(True)
        while operation["state"] not in OVER and not self._dialog.is_deleted:
            self._progress.set_value(operation["progress"] or 0)
            self._progress.props(add="" if operation["progress"] else "indeterminate")
            self._say(f"It is {operation['state']}: {operation['said'] or 'begun'}. It goes on if you close this.", "")
            await asyncio.sleep(ASK_S)
            operation = await self._visitor.get(f"/operations/{quote(operation['id'], safe='')}")
        if self._dialog.is_deleted:
            return
        self._progress.set_visibility(False)
        well = operation["state"] == "done"
        self._say("\n".join([ended_words(operation), *outcome_lines(operation)]), "" if well else "bad")
        if not well or self._filled().get("dry_run"):  # it may be asked for again, or for good
            self._go.set_visibility(True)
            self._go.enable()

    def _filled(self) -> dict[str, Any]:
        return {name: each.value for name, each in self._fields.items()}

    def _say(self, text: str, tone: str) -> None:
        self._said.set_text(text)
        self._said.classes(replace=f"note {tone}")
        self._said.set_visibility(True)


def _filled_in(each: Field, known: Known) -> Any:
    """The element for a field; its `value` is what was filled in."""
    choices = list(each.choices(known))
    match each.kind:
        case Kind.FLAG:
            return ui.checkbox(each.label, value=bool(each.default)).props("dense")
        case Kind.NUMBER:
            return ui.number(each.label, value=each.default).props("dense outlined clearable")
        case Kind.CHOICE:
            first = None if each.optional or not choices else choices[0]
            return ui.select(choices, label=each.label, value=first, clearable=each.optional).props("dense outlined")
        case Kind.TEXT:
            return ui.input(each.label, autocomplete=choices).props("dense outlined autocomplete=off")


def progress_text(operation: Mapping[str, Any]) -> str:
    """How far an operation is, in words."""
    done = operation["progress"]
    parts = [share(done) if done is not None and operation["state"] == "running" else "", operation["said"]]
    return ", ".join(part for part in parts if part)
