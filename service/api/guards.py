"""/v1/jobs/{job}/doctor, /freshness: signs of trouble with a job's slots, and the price of a served version's age.

The work is in service.history. Measuring anew is `headrace freshness`, on the job's machine.
"""

from dataclasses import asdict
from datetime import datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request

from headrace.errors import SpecError
from headrace.service.api.authorization import AuthorizedRoute, CallerOf, authorized
from headrace.service.api.job_cache import LOADED_S, JobCache, StatusesOf
from headrace.service.api.read_places import one_of_few
from headrace.service.api.schemas import JobName, ResponseBody, finite
from headrace.service.auth.guard import address_of
from headrace.service.auth.limits import share_key
from headrace.service.auth.roles import Role
from headrace.service.history.commit_lookup import reader
from headrace.service.history.slot_report import JobReport, SlotDiagnosis, SlotOrder, ranked, report_of
from headrace.service.history.version_ages import read_ages
from headrace.trainer.checkpoint.commits import Commits

router = APIRouter(prefix="/v1/jobs/{job}", tags=["guards"], route_class=AuthorizedRoute)

MAX_WEIGHED_ROWS = 200_000
"""A commit with more rows is not read here, so that the service stays quick; its slots have no weight."""
GONE = (HTTPStatus.NOT_FOUND,)


class JobDiagnosis(ResponseBody):
    """A job's slots at its newest commit, or at that of a minute ago."""

    commit: str | None
    """Its name; null if there is none yet."""
    guarded: bool
    """Whether the job has guards, so that there are figures of passes."""
    slots: list[SlotDiagnosis]


class AgeCostEntry(ResponseBody):
    """One metric of one task, of versions of one age, against the job itself over the same events."""

    task: str
    metric: str
    """auc, gauc or logloss."""
    from_s: float
    """Least age, in seconds of event time."""
    to_s: float | None
    """Greatest age; null: no bound."""
    parts: int
    """Passes that were compared, of one version each."""
    versions: int
    samples: int
    job: float | None
    """The metric of the job, which learns each pass after it has predicted it."""
    frozen: float | None
    """The metric of versions of that age."""
    difference: float | None
    """Of the frozen versions from the job."""
    error: float | None
    """Standard error of the difference; null for fewer than six parts."""
    p: float | None
    """Of a paired test; null for fewer than six parts."""


class AgesOfVersions(ResponseBody):
    """The price of a served version's age, as `headrace freshness` measured it last."""

    measured_at: datetime | None
    """Null if it was never measured."""
    passes: int
    """The newest pass that the job had closed then."""
    versions: list[int]
    """The old versions that were run again."""
    ages: list[AgeCostEntry]
    """By task, metric and age."""
    left_out: int
    """Further entries, which are not kept."""


@router.get(
    "/doctor", **authorized(Role.VIEWER, *GONE), operation_id="getDoctor", summary="Signs of trouble with slots"
)
def doctor(
    request: Request,
    caller: CallerOf,
    statuses: StatusesOf,
    job: JobName,
    by: Annotated[SlotOrder, Query(description="What comes first: the greatest shift, value or cost.")] = (
        SlotOrder.SHIFT
    ),
) -> JobDiagnosis:
    """Figures of each slot at the newest commit, and signs of trouble in words, as `headrace doctor` prints them."""
    found = statuses.job(job)
    with one_of_few(share_key(caller, address_of(request))):
        key = ("doctor", job, found.created.isoformat())
        report = statuses.kept.get(key, LOADED_S, lambda: _report(statuses, job))
    if report is None:
        return JobDiagnosis(commit=None, guarded=False, slots=[])
    slots = [SlotDiagnosis(**finite(asdict(each))) for each in ranked(report.slots, by)]
    return JobDiagnosis(commit=report.commit, guarded=report.guarded, slots=slots)


def _report(statuses: JobCache, job: str) -> JobReport | None:
    """None where the job has no commit. Raises SpecError for commits in an object store."""
    loaded = statuses.loaded(job)
    if not Commits(loaded.store).names():
        return None
    if loaded.spec.store.parts == "object":
        raise SpecError('is "object", whose files the service does not fetch; use `headrace doctor`', "store.parts")
    return report_of(loaded, SlotOrder.SHIFT, {}, max_weighed=MAX_WEIGHED_ROWS, what=reader())


@router.get(
    "/freshness", **authorized(Role.VIEWER, *GONE), operation_id="getFreshness", summary="The price of a version's age"
)
def freshness(statuses: StatusesOf, job: JobName) -> AgesOfVersions:
    """The last result of `headrace freshness`: metrics of old versions against the job itself, by their age."""
    found = read_ages(statuses.job(job).store)
    if found is None:
        return AgesOfVersions(measured_at=None, passes=0, versions=[], ages=[], left_out=0)
    return AgesOfVersions(**finite(asdict(found)))
