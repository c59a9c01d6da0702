"""How the page writes numbers, times and states: alike everywhere. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from service.lines import age, count, ratio

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
"""By phase of a job, or state of an operation; any other is nothing special."""
GRAVE = ("commits", "log")
"""Alarms after which a job ends if nobody does something; see service.alarms."""


def number(value: float | None) -> str:
    """A count, thousands apart."""
    return NONE if value is None else count(value)


def rate(value: float | None) -> str:
    """A rate: whole above ten, one place below."""
    if value is None:
        return NONE
    return count(value) if value >= 10 else f"{value:.1f}"


def measure(value: float | None) -> str:
    """A metric, four places."""
    return NONE if value is None else ratio(value)


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return NONE if value is None else f"{value:.1%}"


def ago(seconds: float | None) -> str:
    """A length of time in a unit that a person would use."""
    return NONE if seconds is None else age(seconds)


def size(num_bytes: float | None) -> str:
    """Bytes in a unit that a person would use."""
    if num_bytes is None:
        return NONE
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= length:
            return f"{num_bytes / length:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def moment(text: str | None) -> str:
    """An ISO time to the second, UTC."""
    return NONE if not text else f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


def tone(word: str) -> str:
    """How a state is coloured: "good", "warn", "bad" or ""."""
    return TONES.get(word, "")


def first_task(metrics: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The task that is shown where there is room for one, with its measures."""
    return next(iter(metrics.items()), ("", {}))


def outcome_words(job: Mapping[str, Any]) -> str:
    """How a job ended, or what is wrong with it; empty: nothing to tell."""
    told = []
    if job["trouble"]:
        told.append(str(job["trouble"]))
    if (outcome := job["outcome"]) is not None and outcome["code"] != 0:
        told.append(f"Ended with code {outcome['code']} at {moment(outcome['at'])} UTC: {outcome['reason']}")
    return "\n".join(told)
