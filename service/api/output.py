"""/v1/jobs/{job}/log, /output, /deadletters: a job's log, the output of its processes, and its rejected events."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from fastapi.responses import FileResponse

from headrace.durable import check_no_link
from headrace.service.api.authorization import AuthorizedRoute, HostOf, authorized, downloads
from headrace.service.api.job_cache import JobCache, StatusesOf
from headrace.service.api.problems import http_error
from headrace.service.api.schemas import JobName, Page, Paged, ResponseBody, cut, encoded, number_after, page
from headrace.service.auth.roles import Role
from headrace.service.cluster.store import LETTERS
from headrace.service.history.dead_letters import LETTERS_FILE, RejectedEvent, is_plain, letter_files, newest_letters
from headrace.service.history.log_text import RecordLine, good_records, log_lines
from headrace.service.jobs.host import LineFilter, LineLevel

router = APIRouter(prefix="/v1/jobs/{job}", tags=["output"], route_class=AuthorizedRoute)

LINES = "application/x-ndjson"
DAMAGED_LOG_S = 1.0
"""Greatest age of a cached log that may be damaged, which is read whole."""
GONE = (HTTPStatus.NOT_FOUND,)
WorkerName = Annotated[str | None, Query(max_length=64, description='Only lines of this process, as in "trainer-0".')]
LineText = Annotated[str, Query(max_length=200, description="Only lines that contain this text, in whatever case.")]
Level = Annotated[LineLevel | None, Query(description="Only lines of this level or a greater one.")]
MAX_LETTERS = 500


class LogLine(ResponseBody):
    """One record of a job's log."""

    number: int
    when: str
    """Time of the record, if it has one; else empty."""
    kind: str
    """"claim", "plan", "operation", "close" or "void"; "damage" at the end of a damaged log."""
    words: str


class OutputLine(ResponseBody):
    """A line that a process of a job printed."""

    at: str
    """ISO 8601, UTC; empty where it is not known."""
    worker: str
    text: str


class OutputPage(ResponseBody):
    """Lines that a job's processes printed."""

    items: list[OutputLine]
    next: str
    """The value of `after` for the lines that follow, also if there are none yet."""


class LettersFile(ResponseBody):
    """Rejected events of one pass and one process, a JSON line each."""

    name: str
    pass_number: int
    rank: int
    bytes: int
    written: datetime


class RejectedEvents(ResponseBody):
    """The newest rejected events."""

    items: list[RejectedEvent]
    """The newest first."""


@router.get("/log", **authorized(Role.VIEWER, *GONE), operation_id="getLog", summary="Read a job's log")
def log(
    statuses: StatusesOf,
    job: JobName,
    paging: Paged,
    last: Annotated[int | None, Query(ge=1, le=1000, description="Only the newest so many, in one page.")] = None,
) -> Page[LogLine]:
    """Every claim, plan, operation and close in the job's log as text, oldest first.

    A damaged log is read up to the damage, which is the last entry.
    """
    pages, begin = statuses.log_pages(job), number_after(paging)
    found = pages.after(begin, paging.limit + 1) if last is None else pages.newest(last)
    lines = _damaged_log(statuses, job) if found is None else [_entry(each) for each in found]
    if last is not None:
        return Page(items=lines[-last:], next=None)
    return cut([line for line in lines if line.number > begin], paging, lambda each: str(each.number))


def _entry(line: RecordLine) -> LogLine:
    return LogLine(number=line.number, when=line.when, kind=line.kind.value, words=line.text)


def _damaged_log(statuses: JobCache, job: str) -> list[LogLine]:
    """All lines up to the damage, and the damage."""
    folder = check_no_link(statuses.job(job).store / "log")

    def read_whole() -> list[LogLine]:
        records, damage = good_records(folder)
        lines = [_entry(each) for each in log_lines(records)]
        if damage is None:
            statuses.log_pages(job).forget()
            return lines
        number = (lines[-1].number if lines else 0) + 1
        return [*lines, LogLine(number=number, when="", kind="damage", words=str(damage))]

    return statuses.kept.get(("log", job, str(folder)), DAMAGED_LOG_S, read_whole)


@router.get(
    "/output",
    **authorized(Role.VIEWER, *GONE),
    operation_id="getOutput",
    summary="Read the output of a job's processes",
)
def output(
    host: HostOf,
    job: JobName,
    paging: Paged,
    worker: WorkerName = None,
    text: LineText = "",
    level: Level = None,
    last: Annotated[bool, Query(description="Only the newest lines, without `after`.")] = False,
) -> OutputPage:
    """Lines that a job's processes printed. The newest `limits.max_output` bytes are kept. Continue with `next`."""
    begin = number_after(paging, -1 if last else 0)
    lines = host.log_lines(job, LineFilter(worker, text, level), begin, paging.limit)
    after = lines[-1].after if lines else max(begin, 0)
    items = [OutputLine(at=line.at, worker=line.worker, text=line.text) for line in lines]
    return OutputPage(items=items, next=encoded(str(after)))


@router.get(
    "/deadletters",
    **authorized(Role.OPERATOR, *GONE),
    operation_id="listDeadLetters",
    summary="List files of dead letters",
)
def dead_letters(statuses: StatusesOf, job: JobName, paging: Paged) -> Page[LettersFile]:
    """Files of rejected events, by pass. They contain the data of the events."""
    entries = []
    for file in letter_files(check_no_link(statuses.job(job).store / LETTERS)):
        try:
            stat = file.path.stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        written = datetime.fromtimestamp(stat.st_mtime, UTC)
        entries.append(
            LettersFile(
                name=file.path.name,
                pass_number=file.pass_number,
                rank=file.rank,
                bytes=stat.st_size,
                written=written,
            )
        )
    return page(entries, paging, lambda each: each.name)


@router.get(
    "/rejected",
    **authorized(Role.OPERATOR, *GONE),
    operation_id="listRejected",
    summary="Read the newest rejected events",
)
def rejected(
    statuses: StatusesOf,
    job: JobName,
    reason: Annotated[str | None, Query(max_length=64, description="Only events rejected for this reason.")] = None,
    last: Annotated[int, Query(ge=1, le=MAX_LETTERS, description="At most so many.")] = 50,
) -> RejectedEvents:
    """The newest rejected events with their reasons, the newest first. They contain the data of the events.

    They come from the files of dead letters: the newest of each file, so of a pass with very many not all.
    """
    folder = check_no_link(statuses.job(job).store / LETTERS)
    return RejectedEvents(items=newest_letters(folder, last, reason))


@router.get(
    "/deadletters/{file}",
    **downloads(Role.OPERATOR, LINES, *GONE),
    operation_id="getDeadLetters",
    summary="Download a file of dead letters",
)
def dead_letter_file(
    statuses: StatusesOf,
    job: JobName,
    file: Annotated[str, InPath(max_length=64, description="Name of the file in the list.")],
) -> FileResponse:
    """One file, with a JSON line for each event: its partition, position, reason and bytes."""
    path = check_no_link(statuses.job(job).store / LETTERS) / file
    if LETTERS_FILE.fullmatch(file) is None or not is_plain(path):
        raise http_error(HTTPStatus.NOT_FOUND, f"there is no file {file!r} of dead letters")
    return FileResponse(path, media_type=LINES, filename=file)
