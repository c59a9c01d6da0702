"""The jobs that the API can tell of and ask, and what it says of each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from service.alarms import alarms
from service.past.asking import ask_commit
from service.past.commits import entries_of
from service.status import Number, Status


class Jobs(Protocol):
    """The jobs known here. Any thread."""

    def names(self) -> list[str]:
        """All of them."""
        ...

    def status(self, name: str) -> Status | None:
        """What a job's chief said last; None where there is no such job."""
        ...

    def commits(self, name: str) -> list[dict[str, Any]]:
        """The commits of a job that is known here, in order of time."""
        ...

    def ask_commit(self, name: str) -> int:
        """Have a job that is known here make a commit; the version it will hold. Raises MillraceError."""
        ...


class OneJob:
    """The one job of a foreground run, with its store."""

    def __init__(self, name: str, status: Callable[[], Mapping[str, Any]], store: Path) -> None:
        self._name, self._status, self._store = name, status, store

    def names(self) -> list[str]:
        """The job's name."""
        return [self._name]

    def status(self, name: str) -> Status | None:
        """Its status."""
        return Status(self._status()) if name == self._name else None

    def commits(self, name: str) -> list[dict[str, Any]]:
        """Its commits."""
        return entries_of(self._store)

    def ask_commit(self, name: str) -> int:
        """See Jobs."""
        return ask_commit(self._store)


class Described(BaseModel):
    """Base of answers: fields are described by their docstrings."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Health(Described):
    """That this process answers."""

    status: str = "ok"
    version: str
    """Millrace's version."""


class JobEntry(Described):
    """One job of a list."""

    name: str
    state: str
    """"starting", "replaying", "training", "draining", "restarting", "done" or "failed"."""


class JobList(Described):
    """All jobs."""

    jobs: list[JobEntry]


class LastCommit(Described):
    """How a job's commits go."""

    version: Number | None
    """What a restart goes on from: nothing up to here can be lost."""
    age_s: Number | None
    """Since it was made, or since the start."""
    writing: bool
    """Whether the next one is being written."""
    rows: Number | None
    """Rows that the last one wrote."""
    pause_s: Number | None
    """How long training waited for it."""
    write_s: Number | None
    """How long it was written for, while training went on."""
    failing: str | None
    """Why the last try failed, until one succeeds."""
    failing_s: Number | None
    """For how long they have failed."""


class LastMirrored(Described):
    """How the copies in the store's mirror go."""

    version: Number | None
    """What an empty machine could go on from; null until one is copied by this generation."""
    behind_s: Number | None
    """How long a newer commit has waited."""
    trouble: str | None


class JobStatus(JobEntry):
    """What a job is doing. A figure that is not known yet is null."""

    pass_number: Number | None = Field(serialization_alias="pass")
    """The pass in training."""
    version: Number | None
    """The last closed pass."""
    events: Number | None
    """Events trained on."""
    samples: Number | None
    """Samples trained on."""
    rejected: dict[str, Number]
    """Events that gave no sample, by reason."""
    events_per_s: Number | None
    samples_per_s: Number | None
    positions: dict[str, Number]
    """By partition: the position after the last event trained on."""
    lag: dict[str, Number]
    """By partition: events that wait."""
    metrics: dict[str, dict[str, dict[str, Number]]]
    """"window", "life" and "pass": by task, by name of the metric; taken before the samples were learnt."""
    loss: Number | None
    """Mean loss of the last steps."""
    freshness_s: Number | None
    """From an event's time to its being learnt."""
    learning: bool
    """False: the job only predicts."""
    table_rows: dict[str, Number]
    """Rows by table."""
    restarts: Number
    """How often the workers were started again since the launcher was."""
    last_death: str | None
    """Why they were started again last."""
    generation: Number | None
    """How many times the workers were started in the job's life."""
    timeline: str | None
    """The branch of the job's history that the versions are of."""
    commit: LastCommit | None
    mirror: LastMirrored | None
    """Null without a mirror."""
    restored: str | None
    """The commit that these workers began from; null: from the beginning."""
    alarms: dict[str, str]
    """What is wrong although the job goes on: "commits", "log", "mirror", "forked", "damage"."""


class CommitEntry(Described):
    """One commit of a job."""

    name: str
    version: int
    """The last closed pass that it holds."""
    timeline: str
    generation: int
    made_at: str | None
    rows: int | None
    bytes: int | None
    """Of all its files."""
    own_bytes: int | None
    """What its removal would free: of files that no other commit shares."""
    held_by: list[str]
    """Who keeps it from being pruned."""
    damaged: str | None
    """What is wrong with its manifest; its files are not read for this list."""
    next: bool
    """Whether a restart begins here, if it is sound."""


class CommitList(Described):
    """A job's commits, in order of time."""

    commits: list[CommitEntry]


class CommitAsked(Described):
    """A commit that the chief was asked for; the list has it once it is made."""

    version: int
    """It will be of this version or a later one."""


def described(name: str, status: Status) -> JobStatus:
    """A chief's status as the API gives it."""
    return JobStatus(
        name=name,
        state=status.text("state", "starting"),
        pass_number=status.number("pass"),
        version=status.number("version"),
        events=status.number("events"),
        samples=status.number("samples"),
        rejected=status.counts("rejected"),
        events_per_s=status.number("events_per_s"),
        samples_per_s=status.number("samples_per_s"),
        positions=status.counts("positions"),
        lag=status.counts("lag"),
        metrics={span: status.metrics(span) for span in ("window", "life", "pass")},
        loss=status.number("loss"),
        freshness_s=status.number("freshness_s"),
        learning=status.raw.get("learning", True) is True,
        table_rows=status.table_rows(),
        restarts=status.number("restarts") or 0,
        last_death=status.text("last_death") or None,
        generation=status.number("generation"),
        timeline=status.text("timeline") or None,
        commit=_last_commit(status.part("commit")),
        mirror=_last_mirrored(status.part("commit").part("mirror")),
        restored=status.text("restored") or None,
        alarms={alarm.value: text for alarm, text in alarms(status).items()},
    )


def _last_commit(status: Status) -> LastCommit | None:
    if not status.raw:
        return None
    return LastCommit(
        version=status.number("version"),
        age_s=status.number("age_s"),
        writing=status.flag("writing") is True,
        rows=status.number("rows"),
        pause_s=status.number("pause_s"),
        write_s=status.number("write_s"),
        failing=status.text("failing") or None,
        failing_s=status.number("failing_s"),
    )


def _last_mirrored(status: Status) -> LastMirrored | None:
    if not status.raw:
        return None
    return LastMirrored(
        version=status.number("version"), behind_s=status.number("behind_s"), trouble=status.text("trouble") or None
    )
