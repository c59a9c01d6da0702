"""/v1/jobs/{job}/exports: list, request and download exports, and choose the current one. See service.exports."""

from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from fastapi.responses import FileResponse
from pydantic import Field

from headrace.deadline import Deadline
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, authorized, downloads
from headrace.service.api.commits import named
from headrace.service.api.forms import Form, FormField, Group, readable, trains
from headrace.service.api.job_cache import JobCache, StatusesOf
from headrace.service.api.problems import http_error
from headrace.service.api.schemas import JobName, Page, Paged, RequestBody, ResponseBody, finite, page, shown_by
from headrace.service.auth.roles import Role
from headrace.service.exports import export_list
from headrace.service.exports.export_request import make_export
from headrace.service.jobs.operation_queue import Operation
from headrace.service.spec.job import LoadedJob
from headrace.trainer.exports.manifest import files_of

router = APIRouter(prefix="/v1/jobs/{job}/exports", tags=["exports"], route_class=AuthorizedRoute)

FILES = "application/octet-stream"
LIST_S = 2.0
"""Greatest age of a cached list, which may come from an object store."""
EXPORT_S = 3_600.0
"""How long a requested export may take."""
StreamName = Annotated[str, InPath(description="A stream of exports.", max_length=128)]
Timeline = Annotated[str, InPath(description='As in "t1".', max_length=32)]
ExportName = Annotated[str, InPath(description='As in "0000000012-base".', max_length=64)]
GONE = (HTTPStatus.NOT_FOUND,)


class ExportEntry(ResponseBody):
    """One export."""

    stream: str
    name: str
    timeline: str
    version: int
    """Version of the exported state."""
    kind: Literal["base", "delta"]
    complete: bool
    current: bool
    """Whether `current.json` names it."""
    damaged: str | None
    """The damage of its manifest; null if none. Other files are not read for this."""
    made_at: str | None
    rows: int | None
    tombstones: int | None
    pending: int | None
    """Rows that have no vector yet."""
    bytes: int | None
    why: str | None
    """Reason for the export, and for a base."""
    failed_gates: list[str]


class ExportDetails(ResponseBody):
    """The content of an export."""

    path: str
    """"t1/0000000012-base"."""
    url: str
    """Its address."""
    current: bool
    manifest: dict[str, Any]
    """Its manifest: tables, gates, files with their hashes, its parent."""


class MakeExport(RequestBody):
    """An export to make."""

    model_config = shown_by({"stream": "serving", "kind": "base"})

    stream: str = Field(max_length=128)
    kind: Literal["base", "delta"] | None = None
    """Default: a delta if the stream has deltas."""


class PublishRequest(RequestBody):
    """An export to make current."""

    model_config = shown_by({"name": "t1/0000000012-base"})

    name: str = Field(max_length=128)
    """Its path, name or version."""


class PublishedExport(ResponseBody):
    """The export that is current now."""

    path: str
    url: str
    failed_gates: list[str]
    """Gates that it did not pass."""


def _entries(statuses: JobCache, job: str, loaded: LoadedJob) -> list[dict[str, Any]]:
    def look() -> list[dict[str, Any]]:
        with export_list.open_streams(loaded, None) as streams:
            return [entry for stream in streams for entry in export_list.entries_of(stream)]

    return statuses.kept.get(("exports", job), LIST_S, look) if loaded.spec.exports else []


@router.get("", **authorized(Role.VIEWER, *GONE), operation_id="listExports", summary="List a job's exports")
def list_exports(
    statuses: StatusesOf,
    job: JobName,
    paging: Paged,
    stream: Annotated[str | None, Query(max_length=128, description="Only exports of this stream.")] = None,
) -> Page[ExportEntry]:
    """A job's exports by stream, oldest first, also incomplete ones."""
    found = _entries(statuses, job, statuses.loaded(job))
    entries = [ExportEntry(**each) for each in found if stream in (None, each["stream"])]
    return page(entries, paging, lambda each: f"{each.stream}/{each.timeline}/{each.name}")


