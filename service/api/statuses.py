"""Jobs as they were a moment ago: however many clients ask, a job is asked at most some times a second."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from service.api.kept import Kept
from service.hosting.host import Host, HostedJob
from service.past.closes import Closes
from service.past.commits import entries_of
from service.spec import LoadedJob
from service.status import Status

KEEP_S = 0.2
COMMITS_S = 1.0
LOADED_S = 60.0
CLOSES_S = 3_600.0
ALL = "*"
"""In place of a job's name: which no job has."""


class Statuses:
    """See module docstring. Any thread."""

    def __init__(self, host: Host, kept: Kept | None = None) -> None:
        self._host, self.kept = host, kept or Kept()

    def of(self, name: str) -> Status:
        """What the job said. Raises UnknownJob."""
        return self.kept.get(("status", name), KEEP_S, lambda: self._host.status(name))

    def jobs(self) -> Sequence[HostedJob]:
        """All jobs, by name."""
        return self.kept.get(("jobs", ALL), KEEP_S, self._host.jobs)

    def job(self, name: str) -> HostedJob:
        """A job. Raises UnknownJob."""
        return self.kept.get(("job", name), KEEP_S, lambda: self._host.job(name))

    def loaded(self, name: str) -> LoadedJob:
        """A job's spec, checked. Raises UnknownJob, SpecError."""
        job = self.job(name)
        return self.kept.get(("loaded", name, str(job.revision), job.created.isoformat()), LOADED_S, job.loaded)

    def commits(self, name: str) -> list[dict[str, Any]]:
        """What a list says of each of a job's commits."""
        store = self.job(name).store
        return self.kept.get(("commits", name), COMMITS_S, lambda: entries_of(store))

    def closes(self, name: str) -> Closes:
        """The closes of a job's log, followed; another job's that had the name before are none of them."""
        job = self.job(name)
        folder: Path = job.store / "log"
        key = ("closes", name, str(folder), job.created.isoformat())
        return self.kept.get(key, CLOSES_S, lambda: Closes(folder))

    def forget(self, name: str) -> None:
        """Ask anew the next time: something was done to the job."""
        for each in ("status", "jobs", "job", "commits", "exports", "log"):
            self.kept.drop((each, ALL if each == "jobs" else name))


async def _statuses(request: Request) -> Statuses:
    statuses: Statuses = request.app.state.statuses
    return statuses


StatusesOf = Annotated[Statuses, Depends(_statuses)]
