"""One version of a job with its files and actions, and two versions side by side."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from nicegui import ui

from headrace.printable import counted
from headrace.service.ui.action_buttons import Actions
from headrace.service.ui.api_client import ApiCaller, RequestRefused
from headrace.service.ui.format import NONE, format_bytes, format_count, format_metric, format_time
from headrace.service.ui.frame import fact_list, heading, panel
from headrace.service.ui.grid import Column, Grid, GridCell, Row

MEASURES = {"auc": "window AUC", "gauc": "window GAUC", "logloss": "window log loss", "calibration": "calibration"}
MAX_POSITIONS = 12
"""Most partitions whose positions are shown."""
COLUMNS = (
    Column("Figure"),
    Column("First", number=True),
    Column("Second", number=True),
    Column("Change", number=True),
)
TOO_FEW = "There are fewer than two versions to compare."
Figures = Mapping[str, float | None]


def key_of(entry: Mapping[str, Any]) -> str:
    """The name of a commit or an export among all versions of the job."""
    return f"{entry['stream']}/{entry['timeline']}/{entry['name']}" if "stream" in entry else str(entry["name"])


def figures_of_version(entry: Mapping[str, Any], close: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The figures of a commit or an export that can be compared; `close` is that of its version."""
    found: dict[str, float | None] = {
        name: entry[key]
        for name, key in (("events", "events"), ("rows", "rows"), ("rows deleted", "tombstones"), ("bytes", "bytes"))
        if entry.get(key) is not None
    }
    tasks = {} if close is None else close["window"]
    for task, measures in tasks.items():
        of_task = f" of {task}" if len(tasks) > 1 else ""
        found |= {f"{title}{of_task}": measures.get(key) for key, title in MEASURES.items() if key in measures}
    return found


def compared_rows(first: Figures, second: Figures) -> list[Row]:
    """A row for each figure of two versions."""
    return [
        (name, (
            GridCell(name),
            GridCell(_words(name, first.get(name)), first.get(name)),
            GridCell(_words(name, second.get(name)), second.get(name)),
            GridCell(_change(name, first.get(name), second.get(name))),
        ))
        for name in dict.fromkeys([*first, *second])
    ]  # fmt: skip


def _words(name: str, value: float | None) -> str:
    if name == "bytes":
        return format_bytes(value)
    return format_count(value) if isinstance(value, int) else format_metric(value)


