"""/v1/jobs/{job}/commits: a job's commits, and actions on them. The work is in service.history."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as InPath
from pydantic import Field

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, authorized
from headrace.service.api.forms import Form, FormField, Group, readable, rests, trains
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.problems import http_error
from headrace.service.api.schemas import JobName, Page, Paged, RequestBody, ResponseBody, page, shown_by
from headrace.service.auth.roles import Caller, Role
from headrace.service.cluster.store import in_use
from headrace.service.history import commit_list
from headrace.service.history.commit_lookup import find_commit
from headrace.service.history.commit_request import make_commit
from headrace.service.history.rewind import rewind_job
from headrace.service.history.verification import check_commit
from headrace.service.jobs.errors import WrongPhase
from headrace.service.jobs.host import HostedJob
from headrace.service.jobs.operation_queue import Operation
from headrace.trainer.checkpoint.commits import Commits

router = APIRouter(prefix="/v1/jobs/{job}/commits", tags=["commits"], route_class=AuthorizedRoute)

CommitName = Annotated[str, InPath(description="A commit's name, or its version.", max_length=128)]
Holder = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Who holds it. Several may. Default: the caller.")
]
READ_S = 86_400.0
"""How long reading a commit back may take: practically unlimited."""
GONE = (HTTPStatus.NOT_FOUND,)
COMMIT_FIELD = FormField("name", "Commit", choices=lambda known: known.commits)
HOLDER_FIELD = FormField("holder", "Held for (default: your name)")


class CommitEntry(ResponseBody):
    """One commit of a job."""

    name: str
    version: int
    """The last closed pass that it contains."""
    timeline: str
    generation: int
    made_at: str | None
    events: int | None
    """Events trained on since the start of the job."""
    rows: int | None
    bytes: int | None
    """Size of all its files."""
    own_bytes: int | None
    """Size of the files that no other commit shares: removing the commit frees as much."""
    held_by: list[str]
    """Holders that keep it from being pruned."""
    damaged: str | None
    """The damage of its manifest; null if none. Other files are not read for this."""
    next: bool
    """Whether a restart begins with this commit, if it is sound."""


class Skipped(ResponseBody):
    """Positions that the job skipped."""

    partition: str
    begin: int
    end: int


class CommitShard(ResponseBody):
    """The part of a commit that one shard wrote."""

    folder: str
    buckets: list[int]
    """The first bucket, and the one after the last."""
    rows: dict[str, int]
    """Rows by table."""


class CommitDetails(CommitEntry):
    """The content of a commit."""

    job: str
    parent: str | None
    trainers: int
    """Number of trainers that wrote it."""
    log_from: int
    """The first log record that a restart from it needs."""
    progress: dict[str, int]
    """"num_events", "num_samples", "skipped_steps"."""
    rejected: dict[str, int]
    """Rejected events, by reason."""
    positions: dict[str, int]
    """By partition: the position after the last event trained on."""
    skips: list[Skipped]
    parts: list[CommitShard]
    files: int
    made_with: dict[str, str]
    """Versions of libraries, and the hardware, that it was made with."""


class HolderRequest(RequestBody):
    """A request to hold a commit, or to release it."""

    model_config = shown_by({"holder": "audit"})

    holder: Holder | None = None


class CommitHolders(ResponseBody):
    """The present holders of a commit."""

    name: str
    held_by: list[str]


@contextmanager
def named() -> Iterator[None]:
    """Answer 404 for an object that the address names and that does not exist."""
    try:
        yield
    except SpecError as error:
        raise http_error(HTTPStatus.NOT_FOUND, str(error)) from error


def must_rest(job: HostedJob) -> None:
    """Raise WrongPhase while the job runs."""
    if in_use(job.store):
        raise WrongPhase(f"job {job.name!r} is running; stop it, and retry once its phase is stopped, ended or failed")


@router.get("", **authorized(Role.VIEWER, *GONE), operation_id="listCommits", summary="List a job's commits")
def list_commits(statuses: StatusesOf, job: JobName, paging: Paged) -> Page[CommitEntry]:
    """A job's commits, oldest first."""
    return page([CommitEntry(**each) for each in statuses.commits(job)], paging, lambda each: each.name)


@action(
    router,
    "",
    id="makeCommit",
    summary="Request a commit",
    grant="commit",
    form=Form(Group.COPIES, "Commit", "The present state is made durable. Training continues meanwhile.", trains),
)
def make(call: ActionCall) -> Operation:
    """Have a running job commit its present state. The result has the `name` of the commit."""
    job = call.loaded

    def work(deadline: Deadline) -> dict[str, Any]:
        return {"name": make_commit(job.store, deadline)}

    return call.start("commit", "waiting for rank 0 to write the commit", job.spec.commit.deadline, work)


