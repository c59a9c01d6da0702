"""The buttons of a job's page, and the dialog before each: what will happen, what to fill in, what came of it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
from nicegui import ui

from headrace.service.api.actions import JobAction
from headrace.service.api.forms import FormContext, Job
from headrace.service.ui.action_catalog import (
    Input,
    InputKind,
    Weight,
    answered_words,
    ended_words,
    inputs_of,
    outcome_lines,
    permitted_actions,
    request_of,
    weight_of,
)
from headrace.service.ui.api_client import ApiCaller, RequestRefused, Visitor, list_all
from headrace.service.ui.format import format_percentage
from headrace.service.ui.frame import heading

ASK_S = 0.7
"""Time between two queries of an operation's state."""
OVER = ("done", "failed", "cancelled", "interrupted")


class Confirmation:
    """The dialog of one action."""

    def __init__(
        self, visitor: ApiCaller, act: JobAction, known: FormContext, done: Callable[[], Awaitable[Job]]
    ) -> None:
        """`done` is called after the request; it returns the job as it is then."""
        self._visitor, self._act, self._known, self._done = visitor, act, known, done
        self._fields: dict[str, Any] = {}
        name = f"{act.form.label}: {known.job['name']}"
        with (
            ui.dialog().props(f'no-backdrop-dismiss aria-label="{name}"') as self._dialog,
            ui.element("div").classes("sheet"),
        ):
            heading(f"{name}?", 2).classes("title")
            ui.label(act.form.words).classes("hint words")
            for each in inputs_of(act, known):
                self._fields[each.name] = _filled_in(each)
            self._said = ui.label().classes("note")
            self._said.set_visibility(False)
            self._progress = ui.linear_progress(0, show_value=False).props('instant-feedback aria-label="progress"')
            self._progress.set_visibility(False)
            with ui.element("div").classes("buttons"):
                self._leave = ui.button("Cancel", color=None, on_click=self._dialog.close).props("flat no-caps")
                self._go = ui.button(act.form.label, on_click=self._ask).props("unelevated no-caps")
                self._go.props(f"color={'negative' if act.form.grave else 'primary'}").mark("confirm")
        self._dialog.on_value_change(lambda event: None if event.value else self._dialog.delete())

    def open(self) -> None:
        """Show it."""
        self._dialog.open()

    async def _ask(self) -> None:
        self._go.disable()
        job = self._known.job
        try:
            names, body = request_of(self._act, self._filled())
            etag = f'"{job["revision"]}"' if self._act.if_match is not None else None
            answer = await self._visitor.call(self._act.id, {"job": job["name"], **names}, body, etag)
            self._known = replace(self._known, job=await self._done())
            if "progress" in (answer or {}):
                await self._follow(answer)
            else:
                ui.notify(answered_words(self._act, job["name"], answer), multi_line=True)
                self._dialog.close()
        except (RequestRefused, ValueError) as refused:
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
            step = operation["said"] or "started"
            self._say(f"The operation is {operation['state']}: {step}. It continues if you close this dialog.", "")
            await asyncio.sleep(ASK_S)
            operation = await self._visitor.get(f"/operations/{quote(operation['id'], safe='')}")
        if self._dialog.is_deleted:
            return
        self._progress.set_visibility(False)
        well = operation["state"] == "done"
        self._say("\n".join([ended_words(operation), *outcome_lines(operation)]), "" if well else "bad")
        if not well or self._filled().get("dry_run"):  # it may be requested again, or without the dry run
            self._go.set_visibility(True)
            self._go.enable()

    def _filled(self) -> dict[str, Any]:
        return {name: each.value for name, each in self._fields.items()}

    def _say(self, text: str, tone: str) -> None:
        self._said.set_text(text)
        self._said.classes(replace=f"note {tone}")
        self._said.set_visibility(True)


