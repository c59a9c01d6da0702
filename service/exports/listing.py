"""`millrace exports`: what of a job's exports is there, what one holds, which one is pointed to.

Reads what lies at the streams' destinations; whether the job runs is of no matter.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from millrace.deadline import Deadline
from millrace.errors import SpecError
from millrace.mistakes import nearest
from millrace.printable import say
from service.lines import count, pending_text
from service.spec import LoadedJob
from trainer.exports import pointing
from trainer.exports.manifest import ManifestUnusable
from trainer.exports.ordering import address_of
from trainer.exports.outlet import Outlet, open_outlet
from trainer.exports.retention import Present, is_export
from trainer.markers import has_done

LOOK_S = 300.0
"""How long a destination may take to say what it holds."""
WIDE = 240
"""Columns of a table that no terminal shows."""


@dataclass(frozen=True)
class Stream:
    """One stream's exports at their destination."""

    name: str
    outlet: Outlet

    def present(self) -> list[Present]:
        """All that lie there, complete or not, in order of time."""
        outlet = self.outlet
        paths = [f"{timeline}/{name}" for timeline in outlet.folders("") for name in outlet.folders(timeline)]
        found = [Present(path, has_done(outlet.names(path))) for path in paths if is_export(path)]
        return sorted(found, key=lambda each: each.order)

    def current(self) -> str | None:
        """The path of what is pointed to."""
        told = pointing.read_current(self.outlet)
        return None if told is None else str(told["path"])

    def chosen(self, text: str) -> str:
        """The path that `text` means: a path, a name or a version, of the newest timeline. Raises SpecError."""
        present = [each for each in self.present() if each.complete]
        found = [each.path for each in present if text in (each.path, each.path.partition("/")[2], str(each.order[1]))]
        if found:
            return found[-1]
        known = ", ".join(each.path for each in present[-20:])
        there_are = f"there are: {known}" if known else "there are none"
        raise SpecError(f"stream {self.name} has no complete export {text!r}; {there_are}")

    def manifest(self, path: str) -> dict[str, Any]:
        """Of a complete export. Raises ManifestUnusable."""
        told = pointing.read_manifest(self.outlet, path)
        if told is None:
            raise ManifestUnusable(f"{self.outlet.url(path)}: is not complete, or has no manifest")
        return told


@contextmanager
def opened(job: LoadedJob, name: str | None) -> Iterator[list[Stream]]:
    """The streams of a job, or the one called `name`. Raises SpecError, Unavailable."""
    sections = job.spec.exports
    if not sections:
        raise SpecError("the job exports nothing; a section [exports.NAME] makes a stream", "exports")
    if name is not None and name not in sections:
        raise SpecError(f"there is no stream {name!r}; {nearest(name, sections)}", "exports")
    with tempfile.TemporaryDirectory(prefix="millrace-exports-") as scratch:
        yield [
            Stream(
                stream,
                open_outlet(
                    address_of(section, stream, job.store, job.folder),
                    job.spec.name,
                    Path(scratch) / stream,
                    Deadline.after(LOOK_S),
                ),
            )
            for stream, section in sections.items()
            if name in (None, stream)
        ]


def entries_of(stream: Stream) -> list[dict[str, Any]]:
    """What a list says of each export, in order of time."""
    current = stream.current()
    return [_entry(stream, each) | {"current": each.path == current} for each in stream.present()]


def _entry(stream: Stream, present: Present) -> dict[str, Any]:
    timeline, _, name = present.path.partition("/")
    entry: dict[str, Any] = {"stream": stream.name, "name": name, "timeline": timeline, "version": present.order[1]}
    entry |= {"kind": "base" if present.is_base else "delta", "complete": present.complete, "damaged": None}
    entry |= dict.fromkeys(("made_at", "rows", "tombstones", "pending", "bytes", "why"))
    entry |= {"failed_gates": []}
    if not present.complete:
        return entry
    try:
        told = stream.manifest(present.path)
        tables, files = told["tables"].values(), told["files"].values()
        return entry | {
            **{key: told[key] for key in ("made_at", "why")},
            **{key: sum(table[key] for table in tables) for key in ("rows", "tombstones", "pending")},
            "bytes": sum(file["bytes"] for file in files),
            "failed_gates": [gate for gate, found in told["gates"].items() if not found["passed"]],
        }
    except (ManifestUnusable, KeyError, TypeError) as error:
        return entry | {"damaged": str(error) or repr(error)}


