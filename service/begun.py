"""The defaults that a job file takes: those that its store began with. What sets of defaults are: trainer.defaults."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.spec import LoadedJob, with_defaults
from trainer.commits import CommitDamaged, Commits
from trainer.config import NEWEST_DEFAULTS
from trainer.defaults import FIRST
from trainer.history import History
from trainer.log import read
from trainer.respec import flat


def as_begun(job: LoadedJob) -> LoadedJob:
    """The job with the defaults that its store began with; its file may name another set. Raises SpecError."""
    logged = None if job.raw.get("defaults") else newest_spec(job.store)
    return job if logged is None else with_defaults(job, logged.get("defaults", FIRST))


def newest_spec(store: Path) -> Mapping[str, Any] | None:
    """The spec of the newest commit, or of the log where there is none; None where the store holds nothing of a run.

    A path that can be no folder holds nothing: the store's claim refuses it. Raises LogDamaged, LogTooNew.
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
    return History.of(read(store / "log")).spec


def told_once(job: LoadedJob) -> str | None:
    """Which old defaults hold for keys that the file leaves out, where the store does not hold every default yet.

    From the next commit on it does.
    """
    logged = newest_spec(job.store)
    if logged is None or "defaults" in logged or not (kept := kept_defaults(job)):
        return None
    return (
        "this store began with older defaults, which go on for keys that the job file leaves out: "
        f"{', '.join(kept)}; to change one that may change, write it into the job file"
    )


def kept_defaults(job: LoadedJob) -> list[str]:
    """Defaults that hold because the store began with them, as "key = value (a new store: value)"."""
    newest = dict(flat(with_defaults(job, NEWEST_DEFAULTS).full))
    kept = [(key, value) for key, value in flat(job.full) if key != "defaults" and newest.get(key) != value]
    return [f"{key} = {value} (a new store: {newest.get(key, 'nothing')})" for key, value in kept]
