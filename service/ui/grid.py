"""A table that updates in place: sortable by each column, with pages. Only changed cells are sent to the browser."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from headrace.service.ui.charts import SPARK
from headrace.service.ui.format import NONE

PAGE_ROWS = 25


@dataclass(frozen=True, slots=True)
class Column:
    """A column."""

    title: str
    number: bool = False
    long: bool = False
    """Whether its text may wrap anywhere."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """The content of a cell."""

    text: str
    order: Any = None
    """The key that it is sorted by; None: its text."""
    link: str = ""
    tone: str = ""
    """"good", "warn", "bad"."""
    chip: bool = False
    tip: str = ""
    spark: str = ""
    """The points of a small line after the text."""
    opens: bool = False
    """Whether it is a button that opens the row."""
    raw: bool = False
    """Whether it is text of others, shown as it is."""


Row = tuple[str, Sequence[GridCell]]
"""A row's key, and its cells."""


class Grid:
    """Without rows it shows the text `empty`."""

    def __init__(
        self,
        columns: Sequence[Column],
        empty: str,
        *,
        sort: int | None = None,
        descending: bool = False,
        on_open: Callable[[str], Any] | None = None,
    ) -> None:
        """`on_open` is called with the key of a row whose cell that opens it is pressed."""
        self._columns, self._sort, self._descending, self._page = columns, sort, descending, 0
        self._on_open = on_open
        self._rows: Sequence[Row] = ()
        self._lines: dict[tuple[str, int], _Line] = {}
        self._empty = ui.label(empty).classes("hint")
        with (
            ui.element("div").classes("grid-box").props("tabindex=0") as self._box,
            ui.element("table").classes("grid"),
        ):
            with ui.element("thead"), ui.element("tr"):
                self._heads = [self._head(number) for number in range(len(columns))]
            self._body = ui.element("tbody")
        with ui.element("div").classes("line") as self._pager:
            ui.button("Previous", color=None, on_click=lambda: self._turn(-1)).props("flat dense no-caps")
            self._place = ui.label()
            ui.button("Next", color=None, on_click=lambda: self._turn(1)).props("flat dense no-caps")
        self._draw()

    def show(self, rows: Sequence[Row], empty: str | None = None) -> None:
        """Show these rows; without any, `empty` if it is given."""
        if empty is not None:
            self._empty.set_text(empty)
        self._rows = rows
        self._draw()

    def _head(self, number: int) -> tuple[ui.element, TextElement]:
        """A head and the button in it, which sorts by this column."""
        column = self._columns[number]
        with ui.element("th").classes("number" if column.number else "").props("scope=col") as head:
            button = TextElement(tag="button", text=column.title).classes("sorts").props("type=button")
            button.on("click", lambda: self._sort_by(number), [])
            return head, button

    def _sort_by(self, number: int) -> None:
        self._descending = not self._descending if self._sort == number else self._columns[number].number
        self._sort, self._page = number, 0
        self._draw()

    def _turn(self, step: int) -> None:
        self._page += step
        self._draw()

    def _draw(self) -> None:
        rows = ordered(self._rows, self._sort, self._descending)
        pages = max(1, -(-len(rows) // PAGE_ROWS))
        self._page = min(max(self._page, 0), pages - 1)
        begin = self._page * PAGE_ROWS
        self._place.set_text(f"{begin + 1}–{min(begin + PAGE_ROWS, len(rows))} of {len(rows):,}")
        self._pager.set_visibility(pages > 1)
        self._empty.set_visibility(not rows)
        self._box.set_visibility(bool(rows))
        for number, (head, button) in enumerate(self._heads):
            mark = "" if number != self._sort else (" ↓" if self._descending else " ↑")
            button.set_text(self._columns[number].title + mark)
            order = "none" if not mark else ("descending" if self._descending else "ascending")
            head.props(f"aria-sort={order}")
        self._fill(rows[begin : begin + PAGE_ROWS])

    def _fill(self, rows: Sequence[Row]) -> None:
        """A row keeps its elements while it is shown, wherever it moves, so that no press of its button is lost."""
        times, keys = Counter[str](), list[tuple[str, int]]()
        for name, _ in rows:
            keys.append((name, times[name]))
            times[name] += 1
        for gone in self._lines.keys() - set(keys):
            self._lines.pop(gone).row.delete()
        for place, (key, (name, cells)) in enumerate(zip(keys, rows, strict=True)):
            if key not in self._lines:
                with self._body:
                    self._lines[key] = _Line(name, self._columns, self._on_open)
            line = self._lines[key]
            if self._body.default_slot.children[place] is not line.row:
                line.row.move(target_index=place)
            line.show(cells)


class _Line:
    """A row on the page."""

    def __init__(self, key: str, columns: Sequence[Column], on_open: Callable[[str], Any] | None) -> None:
        self._cells: list[GridCell | None] = [None] * len(columns)
        self._key, self._on_open = key, on_open
        with ui.element("tr") as self.row:
            self._places = [
                ui.element("td")
                .classes(" ".join(filter(None, ("number" * each.number, "long" * each.long))))
                .props(f'data-label="{each.title}"')
                for each in columns
            ]

    def show(self, cells: Sequence[GridCell]) -> None:
        for number, (place, cell) in enumerate(zip(self._places, cells, strict=True)):
            if cell != self._cells[number]:
                self._cells[number] = cell
                place.clear()
                with place:
                    if cell.opens and (on_open := self._on_open) is not None:
                        button = TextElement(tag="button", text=cell.text).classes("opens").props("type=button")
                        button.on("click", lambda on_open=on_open: on_open(self._key), [])
                    else:
                        _shown(cell)


def _shown(cell: GridCell) -> None:
    if cell.spark:
        size = f"viewBox='0 0 {SPARK[0]} {SPARK[1]}' width={SPARK[0]} height={SPARK[1]}"
        with ui.element("svg").classes("spark").props(f"{size} aria-hidden=true"):
            ui.element("polyline").props(f"points='{cell.spark}'")
    element: ui.element = ui.link(cell.text, cell.link) if cell.link else ui.label(cell.text)
    if cell.raw:
        element.classes("raw")
    if cell.chip:
        element.classes(f"chip {cell.tone}")
    elif cell.tone:
        element.classes(f"{cell.tone}-text")
    if cell.tip:
        element.tooltip(cell.tip)


def ordered(rows: Sequence[Row], column: int | None, descending: bool) -> list[Row]:
    """Rows sorted by a column; those without a value come last."""
    if column is None:
        return list(rows)

    def place(row: Row) -> tuple[int, float, str]:
        cell = row[1][column]
        if isinstance(cell.order, int | float):
            return 0, float(cell.order), cell.text
        return (1, 0.0, cell.text) if cell.order is None else (0, 0.0, str(cell.order))

    known = [row for row in rows if row[1][column].text != NONE]
    return sorted(known, key=place, reverse=descending) + [row for row in rows if row[1][column].text == NONE]
