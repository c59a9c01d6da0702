"""A job's stream: how fast events come, how many wait, how old they are when they are learnt."""

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from service.ui.charts import COLORS, Line, lines_chart
from service.ui.frame import panel
from service.ui.recording import Moment, Recorder
from service.ui.series import Point


def rate_lines(moments: Sequence[Moment]) -> list[Line]:
    """Events and samples a second."""
    return [
        Line("events/s", [(each.at_ms, each.events_per_s) for each in moments], COLORS[0]),
        Line("samples/s", [(each.at_ms, each.samples_per_s) for each in moments], COLORS[2], dashed=True),
    ]


def lag_lines(moments: Sequence[Moment]) -> list[Line]:
    """Events that wait, by partition."""
    partitions = list(dict.fromkeys(name for each in moments for name in each.lag))
    return [
        Line(name, [(each.at_ms, each.lag.get(name)) for each in moments], COLORS[number % len(COLORS)])
        for number, name in enumerate(partitions)
    ]


def freshness_line(moments: Sequence[Moment]) -> list[Line]:
    """From an event's time to its being learnt, in seconds."""
    points: list[Point] = [(each.at_ms, each.freshness_s) for each in moments]
    return [Line("freshness", points, COLORS[1])]


class StreamPart:
    """See module docstring."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name, self._recorder, self._shown = name, recorder, -1.0
        with ui.element("div").classes("side"):
            with panel("Rate", "events and samples trained on, a second"):
                self._rate = ui.echart(lines_chart([], by_time=True)).classes("chart low")
            with panel("Lag", "events that wait, by partition"):
                self._lag = ui.echart(lines_chart([], by_time=True)).classes("chart low")
        with panel("Freshness", "seconds from an event's time to its being learnt"):
            self._freshness = ui.echart(lines_chart([], by_time=True)).classes("chart low")

    def refresh(self, _job: Mapping[str, Any]) -> None:
        """Show what was recorded since."""
        moments = self._recorder.moments(self._name)
        if not moments or moments[-1].at_ms == self._shown:
            return
        self._shown = moments[-1].at_ms
        redraw(self._rate, lines_chart(rate_lines(moments), by_time=True, from_zero=True))
        redraw(self._lag, lines_chart(lag_lines(moments), by_time=True, from_zero=True))
        redraw(self._freshness, lines_chart(freshness_line(moments), by_time=True))


def redraw(chart: ui.echart, options: Mapping[str, Any]) -> None:
    """Have a chart show something else."""
    chart.options.clear()
    chart.options.update(options)
    chart.update()
