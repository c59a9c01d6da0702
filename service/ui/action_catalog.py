"""The actions on a job: label, description, input fields, and the states in which each is possible. Pure.

The API checks the rights of the reader; this table only names the API's operations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace import documents
from headrace.service.tables.table_operations import format_dry_run
from headrace.service.ui.format import format_count
from headrace.trainer.spec.changes import hot_keys

Job = Mapping[str, Any]
RUNS = frozenset({"starting", "training", "replaying", "paused", "draining", "restarting"})
TRAINS = frozenset({"training", "replaying", "paused"})
RESTS = frozenset({"ended", "stopped", "failed"})


class InputKind(StrEnum):
    """The kind of an input field."""

    TEXT = "text"
    NUMBER = "number"
    FLAG = "flag"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Field:
    """An input field of an action."""

    name: str
    label: str
    kind: InputKind
    default: Any = None
    optional: bool = False
    choices: Callable[["ActionContext"], Sequence[str]] = lambda known: ()
    """The options of a choice; the suggestions for a text."""


@dataclass(frozen=True, slots=True)
class ActionContext:
    """The data of a job that the fields of an action need."""

    job: Job
    spec: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()
    """Names, newest first."""


@dataclass(frozen=True, slots=True)
class JobAction:
    """One action."""

    operation: str
    """Id of the operation in the OpenAPI document."""
    label: str
    words: str
    """Description of its effect."""
    sense: Callable[[Job], bool]
    """Whether it is possible now."""
    fields: tuple[Field, ...] = ()
    in_path: tuple[str, ...] = ()
    """Fields that are part of the address."""
    body: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the body of the request from the input; None: no body."""
    grave: bool = False
    """Whether its button is a warning."""
    tagged: bool = False
    """Whether it is refused if the job has changed since it was shown."""


def _plain(filled: Mapping[str, Any]) -> dict[str, Any]:
    """What is filled in. A browser makes no difference between 3 and 3.0; the API refuses 3.5 where it counts."""
    whole = {name: int(value) for name, value in filled.items() if isinstance(value, float) and value.is_integer()}
    return {name: value for name, value in {**filled, **whole}.items() if value is not None and value != ""}


def _hot_key(filled: Mapping[str, Any]) -> dict[str, Any]:
    return {"keys": {str(filled["key"]).strip(): value_of(str(filled["value"]))}}


def value_of(text: str) -> Any:
    """The value that a user's text stands for; "none" removes a threshold."""
    text = text.strip()
    if text.lower() in ("none", "null"):
        return None
    try:
        return documents.parse(text, "the value")
    except ValueError:
        return text


def _runs(job: Job) -> bool:
    return job["phase"] in RUNS


def _trains(job: Job) -> bool:
    return job["phase"] in TRAINS


def _rests(job: Job) -> bool:
    return job["phase"] in RESTS


