"""What a reader can have done to a job: under which name, what it will do in words, and when it makes sense. Pure.

Whether they may is the API's to say; this table only names its operations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from millrace import documents
from service.operating.tables import format_dry_run
from service.ui.wording import number
from trainer.respec import HOT, flat, is_hot

Job = Mapping[str, Any]
RUNS = frozenset({"starting", "training", "replaying", "paused", "draining", "restarting"})
TRAINS = frozenset({"training", "replaying", "paused"})
RESTS = frozenset({"ended", "stopped", "failed"})


class Kind(StrEnum):
    """How a field is filled in."""

    TEXT = "text"
    NUMBER = "number"
    FLAG = "flag"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Field:
    """Something to be filled in before an act."""

    name: str
    label: str
    kind: Kind
    default: Any = None
    optional: bool = False
    choices: Callable[["Known"], Sequence[str]] = lambda known: ()
    """Of a choice; of a text, suggestions."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a job when an act is asked for."""

    job: Job
    spec: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()
    """Names, the newest first."""


@dataclass(frozen=True, slots=True)
class Act:
    """One act."""

    operation: str
    """Its id in the OpenAPI document."""
    label: str
    words: str
    """What will happen."""
    sense: Callable[[Job], bool]
    """Whether there is any in it now."""
    fields: tuple[Field, ...] = ()
    in_path: tuple[str, ...] = ()
    """Fields that are in the address."""
    body: Callable[[Mapping[str, Any]], Any] | None = None
    """What is sent, of what was filled in; None: nothing."""
    grave: bool = False
    tagged: bool = False
    """Whether it is refused where the job was changed since it was shown."""


def _plain(filled: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in filled.items() if value is not None and value != ""}


def _hot_key(filled: Mapping[str, Any]) -> dict[str, Any]:
    return {"keys": {str(filled["key"]).strip(): value_of(str(filled["value"]))}}


def value_of(text: str) -> Any:
    """What somebody means who writes this as a value: "none" takes a threshold away."""
    text = text.strip()
    if text.lower() in ("none", "null"):
        return None
    try:
        return documents.parse(text, "the value")
    except ValueError:
        return text


def hot_keys(spec: Mapping[str, Any]) -> list[str]:
    """Keys of a spec that may be set while the job runs, and those of its tables that may be added."""
    written = [key for key, _ in flat(spec) if is_hot(key)]
    tables = [key.replace("*", table, 1) for table in spec.get("tables", {}) for key in HOT if key.count("*") == 1]
    return sorted({*written, *(key for key in tables if "#" not in key)})


def _runs(job: Job) -> bool:
    return job["phase"] in RUNS


def _trains(job: Job) -> bool:
    return job["phase"] in TRAINS


def _rests(job: Job) -> bool:
    return job["phase"] in RESTS


