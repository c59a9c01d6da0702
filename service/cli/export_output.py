"""Prints a job's exports: the list, and one export."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.printable import print_printable
from headrace.service.exports import export_list
from headrace.service.monitor.lines import count, pending_text
from headrace.service.spec.job import LoadedJob

WIDE = 240
"""Columns of a table that is not printed to a terminal."""


def list_exports(job: LoadedJob, name: str | None, *, as_json: bool) -> None:
    """Print the exports in order of time, one row each."""
    with export_list.open_streams(job, name) as streams:
        entries = [entry for stream in streams for entry in export_list.entries_of(stream)]
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
    remarks = []
    if entry["current"]:
        remarks.append("current")
    if not entry["complete"]:
        remarks.append("not complete")
    if entry["damaged"]:
        remarks.append(f"damaged: {entry['damaged']}")
    if entry["failed_gates"]:
        remarks.append(f"failed gates: {', '.join(entry['failed_gates'])}")
    return "; ".join(remarks)


def show_export(job: LoadedJob, stream: str, text: str, *, as_json: bool) -> None:
    """Print what an export contains; as JSON, its whole manifest."""
    found = export_list.export_details(job, stream, text)
    for line in [json.dumps(found.manifest, indent=2)] if as_json else _details(found):
        print_printable(line)


def _details(shown: export_list.CompleteExport) -> Iterator[str]:
    manifest, parent = shown.manifest, shown.manifest["parent"]
    yield f"{shown.url}{' (current)' if shown.current else ''}"
    yield f"  {manifest['kind']} of version {manifest['version']}, made {manifest['made_at']}: {manifest['why']}"
    if parent is not None:
        yield f"  builds on {parent['timeline']}/{parent['name']}"
    for name, table in manifest["tables"].items():
        yield (
            f"  table {name}: {count(table['rows'])} rows, {count(table['tombstones'])} deleted, "
            f"{pending_text(table)}; {count(table['model_rows'])} rows in the model; {table['dtype']}"
        )
    for gate, found in manifest["gates"].items():
        yield f"  gate {gate}: {'passed' if found['passed'] else 'failed: ' + found['why']}"
    yield f"  files: {len(manifest['files'])}, {count(sum(file['bytes'] for file in manifest['files'].values()))} bytes"
