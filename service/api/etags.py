"""A job's revision as an ETag, and `If-Match` on what changes it: from there on, who changes a job has it alone."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import Depends, Header, Request

from service.api.problems import refused
from service.hosting.errors import NotNow
from service.hosting.host import Host, HostedJob

TURN_S = 10.0
"""How long a change waits for one that was there before it."""
_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')

Precondition = Annotated[
    str | None,
    Header(alias="If-Match", max_length=200, description="The ETag of the job as it was read, or *."),
]


def etag(job: HostedJob) -> str:
    """The job's ETag: another one after every change that somebody makes."""
    return f'"{job.revision}"'


class Turns:
    """Changes of a job one after the other, so that what one has checked holds while it acts. Any thread.

    Nobody else changes what an ETag is of: a root has one service, and this is its only way in.
    """

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def changing(self, host: Host, name: str, wanted: str | None, *, needed: bool) -> Iterator[None]:
        """The job is as `wanted` says, and nobody else's before the end of the context.

        Raises UnknownJob, what `check` raises, and NotNow where somebody else's change takes long.
        """
        with self._lock:
            mine = self._locks.setdefault(name, threading.Lock())
        if not mine.acquire(timeout=self._turn_s):
            raise NotNow(f"job {name!r} is being changed by somebody else; ask again")
        try:
            check(host.job(name), wanted, needed=needed)
            yield
        finally:
            mine.release()


async def _turns(request: Request) -> Turns:
    turns: Turns = request.app.state.turns
    return turns


TurnsOf = Annotated[Turns, Depends(_turns)]


def check(job: HostedJob, wanted: str | None, *, needed: bool) -> None:
    """Raises 428 where a precondition is `needed` and missing, 412 where the job was changed since."""
    if wanted is None:
        if needed:
            raise refused(
                HTTPStatus.PRECONDITION_REQUIRED,
                f"send If-Match with the ETag of the job as you read it, now {etag(job)}: others may have changed it",
            )
        return
    tags = [match[1] for part in wanted.split(",") if (match := _TAG.fullmatch(part))]
    if wanted.strip() != "*" and str(job.revision) not in tags:
        raise refused(
            HTTPStatus.PRECONDITION_FAILED, f"the job was changed since: its ETag is {etag(job)}; get it again"
        )
