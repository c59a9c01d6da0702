"""/v1/jobs/{job}/commits: a job's commits, and what is done to them. The work is service.past's."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath
from pydantic import Field

from millrace.deadline import Deadline
from millrace.errors import SpecError
from service.access.roles import Caller, Role
from service.api.answers import Asked, Described, Page, Paged, page
from service.api.doors import CallerOf, Door, HostOf, door, note
from service.api.jobs import JobName
from service.api.operations import OperationEntry, begins, begun, said
from service.api.problems import refused
from service.api.statuses import StatusesOf
from service.hosting.errors import NotNow
from service.hosting.host import HostedJob
from service.past import commits as work
from service.past.asking import make_commit
from service.past.choosing import chosen
from service.past.steering import rewind_job
from service.past.verify import check_commit
from service.store import in_use
from trainer.commits import Commits

router = APIRouter(prefix="/v1/jobs/{job}/commits", tags=["commits"], route_class=Door)

CommitName = Annotated[str, InPath(description="A commit's name, or its version.", max_length=128)]
Holder = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Who keeps it; each may. Unless given, who asks.")
]
READ_S = 86_400.0
"""How long reading a commit back may take: as long as it does."""
GONE = (HTTPStatus.NOT_FOUND,)


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
    """What is wrong with its manifest; its files are not read for this."""
    next: bool
    """Whether a restart begins here, if it is sound."""


class Skipped(Described):
    """Positions that the job went past."""

    partition: str
    begin: int
    end: int


class ShardPart(Described):
    """What one shard holds of a commit."""

    folder: str
    buckets: list[int]
    """The first, and the one after the last."""
    rows: dict[str, int]
    """By table."""


class CommitDetails(CommitEntry):
    """What a commit holds."""

    job: str
    parent: str | None
    trainers: int
    """How many made it."""
    log_from: int
    """The first record of the log that going on from it needs."""
    progress: dict[str, int]
    """"num_events", "num_samples", "skipped_steps"."""
    rejected: dict[str, int]
    """Events that gave no sample, by reason."""
    positions: dict[str, int]
    """By partition: the position after the last event trained on."""
    skips: list[Skipped]
    parts: list[ShardPart]
    files: int
    made_with: dict[str, str]
    """Libraries and hardware."""


class Pin(Asked):
    """Who keeps a commit."""

    holder: Holder | None = None


class Pinned(Described):
    """Who keeps a commit now."""

    name: str
    held_by: list[str]


@contextmanager
def named() -> Iterator[None]:
    """What is called by a name in the address, and is not there, is a 404."""
    try:
        yield
    except SpecError as error:
        raise refused(HTTPStatus.NOT_FOUND, str(error)) from error


def must_rest(job: HostedJob) -> None:
    """Raises NotNow while the job runs."""
    if in_use(job.store):
        raise NotNow(f"job {job.name!r} runs; stop it, and ask again once its phase is stopped, ended or failed")


@router.get("", **door(Role.VIEWER, *GONE), operation_id="listCommits", summary="List a job's commits")
def list_commits(statuses: StatusesOf, job: JobName, paging: Paged) -> Page[CommitEntry]:
    """A job's commits, in order of time."""
    return page([CommitEntry(**each) for each in statuses.commits(job)], paging, lambda each: each.name)


@router.post("", **begins(Role.OPERATOR, act="commit"), operation_id="makeCommit", summary="Have a commit made")
def make(host: HostOf, statuses: StatusesOf, caller: CallerOf, job: JobName, response: Response) -> OperationEntry:
    """Have a running job make a commit of what it has learnt by now; the result has its `name`."""
    loaded = statuses.loaded(job)

    def work(deadline: Deadline) -> dict[str, Any]:
        return {"name": make_commit(loaded.store, deadline)}

    act = said("waiting for the chief to write it", loaded.spec.commit.deadline, work)
    return begun(host, "commit", job, caller, act, response)


