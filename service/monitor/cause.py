"""Why a job failed, restarts or waits, and what to do: one sentence each. Pure, from its state and its status."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.lifecycle import ExitCode, cause_in
from headrace.service.monitor.alarms import stall_text
from headrace.trainer.job_status import Status

MAX_CHARACTERS = 2_000
"""Longest error that is shown; the rest is in the output of the worker."""
SHOWN_IDLE_S = 30.0
"""A job waits for events from this time without one on."""

_KILLED = "killed by SIGKILL"
_BY_CODE: dict[int, str] = {
    ExitCode.FAILED: "Correct this, then choose Restart.",
    ExitCode.BAD_CONFIG: (
        "Correct the job file, and submit it in place of this one: docs/service.md, A new job file, has the steps."
    ),
    ExitCode.BUG: (
        "This is a fault in Headrace, in the model or in the pipe command. The output has the whole message. "
        "Restart tries again."
    ),
    ExitCode.RETRY: "Make sure that what it names can be reached, then choose Restart.",
}
_MEMORY = (
    "The system ends a process like this when its memory runs out. Compare the memory of the machine with what "
    "`headrace size` estimates for this job."
)
_WAITS: dict[str, str] = {
    "workers": "Start workers for the job, or free some that run others: training then begins by itself.",
    "store": "Check the address, the credentials and the network of the object store. The job tries again by itself.",
    "pipe": "Check that events arrive and that the pipe command prints samples: the output has its errors.",
}
_OTHER_WAIT = "The output of that worker says more. After train.step_deadline all workers are started again."
_IDLE = "Training goes on with the next event. If there should be some, check that something writes to the source."


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a job does not train as it should."""

    kind: str
    """"failed", "broken", "restarting" or "waiting"."""
    text: str
    """The sentence that explains it."""
    advice: str
    """The advice: what to do about it."""


def cause_of_trouble(trouble: str) -> Cause | None:
    """Why a job is broken."""
    return Cause("broken", trouble, "Repair what it names, or delete the job.") if trouble else None


def cause_of_end(code: int, reason: str, lines: Sequence[str]) -> Cause | None:
    """Why a job ended with an error, from its outcome and the last lines of the worker that fell first."""
    if code == ExitCode.DRAINED:
        return None
    advice = _MEMORY if _KILLED in reason else _BY_CODE.get(code, _BY_CODE[ExitCode.BUG])
    return Cause("failed", (cause_in(lines) or reason)[:MAX_CHARACTERS], advice)


def cause_of_wait(status: Status) -> Cause | None:
    """Why a job that has processes restarts or waits; None where it does neither."""
    if status.state == "restarting" or (status.restarts and status.state in ("starting", "replaying")):
        died = status.last_death or "the workers ended"
        return Cause("restarting", (status.last_error or died)[:MAX_CHARACTERS], _restart_advice(status, died))
    if (stalled := status.stalled) is not None:
        return Cause("waiting", stall_text(status.pass_number, stalled), _WAITS.get(stalled.waits_for, _OTHER_WAIT))
    if status.state == "training" and (status.idle_s or 0) >= SHOWN_IDLE_S:
        return Cause("waiting", f"No event has come for more than {SHOWN_IDLE_S:g} s.", _IDLE)
    return None


def _restart_advice(status: Status, died: str) -> str:
    version = None if status.commit is None else status.commit.version
    begins = "the beginning" if version is None else f"version {version:,}"
    again = f"The workers are started again by themselves, and go on from {begins}. No event is lost or learnt twice."
    return f"{again} {_MEMORY}" if _KILLED in died else again
