"""Chooses the set of defaults for a job file: the one that its store began with. trainer.spec.defaults has the sets."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.spec.job import LoadedJob, with_defaults
from trainer.config import NEWEST_DEFAULTS
from trainer.control.commit_store import CommitDamaged, Commits
from trainer.control.job_log import read_history
from trainer.control.job_spec import FIRST, flat_values


def with_store_defaults(job: LoadedJob) -> LoadedJob:
    """The job with the defaults that its store began with, unless its file names another set. Raises SpecError."""
    logged = None if job.raw.get("defaults") else newest_spec(job.store)
    return job if logged is None else with_defaults(job, logged.get("defaults", FIRST))


def newest_spec(store: Path) -> Mapping[str, Any] | None:
    """The spec of the newest commit, or of the log where there is no commit; None where the store holds no run.

    A path that cannot be a folder holds no run; the claim of the store refuses it. Raises LogDamaged, LogTooNew.
    """
    commits = Commits(store)
    try:
        names = commits.names()
    except OSError:
        return None
    for name in reversed(names):
        with suppress(CommitDamaged):
            spec: Mapping[str, Any] = commits.read(name).state["spec"]
            return spec
    return read_history(store / "log").spec


def old_defaults_note(job: LoadedJob) -> str | None:
    """A note about old defaults in force for keys missing in the file; None where there is nothing to note.

    It is made until the store has a commit that holds every default.
    """
    logged = newest_spec(job.store)
    if logged is None or "defaults" in logged or not (old := old_defaults(job)):
        return None
    return (
        "this store began with older defaults, which stay in force for keys that the job file leaves out: "
        f"{', '.join(old)}; to change one that may change, write it into the job file"
    )


def old_defaults(job: LoadedJob) -> list[str]:
    """Defaults in force because the store began with them, as "key = value (a new store: value)"."""
    newest = dict(flat_values(with_defaults(job, NEWEST_DEFAULTS).full))
    old = [(key, value) for key, value in flat_values(job.full) if key != "defaults" and newest.get(key) != value]
    return [f"{key} = {value} (a new store: {newest.get(key, 'nothing')})" for key, value in old]
