"""Jobs as they were a moment ago: however many clients ask, a job is queried only a few times a second."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from headrace.durable import check_no_link
from headrace.service.history.closes import Closes
from headrace.service.history.commit_list import entries_of
from headrace.service.history.log_pages import LogPages
from headrace.service.jobs.host import Host, HostedJob
from headrace.service.spec.job import LoadedJob
from headrace.trainer.job_status import Status

MAX_KEPT = 2_000
"""Most entries; beyond it the oldest one is dropped."""
Found = TypeVar("Found")


@dataclass(slots=True)
class _One:
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_s: float = float("-inf")
    found: Any = None


class TimedCache:
    """Values with a time to live. Any thread; a value is computed by one thread at a time, others wait for it."""

    def __init__(self, now: Callable[[], float] = time.monotonic, max_kept: int = MAX_KEPT) -> None:
        self._now, self._max_kept = now, max_kept
        self._known: OrderedDict[tuple[str, ...], _One] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, ...], keep_s: float, look: Callable[[], Found]) -> Found:
        """The result of `look`, or that of at most `keep_s` seconds ago. Errors are not cached."""
        with self._lock:
            one = self._known.setdefault(key, _One())
            if len(self._known) > self._max_kept:
                self._known.popitem(last=False)
        with one.lock:
            if self._now() - one.at_s >= keep_s:
                try:
                    one.found = look()
                except BaseException:
                    with self._lock:
                        self._known.pop(key, None)
                    raise
                one.at_s = self._now()
            found: Found = one.found
            return found

    def drop(self, start: tuple[str, ...]) -> None:
        """Drop all entries whose key begins with `start`."""
        with self._lock:
            for key in [key for key in self._known if key[: len(start)] == start]:
                del self._known[key]


KEEP_S = 0.2
COMMITS_S = 1.0
LOADED_S = 60.0
FOLLOWED_S = float("inf")
"""A follower of a log reads on at each request, so it never expires; the oldest is dropped beyond MAX_KEPT."""
ALL = "*"
"""In place of a job's name; no job has this name."""


class JobCache:
    """Any thread."""

    def __init__(self, host: Host, kept: TimedCache | None = None) -> None:
        self._host, self.kept = host, kept or TimedCache()

    def of(self, name: str) -> Status:
        """A job's status. Raises UnknownJob."""
        return self.kept.get(("status", name), KEEP_S, lambda: self._host.status(name))

    def jobs(self) -> Sequence[HostedJob]:
        """All jobs, by name."""
        return self.kept.get(("jobs", ALL), KEEP_S, self._host.jobs)

    def job(self, name: str) -> HostedJob:
        """A job. Raises UnknownJob."""
        return self.kept.get(("job", name), KEEP_S, lambda: self._host.job(name))

    def loaded(self, name: str) -> LoadedJob:
        """A job's validated spec. Raises UnknownJob, SpecError."""
        job = self.job(name)
        return self.kept.get(("loaded", name, str(job.revision), job.created.isoformat()), LOADED_S, job.loaded)

    def commits(self, name: str) -> list[dict[str, Any]]:
        """A job's commits, as entries of a list."""
        store = self.job(name).store
        return self.kept.get(("commits", name), COMMITS_S, lambda: entries_of(store))

    def closes(self, name: str) -> Closes:
        """The closes in a job's log, not those of an earlier job of the same name."""
        return self._followed(name, Closes)

    def log_pages(self, name: str) -> LogPages:
        """The lines of a job's log, not those of an earlier job of the same name."""
        return self._followed(name, LogPages)

    def _followed(self, name: str, follow: Callable[[Path], Found]) -> Found:
        job = self.job(name)
        folder = check_no_link(job.store / "log")
        key = (follow.__name__, name, str(folder), job.created.isoformat())
        return self.kept.get(key, FOLLOWED_S, lambda: follow(folder))

    def forget(self, name: str) -> None:
        """Drop what is cached of a job that has changed."""
        for each in ("status", "jobs", "job", "commits", "exports", "log"):
            self.kept.drop((each, ALL if each == "jobs" else name))


async def _statuses(request: Request) -> JobCache:
    statuses: JobCache = request.app.state.statuses
    return statuses


StatusesOf = Annotated[JobCache, Depends(_statuses)]