def list_exports(job: LoadedJob, name: str | None, *, as_json: bool) -> None:
    """Print the exports in order of time, a row each."""
    with opened(job, name) as streams:
        entries = [entry for stream in streams for entry in entries_of(stream)]
    if as_json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print("there are no exports yet")
    else:
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=WIDE)).print(_table(entries))


def _table(entries: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("stream", "export", "made at", "rows", "deleted", "pending", "bytes", ""):
        table.add_column(heading, justify="right" if heading in ("rows", "deleted", "pending", "bytes") else "left")
    for entry in entries:
        counts = [count(entry[key]) for key in ("rows", "tombstones", "pending", "bytes")]
        path = f"{entry['timeline']}/{entry['name']}"
        table.add_row(entry["stream"], path, entry["made_at"] or "-", *counts, _remark(entry))
    return table


def _remark(entry: Mapping[str, Any]) -> str:
    words = []
    if entry["current"]:
        words.append("current")
    if not entry["complete"]:
        words.append("not complete")
    if entry["damaged"]:
        words.append(f"damaged: {entry['damaged']}")
    if entry["failed_gates"]:
        words.append(f"failed gates: {', '.join(entry['failed_gates'])}")
    return "; ".join(words)


def show_export(job: LoadedJob, stream: str, text: str, *, as_json: bool) -> None:
    """Print what one holds; as JSON, its whole manifest."""
    found = shown(job, stream, text)
    for line in [json.dumps(found.manifest, indent=2)] if as_json else _told(found):
        say(line)


@dataclass(frozen=True)
class Shown:
    """One complete export."""

    path: str
    url: str
    manifest: Mapping[str, Any]
    current: bool


def shown(job: LoadedJob, stream: str, text: str) -> Shown:
    """The export that `text` means. Raises SpecError, ManifestUnusable, Unavailable."""
    with opened(job, stream) as [found]:
        path = found.chosen(text)
        return Shown(path, found.outlet.url(path), found.manifest(path), path == found.current())


def _told(shown: Shown) -> Iterator[str]:
    told, parent = shown.manifest, shown.manifest["parent"]
    yield f"{shown.url}{' (current)' if shown.current else ''}"
    yield f"  {told['kind']} of version {told['version']}, made {told['made_at']}: {told['why']}"
    if parent is not None:
        yield f"  builds on {parent['timeline']}/{parent['name']}"
    for name, table in told["tables"].items():
        yield (
            f"  table {name}: {count(table['rows'])} rows, {count(table['tombstones'])} deleted, "
            f"{pending_text(table)}; {count(table['model_rows'])} rows in the model; {table['dtype']}"
        )
    for gate, found in told["gates"].items():
        yield f"  gate {gate}: {'passed' if found['passed'] else 'failed: ' + found['why']}"
    yield f"  files: {len(told['files'])}, {count(sum(file['bytes'] for file in told['files'].values()))} bytes"


@dataclass(frozen=True)
class Pointed:
    """What was made current."""

    path: str
    url: str
    failed_gates: list[str]


def point_to(job: LoadedJob, stream: str, text: str) -> Pointed:
    """Have current.json name an export, whatever its gates said, until the job points to its next one."""
    with opened(job, stream) as [found]:
        path = found.chosen(text)
        told = found.manifest(path)
        pointing.point(found.outlet, told, pointing.chain_of(found.outlet, told, ()))
        url = found.outlet.url(path)
    return Pointed(path, url, [gate for gate, each in told["gates"].items() if not each["passed"]])
