"""/v1/jobs: the jobs, their status, and actions on a whole job."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, JsonValue, model_validator

from headrace.codec import plain
from headrace.config import FolderPath
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import counted
from headrace.rpc.job_client import JobClient
from headrace.service.api import etags
from headrace.service.api.actions import ActionCall, IfMatch, action
from headrace.service.api.authorization import AuthorizedRoute, CallerOf, HostOf, authorized, note
from headrace.service.api.forms import Form, FormField, Group, Job, rests, runs, trains, value_of
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.job_figures import JobFigures, figures_of
from headrace.service.api.read_places import one_of_few
from headrace.service.api.schemas import JobName, Page, Paged, RequestBody, ResponseBody, finite, page, shown_by
from headrace.service.auth.guard import address_of
from headrace.service.auth.limits import share_key
from headrace.service.auth.roles import Role
from headrace.service.auth.spec_sizes import MAX_WORKERS, check_lines
from headrace.service.cluster.resizing import MOVE_S, resize
from headrace.service.jobs.host import Action, Desired, HostedJob, NewJob, Phase
from headrace.service.jobs.operation_queue import Operation
from headrace.service.jobs.spec_difference import WHAT_TO_DO, not_taken_yet, settings_in_force
from headrace.service.monitor.cause import cause_of_end, cause_of_trouble, cause_of_wait
from headrace.trainer.job_status import Status
from headrace.trainer.spec.changes import check_set, hot_keys

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=AuthorizedRoute)

ETAG = {"ETag": {"description": "For If-Match. It differs after every change.", "schema": {"type": "string"}}}
TAGGED = {"description": "The job.", "headers": ETAG}
GONE = (HTTPStatus.NOT_FOUND,)
CHANGE_S = 600.0
"""How long to wait for the close at which settings take effect."""


class OutcomeEntry(ResponseBody):
    """How a job ended."""

    code: int
    """0: success; 1: a permanent error; 2: the spec is wrong; 70: a bug; 75: something was unavailable."""
    reason: str
    lines: list[str]
    """The last lines of output of the worker that failed."""
    at: datetime


class JobEntry(ResponseBody):
    """A job, its desired state and its phase."""

    name: str
    phase: Phase
    """Its present phase."""
    desired: Desired
    """Its desired state, until another one is requested."""
    trouble: str
    """Why it is broken, or what it waits for; else empty."""
    revision: int
    """Number of changes by users; the ETag."""
    created: datetime
    created_by: str
    changed: datetime
    outcome: OutcomeEntry | None
    """How it ended; null if it has not."""
    build: str
    """The build that it runs in, a name of the service's configuration; empty: the service's own environment."""
    headrace_version: str
    """The version of Headrace that its launcher runs, or ran last; empty if that is not known."""


class JobCause(ResponseBody):
    """Why a job failed, is broken, restarts or waits."""

    kind: str
    """"failed", "broken", "restarting" or "waiting"."""
    text: str
    """The sentence that explains it, as the worker that fell first printed it."""
    advice: str
    """The advice: what to do about it."""


class JobStatus(JobEntry, JobFigures):
    """A job with all its figures. A figure that is not known yet is null."""

    cause: JobCause | None
    """Why it does not train as it should; null where it does."""


class JobSpec(ResponseBody):
    """A job's spec."""

    spec: dict[str, Any]
    """The spec as its user wrote it, with "***" in place of passwords."""
    base: str
    """The folder where its relative paths start."""
    store: str
    """The folder of the store."""


class JobSetting(ResponseBody):
    """A setting of a job."""

    key: str
    file: str | None
    """Its value in the job file, as JSON; null: the file leaves it out."""
    now: str
    """The value in force, as JSON."""
    origin: str
    """"file", "default", "chosen" (by the job, as it began) or "set" (while it ran)."""


class WaitingChange(ResponseBody):
    """A key of the job file that the present run has not taken."""

    key: str
    was: str
    """The value of the run, as JSON; "nothing" where it lacks the key."""
    now: str
    """The value of the job file."""
    note: str
    change: str
    """The kind of the change, which says what takes it."""
    to_do: str
    """How to have it taken."""


class JobSettings(ResponseBody):
    """The settings of a job that are in force, and changes of its file that are not."""

    settings: list[JobSetting]
    waiting: list[WaitingChange]
    """Changes of the job file since its run began."""


