"""A Host in memory for tests: its jobs do no work; its database is a real one."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.service.jobs.errors import JobExists, StillRunning, UnknownJob
from headrace.service.jobs.host import AT_REST, Action, Desired, HostedJob, LineFilter, NewJob, Phase, PrintedLine
from headrace.service.jobs.operation_queue import OperationQueue
from headrace.service.records.database import Records, utc_now
from headrace.service.spec.job import job_of
from headrace.trainer.job_status import Status, read

FOLLOWS = {
    Action.PAUSE: (Desired.PAUSED, Phase.PAUSED),
    Action.RESUME: (Desired.RUNNING, Phase.TRAINING),
    Action.DRAIN: (Desired.DRAINED, Phase.ENDED),
    Action.STOP: (Desired.STOPPED, Phase.STOPPED),
    Action.RESTART: (Desired.RUNNING, Phase.TRAINING),
}


@dataclass
class MemoryHost:
    """Actions take effect at once."""

    records: Records
    work: OperationQueue
    root: Path
    """The folder of the jobs' folders; nothing is written there."""
    statuses: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Status by job."""
    lines: dict[str, list[PrintedLine]] = field(default_factory=dict)
    builds: dict[str, Path] = field(default_factory=dict)
    """See Host."""
    asked: int = 0
    """Number of status requests."""
    away: HeadraceError | None = None
    """Raised instead of a status."""
    _jobs: dict[str, HostedJob] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def jobs(self) -> list[HostedJob]:
        with self._lock:
            return [self._jobs[name] for name in sorted(self._jobs)]

    def job(self, name: str) -> HostedJob:
        with self._lock:
            if name not in self._jobs:
                raise UnknownJob(name, sorted(self._jobs))
            return self._jobs[name]

    def create(self, request: NewJob, who: str) -> HostedJob:
        spec = {**request.spec, **({"name": request.name} if request.name else {})}
        name = str(spec.get("name"))
        folder = self.root / name
        loaded = job_of(spec, request.base or folder)
        with self._lock:
            if name in self._jobs:
                raise JobExists(name)
            now = utc_now()
            self._jobs[name] = HostedJob(
                name=name,
                spec=spec,
                folder=folder,
                base=request.base or folder,
                store=loaded.store,
                desired=Desired.RUNNING if request.start else Desired.STOPPED,
                phase=Phase.TRAINING if request.start else Phase.STOPPED,
                revision=1,
                created=now,
                created_by=who,
                changed=now,
            )
            return self._jobs[name]

    def delete(self, name: str, who: str, keep_store: bool) -> None:
        with self._lock:
            if self.job(name).phase not in AT_REST:
                raise StillRunning(name, "runs")
            del self._jobs[name]

    def check_allowed(self, name: str) -> None:
        self.job(name)

    def act(self, name: str, action: Action, who: str) -> HostedJob:
        desired, phase = FOLLOWS[action]
        with self._lock:
            job = self.job(name)
            self._jobs[name] = replace(job, desired=desired, phase=phase, revision=job.revision + 1, changed=utc_now())
            return self._jobs[name]

    def use_build(self, name: str, build: str) -> HostedJob:
        with self._lock:
            job = self.job(name)
            self._jobs[name] = replace(job, build=build, revision=job.revision + 1, changed=utc_now())
            return self._jobs[name]

    def count_change(self, name: str) -> None:
        with self._lock:
            job = self.job(name)
            self._jobs[name] = replace(job, revision=job.revision + 1)

    def status(self, name: str) -> Status:
        self.job(name)
        self.asked += 1
        if self.away is not None:
            raise self.away
        return read(Status, self.statuses.get(name, {"job": name, "state": "starting"}))

    def log_lines(self, name: str, wanted: LineFilter | None, after: int, limit: int) -> Sequence[PrintedLine]:
        self.job(name)
        found = list((wanted or LineFilter()).chosen(self.lines.get(name, [])))
        return found[-limit:] if after < 0 else [line for line in found if line.after > after][:limit]