@action(
    router,
    "",
    id="makeExport",
    summary="Request an export",
    form=Form(
        Group.COPIES,
        "Export",
        "The state at the next close is exported for serving. The export becomes current if it passes its gates.",
        lambda job: trains(job) and bool(job["exports"]),
        (
            FormField("stream", "Stream of exports", choices=lambda known: list(known.job["exports"])),
            FormField("kind", "Kind (default: a delta if the stream has deltas)"),
        ),
    ),
)
def make(call: ActionCall, asked: MakeExport) -> Operation:
    """Have a running job export its state at the next close. The result has its `name`, and whether it is `current`."""
    job = call.loaded
    _check_stream(job, asked.stream)

    def work(deadline: Deadline) -> dict[str, Any]:
        return make_export(job.store, asked.stream, asked.kind, deadline).message(asked.stream)

    return call.start("export", "waiting for the next close and the export", EXPORT_S, work)


@router.get(
    "/{stream}/{timeline}/{name}", **authorized(Role.VIEWER, *GONE), operation_id="getExport", summary="Get an export"
)
def get_export(
    statuses: StatusesOf, job: JobName, stream: StreamName, timeline: Timeline, name: ExportName
) -> ExportDetails:
    """A complete export and its manifest."""
    found = _shown(statuses.loaded(job), stream, timeline, name)
    return ExportDetails(path=found.path, url=found.url, current=found.current, manifest=finite(dict(found.manifest)))


@router.get(
    "/{stream}/{timeline}/{name}/files/{file}",
    **downloads(Role.VIEWER, FILES, *GONE),
    operation_id="getExportFile",
    summary="Download a file of an export",
)
def get_file(
    statuses: StatusesOf,
    job: JobName,
    stream: StreamName,
    timeline: Timeline,
    name: ExportName,
    file: Annotated[str, InPath(description="Name of the file in the manifest.", max_length=256)],
) -> FileResponse:
    """One file of a complete export in a folder. Files in an object store must be fetched from there."""
    found = _shown(statuses.loaded(job), stream, timeline, name)
    if file not in files_of(found.manifest) or PurePosixPath(file).name != file:
        raise http_error(HTTPStatus.NOT_FOUND, f"export {found.path} has no file {file!r}")
    if "://" in found.url:
        raise http_error(HTTPStatus.CONFLICT, f"this export is stored at {found.url}; fetch {file} from there")
    folder = Path(found.url).resolve()
    path = (folder / file).resolve()
    if path.parent != folder or not path.is_file():
        raise http_error(HTTPStatus.NOT_FOUND, f"{file} of export {found.path} does not exist")
    return FileResponse(path, media_type=FILES, filename=file)


@action(
    router,
    "/{stream}/current",
    id="pointToExport",
    summary="Make an export current",
    form=Form(
        Group.PAST,
        "Serve an export",
        "Replicas and other readers of the stream serve this export from now on, also if it failed its gates. An older "
        "one rolls the stream back. The job's next export becomes current as usual.",
        lambda job: readable(job) and bool(job["exports"]),
        (
            FormField("stream", "Stream of exports", choices=lambda known: list(known.job["exports"])),
            FormField("name", "Export", choices=lambda known: known.exports, free=True),
        ),
        with_exports=True,
    ),
)
def point(call: ActionCall, stream: StreamName, asked: PublishRequest) -> PublishedExport:
    """Write an export to `current.json`, also if it failed its gates, until the job writes its next one."""
    job = call.loaded
    _check_stream(job, stream)
    with named():
        done = export_list.make_current(job, stream, asked.name)
    return PublishedExport(path=done.path, url=done.url, failed_gates=done.failed_gates)


def _check_stream(job: LoadedJob, stream: str) -> None:
    if stream not in job.spec.exports:
        streams = ", ".join(job.spec.exports) or "none"
        raise http_error(HTTPStatus.NOT_FOUND, f"the job has no stream {stream!r} of exports; its streams: {streams}")


def _shown(job: LoadedJob, stream: str, timeline: str, name: str) -> export_list.CompleteExport:
    _check_stream(job, stream)
    with named():
        return export_list.export_details(job, stream, f"{timeline}/{name}")