PAUSE = Act(
    "pauseJob", "Pause",
    "No new pass is trained until somebody resumes the job. Passes that were planned before are finished, the workers "
    "stay, commits are made, and events wait in the stream.",
    lambda job: _runs(job) and job["desired"] == "running", tagged=True,
)  # fmt: skip
RESUME = Act(
    "resumeJob", "Resume",
    "Training goes on where it was. A job that has ended or was stopped is started again.",
    lambda job: job["desired"] == "paused" or _rests(job), tagged=True,
)  # fmt: skip
DRAIN = Act(
    "drainJob", "Drain",
    "The job finishes its pass, commits, completes its exports and ends. Nothing is lost; it can be resumed.",
    lambda job: _runs(job) and job["desired"] in ("running", "paused"), grave=True, tagged=True,
)  # fmt: skip
STOP = Act(
    "stopJob", "Stop",
    "As drain, but the job is killed if that takes longer than limits.stop. The log has what the last commit has not; "
    "it can be resumed.",
    lambda job: _runs(job) and job["desired"] != "stopped", grave=True, tagged=True,
)  # fmt: skip
RESTART = Act(
    "restartJob", "Restart",
    "The job is stopped, then begins again where it was. Training rests meanwhile.",
    lambda job: job["phase"] != "broken", grave=True, tagged=True,
)  # fmt: skip
COMMIT = Act(
    "makeCommit", "Commit",
    "What has been learnt by now is made durable. Training goes on meanwhile.",
    _trains,
)  # fmt: skip
EXPORT = Act(
    "makeExport", "Export",
    "The state at the next close is exported for serving. Serving is pointed to it if its gates pass.",
    lambda job: _trains(job) and bool(job["exports"]),
    fields=(
        Field("stream", "Stream of exports", Kind.CHOICE, choices=lambda known: list(known.job["exports"])),
        Field("kind", "Kind (else a delta where the stream has them)", Kind.CHOICE, optional=True,
              choices=lambda known: ["base", "delta"]),
    ),
    body=_plain,
)  # fmt: skip
SHRINK = Act(
    "shrinkTable", "Shrink",
    "Rows go that meet the table's own rule, or the one given here. A dry run only counts them, by slot. Rows that are "
    "gone cannot be had back but by a rewind.",
    _trains,
    fields=(
        Field("table", "Table", Kind.CHOICE, choices=lambda known: list(known.spec.get("tables", {}))),
        Field("delete_below", "Rows whose score is below (else the table's rule)", Kind.NUMBER, optional=True),
        Field("delete_after_days", "Rows that were not seen for more days than", Kind.NUMBER, optional=True),
        Field("dry_run", "Dry run: only count", Kind.FLAG, default=True),
        Field("allow", "Leave to take more than max_shrink_fraction", Kind.FLAG, default=False),
    ),
    in_path=("table",), body=lambda filled: {**_plain(filled), **_whole_days(filled)}, grave=True,
)  # fmt: skip
TICK = Act(
    "tickDay", "Day tick",
    "The next day begins for a job whose events have no time: scores decay, and the tables' daily shrink is done.",
    _trains,
    fields=(Field("to", "To the day (else the next)", Kind.NUMBER, optional=True),),
    body=lambda filled: {name: int(value) for name, value in _plain(filled).items()},
)  # fmt: skip
SET = Act(
    "setKeys", "Set",
    "The setting acts at the close of a pass, and stands before the job's spec, also after a restart.",
    _trains,
    fields=(
        Field("key", "Key", Kind.TEXT, choices=lambda known: hot_keys(known.spec)),
        Field("value", 'Value ("none" takes a threshold away)', Kind.TEXT),
    ),
    body=_hot_key, tagged=True,
)  # fmt: skip
REWIND = Act(
    "rewindJob", "Rewind",
    "The commit is read back; then the job goes on from it, on a new timeline, once it is resumed. What it learnt "
    "after that commit is trained anew. The job must be at rest.",
    _rests,
    fields=(Field("name", "Commit", Kind.CHOICE, choices=lambda known: known.commits),),
    in_path=("name",), grave=True,
)  # fmt: skip
ACTS = (PAUSE, RESUME, DRAIN, STOP, RESTART, COMMIT, EXPORT, SET, SHRINK, TICK, REWIND)


def _whole_days(filled: Mapping[str, Any]) -> dict[str, int]:
    days = filled.get("delete_after_days")
    return {} if days in (None, "") else {"delete_after_days": int(days)}


def offered(may: Callable[[str], bool]) -> list[Act]:
    """The acts that a visitor may have done."""
    return [act for act in ACTS if may(act.operation)]


def request_of(act: Act, filled: Mapping[str, Any]) -> tuple[dict[str, str], Any]:
    """The names in the address, and the body, of an act that was filled in. Raises ValueError: something is missing."""
    for each in act.fields:
        if not each.optional and filled.get(each.name) in (None, ""):
            raise ValueError(f"{each.label}: must be filled in")
    names = {name: str(filled[name]) for name in act.in_path}
    rest = {name: value for name, value in filled.items() if name not in act.in_path}
    return names, None if act.body is None else act.body(rest)


def outcome_lines(operation: Mapping[str, Any]) -> list[str]:
    """What came of an operation that has ended, in words."""
    if (problem := operation["problem"]) is not None:
        return [str(problem.get("detail") or problem.get("title") or "it failed, and did not say why")]
    result = operation["result"]
    match result:
        case {"fraction": _, "going": _, "below": _}:
            return [line.replace("needs --allow", "needs leave to take more") for line in format_dry_run(result)]
        case {"said": str(said)}:
            return [said]
        case {"lines": list(lines)}:
            return [str(line) for line in lines]
        case dict():
            return [f"{name}: {_told(value)}" for name, value in result.items() if value not in (None, [], {})]
        case None:
            return []
        case _:
            return [_told(result)]


def ended_words(operation: Mapping[str, Any]) -> str:
    """How an operation ended, in words."""
    match operation["state"]:
        case "done":
            return "It is done."
        case "failed":
            return "It failed."
        case "cancelled":
            return "It was called off."
        case _:
            return "The service ended meanwhile: ask for it again."


def _told(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)
