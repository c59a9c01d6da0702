"""The trace of a run: the timelines of its workers, put together as one file in the trace format of Chrome.

Perfetto (https://ui.perfetto.dev) and chrome://tracing read it. Workers are processes of the trace, their threads are
its threads. headrace.timeline records the parts, one file for each worker, below the store on the worker's machine.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.service.cluster.store import TRACE, TRACE_PARTS, TRACE_REQUEST
from headrace.timeline import FORMAT, LOOK_S, Span, TraceWindow

MAX_PART_BYTES = 64 << 20
"""Longest part; one with the most spans has about 10 MB."""
PART = re.compile(r"g([0-9]+)-(.+)\.json")
"""Name of the file of a part: generation and worker."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The timeline of one worker."""

    worker: str
    content: Mapping[str, Any]

    @property
    def anchor(self) -> tuple[str, int]:
        """The clock of its machine, and what to add to its times to get wall time."""
        return self.content["clock"], self.content["wall_ns"] - self.content["monotonic_ns"]


def begin_trace(store: Path) -> None:
    """Remove the trace of an earlier run."""
    shutil.rmtree(store / TRACE_PARTS, ignore_errors=True)
    with writing(store / TRACE):
        (store / TRACE).unlink(missing_ok=True)


def record_trace(store: Path, steps: int, workers: Sequence[str], deadline: Deadline) -> str:
    """Have the workers of a run record a timeline of their next steps, and put it together. Returns a sentence.

    1. Remove an earlier trace. 2. Ask for the steps: every worker looks for the request. 3. Wait for all parts, at most
    until the deadline. 4. Put them together. Raises Unwritable.
    """
    begin_trace(store)  # 1
    with writing(store / TRACE_REQUEST):
        write_whole(REAL, store / TRACE_REQUEST, TraceWindow(steps=steps).model_dump_json().encode())  # 2
    while not deadline.passed():  # 3
        if {*workers} <= _recorded(store / TRACE_PARTS):
            break
        time.sleep(LOOK_S)
    return finish_trace(store, workers)  # 4


def finish_trace(store: Path, workers: Sequence[str]) -> str:
    """Put the parts of the newest generation together, and remove all parts. Returns a sentence about it.

    `workers`: all names. Raises Unwritable.
    """
    parts, unread = _read(store / TRACE_PARTS)
    if not parts:
        return f"no worker has recorded a timeline{unread}"
    with writing(store / TRACE):
        write_whole(REAL, store / TRACE, _encoded(parts))
    shutil.rmtree(store / TRACE_PARTS, ignore_errors=True)
    missing = sorted({*workers} - {part.worker for part in parts})
    lacks = f"; it lacks {', '.join(missing)}: killed, or on another machine in {store / TRACE_PARTS}" * bool(missing)
    num_dropped = sum(part.content["dropped"] for part in parts)
    dropped = f"; {num_dropped} older spans were dropped" * bool(num_dropped)
    return f"{store / TRACE}{lacks}{dropped}{unread}"


def _recorded(folder: Path) -> set[str]:
    """The workers with a part of the newest generation with any. No part is opened: each is written whole."""
    found: dict[int, set[str]] = {}
    for generation, worker, _ in _files(folder):
        found.setdefault(generation, set()).add(worker)
    return found[max(found)] if found else set()


def _files(folder: Path) -> list[tuple[int, str, Path]]:
    """The generation, the worker and the file of each part."""
    return [
        (int(found[1]), found[2], path) for path in sorted(folder.glob("g*")) if (found := PART.fullmatch(path.name))
    ]


def _read(folder: Path) -> tuple[list[_Part], str]:
    """The parts of the newest generation with any, by name of the worker; and what is wrong with others, in words."""
    found: dict[int, list[_Part]] = {}
    wrong = []
    for generation, worker, path in _files(folder):
        try:
            content = documents.read_object(path, MAX_PART_BYTES)
            if content.get("format") != FORMAT:
                raise ValueError(f"{path} is of format {content.get('format')}, not {FORMAT}")
            found.setdefault(generation, []).append(_Part(worker, content))
        except (OSError, ValueError) as error:
            wrong.append(str(error))
    return found[max(found)] if found else [], "".join(f"; {why}" for why in wrong)


def _encoded(parts: Sequence[_Part]) -> bytes:
    anchors: dict[str, int] = {}
    for clock, wall_ns in (part.anchor for part in parts):
        anchors.setdefault(clock, wall_ns)  # one for each machine, whose processes read the same clock
    begins_ns = [span[2] + anchors[part.anchor[0]] for part in parts for span in part.content["spans"]]
    zero_ns = min(begins_ns, default=0)
    events = [
        event
        for process, part in enumerate(parts, 1)
        for event in _events(process, part, anchors[part.anchor[0]] - zero_ns)
    ]
    about = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_wall_s": zero_ns / 1e9}}
    return json.dumps(about, separators=(",", ":")).encode()


def _events(process: int, part: _Part, shift_ns: int) -> Iterator[dict[str, Any]]:
    """The events of one worker: its names, then its spans."""
    content = part.content
    named = {"ph": "M", "pid": process}
    yield {**named, "name": "process_name", "args": {"name": part.worker}}
    yield {**named, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, name in enumerate(content["threads"]):
        yield {**named, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for kind, thread, begin_ns, end_ns, step in content["spans"]:
        name = content["names"][kind]
        times = {"ts": (begin_ns + shift_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        args = {"args": {"step": step}} if name == Span.STEP else {}
        yield {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": name, **times, **args}
