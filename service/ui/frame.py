"""Elements of every page: the header with the caller, error messages, a timer, and figures, chips and panels."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx
from fastapi import FastAPI, Request
from nicegui import background_tasks, ui
from nicegui.elements.mixins.text_element import TextElement

from headrace.service.ui.api_client import RequestRefused, Visitor
from headrace.service.ui.charts import Options
from headrace.service.ui.format import state_colour
from headrace.service.ui.page_access import ROOT, VISIT, Visit
from headrace.service.ui.sign_in import STYLE

log = logging.getLogger(__name__)

TICK_S = 1.0
PRIMARY = "#3b6fe0"
"""Colour of filled buttons: its contrast is 4.6 with white text, and 3.5 with the dark page."""


def visitor_of(api: FastAPI, request: Request) -> Visitor:
    """The visitor of the page that is being built; released when the page is closed."""
    visit: Visit = request.scope[VISIT]
    visitor = Visitor(api, visit)
    ui.context.client.on_delete(lambda: background_tasks.create(visitor.leave(), name="a visitor leaves"))
    return visitor


def add_header(visitor: Visitor) -> None:
    """Add the style sheet and the header."""
    ui.add_css(STYLE)
    ui.colors(primary=PRIMARY)
    caller, layout = visitor.caller, ui.context.client.layout
    with layout, ui.element("header").classes("top") as header:
        ui.link("Headrace", "/").classes("brand")
        ui.link("Jobs", "/")
        TextElement(tag="a", text="REST API").props("href=/docs")  # not a page of /ui, to which links lead
        role = caller.role.word if caller.role is not None else "none"
        ui.label(f"{caller.name} ({role})").classes("who")
        if visitor.signed_in:
            with ui.element("form").props(f'method=post action="{ROOT}/logout"'):
                ui.button("Sign out", color=None).props("flat dense no-caps type=submit")
        elif visitor.can_sign_in:
            ui.link("Sign in", "/login")
    header.move(layout, 0)  # beside the page's <main>, not in it


def heading(text: str, level: int) -> TextElement:
    """A heading, from level 1 on."""
    return TextElement(tag=f"h{level}", text=text)


def chart(options: Options, label: str, classes: str = "chart") -> ui.echart:
    """A chart that is drawn as SVG, so that its text takes the colours of the page; `label` says what it shows."""
    return ui.echart(options, renderer="svg").classes(classes).props(f'role=img aria-label="{label}"')


class ErrorLine:
    """A line with the present error; hidden without one."""

    def __init__(self) -> None:
        self._label = ui.label().classes("note bad")
        self._label.set_visibility(False)

    def say(self, text: str) -> None:
        """Show an error; hide the line if `text` is empty."""
        self._label.set_text(text)
        self._label.set_visibility(bool(text))


class PageTimer:
    """Calls `act` every TICK_S, one call at a time, until the page is closed, and shows its errors in `trouble`."""

    def __init__(self, act: Callable[[], Awaitable[None]], trouble: ErrorLine, every_s: float = TICK_S) -> None:
        self._act, self._trouble, self._busy = act, trouble, False
        self._client = ui.context.client
        self._timer = ui.timer(every_s, self._tick)

    async def _tick(self) -> None:
        if self._busy or not self._client.has_socket_connection:  # the page is not connected; it may reconnect
            return
        self._busy = True
        try:
            await self._act()
            self._trouble.say("")
        except RequestRefused as refused:
            if refused.status == HTTPStatus.UNAUTHORIZED:
                self._timer.deactivate()
                ui.navigate.to("/login")
            self._trouble.say(str(refused))
        except httpx.HTTPError as error:
            self._trouble.say(f"the service does not answer: {type(error).__name__}")
        finally:
            self._busy = False


class Figure:
    """A figure with its name above and a remark below."""

    def __init__(self, name: str, tip: str = "") -> None:
        with ui.element("div").classes("figure") as box:
            ui.label(name).classes("label")
            self._value = ui.label("–").classes("value")
            self._more = ui.label("").classes("more")
        if tip:
            box.tooltip(tip)

    def show(self, value: str, more: str = "", tone: str = "") -> None:
        """Show it."""
        self._value.set_text(value)
        self._value.classes(replace=f"value {tone}-text" if tone else "value")
        self._more.set_text(more)


class Chip:
    """A state as a coloured word."""

    def __init__(self) -> None:
        self._label = ui.label().classes("chip")

    def show(self, word: str, tone: str) -> None:
        """Show it."""
        self._label.set_text(word)
        self._label.classes(replace=f"chip {tone}")


CAUSE_TITLES = {"failed": "Failed", "broken": "Broken", "restarting": "Restarting", "waiting": "Waiting"}


class CauseBox:
    """Why a job failed, restarts or waits, and what to do; hidden where it does neither."""

    def __init__(self) -> None:
        with ui.element("div").classes("cause").props("role=status") as self._box:
            self._title = ui.label().classes("kind")
            self._text = ui.label().classes("text")
            self._advice = ui.label().classes("advice")
        self._box.set_visibility(False)

    def show(self, cause: Mapping[str, Any] | None) -> None:
        """Show it."""
        self._box.set_visibility(cause is not None)
        if cause is not None:
            self._box.classes(replace=f"cause {state_colour(cause['kind'])}")
            self._title.set_text(CAUSE_TITLES.get(cause["kind"], cause["kind"]))
            self._text.set_text(cause["text"])
            self._advice.set_text(cause["advice"])


def fact_list(facts: Sequence[tuple[str, str]]) -> None:
    """Titles with their texts."""
    with ui.element("dl").classes("facts"):
        for title, text in facts:
            TextElement(tag="dt", text=title)
            TextElement(tag="dd", text=text)


def panel(title: str, hint: str = "") -> ui.element:
    """A box with a title; a context for its content."""
    return titled_panel(title, hint)[0]


def titled_panel(title: str, hint: str = "") -> tuple[ui.element, TextElement]:
    """The same, and its title, whose text may change."""
    with ui.element("section").classes("panel") as box, ui.element("div").classes("title"):
        shown = heading(title, 2)
        if hint:
            ui.label(hint).classes("hint")
    return box, shown
