"""/v1/jobs/{job}/metrics: metrics of predictions made before training on the samples: now, over time, and live."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from headrace.errors import SpecError
from headrace.service.api.authorization import AuthorizedRoute, CallerOf, authorized
from headrace.service.api.event_streams import EventStream, Streams
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.schemas import JobName, Number, Page, Paged, Paging, ResponseBody, cut, finite
from headrace.service.auth.guard import address_of
from headrace.service.auth.limits import share_key
from headrace.service.auth.roles import Role
from headrace.service.history.closes import Close, TimelineVersion
from headrace.trainer.exposed_figures import numbers
from headrace.trainer.job_status import Status

router = APIRouter(prefix="/v1/jobs/{job}/metrics", tags=["metrics"], route_class=AuthorizedRoute)

MAX_LAST = 2_000
SPANS = ("life", "window", "pass")
TIMELINE = r"^t[0-9]{1,9}$"
OF_SINCE = "The timeline of `since`. If the job was rewound to before `since`: closes after that commit."
GONE = (HTTPStatus.NOT_FOUND,)
Measures = dict[str, dict[str, Number]]


class JobMetrics(ResponseBody):
    """Metrics of predictions made before training on their samples, by task and name, as far as known."""

    version: Number | None
    """The last closed pass."""
    life: Measures
    """Since the start of the job."""
    window: Measures
    """Over `metrics.window`."""
    last_pass: Measures
    """Of the last pass."""
    slices: dict[str, Any]
    """"life" and "window": by task, slot and value; see `metrics.slices`."""
    reliability: dict[str, Any]
    """"life" and "window": by task with loss "bce", for tenths of the samples by their predictions: the mean
    "prediction", the mean "label", the "weight"."""
    tensors: dict[str, Any]
    """"pass", "window" and "life": mean and more of each tensor that the model returns."""
    infer_first: dict[str, Measures]
    """"life", "window" and "pass", if `metrics.infer_first` is set: a whole pass is predicted before training on it."""


class CloseEntry(ResponseBody):
    """A closed pass."""

    version: int
    timeline: str
    event_time: datetime | None
    """Time of the newest event trained on; null without event time."""
    day: int
    """The job's day."""
    events: int
    samples: int
    rejected: dict[str, int]
    """Rejected events, by reason."""
    window: Measures
    """Window metrics at the close: auc, gauc, logloss, calibration, rmse, index_recall, popular_recall. Empty if
    nothing was predicted."""


@router.get("", **authorized(Role.VIEWER, *GONE), operation_id="getMetrics", summary="A job's metrics")
def metrics(statuses: StatusesOf, job: JobName) -> JobMetrics:
    """Metrics of the job's life, the window and the last pass, and by slice."""
    return job_metrics(statuses.of(job))


def job_metrics(status: Status) -> JobMetrics:
    """The metrics in a status."""
    found = status.metrics
    slices, reliability = (
        {
            span: {task: finite(measures.get(key, nothing)) for task, measures in tasks.items()}
            for span, tasks in (("life", found.life), ("window", found.window))
        }
        for key, nothing in (("slices", {}), ("reliability", []))
    )
    life, window, last_pass = (status.measures(span) for span in SPANS)
    first = found.infer_first or {}
    return JobMetrics(
        version=status.version,
        life=life,
        window=window,
        last_pass=last_pass,
        slices=slices,
        reliability=reliability,
        tensors=finite(found.tensors),
        infer_first={
            span: {task: numbers(each) for task, each in first.get(span, {}).items()} for span in SPANS if first
        },
    )


@router.get("/history", **authorized(Role.VIEWER, *GONE), operation_id="getMetricsHistory", summary="Metrics over time")
def history(
    statuses: StatusesOf,
    job: JobName,
    paging: Paged,
    since: Annotated[int, Query(ge=0, le=2**53, description="Only versions after this one.")] = 0,
    timeline: Annotated[str | None, Query(pattern=TIMELINE, description=OF_SINCE)] = None,
    last: Annotated[int | None, Query(ge=1, le=MAX_LAST, description="Only the newest so many, in one page.")] = None,
) -> Page[CloseEntry]:
    """The closes in the job's log, oldest first."""
    closes = statuses.closes(job)
    begin = closes.placed(_begin(paging, since, timeline)).version
    if last is not None:
        found = [close for close in closes.newest(last) if close.version > begin]
        return Page(items=[close_entry(close) for close in found], next=None)
    entries = [close_entry(close) for close in closes.after(begin, paging.limit + 1)]
    return cut(entries, paging, lambda each: f"{each.timeline}-{each.version}")


def _begin(paging: Paging, since: int, timeline: str | None) -> TimelineVersion:
    """The moment after which a page begins. Raises SpecError."""
    if paging.after is None:
        return TimelineVersion(int(timeline[1:]) if timeline else 0, since)
    if (begin := TimelineVersion.of(paging.after)) is None:
        raise SpecError("this cursor is of another list; use `next` of the previous page", "query.after")
    return begin


def close_entry(close: Close) -> CloseEntry:
    """A close as an entry of the API."""
    content, at_s = close.content, close.content.event_time_s
    return CloseEntry(
        version=close.version,
        timeline=close.timeline,
        event_time=None if at_s is None else datetime.fromtimestamp(at_s, UTC),
        day=content.day,
        events=content.events,
        samples=content.samples,
        rejected=dict(content.rejected),
        window=dict(content.window),
    )


@router.get(
    "/stream",
    **authorized(Role.VIEWER, *GONE),
    operation_id="streamMetrics",
    summary="Metrics as a live stream",
    response_class=EventStream,
    status_code=HTTPStatus.OK,
)
async def stream(
    request: Request,
    caller: CallerOf,
    job: JobName,
    last_event_id: Annotated[
        str | None, Header(description="The last event received. Closes since then are sent first.", max_length=64)
    ] = None,
) -> EventStream:
    """A stream of server-sent events, until the job ends.

    `close`: a closed pass, as in the history. Its id has timeline and version, as in t2-23. A job that was rewound
    closes versions again, on a new timeline; they are sent from the commit of the rewind on. `figures`: a job's
    figures, at each close and at least once a second while they change. `end`: the phase at the job's end. Comments
    keep the connection open.
    """
    streams: Streams = request.app.state.streams
    return await streams.open(job, last_event_id, share_key(caller, address_of(request)))
