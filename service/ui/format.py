"""Formats numbers, times and states for the pages. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from headrace.service.monitor.lines import age, count, ratio

NONE = "–"
TONES = {
    "training": "good",
    "ended": "good",
    "done": "good",
    "running": "good",
    "starting": "warn",
    "replaying": "warn",
    "paused": "warn",
    "draining": "warn",
    "restarting": "warn",
    "waiting": "warn",
    "interrupted": "warn",
    "failed": "bad",
    "broken": "bad",
}
"""Colour by phase of a job or state of an operation; others have none."""
GRAVE = ("commits", "log")
"""Alarms that end the job if their cause stays; see service.monitor.alarms."""


def format_count(value: float | None) -> str:
    """A count, with thousands separated."""
    return NONE if value is None else count(value)


def format_rate(value: float | None) -> str:
    """A rate: an integer from ten on, one decimal below."""
    if value is None:
        return NONE
    return count(value) if value >= 10 else f"{value:.1f}"


def format_metric(value: float | None) -> str:
    """A metric with four decimals."""
    return NONE if value is None else ratio(value)


def format_percentage(value: float | None) -> str:
    """A fraction as a percentage."""
    return NONE if value is None else f"{value:.1%}"


def format_duration(seconds: float | None) -> str:
    """A duration in a suitable unit."""
    return NONE if seconds is None else age(seconds)


def format_bytes(num_bytes: float | None) -> str:
    """Bytes in a suitable unit."""
    if num_bytes is None:
        return NONE
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= length:
            return f"{num_bytes / length:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def format_time(text: str | None) -> str:
    """An ISO time in UTC, to the second."""
    return NONE if not text else f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


def state_colour(word: str) -> str:
    """The colour of a state: "good", "warn", "bad" or ""."""
    return TONES.get(word, "")


def first_task(metrics: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The first task with its measures, for places that show only one task."""
    return next(iter(metrics.items()), ("", {}))


def cause_words(job: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """Why a job failed, restarts or waits, for the list of jobs; empty if it does neither."""
    if cause := figures.get("cause"):
        return str(cause["text"])
    return outcome_words(job)


def outcome_words(job: Mapping[str, Any]) -> str:
    """How a job failed, or why it is broken; empty if neither."""
    lines = []
    if job["trouble"]:
        lines.append(str(job["trouble"]))
    if (outcome := job["outcome"]) is not None and outcome["code"] != 0:
        lines.append(f"Ended with code {outcome['code']} at {format_time(outcome['at'])} UTC: {outcome['reason']}")
    return "\n".join(lines)