SMALL_JOB = {
    "name": "clicks",
    "sources": {"clicks": {"kind": "files", "paths": ["/data/clicks/*.jsonl"]}},
    "pipe": {"kind": "columns"},
    "slots": [
        {"name": "user", "values": "string"},
        {"name": "item", "values": "string"},
        {"name": "click", "kind": "meta"},
    ],
    "tasks": [{"name": "ctr", "label": "click"}],
    "model": {"name": "deepfm"},
}
"""The job of the documentation's example."""


class CreateJob(RequestBody):
    """A job to create, by `spec` or `toml`."""

    model_config = shown_by({"spec": SMALL_JOB})

    spec: dict[str, JsonValue] | None = None
    """The spec as JSON."""
    toml: str | None = Field(default=None, max_length=1 << 20)
    """The spec as TOML text."""
    name: str | None = Field(default=None, max_length=64)
    """Overrides the name in the spec."""
    base: FolderPath | None = Field(default=None, max_length=4096)
    """The folder where relative paths start, below an allowed root. Default: the job's own folder."""
    start: bool = True
    """Whether the job starts at once."""

    @model_validator(mode="after")
    def _one_of(self) -> "CreateJob":
        if (self.spec is None) == (self.toml is None):
            raise ValueError("give either spec or toml")
        return self

    def raw(self) -> dict[str, Any]:
        """The spec. Raises SpecError."""
        if self.spec is not None:
            return dict(self.spec)
        check_lines(self.toml or "")
        try:
            return tomllib.loads(self.toml or "")
        except (ValueError, RecursionError) as error:  # not TOML, or a number or a depth beyond Python's bounds
            raise SpecError(f"not TOML: {error}", "toml") from None


class SetKeys(RequestBody):
    """Settings to change while the job runs."""

    model_config = shown_by({"keys": {"tables.default.optimizer.lr": 0.02}})

    keys: dict[Annotated[str, Field(max_length=500)], JsonValue] = Field(min_length=1, max_length=100)
    """By key, as in "tables.default.optimizer.lr": 0.02; null removes a threshold."""


class ResizeJob(RequestBody):
    """Numbers of workers to go on with; what is left out stays."""

    model_config = shown_by({"trainers": 2, "shards": 2})

    shards: int | None = Field(default=None, ge=0, le=MAX_WORKERS, strict=True)
    """Shard processes; 0: the shard lives in the one trainer."""
    trainers: int | None = Field(default=None, ge=1, le=MAX_WORKERS, strict=True)
    """Trainer processes."""

    @model_validator(mode="after")
    def _bounded(self) -> "ResizeJob":
        if self.shards is None and self.trainers is None:
            raise ValueError("give shards, trainers, or both")
        if (self.shards or 0) + (self.trainers or 0) > MAX_WORKERS:
            raise ValueError(f"at most {MAX_WORKERS} workers in all")
        return self


def job_entry(job: HostedJob) -> dict[str, Any]:
    """The fields of JobEntry."""
    ended = job.outcome
    outcome = None if ended is None else OutcomeEntry(
        code=ended.code, reason=ended.reason, lines=list(ended.lines), at=ended.at
    )  # fmt: skip
    return {
        "name": job.name,
        "phase": job.phase,
        "desired": job.desired,
        "trouble": job.trouble,
        "revision": job.revision,
        "created": job.created,
        "created_by": job.created_by,
        "changed": job.changed,
        "outcome": outcome,
        "build": job.build,
        "headrace_version": job.version,
    }


def _tagged(job: HostedJob, response: Response) -> JobEntry:
    response.headers["ETag"] = etags.etag(job)
    return JobEntry(**job_entry(job))


