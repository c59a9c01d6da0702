"""A job's workers: machine, processor time, memory, waits, traffic; and the one that the others wait for."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from nicegui import ui

from headrace.service.ui.action_buttons import OVER, Actions
from headrace.service.ui.action_catalog import outcome_lines
from headrace.service.ui.api_client import ApiCaller
from headrace.service.ui.format import NONE, format_bytes, format_duration, format_time
from headrace.service.ui.frame import panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

COLUMNS = (
    Column("Worker"),
    Column("Role"),
    Column("Machine"),
    Column("Process", number=True),
    Column("Cores", number=True),
    Column("Processor time", number=True),
    Column("Memory", number=True),
    Column("Waited for others", number=True),
    Column("Others waited for it", number=True),
    Column("Sent", number=True),
    Column("Received", number=True),
    Column("Note", long=True),
)
NO_WORKER = "There are no figures of workers yet. They come with the first pass that closes."
TRACE = "recordTrace"
NO_TRACE = "No trace was recorded lately."
SENT, RECEIVED = ("sent_bytes", "shared_sent_bytes"), ("received_bytes", "shared_received_bytes")


def worker_rows(job: Mapping[str, Any]) -> list[Row]:
    """A row for each worker that has figures."""
    links, usage = job["links"], job["usage"]
    peers = {peer for found in links.values() for peer in found}
    slow = f"trainer-{job['straggler']['rank']}" if job["straggler"] else ""
    return [(worker, _cells(worker, links, usage.get(worker, {}), slow)) for worker in sorted({*links, *usage, *peers})]


def _cells(worker: str, links: Mapping[str, Any], used: Mapping[str, Any], slow: str) -> list[GridCell]:
    own = links.get(worker, {}).values()
    waited_s = sum(found.get("wait_s", 0.0) for found in own)
    for_it_s = sum(found[worker].get("wait_s", 0.0) for found in links.values() if worker in found)
    sent, received = (sum(found.get(key, 0) for found in own for key in keys) for keys in (SENT, RECEIVED))
    cores, cpu_s, memory = (used.get(key) for key in ("cores", "cpu_s", "memory_bytes"))
    return [
        GridCell(worker),
        GridCell(worker.partition("-")[0]),
        GridCell(used.get("machine") or NONE),
        GridCell(str(used.get("pid") or NONE), used.get("pid")),
        GridCell(NONE if cores is None else f"{cores:.2f}", cores),
        GridCell(format_duration(cpu_s), cpu_s),
        GridCell(format_bytes(memory), memory),
        GridCell(format_duration(waited_s), waited_s),
        GridCell(format_duration(for_it_s), for_it_s),
        GridCell(format_bytes(sent), sent),
        GridCell(format_bytes(received), received),
        GridCell("the others wait for it" if worker == slow else "", tone="warn"),
    ]


def trace_link(job: str) -> str:
    """The link by which a browser session downloads a job's trace, relative to the root of all pages."""
    return f"/trace/{quote(job, safe='')}"


def trace_words(operation: Mapping[str, Any] | None) -> str:
    """The newest recording of a trace, as text."""
    if operation is None:
        return NO_TRACE
    if operation["state"] not in OVER:
        return "It is being recorded."
    return f"{format_time(operation['ended'])} UTC: {'; '.join(outcome_lines(operation)) or operation['state']}"


class WorkersPart:
    """The part of a job's page about its workers."""

    def __init__(self, visitor: ApiCaller, name: str, actions: Actions) -> None:
        self._visitor, self._name, self._actions = visitor, name, actions
        self._trace = next((act for act in actions.permitted if act.id == TRACE), None)
        self._straggler = ui.label().classes("note warn")
        self._straggler.set_visibility(False)
        with panel(
            "Workers", "waits and traffic since the workers started; cores in recent passes, without pipe commands"
        ):
            self._grid = Grid(COLUMNS, NO_WORKER)
        with panel("Trace", "what each thread does in the next steps"), ui.element("div").classes("line"):
            if (trace := self._trace) is not None:
                self._record = ui.button(trace.form.label, color=None, on_click=lambda: actions.open(trace))
                self._record.props("outline no-caps")
            self._traced = ui.label(NO_TRACE).classes("hint")
            self._file = ui.link("Download it, and open it in ui.perfetto.dev", trace_link(name))
            self._file.set_visibility(False)

    async def refresh(self, job: Mapping[str, Any]) -> None:
        """Show the present figures."""
        if self._trace is not None:
            self._record.set_enabled(self._actions.possible(self._trace))
        text = (job["straggler"] or {}).get("text", "")
        self._straggler.set_text(text)
        self._straggler.set_visibility(bool(text))
        self._grid.show(worker_rows(job), NO_WORKER)
        operations = (await self._visitor.get("/operations", job=self._name, limit=50))["items"]
        newest = next((each for each in operations if each["kind"] == "trace"), None)
        self._traced.set_text(trace_words(newest))
        self._file.set_visibility(newest is not None and newest["state"] == "done")
