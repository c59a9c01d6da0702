"""Says whether this environment can go on with a job of another service.

`python -m headrace.service.jobs.build_check FOLDER` reads the job's spec and the formats of its store, and changes
nothing. The job may run meanwhile.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import headrace
from headrace.errors import HeadraceError
from headrace.service.cluster.store import check_free
from headrace.service.jobs.environment import environment
from headrace.service.jobs.folder import JobFolder
from headrace.service.spec.job import job_of
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits, NewerFormat
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log_file import LogDamaged


def report_on(folder: JobFolder) -> dict[str, str]:
    """The version and identity of this environment, and why it cannot go on with the job; empty where it can."""
    problem = ""
    try:
        spec, base = folder.job()
        job = job_of(spec, base)
        if check_free(job.store, job.spec.name, fresh=False):
            _check_commits(Commits(job.store))
            _check_log(job.store)
    except HeadraceError as error:
        problem = str(error)
    return {"version": headrace.__version__, "environment": environment(), "problem": problem}


def _check_commits(commits: Commits) -> None:
    """Read each manifest. Raises NewerFormat for one of a newer Headrace; damage is for the start to judge."""
    for name in commits.names():
        try:
            commits.read(name)
        except NewerFormat:
            raise
        except CommitDamaged:
            continue


def _check_log(store: Path) -> None:
    """Read the log, whose end may be torn while the job runs. Raises LogTooNew; damage is for the start to judge."""
    with suppress(LogDamaged):
        read_records(store / "log")


if __name__ == "__main__":
    print(json.dumps(report_on(JobFolder(Path(sys.argv[1])))))
