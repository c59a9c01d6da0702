"""Moves jobs to another build, one by one.

The job finishes its pass and commits; its launcher and workers end at that close, and start again in the other
environment. What the job has learnt and read does not change by it.
"""

import threading
from collections.abc import Sequence
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError
from headrace.service.jobs import builds
from headrace.service.jobs.builds import BuildRefused, BuildReport, shown
from headrace.service.jobs.errors import Cancelled, HostingError
from headrace.service.jobs.host import AT_REST, Host, HostedJob, Phase
from headrace.service.jobs.operation_queue import ReportProgress

MOVE_S = 1800.0
"""Longest time until a job trains in the other build."""
POLL_S = 0.25
AT_EASE = (Phase.PAUSED, Phase.ENDED)


def upgrade(host: Host, name: str, build: str, progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
    """Move one job; what it came from and to. Raises SpecError, BuildRefused, HostingError, Cancelled.

    1. The build says whether it can go on with the job; if not, nothing is changed. 2. Request the move: from here on
    it happens, also if the operation is cancelled. 3. Wait until the job trains again. A job at rest has the build
    from its next start on. Nothing is done where the job's launcher runs in this very environment.
    """
    job = host.job(name)
    progress(None, f"{name}: asking {shown(build)}")
    found = builds.ask(host.builds, build, job.folder, Deadline.after(builds.ASK_S))  # 1
    if found.problem:
        raise BuildRefused(build, name, found.problem)
    said = {"job": name, "build": build, "version": found.version, "was": job.version}
    if _runs_in(job, build, found):
        return said
    generation = host.status(name).generation or 0
    moved = host.use_build(name, build)  # 2
    if moved.phase not in AT_REST:
        _await(host, name, generation, progress, cancelled)  # 3
    return said


def _runs_in(job: HostedJob, build: str, found: BuildReport) -> bool:
    """Whether the job runs in the environment that the build is now. One of an unknown identity is another one.

    The version does not tell: a restarted service has other code under the same name, perhaps of the same version.
    """
    known = found.environment != "" and job.environment == found.environment
    return known and job.build == build and job.phase not in AT_REST


def upgrade_all(host: Host, build: str, progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
    """Move all jobs by name, one after another. The first that fails ends it; those before it stay moved."""
    names = [job.name for job in host.jobs()]
    done: list[dict[str, Any]] = []
    for name in names:
        try:
            done.append(upgrade(host, name, build, progress, cancelled))
        except Cancelled:
            raise
        except HeadraceError as error:
            raise HostingError(f"{error}. {_others(names, len(done))}") from error
    return {"jobs": done}


def _others(names: Sequence[str], num_done: int) -> str:
    moved, left = ", ".join(names[:num_done]) or "none", ", ".join(names[num_done + 1 :]) or "none"
    return f"Moved before: {moved}; not tried: {left}"


def _await(host: Host, name: str, generation: float, progress: ReportProgress, cancelled: threading.Event) -> None:
    """Wait until the job trains again after its workers of this `generation`."""
    deadline = Deadline.after(MOVE_S)
    while not _goes_on(host, job := host.job(name), generation):
        if job.phase in (Phase.FAILED, Phase.BROKEN):
            why = job.trouble if job.outcome is None else job.outcome.reason
            raise HostingError(
                f"job {name!r} does not go on in {shown(job.build)}: {why}; it has lost nothing: upgrade it to the "
                "build that it came from, or mend the cause and restart it"
            )
        if deadline.passed():
            raise DeadlineExceeded(f"job {name!r} is {job.phase.value} after {MOVE_S:g} s; the move goes on")
        progress(None, f"{name}: {job.phase.value}")
        cancelled.wait(POLL_S)


def _goes_on(host: Host, job: HostedJob, generation: float) -> bool:
    """Whether workers of the other build train, or wait for events.

    A launcher that has just started is told to train by the last status of the one before it, of an older generation.
    """
    if job.phase in (Phase.STARTING, Phase.TRAINING):
        found = host.status(job.name).generation
        return found > generation if found is not None else job.phase is Phase.TRAINING
    return job.phase in AT_EASE
