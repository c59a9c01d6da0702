"""The closes of a job as a table: metrics over time, for programs and notebooks."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace.service.history.closes import Close
from headrace.trainer.exposed_figures import numbers

COLUMNS = pa.schema(
    [
        ("version", pa.int64()),
        ("timeline", pa.string()),
        ("event_time", pa.timestamp("us", tz="UTC")),
        ("day", pa.int64()),
        ("events", pa.int64()),
        ("samples", pa.int64()),
        ("task", pa.string()),
    ]
)
"""The columns before those of metrics, which are float64."""


def metrics_table(closes: Sequence[Close]) -> pa.Table:
    """A row for each close and task; metrics that a close does not have are null."""
    rows = [{**_facts(close), **of_task} for close in closes for of_task in _by_task(close)]
    metrics = sorted({name for row in rows for name in row} - set(COLUMNS.names), key=_order)
    return pa.Table.from_pylist(rows, schema=pa.schema([*COLUMNS, *((name, pa.float64()) for name in metrics)]))


def _facts(close: Close) -> dict[str, Any]:
    content, at_s = close.content, close.content.event_time_s
    time_us = None if at_s is None else round(at_s * 1e6)
    counts = {"day": content.day, "events": content.events, "samples": content.samples}
    return {"version": close.version, "timeline": close.timeline, "event_time": time_us, **counts}


def _by_task(close: Close) -> list[dict[str, Any]]:
    """The metrics of each task: of the window, and of the pass."""
    spans: dict[str, Mapping[str, Any]] = {"window": close.content.window, "pass": close.content.of_pass}
    return [
        {
            "task": task,
            **{
                f"{span}_{name}": float(value)
                for span, found in spans.items()
                for name, value in numbers(found.get(task, {})).items()
            },
        }
        for task in dict.fromkeys([*spans["window"], *spans["pass"]])
    ]


def _order(name: str) -> tuple[bool, str]:
    """Metrics of the window first."""
    return not name.startswith("window_"), name
