"""Options of charts for ECharts, without scripts, with colours for light and dark pages. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.service.ui.series import Point, thinned

SOFT, FAINT = "#8a94a3", "rgba(138,148,163,0.22)"
COLORS = ("#3f7ae0", "#e0832f", "#2c9c69", "#a35bd0", "#c9504a", "#2fa3b5", "#b39322", "#7c8796")
DIGITS = 5
NARROW, MAX_LEVEL = 420, 3
"""Width of a chart on a telephone, in pixels; most names that are level below its bars: of more, many would lack."""
LEVEL = {"interval": "auto", "rotate": 0}
TIME_LABELS = {
    "year": "{yyyy}",
    "month": "{MMM} {yyyy}",
    "day": "{d} {MMM}",
    "hour": "{HH}:{mm}",
    "minute": "{HH}:{mm}",
    "second": "{HH}:{mm}:{ss}",
}
"""The texts at the ticks of a time axis."""
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    color: str = COLORS[0]
    dashed: bool = False


def lines_chart(lines: Sequence[ChartLine], *, by_time: bool, x_name: str = "", from_zero: bool = False) -> Options:
    """A chart of lines over time (UTC) or over versions."""
    options = _frame([line.name for line in lines] if len(lines) > 1 else [])
    options["xAxis"] = _x_axis(by_time, x_name)
    options["yAxis"] = _axis() | {"type": "value", "scale": not from_zero}
    options["dataZoom"] = [{"type": "inside", "zoomOnMouseWheel": "shift", "moveOnMouseWheel": False}]
    options["series"] = [
        {
            "type": "line",
            "name": line.name,
            "data": [[x, _rounded(y)] for x, y in thinned(line.points)],
            "showSymbol": len(line.points) < 3,
            "symbolSize": 4,
            "color": line.color,
            "lineStyle": {"width": 1.7, "type": "dashed" if line.dashed else "solid"},
            "emphasis": {"disabled": True},
        }
        for line in lines
    ]
    return options


def bars_chart(names: Sequence[str], values: Sequence[float], color: str = COLORS[0]) -> Options:
    """A chart with a bar for each name."""
    options = _frame([])
    options["grid"]["bottom"] = 10  # else the lower part of letters such as "p" is cut off
    options["xAxis"] = _axis() | {"type": "category", "data": list(names)}
    options["yAxis"] = _axis() | {"type": "value"}
    if len(names) > MAX_LEVEL:
        slanted, level = ({"xAxis": {"axisLabel": each}} for each in ({"interval": 0, "rotate": 45}, LEVEL))
        options["media"] = [{"query": {"maxWidth": NARROW}, "option": slanted}, {"option": level}]
    options["series"] = [
        {"type": "bar", "data": [_rounded(each) for each in values], "color": color, "barMaxWidth": 40}
    ]
    return options


def reliability_chart(lines: Sequence[ChartLine]) -> Options:
    """Lines of observed shares over predicted ones, and a dashed one where both are equal."""
    options = _frame([line.name for line in lines] if len(lines) > 1 else [])
    values = [value or 0.0 for line in lines for point in line.points for value in point]
    top = max(values, default=0.0) or 1.0
    options["xAxis"] = _axis() | {"type": "value", "min": 0, "max": _rounded(top)}
    options["yAxis"] = _axis() | {"type": "value", "min": 0}
    right = ChartLine("right", [(0.0, 0.0), (top, top)], SOFT, dashed=True)
    options["series"] = [
        {
            "type": "line",
            "name": line.name,
            "data": [[_rounded(x), _rounded(y)] for x, y in line.points],
            "showSymbol": line is not right,
            "symbolSize": 5,
            "color": line.color,
            "lineStyle": {"width": 1.7, "type": "dashed" if line.dashed else "solid"},
            "emphasis": {"disabled": True},
        }
        for line in (*lines, right)
    ]
    return options


@dataclass(frozen=True, slots=True)
class ChartMark:
    """One event in a chart of events."""

    at_ms: float
    row: str
    text: str
    color: str = COLORS[0]


def marks_chart(marks: Sequence[ChartMark], rows: Sequence[str]) -> Options:
    """A chart of events over time (UTC), with a row for each kind."""
    options = _frame([])
    options["tooltip"] = _tooltip("item") | {"formatter": "{b}"}
    options["grid"]["right"] = 32  # half of the last time
    options["xAxis"] = _x_axis(True, "")
    options["yAxis"] = _axis() | {"type": "category", "data": list(rows), "inverse": True}
    options["series"] = [
        {
            "type": "scatter",
            "symbolSize": 10,
            "data": [
                {"name": mark.text, "value": [mark.at_ms, mark.row], "itemStyle": {"color": mark.color}}
                for mark in marks
            ],
        }
    ]
    return options


SPARK = (96, 22)
"""Width and height of a line in a table, in pixels."""
MAX_SPARK = 48


def spark_points(values: Sequence[float | None]) -> str:
    """The points of an SVG polyline for a line in a table; empty where there are fewer than two values."""
    line = thinned([(float(at), value) for at, value in enumerate(values) if value is not None], MAX_SPARK)
    if len(line) < 2:
        return ""
    (width, height), ys = SPARK, [y or 0.0 for _, y in line]
    low, span, begin, end = min(ys), (max(ys) - min(ys)) or 1.0, line[0][0], line[-1][0]
    return " ".join(
        f"{1 + (x - begin) / (end - begin) * (width - 2):.1f},{height - 2 - (y - low) / span * (height - 4):.1f}"
        for (x, _), y in zip(line, ys, strict=True)
    )


def _frame(legend: Sequence[str]) -> Options:
    return {
        "animation": False,
        "useUTC": True,
        "backgroundColor": "transparent",
        "textStyle": {"color": SOFT, "fontFamily": "system-ui, sans-serif"},
        "grid": {"left": 8, "right": 16, "top": 30 if legend else 12, "bottom": 4, "containLabel": True},
        "legend": {
            "show": bool(legend), "data": list(legend), "type": "scroll", "top": 0, "left": 0,
            "icon": "roundRect", "itemWidth": 14, "itemHeight": 3, "textStyle": {"color": SOFT},
        },
        "tooltip": _tooltip("axis"),
    }  # fmt: skip


def _tooltip(trigger: str) -> Options:
    return {
        "trigger": trigger,
        "confine": True,
        "backgroundColor": "rgba(28,32,39,0.94)",
        "borderWidth": 0,
        "textStyle": {"color": "#e3e7ee", "fontSize": 12},
    }


def _axis() -> Options:
    return {
        "axisLine": {"lineStyle": {"color": FAINT}},
        "axisTick": {"show": False},
        "axisLabel": {"color": SOFT, "fontSize": 11, "hideOverlap": True},
        "splitLine": {"lineStyle": {"color": FAINT}},
    }


def _x_axis(by_time: bool, name: str) -> Options:
    kind: Options = {"type": "time"} if by_time else {"type": "value", "scale": True, "minInterval": 1}
    named = {"name": name, "nameLocation": "middle", "nameGap": 24, "nameTextStyle": {"color": SOFT}} if name else {}
    axis = _axis() | kind | named | {"splitLine": {"show": False}}
    if by_time:
        axis["axisLabel"] |= {"formatter": TIME_LABELS}
    return axis


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