def _filled_in(each: Input) -> Any:
    """The element of an input; its `value` is what is filled in."""
    choices = list(each.options)
    match each.kind:
        case InputKind.FLAG:
            return ui.checkbox(each.label, value=bool(each.default)).props("dense")
        case InputKind.NUMBER:
            return ui.number(each.label, value=each.default).props("dense outlined clearable")
        case InputKind.CHOICE:
            first = None if each.optional or not choices else choices[0]
            first = each.default if each.default in choices else first
            return ui.select(choices, label=each.label, value=first, clearable=each.optional).props("dense outlined")
        case InputKind.TEXT:
            box = ui.input(each.label, value=str(each.default or ""), autocomplete=choices)
            return box.props("dense outlined autocomplete=off")


def progress_text(operation: Mapping[str, Any]) -> str:
    """The progress of an operation as text."""
    done = operation["progress"]
    parts = [format_percentage(done) if done is not None and operation["state"] == "running" else "", operation["said"]]
    return ", ".join(part for part in parts if part)


class Actions:
    """The buttons: everyday actions, and menus of the others. A reader without rights sees a note instead."""

    def __init__(self, visitor: Visitor, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._job: Job | None = None
        self._buttons: list[tuple[JobAction, ui.button]] = []
        self._items: list[tuple[JobAction, ui.menu_item]] = []
        self.permitted = acts = permitted_actions(visitor.may)
        with ui.element("div").classes("actions") as self._box:
            for weight in Weight:
                self._draw(weight, [act for act in acts if weight_of(act) is weight])
            if not acts:
                ui.label("read only").classes("hint")

    def show(self, job: Job) -> None:
        """Enable the buttons that are possible in the job's present state."""
        self._job = job
        for act, button in self._buttons:
            button.set_enabled(act.form.possible(job))
        for act, item in self._items:
            item.props(remove="disable") if act.form.possible(job) else item.props("disable")

    def _draw(self, weight: Weight, acts: Sequence[JobAction]) -> None:
        if not acts:
            return
        if weight is Weight.EVERYDAY:
            for act in acts:
                button = ui.button(act.form.label, color=None, on_click=lambda act=act: self.open(act))
                button.props("outline dense no-caps").mark(act.id)
                button.disable()
                self._buttons.append((act, button))
            return
        with ui.button(weight.value, color=None).props("outline dense no-caps icon-right=arrow_drop_down"):
            with ui.menu().props(f'aria-label="{weight.value}"'):
                for act in acts:
                    item = ui.menu_item(act.form.label, lambda act=act: self.open(act)).props("role=menuitem disable")
                    self._items.append((act, item.mark(act.id)))

    def possible(self, act: JobAction) -> bool:
        """Whether an action is possible in the job's present state."""
        return self._job is not None and act.form.possible(self._job)

    async def open(self, act: JobAction, **given: Any) -> None:
        """Open the dialog of an action; `given` are values that its fields begin with."""
        if self._job is not None:
            with self._box:  # the element that was pressed may be gone by now
                await self._ask(act, self._job, given)

    async def _ask(self, act: JobAction, job: Job, given: Mapping[str, Any]) -> None:
        try:
            spec = (await self._visitor.get(f"{self._path}/spec"))["spec"] if act.form.fields else {}
            commits = await list_all(self._visitor, f"{self._path}/commits") if act.form.with_commits else []
            exports = await list_all(self._visitor, f"{self._path}/exports") if act.form.with_exports else []
        except (RequestRefused, httpx.HTTPError) as error:
            ui.notify(str(error), type="negative")
            return
        names = [each["name"] for each in reversed(commits)]
        paths = [f"{each['timeline']}/{each['name']}" for each in reversed(exports) if each["complete"]]
        known = FormContext(job, spec, names, list(dict.fromkeys(paths)), given)
        Confirmation(self._visitor, act, known, self._again).open()

    async def _again(self) -> Job:
        job: Job = await self._visitor.get(self._path)
        self.show(job)
        return job