def _change(name: str, first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return NONE
    change = second - first
    return f"{'-' if change < 0 else '+'}{_words(name, abs(change))}"


class Comparison:
    """The panel that compares two versions: by default, the newest two of the same kind."""

    def __init__(self) -> None:
        self._figures: Mapping[str, Figures] = {}
        self._newest: list[str] = []
        with panel("Compare two versions", "window metrics are of predictions made before training on the samples"):
            with ui.element("div").classes("line") as self._choosers:
                self._first = self._chooser("First version")
                self._second = self._chooser("Second version")
            self._grid = Grid(COLUMNS, TOO_FEW)

    def show(self, figures: Mapping[str, Figures]) -> None:
        """Show the present versions, newest first, each with its figures."""
        self._figures, keys = figures, list(figures)
        if keys != self._first.options:
            newest = [key for key in keys if key.count("/") == keys[0].count("/")][:2] if keys else []
            for chooser, default in zip((self._second, self._first), newest, strict=False):
                chosen = chooser.value in figures and chooser.value not in self._newest
                chooser.set_options(keys, value=chooser.value if chosen else default)
            self._newest = newest
        self._choosers.set_visibility(len(keys) > 1)
        self._draw()

    def _chooser(self, label: str) -> ui.select:
        return ui.select([], label=label, on_change=self._draw).props("dense outlined options-dense")

    def _draw(self) -> None:
        first, second = self._figures.get(str(self._first.value)), self._figures.get(str(self._second.value))
        both = len(self._figures) > 1 and first is not None and second is not None
        self._grid.show(compared_rows(first or {}, second or {}) if both else [])


def commit_facts(commit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The content of a commit: titles and texts."""
    rows: dict[str, int] = {}
    for part in commit["parts"]:
        for table, number in part["rows"].items():
            rows[table] = rows.get(table, 0) + number
    positions = list(commit["positions"].items())
    shown = [f"{name}: {format_count(at)}" for name, at in positions[:MAX_POSITIONS]]
    more = [f"and {len(positions) - MAX_POSITIONS:,} more"] if len(positions) > MAX_POSITIONS else []
    return [
        ("Made, UTC", format_time(commit["made_at"])),
        ("Made by", f"generation {commit['generation']:,}, {counted(commit['trainers'], 'trainer')}"),
        ("Timeline", commit["timeline"]),
        ("After", commit["parent"] or "the beginning"),
        ("Events", format_count(commit["progress"].get("num_events"))),
        ("Samples", format_count(commit["progress"].get("num_samples"))),
        ("Rejected", _counts(commit["rejected"]) or "none"),
        ("Rows", _counts(rows)),
        ("Size", f"{format_bytes(commit['bytes'])} in {format_count(commit['files'])} files"),
        ("Freed if removed", format_bytes(commit["own_bytes"])),
        ("Kept for", ", ".join(commit["held_by"]) or "nobody"),
        ("Positions", ", ".join([*shown, *more])),
        ("Made with", ", ".join(f"{name} {version}" for name, version in commit["made_with"].items())),
        *([("Damaged", commit["damaged"])] if commit["damaged"] else []),
    ]  # fmt: skip


def export_facts(export: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The content of an export: titles and texts."""
    manifest = export["manifest"]
    gates = [f"{name}: {'passed' if found['passed'] else 'failed'}" for name, found in manifest["gates"].items()]
    tables = {name: table["rows"] for name, table in manifest["tables"].items()}
    return [
        ("Made, UTC", format_time(manifest.get("made_at"))),
        ("Kind", str(manifest["kind"])),
        ("Reason", str(manifest.get("why") or NONE)),
        ("State", "served now" if export["current"] else "not served"),
        ("Gates", ", ".join(gates) or "none"),
        ("Rows", _counts(tables)),
        ("Address", export["url"]),
    ]


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_count(number)}" for name, number in found.items())


def file_link(job: str, stream: str, path: str, file: str) -> str:
    """The link by which a browser session downloads a file of an export, relative to the root of all pages."""
    timeline, _, name = path.partition("/")
    return "/exports/" + "/".join(quote(each, safe="") for each in (job, stream, timeline, name, file))


def file_rows(files: Mapping[str, tuple[int, str]]) -> list[Row]:
    """A row for each file with its size, and the link to it where there is one."""
    return [
        (file, (GridCell(file, link=link), GridCell(format_bytes(size), size))) for file, (size, link) in files.items()
    ]


class VersionSheet:
    """The dialog about one commit or export."""

    def __init__(self, visitor: ApiCaller, job: str, actions: Actions) -> None:
        self._visitor, self._job, self._actions = visitor, job, actions
        self._path = f"/jobs/{quote(job, safe='')}"
        self._place = ui.element("div")

    async def open(self, key: str) -> None:
        """Show the version of this key."""
        with self._place:  # the cell that was pressed may be drawn anew by now
            try:
                await (self._export(*key.split("/", 2)) if "/" in key else self._commit(key))
            except (RequestRefused, httpx.HTTPError) as error:
                ui.notify(str(error), type="negative")

    async def _commit(self, name: str) -> None:
        commit = await self._visitor.get(f"{self._path}/commits/{quote(name, safe='')}")
        self._sheet(f"Commit {name}", commit_facts(commit), {"name": name}, commits=True)

    async def _export(self, stream: str, timeline: str, name: str) -> None:
        parts = "/".join(quote(each, safe="") for each in (stream, timeline, name))
        export = await self._visitor.get(f"{self._path}/exports/{parts}")
        here = "://" not in export["url"]
        files = {
            file: (found["bytes"], file_link(self._job, stream, export["path"], file) if here else "")
            for file, found in export["manifest"]["files"].items()
        }
        given = {"stream": stream, "name": export["path"]}
        self._sheet(f"Export {stream} {export['path']}", export_facts(export), given, commits=False, files=files)

    def _sheet(
        self,
        title: str,
        facts: Sequence[tuple[str, str]],
        given: Mapping[str, str],
        *,
        commits: bool,
        files: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        """Show facts, the `files` with sizes and links, and the actions on a commit, or else on an export."""
        with ui.dialog().props(f'aria-label="{title}"') as dialog, ui.element("div").classes("sheet"):
            heading(title, 2).classes("title")
            fact_list(facts)
            if files:
                heading("Files", 3)
                Grid((Column("File", long=True), Column("Size", number=True)), "").show(file_rows(files))
            with ui.element("div").classes("buttons"):
                for act in self._actions.permitted:
                    if not (act.form.with_commits if commits else act.form.with_exports):
                        continue

                    async def ask(act: Any = act) -> None:
                        dialog.close()
                        await self._actions.open(act, **given)

                    button = ui.button(act.form.label, color=None, on_click=ask).props("outline no-caps").mark(act.id)
                    button.set_enabled(self._actions.possible(act))
                ui.button("Close", color=None, on_click=dialog.close).props("flat no-caps")
        dialog.on_value_change(lambda event: None if event.value else dialog.delete())
        dialog.open()
