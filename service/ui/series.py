"""Time series for charts: bounds their length, downsamples them, and aligns those of two jobs. Pure.

A point is (x, y): x is a time in milliseconds since 1970, UTC, or a version; y is None where there is no value.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

Point = tuple[float, float | None]
MAX_POINTS = 400
"""Most points of a line in a chart: about one for each two pixels."""
MAX_CLOSES = 4_000
"""Most closes in a page's memory; beyond it every other one of the older half is dropped."""


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` of the points, such that the line looks the same.

    Largest triangle three buckets (Steinarsson, Downsampling Time Series for Visual Representation, 2013). The first
    and the last point stay; a gap stays where a bucket begins with it.
    """
    if len(points) <= most or most < 3:
        return list(points) if most >= 3 else list(points[:most])
    every = (len(points) - 2) / (most - 2)
    kept = [points[0]]
    for bucket in range(most - 2):
        begin, end = int(bucket * every) + 1, int((bucket + 1) * every) + 1
        kept.append(_outermost(kept[-1], points[begin:end], points[end : int((bucket + 2) * every) + 1] or points[-1:]))
    return [*kept, points[-1]]


def _outermost(before: Point, bucket: Sequence[Point], after: Sequence[Point]) -> Point:
    """The point that spans the largest triangle with the one before and the mean of those after."""
    numbers = [(x, y) for x, y in after if y is not None]
    x0, y0 = before
    if bucket[0][1] is None or y0 is None or not numbers:
        return bucket[0]
    mean_x = sum(x for x, _ in numbers) / len(numbers)
    mean_y = sum(y for _, y in numbers) / len(numbers)
    areas = [-1.0 if y is None else abs((x0 - mean_x) * (y - y0) - (x0 - x) * (mean_y - y0)) for x, y in bucket]
    return bucket[areas.index(max(areas))]


def halved(items: Sequence[Any], most: int) -> list[Any]:
    """`items`; if they are more than `most`, without every other one of the older half."""
    if len(items) <= most:
        return list(items)
    middle = len(items) // 2
    return [*items[:middle:2], *items[middle:]]


def append_closes(closes: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Closes of a job with newer ones; closes that a rewind undid are dropped."""
    if not more:
        return list(closes)
    begin = more[0]["version"]
    return halved([*(each for each in closes if each["version"] < begin), *more], MAX_CLOSES)


def tasks_of(closes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The tasks in the metrics of these closes, in order."""
    return list(dict.fromkeys(task for close in closes for task in close["window"]))


def has_event_time(closes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the events of a job have times."""
    return any(close["event_time"] is not None for close in closes)


def metric_line(closes: Sequence[Mapping[str, Any]], task: str, metric: str, by_time: bool) -> list[Point]:
    """A metric of a task over event time, or over versions."""
    points: list[Point] = []
    for close in closes:
        at = millis(close["event_time"]) if by_time else float(close["version"])
        value = close["window"].get(task, {}).get(metric)
        if at is not None and value is not None:  # a pass of no events has none
            points.append((at, value))
    return points


def within_range(points: Sequence[Point], span: Sequence[Point]) -> list[Point]:
    """The `points` within the range of x in `span`, and one more on either side."""
    if not points or not span:
        return list(points)
    low, high = span[0][0], span[-1][0]
    inside = [number for number, (x, _) in enumerate(points) if low <= x <= high]
    if not inside:
        return []
    return list(points[max(inside[0] - 1, 0) : inside[-1] + 2])


def newest(points: Sequence[Point], length: float) -> list[Point]:
    """The points of the newest part of a line that is so long; all of them if `length` is 0."""
    if not length or not points:
        return list(points)
    return [point for point in points if point[0] >= points[-1][0] - length]


def millis(text: str | None) -> float | None:
    """An ISO time in milliseconds since 1970."""
    return None if text is None else datetime.fromisoformat(text).timestamp() * 1000
