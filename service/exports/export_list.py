"""The exports of a job: list them, show one, and choose the one that current.json names.

Reads the streams' export stores, so it works whether or not the job runs.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.done_markers import has_done
from headrace.errors import SpecError
from headrace.service.spec.job import LoadedJob
from headrace.trainer.exports.destination import ExportDestination, address_of, open_destination
from headrace.trainer.exports.manifest import ManifestUnusable
from headrace.trainer.exports.pointers import StoredExport, is_export, point_to, read_current, read_manifest
from headrace.validation import no_such

LOOK_S = 300.0
"""Longest time to list an export store."""


@dataclass(frozen=True)
class ExportStream:
    """One stream's exports in their store."""

    name: str
    outlet: ExportDestination

    def present(self) -> list[StoredExport]:
        """All exports in the store, complete or not, in order of time."""
        outlet = self.outlet
        paths = [f"{timeline}/{name}" for timeline in outlet.folders("") for name in outlet.folders(timeline)]
        found = [StoredExport(path, has_done(outlet.names(path))) for path in paths if is_export(path)]
        return sorted(found, key=lambda each: each.order)

    def current(self) -> str | None:
        """The path of the export that current.json names; None if there is no such file."""
        current = read_current(self.outlet)
        return None if current is None else str(current["path"])

    def chosen(self, text: str) -> str:
        """The path of the complete export that `text` means: its path, or its name or version on the newest timeline.

        Raises SpecError.
        """
        present = [each for each in self.present() if each.complete]
        found = [each.path for each in present if text in (each.path, each.path.partition("/")[2], str(each.order[1]))]
        if found:
            return found[-1]
        known = ", ".join(each.path for each in present[-20:])
        existing = f"there are: {known}" if known else "there are none"
        raise SpecError(f"stream {self.name} has no complete export {text!r}; {existing}")

    def manifest(self, path: str) -> dict[str, Any]:
        """The manifest of a complete export. Raises ManifestUnusable."""
        manifest = read_manifest(self.outlet, path)
        if manifest is None:
            raise ManifestUnusable(f"{self.outlet.url(path)}: is not complete, or has no manifest")
        return manifest


@contextmanager
def open_streams(job: LoadedJob, name: str | None) -> Iterator[list[ExportStream]]:
    """The streams of a job, or only the one called `name`. Raises SpecError, Unavailable."""
    sections = job.spec.exports
    if not sections:
        raise SpecError("the job has no exports; a section [exports.NAME] adds a stream", "exports")
    if name is not None and name not in sections:
        raise SpecError(no_such("stream", name, sections), "exports")
    with tempfile.TemporaryDirectory(prefix="headrace-exports-") as scratch:
        yield [
            ExportStream(
                stream,
                open_destination(
                    address_of(section, stream, job.store, job.folder),
                    job.spec.name,
                    Path(scratch) / stream,
                    Deadline.after(LOOK_S),
                ),
            )
            for stream, section in sections.items()
            if name in (None, stream)
        ]


def entries_of(stream: ExportStream) -> list[dict[str, Any]]:
    """An entry for each export of a stream, in order of time."""
    current = stream.current()
    return [_entry(stream, each) | {"current": each.path == current} for each in stream.present()]


def _entry(stream: ExportStream, present: StoredExport) -> dict[str, Any]:
    timeline, _, name = present.path.partition("/")
    entry: dict[str, Any] = {"stream": stream.name, "name": name, "timeline": timeline, "version": present.order[1]}
    entry |= {"kind": "base" if present.is_base else "delta", "complete": present.complete, "damaged": None}
    entry |= dict.fromkeys(("made_at", "rows", "tombstones", "pending", "bytes", "why"))
    entry |= {"failed_gates": []}
    if not present.complete:
        return entry
    try:
        manifest = stream.manifest(present.path)
        tables, files = manifest["tables"].values(), manifest["files"].values()
        return entry | {
            **{key: manifest[key] for key in ("made_at", "why")},
            **{key: sum(table[key] for table in tables) for key in ("rows", "tombstones", "pending")},
            "bytes": sum(file["bytes"] for file in files),
            "failed_gates": [gate for gate, found in manifest["gates"].items() if not found["passed"]],
        }
    except (ManifestUnusable, KeyError, TypeError) as error:
        return entry | {"damaged": str(error) or repr(error)}


@dataclass(frozen=True)
class CompleteExport:
    """One complete export."""

    path: str
    url: str
    manifest: Mapping[str, Any]
    current: bool


def export_details(job: LoadedJob, stream: str, text: str) -> CompleteExport:
    """The export that `text` means. Raises SpecError, ManifestUnusable, Unavailable."""
    with open_streams(job, stream) as [found]:
        path = found.chosen(text)
        return CompleteExport(path, found.outlet.url(path), found.manifest(path), path == found.current())


@dataclass(frozen=True)
class NewCurrent:
    """The export that current.json names now."""

    path: str
    url: str
    failed_gates: list[str]


def make_current(job: LoadedJob, stream: str, text: str) -> NewCurrent:
    """Have current.json name an export, even if it failed its gates, until the job's next export replaces it."""
    with open_streams(job, stream) as [found]:
        path = found.chosen(text)
        manifest = found.manifest(path)
        point_to(found.outlet, manifest)
        url = found.outlet.url(path)
    return NewCurrent(path, url, [gate for gate, each in manifest["gates"].items() if not each["passed"]])
