"""A service's answers about its jobs, as lines of text."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.service.cli.targets import path_of
from headrace.service.monitor.alarms import held_text
from headrace.service.monitor.lines import choice_lines, count, progress_line, tuning_text
from headrace.trainer.job_status import HeldShrink, Status, read
from headrace.trainer.tuning_status import TuningStatus

if TYPE_CHECKING:
    from headrace.service.python.rest_client import ServiceClient

LOOK_S = 1.0
"""Pause between two requests for more output."""
PAGE = 200

Json = Mapping[str, Any]


def job_lines(jobs: Sequence[Json]) -> list[str]:
    """A line for each job: name, phase, problem."""
    if not jobs:
        return ["no jobs"]
    width = max((len(job["name"]) for job in jobs), default=0)
    return [f"{job['name']:<{width}}  {job['phase']:<10}  {_trouble(job) or _tuning(job)}".rstrip() for job in jobs]


def phase_line(job: Json) -> str:
    """A job's phase, and the desired phase if it differs."""
    wanted = "" if job["desired"] in ("running", job["phase"]) else f"; desired: {job['desired']}"
    return f"{job['name']}: {job['phase']}{wanted}"


def status_lines(job: Json) -> list[str]:
    """A job's phase, figures, problems and alarms."""
    status = as_status(job)
    lines = [phase_line(job), progress_line(status)]
    if trouble := _trouble(job):
        lines.append(trouble)
    lines += (job.get("outcome") or {}).get("lines", [])
    if (advice := job.get("advice")) and not job.get("outcome"):  # the outcome's lines have it
        lines.append(f"advice: {advice}")
    if (straggler := job.get("straggler")) and not job.get("outcome"):
        lines.append(f"straggler: {straggler['text']}")
    lines += [f"{name}: {text}" for name, text in job.get("alarms", {}).items()]
    return [*lines, *choice_lines(status.tuning)]


def table_lines(tables: Sequence[Json]) -> list[str]:
    """A line for each table, and below it one for each slot."""
    lines = []
    for table in tables:
        size = table["bytes"]
        rows = f"{count(table['rows'])} rows of dim {table['dim']}"
        lines.append(f"{table['name']}: {rows}" + ("" if size is None else f", {size / (1 << 20):,.1f} MiB"))
        if table["held"]:
            lines.append(f"  a shrink waits: {held_text(table['name'], read(HeldShrink, table['held']))}")
        if table.get("frozen"):  # a service of an older version tells none
            lines.append(f"  frozen, so their rows do not learn: {', '.join(table['frozen'])}")
        for slot, figures in table["slots"].items():
            shown = ", ".join(f"{name} {_number(value)}" for name, value in figures.items() if _is_number(value))
            lines.append(f"  {slot}: {shown}".rstrip(": "))
    return lines


def progress_lines(client: "ServiceClient", job: str, *, as_json: bool = False) -> Iterator[str]:
    """A line of progress for each event of the stream, until the job ends; as JSON, what the event has."""
    for name, data in client.events(path_of("jobs", job, "metrics", "stream")):
        if name not in ("figures", "end"):
            continue
        if as_json:
            yield json.dumps(data)
        else:
            yield progress_line(as_status(data)) if name == "figures" else f"{job}: {data['phase']}"
        if name == "end":
            return


def output_lines(
    client: "ServiceClient", job: str, worker: str | None, last: int | None, *, follow: bool
) -> Iterator[dict[str, str]]:
    """The output of a job's processes by line: the `last`, or all that are kept; with `follow` also new ones.

    Each has its `worker` and its `text`.
    """
    path, newest = path_of("jobs", job, "output"), "true" if last is not None else None
    page = client.get(path, worker=worker, limit=last or PAGE, last=newest)
    while True:
        for line in page["items"]:
            yield {"worker": line["worker"], "text": line["text"]}
        if not page["items"]:
            if not follow:
                return
            time.sleep(LOOK_S)
        elif last is not None and not follow:
            return
        page = client.get(path, worker=worker, limit=PAGE, after=page["next"])


def as_status(job: Json) -> Status:
    """A job's figures from the API, in the form of rank 0's status."""
    tables = {name: {"rows": rows} for name, rows in job.get("table_rows", {}).items()}
    return read(Status, {**job, "tables": tables, "operations": {"exporting": job.get("exports", {})}})


def _trouble(job: Json) -> str:
    outcome = job.get("outcome")
    ended = f"ended with {outcome['code']}: {outcome['reason']}" if outcome else ""
    return job.get("trouble") or ended


def _tuning(job: Json) -> str:
    return tuning_text(read(TuningStatus, job.get("tuning") or {}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> str:
    """Whole and large numbers with separators of thousands, others to four digits."""
    return count(value) if value == int(value) or abs(value) >= 1_000 else f"{value:.4g}"


def settings_lines(found: Mapping[str, Any], everything: bool) -> Iterator[str]:
    """Settings that were changed while a job ran, changes of its file that wait, and with `everything` all others."""
    changed = [each for each in found["settings"] if each["origin"] == "set"]
    yield "set while it ran:" if changed else "nothing was changed while the job ran"
    for each in changed:
        yield f"  {each['key']} = {each['now']}; in the job file {each['file'] or 'left out'}"
    yield "changes of the job file that wait:" if found["waiting"] else "the run has the job file as it is"
    for each in found["waiting"]:
        yield f"  {each['key']}: {each['was']} -> {each['now']}; {each['to_do']}"
    if everything:
        yield "all settings:"
        yield from (f"  {each['key']} = {each['now']} ({each['origin']})" for each in found["settings"])
