"""Builds: environments with Headrace that the service's configuration names, and how jobs move from one to another.

A job's launcher and workers run in one of them, or in the service's own. No request names a path. The job that moves
finishes its pass and commits; its launcher and workers end at that close, and start again in the other environment.
What the job has learnt and read does not change by it.
"""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, SpecError
from headrace.process import run
from headrace.service.jobs.build_check import report_on
from headrace.service.jobs.errors import Cancelled, HostingError
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.host import AT_REST, Host, HostedJob, Phase
from headrace.service.jobs.operation_queue import ReportProgress

OWN = ""
"""The name of the service's own environment."""
ASK_S = 120.0
"""How long an environment may take to say whether it can go on with a job."""
PACKAGE_VARIABLES = frozenset({"PYTHONHOME", "PYTHONPATH"})
"""Variables that say where an interpreter finds packages. With the service's own ones a build would run its code."""
MOVE_S = 1800.0
"""Longest time until a job trains in the other build."""
POLL_S = 0.25
AT_EASE = (Phase.PAUSED, Phase.ENDED)


class BuildRefused(HostingError):
    """A build cannot go on with a job."""

    def __init__(self, build: str, job: str, why: str) -> None:
        super().__init__(f"{shown(build)} cannot go on with job {job!r}, which stays as it is: {why}")


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The answer of a build about a job."""

    version: str
    """Its version of Headrace."""
    problem: str
    """Why it cannot go on with the job; empty where it can."""
    environment: str = ""
    """Identity of the environment (service.jobs.build_check.environment); empty for a build that does not tell it."""


def shown(build: str) -> str:
    """A build in words."""
    return f"build {build!r}" if build else "the service's own build"


def interpreter(builds: Mapping[str, Path], build: str) -> str:
    """The Python of a build. Raises SpecError for one that the configuration does not name."""
    if build == OWN:
        return sys.executable
    if build not in builds:
        known = ", ".join(sorted(builds)) or "none"
        raise SpecError(f"{build!r} is not among the builds of the service's configuration: {known}", "build")
    return str(builds[build])


def variables_for(python: str) -> dict[str, str]:
    """The environment variables of a process of this interpreter: ours, less those of packages if it is another one."""
    left_out = frozenset[str]() if python == sys.executable else PACKAGE_VARIABLES
    return {name: text for name, text in os.environ.items() if name not in left_out}


def ask(builds: Mapping[str, Path], build: str, folder: Path, deadline: Deadline) -> BuildReport:
    """Ask the build about the job in `folder`. Raises SpecError, HostingError where it does not answer."""
    python = interpreter(builds, build)
    if build == OWN:
        return BuildReport(**report_on(JobFolder(folder)))
    command = [python, "-P", "-m", "headrace.service.jobs.build_check", str(folder)]
    try:
        done = run(command, deadline=deadline, folder=folder, environment=variables_for(python))
    except OSError as error:
        raise HostingError(f"{shown(build)} cannot be started: {error}") from error
    if done.code is None:
        raise DeadlineExceeded(f"{shown(build)} did not answer in time")
    last = (done.errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
    if done.code != 0:
        raise HostingError(f"{shown(build)} ({python}) is no environment that a job can move to: {last}")
    try:
        said = documents.parse_object(done.output, f"the answer of {shown(build)}")
        return BuildReport(str(said["version"]), str(said["problem"]), str(said.get("environment", "")))
    except (documents.InvalidDocument, KeyError) as error:
        raise HostingError(f"{shown(build)} gave no answer that can be read: {error}") from error


def upgrade(host: Host, name: str, build: str, progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
    """Move one job; what it came from and to. Raises SpecError, BuildRefused, HostingError, Cancelled.

    1. The build says whether it can go on with the job; if not, nothing is changed. 2. Request the move: from here on
    it happens, also if the operation is cancelled. 3. Wait until the job trains again. A job at rest has the build
    from its next start on. Nothing is done where the job's launcher runs in this very environment.
    """
    job = host.job(name)
    progress(None, f"{name}: asking {shown(build)}")
    found = ask(host.builds, build, job.folder, Deadline.after(ASK_S))  # 1
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
