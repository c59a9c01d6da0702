"""The interface between the API and the jobs: a Host has jobs, and carries out actions on them.

service.jobs.local_host hosts many jobs, each with a launcher of its own; service.jobs.foreground_host a foreground run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from headrace.secrets import with_secrets
from headrace.service.jobs.operation_queue import OperationQueue
from headrace.service.records.database import Records
from headrace.service.spec.job import LoadedJob, job_of
from headrace.trainer.job_status import Status


class Action(StrEnum):
    """Actions on a job."""

    PAUSE = "pause"
    """Plan no new pass; the workers stay."""
    RESUME = "resume"
    """Plan passes again. A job that has ended or was stopped continues where it was."""
    DRAIN = "drain"
    """Finish the pass, commit, complete exports, end."""
    STOP = "stop"
    """As drain, but kill the job if that takes too long."""
    RESTART = "restart"
    """Stop, then start again where it was."""


class Desired(StrEnum):
    """The desired state of a job, until another one is requested."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINED = "drained"
    STOPPED = "stopped"


class Phase(StrEnum):
    """The phase of a job."""

    STARTING = "starting"
    TRAINING = "training"
    REPLAYING = "replaying"
    PAUSED = "paused"
    DRAINING = "draining"
    RESTARTING = "restarting"
    ENDED = "ended"
    """Its stream has ended, or it was drained."""
    STOPPED = "stopped"
    """It was stopped, or never started."""
    FAILED = "failed"
    """It ended with a permanent error; see its outcome."""
    BROKEN = "broken"
    """Its folder is damaged, or another run uses its store; see `trouble`."""


AT_REST = frozenset({Phase.ENDED, Phase.STOPPED, Phase.FAILED, Phase.BROKEN})
"""Phases of a job without running processes."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job's launcher ended."""

    code: int
    """Exit code: 0 drained, 1 error, 2 bad configuration, 3 no samples, 70 a bug, 75 unavailable."""
    reason: str
    lines: tuple[str, ...]
    """The last lines of output of the worker that failed, if one did."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedJob:
    """A job, its desired state and its phase."""

    name: str
    spec: Mapping[str, Any]
    """As the user wrote it, overrides applied, with "***" for its secrets."""
    folder: Path
    """Its own folder."""
    base: Path
    """The folder where relative paths of the spec start."""
    store: Path
    desired: Desired
    phase: Phase
    trouble: str = ""
    """Why it is broken, or what the host waits for."""
    revision: int
    """Number of changes by users."""
    created: datetime
    created_by: str
    changed: datetime
    outcome: Ending | None = None
    """How it ended; None if it has not, or was started again."""
    build: str = ""
    """The name of the build that it runs in; empty: the service's own environment."""
    version: str = ""
    """The version of Headrace that its launcher runs, or ran last; empty where it is not known."""
    environment: str = ""
    """Identity of the environment that its launcher runs in, or ran in last; empty where it is not known."""
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Secrets of the spec, by the path of their key."""

    def loaded(self) -> LoadedJob:
        """Its validated spec. Raises SpecError."""
        return job_of(with_secrets(self.spec, self.secrets), self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A request to create a job."""

    spec: Mapping[str, Any]
    name: str | None = None
    """Overrides the name in the spec."""
    base: Path | None = None
    """The folder where relative paths start; None: the job's own folder."""
    start: bool = True
    """Whether it starts at once."""


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line that a process of a job printed."""

    after: int
    """The position after this line: reading continues from it."""
    at: str
    """ISO 8601, UTC; empty where it is not known."""
    worker: str
    text: str


class LineLevel(StrEnum):
    """The level of a line of output, the least first."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


LEVELS = tuple(LineLevel)
LEVEL_OF_LINE = re.compile(rf"\d\d:\d\d:\d\d ({'|'.join(LEVELS)})\b")
"""How headrace.logs begins a line."""


@dataclass(frozen=True, slots=True)
class LineFilter:
    """A choice of lines of output."""

    worker: str | None = None
    """Only lines of this process."""
    text: str = ""
    """Only lines that contain this text, in whatever case."""
    level: LineLevel | None = None
    """Only lines of this level or a greater one. A line that names none, as of a traceback, continues the line before
    of its process; a process begins with INFO."""

    def chosen(self, lines: Iterable[PrintedLine]) -> Iterator[PrintedLine]:
        """The chosen ones of these lines, which follow each other."""
        wanted, least = self.text.casefold(), 0 if self.level is None else LEVELS.index(self.level)
        levels: dict[str, int] = {}
        for line in lines:
            if found := LEVEL_OF_LINE.match(line.text):
                levels[line.worker] = LEVELS.index(LineLevel(found[1]))
            if levels.get(line.worker, LEVELS.index(LineLevel.INFO)) < least:
                continue
            if self.worker in (None, line.worker) and wanted in line.text.casefold():
                yield line


class Host(Protocol):
    """A set of jobs. Any thread. Methods that take a name raise UnknownJob where no job has it."""

    @property
    def work(self) -> OperationQueue:
        """Operations."""
        ...

    @property
    def records(self) -> Records:
        """The database."""
        ...

    @property
    def builds(self) -> Mapping[str, Path]:
        """The interpreters of the builds that jobs may move to, by name."""
        ...

    def use_build(self, name: str, build: str) -> HostedJob:
        """Request that the job goes on in this build from its next close on; return it as it is now.

        The caller has checked that the build can. Raises SpecError for an unknown one, NotHosted.
        """
        ...

    def check_allowed(self, name: str) -> None:
        """Raise SpecError where this host would not start the job now: its rules, or links, may have changed."""
        ...

    def jobs(self) -> list[HostedJob]:
        """All jobs, by name."""
        ...

    def job(self, name: str) -> HostedJob:
        """One job."""
        ...

    def create(self, request: NewJob, who: str) -> HostedJob:
        """Create a job, and start it if requested. Raises SpecError, JobExists, LimitReached, NotHosted."""
        ...

    def delete(self, name: str, who: str, keep_store: bool) -> None:
        """Delete a stopped job and its folder, and its store unless `keep_store`.

        Raises StillRunning, NotHosted.
        """
        ...

    def act(self, name: str, action: Action, who: str) -> HostedJob:
        """Request an action, which is carried out soon; return the job as it is now. Raises WrongPhase, NotHosted.

        Idempotent: a second request has no further effect.
        """
        ...

    def count_change(self, name: str) -> None:
        """Another revision of the job: a user has changed what its record does not have, such as hot settings."""
        ...

    def status(self, name: str) -> Status:
        """The last status of its rank 0 and launcher; how it ended, if it has."""
        ...

    def log_lines(self, name: str, wanted: LineFilter | None, after: int, limit: int) -> Sequence[PrintedLine]:
        """Output lines, all or the wanted ones, after the position `after`; 0 is the oldest kept.

        A negative position means the last `limit` lines.
        """
        ...
