"""A job's revision as an ETag, and `If-Match` on requests that change it, one request at a time."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import Depends, Header, Request

from headrace.service.api.problems import http_error
from headrace.service.jobs.errors import WrongPhase
from headrace.service.jobs.host import Host, HostedJob

TURN_S = 10.0
"""How long a change waits for an earlier one."""
_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')

Precondition = Annotated[
    str | None,
    Header(alias="If-Match", max_length=200, description="The ETag of the job as you read it, or *."),
]


def etag(job: HostedJob) -> str:
    """The job's ETag, which differs after every change by a user."""
    return f'"{job.revision}"'


class JobLocks:
    """Serializes changes of a job, so that a checked precondition still holds during the change. Any thread.

    Nothing else changes a job's revision: a root has one service, and all changes go through here.
    """

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def changing(self, host: Host, name: str, wanted: str | None, *, needed: bool) -> Iterator[None]:
        """Hold the job, whose ETag is one of `wanted`, until the end of the context.

        Raises UnknownJob, what `check` raises, and WrongPhase where another change takes long.
        """
        with self._lock:
            mine = self._locks.setdefault(name, threading.Lock())
        if not mine.acquire(timeout=self._turn_s):
            raise WrongPhase(f"job {name!r} is being changed by another request; retry")
        try:
            check(host.job(name), wanted, needed=needed)
            yield
        finally:
            mine.release()


async def _turns(request: Request) -> JobLocks:
    turns: JobLocks = request.app.state.turns
    return turns


TurnsOf = Annotated[JobLocks, Depends(_turns)]


def check(job: HostedJob, wanted: str | None, *, needed: bool) -> None:
    """Raise 428 where a precondition is `needed` and missing, 412 where the job has changed since."""
    if wanted is None:
        if needed:
            raise http_error(
                HTTPStatus.PRECONDITION_REQUIRED,
                f"send If-Match with the ETag of the job as you read it, now {etag(job)}: it may have changed since",
            )
        return
    tags = [match[1] for part in wanted.split(",") if (match := _TAG.fullmatch(part))]
    if wanted.strip() != "*" and str(job.revision) not in tags:
        raise http_error(
            HTTPStatus.PRECONDITION_FAILED, f"the job has changed: its ETag is now {etag(job)}; get it again"
        )
