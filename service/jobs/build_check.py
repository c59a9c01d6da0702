"""Says which environment this is, and whether it can go on with a job of another service.

`python -m headrace.service.jobs.build_check FOLDER` reads the job's spec and the formats of its store, and changes
nothing. The job may run meanwhile.

The identity of an environment is that of its interpreter and its code of Headrace: two builds of one name and one
version can differ, since the service was started from another environment, or its packages were installed anew. Other
packages are not compared.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import headrace
from headrace.errors import HeadraceError
from headrace.service.cluster.store import check_free
from headrace.service.jobs.folder import JobFolder
from headrace.service.spec.job import job_of
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits, NewerFormat
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log_file import LogDamaged

PACKAGES = (".", "dataset", "pserver", "service", "trainer")
"""The folders of `headrace`. In a checkout all but the first are links, which a search from above does not enter."""
SUFFIXES = frozenset({".css", ".json", ".proto", ".py"})
"""Files that decide what the packages do. Compiled ones follow from them."""


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


@cache
def environment() -> str:
    """The identity of this process's environment, hashed at the first call; empty where its files cannot be read."""
    try:
        return identity_of(sys.prefix, Path(headrace.__file__).parent)
    except OSError:  # perhaps it is being replaced: an unknown identity equals no other
        return ""


def identity_of(prefix: str, root: Path) -> str:
    """The identity of the interpreter at `prefix` with the package `headrace` in `root`. Raises OSError."""
    whole = hashlib.sha256(f"{prefix}\0{sys.version}\0".encode())
    for path in _sources(root):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(path for path in (root / package).rglob("*") if path.suffix in SUFFIXES and path.is_file())


if __name__ == "__main__":
    print(json.dumps(report_on(JobFolder(Path(sys.argv[1])))))