@router.get("/{name}", **door(Role.VIEWER, *GONE), operation_id="getCommit", summary="What a commit holds")
def get_commit(statuses: StatusesOf, job: JobName, name: CommitName) -> CommitDetails:
    """What a commit's manifest says of it."""
    store = statuses.job(job).store
    with named():
        return CommitDetails(**work.details_of(store, name))


@router.delete(
    "/{name}",
    **door(Role.OPERATOR, *GONE),
    status_code=HTTPStatus.NO_CONTENT,
    operation_id="deleteCommit",
    summary="Remove a commit",
)
def delete_commit(host: HostOf, statuses: StatusesOf, _caller: CallerOf, job: JobName, name: CommitName) -> None:
    """Remove a commit of a job that does not run, unless somebody keeps it, or the next run begins at it."""
    found = host.job(job)
    with named():
        commit = chosen(found.store, name)
    must_rest(found)
    work.remove(found.store, found.name, commit.name)
    statuses.forget(job)


@router.post(
    "/{name}/verify", **begins(Role.OPERATOR), operation_id="verifyCommit", summary="Read a commit back and check it"
)
def verify(
    host: HostOf, statuses: StatusesOf, caller: CallerOf, job: JobName, name: CommitName, response: Response
) -> OperationEntry:
    """Read every file back, open every table, count its rows; the result has `sound`, and what is wrong by file."""
    store = statuses.job(job).store
    with named():
        found = chosen(store, name).name

    def check(_deadline: Deadline) -> dict[str, Any]:
        verdict = check_commit(store, found)
        return asdict(verdict) | {"sound": verdict.sound}

    return begun(host, "verify", job, caller, said(f"reading {found} back", READ_S, check), response)


def _keeping(word: str, act: Callable[[Path, str, str], object], summary: str, told: str) -> None:
    """The route of one act of holders."""

    def kept(
        statuses: StatusesOf,
        caller: CallerOf,
        job: JobName,
        name: CommitName,
        request: Request,
        asked: Pin | None = None,
    ) -> Pinned:
        store, who = statuses.job(job).store, work.check_person(_holder(asked, caller))
        note(request, name=name, holder=who)
        with named():
            found = chosen(store, name).name
        act(store, found, who)
        statuses.forget(job)
        return Pinned(name=found, held_by=Commits(store).holders().get(found, []))

    kept.__doc__ = told
    router.add_api_route(
        f"/{{name}}/{word}",
        kept,
        methods=["POST"],
        **door(Role.OPERATOR, *GONE, repeatable=True),
        operation_id=f"{word}Commit",
        summary=summary,
    )


_keeping(
    "pin",
    work.pin,
    "Keep a commit from being pruned",
    "Keep a commit from being pruned until it is unpinned by the same holder.",
)
_keeping("unpin", work.unpin, "Let a pinned commit go", "Let a commit go, when its turn comes to be pruned.")


@router.post(
    "/{name}/rewind", **begins(Role.OPERATOR), operation_id="rewindJob", summary="Have a job go on from a commit"
)
def rewind(
    host: HostOf, statuses: StatusesOf, caller: CallerOf, job: JobName, name: CommitName, response: Response
) -> OperationEntry:
    """Have a job that does not run go on from a commit, on a new timeline; what came after it is trained anew.

    The commit is read back first. The result has the `timeline`, and in `left` the way back.
    """
    found, loaded = host.job(job), statuses.loaded(job)
    with named():
        commit = chosen(found.store, name).name
    must_rest(found)

    def steer(_deadline: Deadline) -> dict[str, Any]:
        done = asdict(rewind_job(loaded, commit))
        return done | {"aside": None if done["aside"] is None else str(done["aside"])}

    return begun(host, "rewind", job, caller, said(f"reading {commit} back", READ_S, steer), response)


def _holder(asked: Pin | None, caller: Caller) -> str:
    """The holder meant: the one given, else the caller, as far as their name is a plain word."""
    if asked is not None and asked.holder is not None:
        return asked.holder
    return re.sub(r"[^A-Za-z0-9_-]", "-", caller.name)[:64]