@router.get("/{name}", **authorized(Role.VIEWER, *GONE), operation_id="getCommit", summary="Get a commit")
def get_commit(statuses: StatusesOf, job: JobName, name: CommitName) -> CommitDetails:
    """A commit, as described by its manifest."""
    store = statuses.job(job).store
    with named():
        return CommitDetails(**commit_list.details_of(store, name))


@action(
    router,
    "/{name}",
    method="DELETE",
    id="deleteCommit",
    summary="Remove a commit",
    form=Form(
        Group.PAST,
        "Remove a commit",
        "The files of the commit are deleted, but for those that other commits share. The job must be stopped. The "
        "commit that the next run begins with stays, and so do commits that are kept for somebody.",
        rests,
        (COMMIT_FIELD,),
        grave=True,
        with_commits=True,
    ),
)
def delete_commit(call: ActionCall, name: CommitName) -> None:
    """Remove a commit of a stopped job, unless it has holders, or the next run begins with it."""
    job = call.host.job(call.name)
    with named():
        commit = find_commit(job.store, name)
    must_rest(job)
    commit_list.remove(job.store, job.name, commit.name)


@action(
    router,
    "/{name}/verify",
    id="verifyCommit",
    summary="Verify a commit",
    form=Form(
        Group.PAST,
        "Verify a commit",
        "Every file of the commit is read back, every table is opened, and its rows are counted.",
        readable,
        (COMMIT_FIELD,),
        with_commits=True,
    ),
)
def verify(call: ActionCall, name: CommitName) -> Operation:
    """Read every file, open every table, count its rows. The result has `sound`, and the damage by file."""
    store = call.job.store
    with named():
        found = find_commit(store, name).name

    def work(_deadline: Deadline) -> dict[str, Any]:
        verdict = check_commit(store, found)
        return asdict(verdict) | {"sound": verdict.sound}

    return call.start("verify", f"reading {found} back", READ_S, work)


@action(
    router,
    "/{name}/pin",
    id="pinCommit",
    summary="Keep a commit from being pruned",
    form=Form(
        Group.PAST,
        "Keep a commit",
        "The commit is kept until it is released, also once commit.keep newer ones exist.",
        readable,
        (COMMIT_FIELD, HOLDER_FIELD),
        with_commits=True,
    ),
)
def pin(call: ActionCall, name: CommitName, asked: HolderRequest | None = None) -> CommitHolders:
    """Keep a commit from being pruned until the same holder unpins it."""
    return _change_holder(call, name, asked, commit_list.pin)


@action(
    router,
    "/{name}/unpin",
    id="unpinCommit",
    summary="Release a pinned commit",
    form=Form(
        Group.PAST,
        "Release a commit",
        "The commit may be removed again once nobody else keeps it.",
        readable,
        (COMMIT_FIELD, HOLDER_FIELD),
        with_commits=True,
    ),
)
def unpin(call: ActionCall, name: CommitName, asked: HolderRequest | None = None) -> CommitHolders:
    """Release a commit: it may be pruned again once it has no other holder."""
    return _change_holder(call, name, asked, commit_list.unpin)


@action(
    router,
    "/{name}/rewind",
    id="rewindJob",
    summary="Rewind a job to a commit",
    form=Form(
        Group.PAST,
        "Rewind",
        "The commit is verified. Once the job is resumed, it continues from the commit, on a new timeline, and "
        "trains again on everything after it. The job must be stopped.",
        rests,
        (COMMIT_FIELD,),
        grave=True,
        with_commits=True,
    ),
)
def rewind(call: ActionCall, name: CommitName) -> Operation:
    """Let a stopped job continue from a commit, on a new timeline. It trains again on everything after the commit.

    The commit is verified first. The result has the new `timeline`, and in `left` the state to return to.
    """
    job, loaded = call.host.job(call.name), call.loaded
    with named():
        commit = find_commit(job.store, name).name
    must_rest(job)
    return call.start("rewind", f"reading {commit} back", READ_S, lambda _: rewind_job(loaded, commit).message())


def _change_holder(
    call: ActionCall, name: str, asked: HolderRequest | None, change: Callable[[Path, str, str], object]
) -> CommitHolders:
    store, who = call.job.store, commit_list.check_holder(_holder(asked, call.caller))
    call.note(holder=who)
    with named():
        found = find_commit(store, name).name
    change(store, found, who)
    return CommitHolders(name=found, held_by=Commits(store).holders().get(found, []))


def _holder(asked: HolderRequest | None, caller: Caller) -> str:
    """The holder in the request, else the caller's name with special characters replaced."""
    if asked is not None and asked.holder is not None:
        return asked.holder
    return re.sub(r"[^A-Za-z0-9_-]", "-", caller.name)[:64]
