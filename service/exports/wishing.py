"""`millrace export`: has a running job make an export, and waits for it."""

import time
from dataclasses import dataclass
from pathlib import Path

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError, Unavailable
from service.past.asking import CALL_S, LOOK_S, chief
from service.past.wishes import carried_out
from service.status import Status


class ExportFailed(MillraceError):
    """The export that was asked for failed; the next of its stream takes what it lacks."""


@dataclass(frozen=True, slots=True)
class Made:
    """An export that was asked for and is there, or one after it."""

    name: str
    current: bool | None
    """Whether it is pointed to; None: another one has ended since."""
    words: str

    def __str__(self) -> str:
        return self.words


def make_export(store: Path, stream: str, kind: str | None, deadline: Deadline) -> Made:
    """Have an export of `stream` made; what became of it, once it is complete.

    Raises ExportFailed, and as service.past.wishes.carried_out.
    """
    version = carried_out(store, {"op": "export", "stream": stream, "kind": kind}, deadline)
    while True:
        try:
            with chief(store) as client:
                status = Status(client.status(Deadline.after(CALL_S)))
            if (told := ended(status, stream, version)) is not None:
                return told
        except (Unavailable, DeadlineExceeded):
            pass
        deadline.check(f"waiting for the export of version {version}, which goes on being made")
        time.sleep(LOOK_S)


def ended(status: Status, stream: str, version: int) -> Made | None:
    """How the export of a version ended; None: it has not. Raises ExportFailed."""
    told = status.part("operations").part("exporting").part(stream)
    last, name = told.part("last"), told.part("last").text("name")
    number = int(name.partition("-")[0]) if name else 0
    if number < version:
        return None
    if number > version:
        newest = told.text("name")
        words = f"that of version {version} has ended, and another one since; the newest is {newest}"
        return Made(newest, None, words)
    if last.text("outcome") != "complete":
        raise ExportFailed(f"export {name} of {stream} failed: {last.text('error')}")
    if last.flag("current") is False:
        gates = "; ".join(told.raw.get("failed_gates") or ())
        return Made(name, False, f"{name} is complete, and not pointed to: {gates}")
    return Made(name, True, f"{name} is complete")
