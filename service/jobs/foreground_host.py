"""The Host of a foreground run: one job, which only its own terminal starts and ends."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.service.jobs.decisions import STATES
from headrace.service.jobs.errors import NotHosted, UnknownJob
from headrace.service.jobs.host import Action, Desired, HostedJob, LineFilter, NewJob, Phase, PrintedLine
from headrace.service.jobs.operation_queue import OperationQueue, ProblemOf, plain_problem
from headrace.service.records.database import Records, opened, utc_now
from headrace.service.spec.job import LoadedJob
from headrace.trainer.job_status import Status

PHASES = {**STATES, "done": Phase.ENDED, "failed": Phase.FAILED}
"""By the state that the run reports. Its end is final: no launcher writes an outcome afterwards."""


class ForegroundHost:
    def __init__(self, job: LoadedJob, status: Callable[[], Status], records: Records, work: OperationQueue) -> None:
        self._job, self._status, self._records, self._work = job, status, records, work
        self._begun: datetime = utc_now()
        self._revision, self._lock = 1, threading.Lock()

    @property
    def work(self) -> OperationQueue:
        return self._work

    @property
    def records(self) -> Records:
        """They are deleted with the run."""
        return self._records

    def jobs(self) -> list[HostedJob]:
        return [self.job(self._job.spec.name)]

    def job(self, name: str) -> HostedJob:
        status = self.status(name)
        return HostedJob(
            name=name,
            spec=self._job.raw,
            secrets=self._job.secrets,
            folder=self._job.folder,
            base=self._job.folder,
            store=self._job.store,
            desired=Desired.RUNNING,
            phase=PHASES.get(status.state, Phase.STARTING),
            revision=self._revision,
            created=self._begun,
            created_by="run",
            changed=self._begun,
        )

    def create(self, request: NewJob, who: str) -> HostedJob:
        raise NotHosted("no job can be created here")

    def delete(self, name: str, who: str, keep_store: bool) -> None:
        self._check(name)
        raise NotHosted("this job cannot be deleted")

    def act(self, name: str, action: Action, who: str) -> HostedJob:
        self._check(name)
        raise NotHosted(f"{action.value} is only possible on its own terminal, where Ctrl-C ends it")

    @property
    def builds(self) -> Mapping[str, Path]:
        return {}

    def check_allowed(self, name: str) -> None:
        self._check(name)

    def use_build(self, name: str, build: str) -> HostedJob:
        self._check(name)
        raise NotHosted("this job cannot move to another build")

    def count_change(self, name: str) -> None:
        self._check(name)
        with self._lock:
            self._revision += 1

    def status(self, name: str) -> Status:
        self._check(name)
        return self._status()

    def log_lines(self, name: str, wanted: LineFilter | None, after: int, limit: int) -> Sequence[PrintedLine]:
        """A foreground run prints its lines and does not store them."""
        self._check(name)
        return []

    def _check(self, name: str) -> None:
        if name != self._job.spec.name:
            raise UnknownJob(name, [self._job.spec.name])


@contextmanager
def foreground_host(
    job: LoadedJob, status: Callable[[], Status], problem_of: ProblemOf = plain_problem
) -> Iterator[ForegroundHost]:
    """The host of a run, with a temporary database."""
    with TemporaryDirectory(prefix="headrace-run-") as folder:
        records = opened(f"sqlite:///{Path(folder) / 'records.db'}")
        work = OperationQueue(records, threads=2, problem_of=problem_of)
        try:
            yield ForegroundHost(job, status, records, work)
        finally:
            work.close()
            records.close()
