"""The page that creates a job: an example or a sample of events to begin with, the job file, and its errors."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from nicegui import ui

from headrace.service.ui.api_client import RequestRefused, Visitor
from headrace.service.ui.frame import ErrorLine, heading, panel
from headrace.service.ui.overview import job_link

HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\-\"]+)\s*\]\]?")
ENTRY = re.compile(r"\s*([\w.\-\"]+)\s*=")
SAID_KEY = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*): (.*)")
SAID_LINE = re.compile(r"\(at line (\d+), column \d+\)")
"""How an error of TOML names its place."""
NOT_ALLOWED = "Only an admin may create jobs. Sign in with such a token."
SAMPLE_HINT = '{"user": "u1", "item": "i7", "ts": 1764460800, "click": 1}'
BUSY = "It is being read."


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of a job file."""

    key: str
    text: str
    line: int | None
    """The number of the line in the job file that it is about; None: it is about none."""


def key_lines(toml: str) -> dict[str, int]:
    """The numbers of the lines of a job file by the path of their key or section; `slots.2` is the third slot."""
    found: dict[str, int] = {}
    section, counts = "", dict[str, int]()
    for number, line in enumerate(toml.split("\n"), 1):
        if header := HEADER.match(line):
            section = header[2].replace('"', "")
            if header[1] == "[[":
                counts[section] = counts.get(section, -1) + 1
                section = f"{section}.{counts[section]}"
            found.setdefault(section, number)
        elif entry := ENTRY.match(line):
            key = entry[1].replace('"', "")
            found.setdefault(f"{section}.{key}" if section else key, number)
    return found


def faults_of(toml: str, detail: str, path: str | None = None) -> list[Fault]:
    """The errors in the words of the API, each with its line: that of the key, or of the section it is missing in."""
    lines, faults = key_lines(toml), list[Fault]()
    for text in detail.splitlines():
        said = SAID_KEY.fullmatch(text)
        key = (said[1] if said else path or "").removeprefix("body.").removeprefix("spec.")
        parts = key.split(".")
        known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        line = next((lines[each] for each in known if each in lines), None)
        if (at := SAID_LINE.search(text)) and key == "toml":
            line = min(int(at[1]), toml.count("\n") + 1)
        faults.append(Fault(key, said[2] if said else text, line))
    return faults


def line_range(text: str, number: int) -> tuple[int, int]:
    """Where a line begins and ends in a text, in characters."""
    lines = text.split("\n")
    begin = sum(len(line) + 1 for line in lines[: number - 1])
    return begin, begin + len(lines[number - 1]) if number <= len(lines) else begin


class FaultList:
    """The errors of a job file, with the lines that they are about; a press on one goes to its line."""

    def __init__(self, go_to: Callable[[int], None]) -> None:
        self._go_to = go_to
        self._box = ui.element("div").classes("faults").props("role=alert")

    def show(self, faults: Sequence[Fault], toml: str) -> None:
        """Show these."""
        self._box.clear()
        lines = toml.split("\n")
        with self._box:
            for each in faults:
                with ui.element("div").classes("note bad"):
                    ui.label(f"{each.key}: {each.text}" if each.key else each.text)
                    if each.line is not None:
                        words = f"line {each.line}: {lines[each.line - 1].strip()}"
                        button = ui.button(words, color=None, on_click=lambda line=each.line: self._go_to(line))
                        button.props("flat dense no-caps align=left").classes("raw")


