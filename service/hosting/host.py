"""What the API is given: the jobs of a host, and what can be asked of them.

service.hosting.local_host hosts many, each with a launcher of its own; service.hosting.one_job is a foreground run's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from millrace.secrecy import with_secrets
from service.hosting.work import Operation, Work
from service.records.database import Records
from service.spec import LoadedJob, job_of
from service.status import Status


class Action(StrEnum):
    """What can be asked of a job."""

    PAUSE = "pause"
    """Plan no new pass; the workers stay."""
    RESUME = "resume"
    """Plan passes again; a job that has ended or was stopped begins again where it was."""
    DRAIN = "drain"
    """Finish the pass, commit, complete exports, end."""
    STOP = "stop"
    """As drain, but killed where that takes long."""
    RESTART = "restart"
    """Stop, then begin again where it was."""


class Desired(StrEnum):
    """What is wanted of a job until somebody asks for something else."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINED = "drained"
    STOPPED = "stopped"


class Phase(StrEnum):
    """Where a job stands."""

    STARTING = "starting"
    TRAINING = "training"
    REPLAYING = "replaying"
    PAUSED = "paused"
    DRAINING = "draining"
    RESTARTING = "restarting"
    ENDED = "ended"
    """Its stream is over, or it was drained."""
    STOPPED = "stopped"
    """It was stopped, or never begun."""
    FAILED = "failed"
    """It ended with an error that would come again; see its outcome."""
    BROKEN = "broken"
    """Its folder is damaged, or another run uses its store; see its trouble."""


AT_REST = frozenset({Phase.ENDED, Phase.STOPPED, Phase.FAILED, Phase.BROKEN})
"""Phases of a job of which nothing runs, until somebody asks."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job's launcher ended."""

    code: int
    """As its exit code: 0 drained, 1 error, 2 bad configuration, 70 a bug, 75 unavailable."""
    reason: str
    lines: tuple[str, ...]
    """The last lines of output of the worker that was to blame; none, where none was."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedJob:
    """A job, what is wanted of it, and where it stands."""

    name: str
    spec: Mapping[str, Any]
    """As the user wrote it, overrides applied, with "***" for its secrets."""
    folder: Path
    """Its own folder."""
    base: Path
    """Where relative paths of the spec start."""
    store: Path
    desired: Desired
    phase: Phase
    trouble: str = ""
    """What is wrong with a broken one, or what the host is waiting for."""
    revision: int
    """Counts the changes by people."""
    created: datetime
    created_by: str
    changed: datetime
    outcome: Ending | None = None
    """How it ended, where it did and was not asked to begin again."""
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Secrets of the spec, by the path of their key."""

    def loaded(self) -> LoadedJob:
        """Its spec, checked. Raises SpecError."""
        return job_of(with_secrets(self.spec, self.secrets), self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a job is made of."""

    spec: Mapping[str, Any]
    name: str | None = None
    """Stands before the spec's."""
    base: Path | None = None
    """Where relative paths start; None: in the job's own folder."""
    start: bool = True
    """Whether it begins at once."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a process of a job printed."""

    after: int
    """Asked for with this, the lines behind it come."""
    at: str
    """ISO 8601, UTC; empty where it is not known."""
    worker: str
    text: str


class Host(Protocol):
    """The jobs here. Any thread. What names a job raises UnknownJob where there is none of that name."""

    @property
    def work(self) -> Work:
        """Operations."""
        ...

    @property
    def records(self) -> Records:
        """What is remembered."""
        ...

    def jobs(self) -> list[HostedJob]:
        """All jobs, by name."""
        ...

    def job(self, name: str) -> HostedJob:
        """One job."""
        ...

    def create(self, request: NewJob, who: str) -> HostedJob:
        """Make a job, and begin it where that is asked for. Raises SpecError, JobExists, TooMany, NotHosted."""
        ...

    def delete(self, name: str, who: str, keep_store: bool) -> None:
        """Forget a job that does not run, and remove its folder; its store, too, unless `keep_store`.

        Raises StillRunning, NotHosted.
        """
        ...

    def act(self, name: str, action: Action, who: str) -> HostedJob:
        """Have it done, soon; the job as it is now. Asked twice, it is done once. Raises NotNow, NotHosted."""
        ...

    def change(self, name: str, keys: Mapping[str, Any], who: str) -> Operation:
        """Have hot settings of a running job changed, as `millrace set` does; the operation that waits until they act.

        Raises SpecError, TooMany.
        """
        ...

    def status(self, name: str) -> Status:
        """What its chief and launcher said last; of one that ended, how it ended."""
        ...

    def log_lines(self, name: str, worker: str | None, after: int, limit: int) -> Sequence[Line]:
        """What its processes printed, of all workers or one: lines behind the place `after`, 0 the oldest kept.

        Below 0: the last `limit` lines.
        """
        ...
