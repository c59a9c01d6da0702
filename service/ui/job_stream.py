"""A job's stream: rate of events, lag, and age of events when the job trains on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nicegui import ui

from headrace.service.ui.charts import COLORS, SOFT, ChartLine, bars_chart, lines_chart
from headrace.service.ui.frame import chart, panel
from headrace.service.ui.recorder import FigureRecord, Recorder
from headrace.service.ui.series import Point, newest


def rate_lines(moments: Sequence[FigureRecord]) -> list[ChartLine]:
    """Events and samples per second."""
    return [
        ChartLine("events/s", [(each.at_ms, each.events_per_s) for each in moments], COLORS[0]),
        ChartLine("samples/s", [(each.at_ms, each.samples_per_s) for each in moments], COLORS[2], dashed=True),
    ]


def lag_lines(moments: Sequence[FigureRecord]) -> list[ChartLine]:
    """Events not yet read, by partition; of many, those that are farthest behind, and the sum of all."""
    partitions = list(dict.fromkeys(name for each in moments for name in each.lag))
    if len(partitions) > len(COLORS):
        total = ChartLine(
            "all partitions", [(each.at_ms, sum(each.lag.values())) for each in moments], SOFT, dashed=True
        )
        now = moments[-1].lag
        partitions = sorted(partitions, key=lambda name: -now.get(name, 0))[: len(COLORS) - 1]
        return [total, *_lag_by_partition(moments, partitions)]
    return _lag_by_partition(moments, partitions)


def _lag_by_partition(moments: Sequence[FigureRecord], partitions: Sequence[str]) -> list[ChartLine]:
    return [
        ChartLine(name, [(each.at_ms, each.lag.get(name)) for each in moments], COLORS[number % len(COLORS)])
        for number, name in enumerate(partitions)
    ]


UNITS = (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0))


def freshness_line(moments: Sequence[FigureRecord]) -> tuple[str, list[ChartLine]]:
    """The time from an event until the job trains on it, and its unit."""
    known = [each.freshness_s for each in moments if each.freshness_s is not None]
    least = min(known, default=0.0)
    unit, length_s = next(((unit, each_s) for unit, each_s in UNITS if least >= 2 * each_s), ("seconds", 1.0))
    points: list[Point] = [
        (each.at_ms, None if each.freshness_s is None else each.freshness_s / length_s) for each in moments
    ]
    return unit, [ChartLine("freshness", points, COLORS[1])]


SPAN_S = {0: "all", 600: "10 minutes", 3_600: "1 hour", 21_600: "6 hours", 86_400: "1 day", 604_800: "7 days"}
"""Choices of the time that charts over time show."""


class TimeSpan:
    """The choice of the time that charts show, up to their newest point."""

    def __init__(self) -> None:
        self._choice = ui.select(SPAN_S, label="Time shown", value=0).props("dense outlined options-dense")

    @property
    def length_ms(self) -> float:
        """0: all."""
        return 1000.0 * int(self._choice.value or 0)

    def of(self, lines: Sequence[ChartLine]) -> list[ChartLine]:
        """The lines, shortened to this time."""
        return [replace(line, points=newest(line.points, self.length_ms)) for line in lines]


class StreamPart:
    """The part of a job's page about its stream."""

    def __init__(self, name: str, recorder: Recorder, span: TimeSpan) -> None:
        self._name, self._recorder, self._span, self._shown = name, recorder, span, (-1.0, 0.0)
        self._boxes = ui.element("div")
        self._boxes.set_visibility(False)
        with self._boxes:
            self._draw()

    def _draw(self) -> None:
        with ui.element("div").classes("side"):
            with panel("Rate", "events and samples trained on, per second"):
                self._rate = chart(
                    lines_chart([], by_time=True), "Events and samples per second over time", "chart low"
                )
            with panel("Lag", "events not yet read, by partition"):
                self._lag = chart(
                    lines_chart([], by_time=True), "Events not yet read over time, by partition", "chart low"
                )
        with panel("Freshness", "time from an event until the job trains on it") as self._age:
            self._unit = ui.label().classes("hint")
            self._freshness = chart(lines_chart([], by_time=True), "Freshness over time", "chart low")
        with panel("Where the time goes", "training time since the workers started, in seconds"):
            self._advice = ui.label().classes("hint")
            self._straggler = ui.label().classes("hint")
            self._spent = chart(bars_chart([], []), "Seconds by part of the training time", "chart low")

    def refresh(self, job: Mapping[str, Any]) -> None:
        """Show new records."""
        self._advice.set_text(job["advice"] or "")
        self._straggler.set_text((job["straggler"] or {}).get("text", ""))
        redraw(self._spent, bars_chart(list(job["time_s"]), list(job["time_s"].values())))
        moments = self._recorder.moments(self._name)
        self._boxes.set_visibility(bool(moments))
        if not moments or (moments[-1].at_ms, self._span.length_ms) == self._shown:
            return
        self._shown, span = (moments[-1].at_ms, self._span.length_ms), self._span
        redraw(self._rate, lines_chart(span.of(rate_lines(moments)), by_time=True, from_zero=True))
        redraw(self._lag, lines_chart(span.of(lag_lines(moments)), by_time=True, from_zero=True))
        unit, lines = freshness_line(moments)
        self._age.set_visibility(any(value is not None for line in lines for _, value in line.points))
        self._unit.set_text(f"in {unit}")
        redraw(self._freshness, lines_chart(span.of(lines), by_time=True))


def redraw(chart: ui.echart, options: Mapping[str, Any]) -> None:
    """Replace the options of a chart."""
    chart.options.clear()
    chart.options.update(options)
    chart.update()
