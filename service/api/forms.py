"""The form of an action on a job's page: its button, its effect in words, its fields, and when it is possible. Pure.

The kind of a field, and whether it may be left out, come from the body of the action's request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from headrace import documents

Job = Mapping[str, Any]
"""A job as the API shows it."""
RUNS = frozenset({"starting", "training", "replaying", "paused", "draining", "restarting"})
TRAINS = frozenset({"training", "replaying", "paused"})
RESTS = frozenset({"ended", "stopped", "failed"})


class Group(IntEnum):
    """A group of buttons; in their order on the page."""

    STATE = auto()
    COPIES = auto()
    SETTINGS = auto()
    ROWS = auto()
    PAST = auto()


@dataclass(frozen=True, slots=True)
class FormContext:
    """The data of a job that forms need."""

    job: Job
    spec: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()
    """Names, newest first; empty unless the form asks for them."""
    exports: Sequence[str] = ()
    """Paths of complete exports, newest first; empty unless the form asks for them."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values to begin with, by the name of the field."""


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form."""

    name: str
    """Its name in the path or the body of the request."""
    label: str
    choices: Callable[[FormContext], Sequence[str]] | None = None
    """The options; None: those of the body, if it has any."""
    free: bool = False
    """Whether other text than the choices may be filled in."""
    default: Any = None
    """None: that of the body."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of one action."""

    group: Group
    label: str
    """Text of its button."""
    words: str
    """Its effect."""
    possible: Callable[[Job], bool]
    """Whether the action is possible in the job's present state."""
    fields: tuple[FormField, ...] = ()
    body: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the body of the request from what is filled in; None: the fields are its keys."""
    grave: bool = False
    """Whether its button is a warning."""
    with_commits: bool = False
    """Whether it acts on a commit: its fields need the names of the job's commits."""
    with_exports: bool = False
    """Whether it acts on an export: its fields need the paths of the job's exports."""


def runs(job: Job) -> bool:
    """Whether a job has processes."""
    return job["phase"] in RUNS


def trains(job: Job) -> bool:
    """Whether a job's rank 0 answers requests."""
    return job["phase"] in TRAINS


def rests(job: Job) -> bool:
    """Whether a job has ended or was stopped."""
    return job["phase"] in RESTS


def readable(job: Job) -> bool:
    """Whether a job's store can be read."""
    return runs(job) or rests(job)


def value_of(text: str) -> Any:
    """The value that a user's text stands for; "none" removes a threshold."""
    text = text.strip()
    if text.lower() in ("none", "null"):
        return None
    try:
        return documents.parse(text, "the value")
    except ValueError:
        return text
