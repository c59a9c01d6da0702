"""Builds: environments with Headrace that the service's configuration names, and how one is asked about a job.

A job's launcher and workers run in one of them, or in the service's own. No request names a path.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace import documents
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, SpecError
from headrace.process import run
from headrace.service.jobs.build_check import report_on
from headrace.service.jobs.errors import HostingError
from headrace.service.jobs.folder import JobFolder

OWN = ""
"""The name of the service's own environment."""
ASK_S = 120.0
"""How long an environment may take to say whether it can go on with a job."""
PACKAGE_VARIABLES = frozenset({"PYTHONHOME", "PYTHONPATH"})
"""Variables that say where an interpreter finds packages. With the service's own ones a build would run its code."""


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
    """Identity of the environment (service.jobs.environment); empty for a build that does not tell it."""


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