class NewJobPage:
    """The page that creates a job."""

    def __init__(self, visitor: Visitor) -> None:
        self._visitor, self._examples = visitor, dict[str, Mapping[str, Any]]()
        with ui.element("div").classes("page"):
            heading("New job", 1).classes("name")
            self._trouble = ErrorLine()
            if not visitor.may("createJob"):
                self._trouble.say(NOT_ALLOWED)
                return
            with ui.element("div").classes("side"):
                self._draw_example()
                self._draw_sample()
            self._draw_file()
        ui.timer(0.1, self._load, once=True)

    def _draw_example(self) -> None:
        with panel("Begin with an example", "its folder and its commands must be allowed by the service"):
            with ui.element("div").classes("line"):
                self._example = ui.select({}, label="Example").props("dense outlined options-dense").classes("wide")
                ui.button("Take it", color=None, on_click=self._take).props("outline no-caps").mark("take")

    def _draw_sample(self) -> None:
        with panel("Or with a sample of events", "JSON objects, one a line; the proposal is a guess to check"):
            self._events = ui.textarea("Events", placeholder=SAMPLE_HINT).props("outlined dense rows=5").classes("code")
            with ui.element("div").classes("line"):
                self._paths = ui.input("Files of the events", placeholder="/data/clicks/*.jsonl")
                self._paths.props("dense outlined").classes("wide")
                ui.button("Propose", color=None, on_click=self._propose).props("outline no-caps").mark("propose")
            self._said = ui.label().classes("hint")

    def _draw_file(self) -> None:
        with panel("Job file", "TOML; without a section [store], the service keeps the job's store in its own folder"):
            with ui.element("div").classes("line"):
                self._name = ui.input("Name (default: that of the file)").props("dense outlined").classes("wide")
                self._base = ui.input("Folder where relative paths start").props("dense outlined").classes("wide")
            self._toml = ui.textarea("Job file").props("outlined rows=22 spellcheck=false").classes("code toml")
            self._faults = FaultList(self._go_to)
            with ui.element("div").classes("line"):
                self._start = ui.checkbox("Start it at once", value=True).props("dense")
                self._create = ui.button("Create", on_click=self._ask).props("unelevated no-caps").mark("create")

    async def _load(self) -> None:
        found = await self._called(self._visitor.get("/examples"))
        if found is not None:
            self._examples = {each["name"]: each for each in found["items"]}
            titles = {name: f"{name}: {each['title']}" for name, each in self._examples.items()}
            self._example.set_options(titles, value=next(iter(titles), None))

    async def _take(self) -> None:
        if (chosen := self._examples.get(str(self._example.value))) is not None:
            self._fill(chosen["toml"], chosen["base"])

    async def _propose(self) -> None:
        body = {"events": self._events.value or "", **({"paths": self._paths.value} if self._paths.value else {})}
        self._said.set_text(BUSY)
        found = await self._called(self._visitor.call("inferSpec", {}, body))
        self._said.set_text("")
        if found is not None:
            self._fill(found["toml"], "")
            notes = [*found["bad_lines"], *(f"fill in {each}" for each in found["missing"])]
            self._said.set_text("; ".join([f"{found['events']:,} events were read", *notes]))

    def _fill(self, toml: str, base: str) -> None:
        self._toml.set_value(toml)
        self._base.set_value(base)
        self._faults.show([], toml)

    async def _ask(self) -> None:
        toml = str(self._toml.value or "")
        given = {"name": self._name.value, "base": self._base.value}
        body = {"toml": toml, "start": bool(self._start.value), **{name: each for name, each in given.items() if each}}
        self._create.disable()
        try:
            job = await self._visitor.call("createJob", {}, body)
            ui.navigate.to(job_link(job["name"]))
        except RequestRefused as refused:
            self._faults.show(faults_of(toml, refused.detail, refused.path), toml)
        except httpx.HTTPError as error:
            self._trouble.say(f"the service does not answer: {type(error).__name__}")
        finally:
            self._create.enable()

    async def _called(self, answer: Any) -> Any:
        """The answer, or None after its error is shown."""
        try:
            found = await answer
        except (RequestRefused, httpx.HTTPError) as error:
            self._trouble.say(str(error) or f"the service does not answer: {type(error).__name__}")
            return None
        self._trouble.say("")
        return found

    def _go_to(self, line: int) -> None:
        begin, end = line_range(str(self._toml.value or ""), line)
        place = json.dumps([begin, end])
        ui.run_javascript(
            f"const box = document.querySelector('.toml textarea'), at = {place}; box.focus(); "
            "box.setSelectionRange(at[0], at[1]); "
            f"box.scrollTop = {line - 4} * parseFloat(getComputedStyle(box).lineHeight)"
        )