def _with_etag(described: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> dict[str, Any]:
    described["responses"][int(status)] = TAGGED
    return described | {"status_code": status}


@router.get("", **authorized(Role.VIEWER), operation_id="listJobs", summary="List the jobs")
def list_jobs(statuses: StatusesOf, paging: Paged) -> Page[JobEntry]:
    """All jobs by name, with their phases."""
    return page([JobEntry(**job_entry(job)) for job in statuses.jobs()], paging, lambda each: each.name)


@router.post(
    "",
    **_with_etag(authorized(Role.ADMIN, repeatable=True), HTTPStatus.CREATED),
    operation_id="createJob",
    summary="Create a job",
)
def create_job(
    host: HostOf, statuses: StatusesOf, caller: CallerOf, asked: CreateJob, request: Request, response: Response
) -> JobEntry:
    """Create a job from a spec, and start it unless `start` is false.

    A spec that names a command, a model or a path that this service does not allow is refused.
    """
    note(request, name=asked.name, base=asked.base, start=asked.start)
    new = NewJob(spec=asked.raw(), name=asked.name, base=Path(asked.base) if asked.base else None, start=asked.start)
    job = host.create(new, caller.name)
    note(request, created=job.name, base=asked.base, start=asked.start)
    statuses.forget(job.name)
    response.headers["Location"] = f"/v1/jobs/{job.name}"
    return _tagged(job, response)


@router.get("/{job}", **_with_etag(authorized(Role.VIEWER, *GONE)), operation_id="getJob", summary="Get a job")
def get_job(statuses: StatusesOf, job: JobName, response: Response) -> JobStatus:
    """A job's phase and all its figures."""
    found = statuses.job(job)
    response.headers["ETag"] = etags.etag(found)
    status = statuses.of(job)
    return JobStatus(**job_entry(found), **dict(figures_of(status)), cause=_cause(found, status))


def _cause(job: HostedJob, status: Status) -> JobCause | None:
    if job.phase is Phase.BROKEN:
        found = cause_of_trouble(job.trouble)
    elif (ended := job.outcome) is not None:
        found = cause_of_end(ended.code, ended.reason, ended.lines)
    else:
        found = cause_of_wait(status)
    return None if found is None else JobCause(**asdict(found))


@action(
    router, "/{job}", method="DELETE", id="deleteJob", summary="Delete a job", role=Role.ADMIN, if_match=IfMatch.NEEDED
)
def delete_job(
    call: ActionCall, keep_store: Annotated[bool, Query(description="Keep the store on disk.")] = False
) -> None:
    """Delete a stopped job and its folder, and its store unless `keep_store` is true."""
    call.host.delete(call.name, call.caller.name, keep_store)


@action(
    router,
    "/{job}",
    method="PATCH",
    id="setKeys",
    summary="Change settings of a running job",
    if_match=IfMatch.NEEDED,
    form=Form(
        Group.SETTINGS,
        "Change a setting",
        "The setting takes effect at the next close. It overrides the job's spec, also after a restart.",
        trains,
        (
            FormField("key", "Key", choices=lambda known: hot_keys(known.spec), free=True),
            FormField("value", 'Value ("none" removes a threshold)'),
        ),
        body=lambda filled: {"keys": {str(filled["key"]).strip(): value_of(str(filled["value"]))}},
    ),
)
def set_keys(call: ActionCall, asked: SetKeys) -> Operation:
    """Change learning rates, schedules, decays and thresholds. They act from the next close; the operation awaits it.

    They override the spec, also after a restart. Invalid settings are refused at once.
    """
    check_set(call.loaded.raw, call.statuses.of(call.name).overrides, asked.keys)
    host, name, store, keys = call.host, call.name, call.job.store, asked.keys

    def work(deadline: Deadline) -> dict[str, Any]:
        version = JobClient(store).carry_out({"op": "set", "keys": keys}, deadline)
        host.count_change(name)
        return {"version": version, "keys": keys}

    operation = call.start("set", "waiting for the next close", CHANGE_S, work)
    host.count_change(name)
    return operation


@action(
    router,
    "/{job}/resize",
    id="resizeJob",
    summary="Resize a running job",
    form=Form(
        Group.SETTINGS,
        "Resize",
        "The job goes on with other numbers of shards and trainers. It trains on while rows move, and stands "
        "still for a moment. The numbers override the job's spec, also after a restart.",
        trains,
        (
            FormField("shards", "Shards (default: as many as now)"),
            FormField("trainers", "Trainers (default: as many as now)"),
        ),
    ),
)
def resize_job(call: ActionCall, asked: ResizeJob) -> Operation:
    """Have a running job go on with other numbers of shards and trainers. The operation ends once these train.

    The numbers override the spec, also after a restart. The result has the `version` after which they train.
    """
    store = call.job.store

    def check() -> None:
        """Raise SpecError where the job would have more workers than one that is created may have."""
        call.statuses.forget(call.name)
        present, cluster = call.statuses.of(call.name).workers, call.loaded.cluster
        shards = present.get("shards", cluster.num_shards) if asked.shards is None else asked.shards
        trainers = present.get("trainers", cluster.num_trainers) if asked.trainers is None else asked.trainers
        if (total := shards + trainers + cluster.readers) > MAX_WORKERS:
            key = "trainers" if asked.shards is None else "shards"
            readers = f" with {counted(cluster.readers, 'reader')}" if cluster.readers else ""
            raise SpecError(
                f"{counted(shards, 'shard')} and {counted(trainers, 'trainer')} are {total} workers{readers}; a "
                f"job has at most {MAX_WORKERS}",
                key,
            )

    def work(deadline: Deadline) -> dict[str, Any]:
        check()  # another resize may have come first
        found: dict[str, Any] = plain(resize(store, asked.shards, asked.trainers, deadline))
        call.statuses.forget(call.name)
        return found

    check()
    return call.start("resize", "waiting for the new workers", MOVE_S, work)


def _add_change(
    change: Action, summary: str, description: str, effect: str, possible: Callable[[Job], bool], *, grave: bool = False
) -> None:
    """Add the action that requests this change of a job's state."""

    def act(call: ActionCall) -> JobEntry:
        return _tagged(call.host.act(call.name, change, call.caller.name), call.response)

    act.__doc__ = description
    path, id = f"/{{job}}/{change.value}", f"{change.value}Job"
    form = Form(Group.STATE, change.value.capitalize(), effect, possible, grave=grave)
    action(router, path, id=id, summary=summary, if_match=IfMatch.OPTIONAL, answer=TAGGED, form=form)(act)


_add_change(
    Action.PAUSE,
    "Pause a job",
    "Train no new pass; the workers stay. The phase changes later.",
    "The job trains no new pass until it is resumed. It finishes the passes that are already planned. The workers "
    "stay, commits go on, and events wait in the stream.",
    lambda job: runs(job) and job["desired"] == "running",
)
_add_change(
    Action.RESUME,
    "Resume a job",
    "Train again. A job that has ended continues where it was.",
    "Training continues where it was. A job that has ended or was stopped is started again.",
    lambda job: job["desired"] == "paused" or rests(job),
)
_add_change(
    Action.DRAIN,
    "Drain a job",
    "Finish the pass, commit, complete the exports and end.",
    "The job finishes its pass, commits, completes its exports and ends. Nothing is lost, and it can be resumed.",
    lambda job: runs(job) and job["desired"] in ("running", "paused"),
    grave=True,
)
_add_change(
    Action.STOP,
    "Stop a job",
    "As drain, but kill the job if that takes too long. It can continue from its log later.",
    "As drain, but the job is killed if that takes longer than limits.stop. Passes after the last commit are in the "
    "log, so the job can be resumed.",
    lambda job: runs(job) and job["desired"] != "stopped",
    grave=True,
)
_add_change(
    Action.RESTART,
    "Restart a job",
    "Stop the job, then start it again where it was.",
    "The job is stopped, then started again where it was. It does not train meanwhile.",
    lambda job: job["phase"] != "broken",
    grave=True,
)


@router.get("/{job}/spec", **authorized(Role.VIEWER, *GONE), operation_id="getSpec", summary="Get a job's spec")
def get_spec(statuses: StatusesOf, job: JobName) -> JobSpec:
    """The spec of the job, without its passwords."""
    found = statuses.job(job)
    return JobSpec(spec=finite(dict(found.spec)), base=str(found.base), store=str(found.store))


@router.get(
    "/{job}/settings", **authorized(Role.VIEWER, *GONE), operation_id="getSettings", summary="Get a job's settings"
)
def get_settings(request: Request, caller: CallerOf, statuses: StatusesOf, job: JobName) -> JobSettings:
    """Every setting in force, with its value in the job file; and changes of the file that the run has not taken."""
    loaded = statuses.loaded(job)
    with one_of_few(share_key(caller, address_of(request))):
        settings = settings_in_force(loaded, statuses.of(job).overrides)
        waiting = not_taken_yet(loaded)
    return JobSettings(
        settings=[JobSetting(**asdict(each)) for each in settings],
        waiting=[
            WaitingChange(
                **{"key": each.key, "was": each.was, "now": each.now, "note": each.note},
                change=each.change.value,
                to_do=WHAT_TO_DO[each.change],
            )
            for each in waiting
        ],
    )
