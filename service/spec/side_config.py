"""The configuration of a process that reads a stream beside its job, and the file with what it found.

service.cluster.side_process runs such processes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config import Section
from headrace.durable import REAL, write_whole, writing
from headrace.secrets import with_secrets
from headrace.service.spec.job import LoadedJob, job_of

RESULT = "result.json"
"""File with what the process found, in its folder."""


class SideConfig(Section):
    """Configuration of the process, written as JSON."""

    job: dict[str, Any]
    """The job, without secrets."""
    secrets: dict[str, Any] = {}
    folder: Path
    """Of the job."""
    store: Path
    """Folder for RESULT."""

    def loaded(self) -> LoadedJob:
        """The job with its secrets. Raises SpecError."""
        return job_of(with_secrets(self.job, self.secrets), self.folder)

    def write(self, found: bytes) -> None:
        """Write RESULT."""
        with writing(self.store / RESULT):
            write_whole(REAL, self.store / RESULT, found)


def config_beside(job: LoadedJob, folder: Path, **more: Any) -> Mapping[str, Any]:
    """A SideConfig as JSON: the job, `folder` for the files of the process, and more."""
    return {"job": job.raw, "secrets": job.secrets, "folder": str(job.folder), "store": str(folder), **more}