PAUSE = JobAction(
    "pauseJob", "Pause",
    "The job trains no new pass until it is resumed. It finishes the passes that are already planned. The workers "
    "stay, commits go on, and events wait in the stream.",
    lambda job: _runs(job) and job["desired"] == "running", tagged=True,
)  # fmt: skip
RESUME = JobAction(
    "resumeJob", "Resume",
    "Training continues where it was. A job that has ended or was stopped is started again.",
    lambda job: job["desired"] == "paused" or _rests(job), tagged=True,
)  # fmt: skip
DRAIN = JobAction(
    "drainJob", "Drain",
    "The job finishes its pass, commits, completes its exports and ends. Nothing is lost, and it can be resumed.",
    lambda job: _runs(job) and job["desired"] in ("running", "paused"), grave=True, tagged=True,
)  # fmt: skip
STOP = JobAction(
    "stopJob", "Stop",
    "As drain, but the job is killed if that takes longer than limits.stop. Passes after the last commit are in the "
    "log, so the job can be resumed.",
    lambda job: _runs(job) and job["desired"] != "stopped", grave=True, tagged=True,
)  # fmt: skip
RESTART = JobAction(
    "restartJob", "Restart",
    "The job is stopped, then started again where it was. It does not train meanwhile.",
    lambda job: job["phase"] != "broken", grave=True, tagged=True,
)  # fmt: skip
COMMIT = JobAction(
    "makeCommit", "Commit",
    "The present state is made durable. Training continues meanwhile.",
    _trains,
)  # fmt: skip
EXPORT = JobAction(
    "makeExport", "Export",
    "The state at the next close is exported for serving. The export becomes current if it passes its gates.",
    lambda job: _trains(job) and bool(job["exports"]),
    fields=(
        Field("stream", "Stream of exports", InputKind.CHOICE, choices=lambda known: list(known.job["exports"])),
        Field("kind", "Kind (default: a delta if the stream has deltas)", InputKind.CHOICE, optional=True,
              choices=lambda known: ["base", "delta"]),
    ),
    body=_plain,
)  # fmt: skip
SHRINK = JobAction(
    "shrinkTable", "Shrink",
    "Rows that meet the table's own rule, or the rule given here, are deleted. A dry run only counts them, by slot. "
    "Only a rewind brings deleted rows back.",
    _trains,
    fields=(
        Field("table", "Table", InputKind.CHOICE, choices=lambda known: list(known.spec.get("tables", {}))),
        Field("delete_below", "Rows with a score below (default: the table's rule)", InputKind.NUMBER, optional=True),
        Field("delete_after_days", "Rows that were not seen for more days than", InputKind.NUMBER, optional=True),
        Field("dry_run", "Dry run: only count", InputKind.FLAG, default=True),
        Field("allow", "Allow more than max_shrink_fraction", InputKind.FLAG, default=False),
    ),
    in_path=("table",), body=_plain, grave=True,
)  # fmt: skip
TICK = JobAction(
    "tickDay", "Day tick",
    "The next day begins for a job whose events have no time: scores decay, and the daily shrink of the tables runs.",
    _trains,
    fields=(Field("to", "Day (default: the next)", InputKind.NUMBER, optional=True),),
    body=_plain,
)  # fmt: skip
SET = JobAction(
    "setKeys", "Set",
    "The setting takes effect at the next close. It overrides the job's spec, also after a restart.",
    _trains,
    fields=(
        Field("key", "Key", InputKind.TEXT, choices=lambda known: hot_keys(known.spec)),
        Field("value", 'Value ("none" removes a threshold)', InputKind.TEXT),
    ),
    body=_hot_key, tagged=True,
)  # fmt: skip
RESIZE = JobAction(
    "resizeJob", "Resize",
    "The job goes on with other numbers of shards and trainers. It trains on while rows move, and stands still for a "
    "moment. The numbers override the job's spec, also after a restart.",
    _trains,
    fields=(
        Field("shards", "Shards (default: as many as now)", InputKind.NUMBER, optional=True),
        Field("trainers", "Trainers (default: as many as now)", InputKind.NUMBER, optional=True),
    ),
    body=_plain,
)  # fmt: skip
REWIND = JobAction(
    "rewindJob", "Rewind",
    "The commit is verified. Once the job is resumed, it continues from the commit, on a new timeline, and trains "
    "again on everything after it. The job must be stopped.",
    _rests,
    fields=(Field("name", "Commit", InputKind.CHOICE, choices=lambda known: known.commits),),
    in_path=("name",), grave=True,
)  # fmt: skip
ACTS = (PAUSE, RESUME, DRAIN, STOP, RESTART, COMMIT, EXPORT, SET, RESIZE, SHRINK, TICK, REWIND)


def permitted_actions(may: Callable[[str], bool]) -> list[JobAction]:
    """The actions that a visitor has the right to."""
    return [act for act in ACTS if may(act.operation)]


def request_of(act: JobAction, filled: Mapping[str, Any]) -> tuple[dict[str, str], Any]:
    """The names in the address, and the body, for an action and its input. Raises ValueError for missing input."""
    for each in act.fields:
        if not each.optional and filled.get(each.name) in (None, ""):
            raise ValueError(f"{each.label}: must be filled in")
    names = {name: str(filled[name]) for name in act.in_path}
    rest = {name: value for name, value in filled.items() if name not in act.in_path}
    return names, None if act.body is None else act.body(rest)


def outcome_lines(operation: Mapping[str, Any]) -> list[str]:
    """The result of an operation that has ended, as lines of text."""
    if (problem := operation["problem"]) is not None:
        return [str(problem.get("detail") or problem.get("title") or "it failed without a reason")]
    result = operation["result"]
    match result:
        case {"fraction": _, "going": _, "below": _}:
            return [line.replace("needs --allow", "needs Allow") for line in format_dry_run(result)]
        case {"said": str(said)}:
            return [said]
        case {"lines": list(lines)}:
            return [str(line) for line in lines]
        case dict():
            return [f"{name}: {_text(value)}" for name, value in result.items() if value not in (None, [], {})]
        case None:
            return []
        case _:
            return [_text(result)]


def ended_words(operation: Mapping[str, Any]) -> str:
    """How an operation ended, as text."""
    match operation["state"]:
        case "done":
            return "It is done."
        case "failed":
            return "It failed."
        case "cancelled":
            return "It was cancelled."
        case _:
            return "The service ended meanwhile: request it again."


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return format_count(value)
    return value if isinstance(value, str) else json.dumps(value)
