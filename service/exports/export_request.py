"""`headrace export`: has a running job make an export, and waits for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError
from headrace.rpc.job_client import CALL_S, JobClient
from headrace.trainer.job_status import ExportStatus, LastExport, Status, read


class ExportFailed(HeadraceError):
    """The requested export failed; the next export of its stream contains the missing rows."""


@dataclass(frozen=True, slots=True)
class RequestedExport:
    """How a requested export ended."""

    name: str
    """Its name; or the newest one of the stream, where another export has ended since."""
    current: bool | None
    """Whether current.json names it; None where another export has ended since."""
    summary: str

    def __str__(self) -> str:
        return self.summary

    def message(self, stream: str) -> dict[str, Any]:
        """As JSON, for an export of `stream`."""
        return {"stream": stream, "name": self.name, "current": self.current, "said": self.summary}


def make_export(store: Path, stream: str, kind: str | None, deadline: Deadline) -> RequestedExport:
    """Have an export of `stream` made; return how it ended.

    Raises ExportFailed, DeadlineExceeded, and what JobClient.carry_out raises.
    """
    job = JobClient(store)
    version = job.carry_out({"op": "export", "stream": stream, "kind": kind}, deadline)

    def late(_reason: str) -> HeadraceError:
        return DeadlineExceeded(f"out of time while waiting for the export of version {version}, which continues")

    return job.poll(
        lambda client: export_result(read(Status, client.status(Deadline.after(CALL_S))), stream, version),
        deadline,
        late,
    )


def export_result(status: Status, stream: str, version: int) -> RequestedExport | None:
    """How the export of a version ended; None while it is being made. Raises ExportFailed."""
    export = status.exports.get(stream, ExportStatus())
    last = export.last or LastExport()
    name = last.name or ""
    number = int(name.partition("-")[0]) if name else 0
    if number < version:
        return None
    if number > version:
        newest = export.name or ""
        summary = f"the export of version {version} has ended, and another one since; the newest is {newest}"
        return RequestedExport(newest, None, summary)
    if last.outcome != "complete":
        raise ExportFailed(f"export {name} of {stream} failed: {last.error or ''}")
    if last.current is False:
        gates = "; ".join(export.failed_gates)
        return RequestedExport(name, False, f"{name} is complete, but current.json does not name it: {gates}")
    return RequestedExport(name, True, f"{name} is complete")
