"""Asks the chief of a running job for an operation, and waits until it has acted, across restarts of the job.

An operation has an id, so asking again does no harm. How the chief is found is service.past.asking's matter.
"""

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError, NotYet, Unavailable
from millrace.role import RoleClient
from service.past.asking import CALL_S, LOOK_S, NotRunning, chief
from service.status import Status

ANSWER_S = 30.0
"""How long one answer may take where shards must be asked."""


class Unfinished(MillraceError):
    """The time to wait is over, or the run is, before an operation has acted."""


def carried_out(store: Path, operation: Mapping[str, Any], deadline: Deadline) -> int:
    """Have `operation` logged, under an id of its own, and wait until it has acted; the version from which on it holds.

    Raises MillraceError where the chief says no, NotRunning where nobody is there to ask, Unfinished.
    """
    request = {"do": "ask", "operation": {**operation, "id": uuid.uuid4().hex}}
    asked = logged = False
    why = ""
    while True:
        try:
            with chief(store) as client:
                while True:
                    asked = True
                    answer = client.operate(request, _within(deadline))
                    logged = True
                    if (version := _acted(client, answer)) is not None:
                        return version
                    _wait(deadline, logged, why)
        except NotRunning:
            if logged:
                raise Unfinished(f"{_SURE}; the run has ended, and the next one carries it out") from None
            if asked:
                raise Unfinished(f"the run ended without an answer: `millrace log` tells whether {_SURE}") from None
            raise
        except (Unavailable, DeadlineExceeded, NotYet) as error:
            why = str(error)
        _wait(deadline, logged, why)


_SURE = "it is logged, and acts at the close of a pass"


def _acted(client: RoleClient, answer: Mapping[str, Any]) -> int | None:
    """The version, once that is closed and told."""
    version = answer["version"]
    told = client.status(Deadline.after(CALL_S))["version"] if version is not None else 0
    return int(version) if version is not None and told >= version else None


def _wait(deadline: Deadline, logged: bool, why: str) -> None:
    if deadline.passed():
        raise Unfinished(
            f"{_SURE} that is not over yet; the status tells when it has" if logged else f"not asked for yet: {why}"
        )
    time.sleep(LOOK_S)


def _within(deadline: Deadline) -> Deadline:
    return Deadline.after(max(0.5, min(ANSWER_S, deadline.left_s())))


def answered(store: Path, request: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
    """What the chief answers, asked again while it is finding out, or a restart is going on."""
    while True:
        try:
            with chief(store) as client:
                return client.operate(request, _within(deadline))
        except (Unavailable, DeadlineExceeded, NotYet) as error:
            _wait(deadline, False, str(error))


def ticked(store: Path, to: int | None, deadline: Deadline) -> tuple[int, int]:
    """Have the next day begin, or the day `to` -> the day, and the version with which it does."""
    day = day_of(store, deadline) + 1 if to is None else to
    return day, carried_out(store, {"op": "day_tick", "to": day}, deadline)


def day_of(store: Path, deadline: Deadline) -> int:
    """The running job's day, once a pass is closed."""
    return int(status_of(store, deadline).number("day") or 0)


def status_of(store: Path, deadline: Deadline) -> Status:
    """What the running chief says, asked again while a restart goes on. Raises NotRunning, Unfinished."""
    while True:
        try:
            with chief(store) as client:
                return Status(client.status(Deadline.after(CALL_S)))
        except (Unavailable, DeadlineExceeded) as error:
            _wait(deadline, False, str(error))
