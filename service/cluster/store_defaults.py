"""Completes a job file by its store: with the set of defaults that it began with, with the settings and crosses that it
chose, and with the numbers of its slots.

trainer.spec.defaults has the sets, dataset.spec.slot_groups the rules of the numbers.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.config import validate
from headrace.dataset.spec.slot_groups import settled
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.service.cluster.store import CROSSED, TUNED
from headrace.service.spec.chosen_crosses import under_crosses
from headrace.service.spec.job import LoadedJob, with_defaults
from headrace.service.spec.tuned_settings import under_choice
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits
from headrace.trainer.config import NEWEST_DEFAULTS
from headrace.trainer.journal.log import read_history
from headrace.trainer.spec.changes import flat_values
from headrace.trainer.spec.defaults import FIRST, fill_defaults


def with_store_defaults(job: LoadedJob) -> LoadedJob:
    """The job with the defaults that its store began with, unless its file names another set, with the settings that
    it chose for keys that its file leaves out, and with the numbers that its slots have in the store. Raises SpecError.
    """
    logged = newest_spec(job.store)
    if logged is None:
        job = under_crosses(job, _chosen_before_log(job.store / CROSSED))
        return under_choice(job, _chosen_before_log(job.store / TUNED))
    job = under_crosses(job, logged.get("crosses", {}).get("chosen"))
    if fill_defaults(logged).get("slots") != job.full["slots"]:
        job = with_slot_numbers(job)
    return _with_defaults_of(job, logged)


def with_defaults_alone(job: LoadedJob) -> LoadedJob:
    """The job with the defaults that its store began with, and with the numbers that its file gives to slots."""
    logged = newest_spec(job.store)
    if logged is None:
        return job
    return _with_defaults_of(under_crosses(job, logged.get("crosses", {}).get("chosen")), logged)


def with_defaults_of_set(job: LoadedJob) -> LoadedJob:
    """The job with the set of defaults that its store began with, unless its file names another; without choices."""
    logged = newest_spec(job.store)
    return job if logged is None else _with_set_of(job, logged)


def _chosen_before_log(path: Path) -> Mapping[str, Any] | None:
    """The choice of a new job, which its first generation logs; None: it has not chosen yet."""
    try:
        return documents.read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _with_defaults_of(job: LoadedJob, logged: Mapping[str, Any]) -> LoadedJob:
    return _with_set_of(under_choice(job, logged.get("tuning", {}).get("chosen")), logged)


def _with_set_of(job: LoadedJob, logged: Mapping[str, Any]) -> LoadedJob:
    return job if job.raw.get("defaults") else with_defaults(job, logged.get("defaults", FIRST))


def with_slot_numbers(job: LoadedJob) -> LoadedJob:
    """The job with the numbers that its slots have in its store, by the spec in force there. Raises SpecError."""
    logged = spec_with_rows(job.store)
    return job if logged is None else numbered_by(job, logged)


def numbered_by(job: LoadedJob, spec: Mapping[str, Any]) -> LoadedJob:
    """The job with the numbers that its slots have in another spec. Raises SpecError."""
    if "slots" not in spec:
        return job
    slots = settled(validate(SlotsSpec, {"slots": spec["slots"]}).slots, job.spec.slots)
    if slots == job.spec.slots:
        return job
    dumped = [each.model_dump(mode="json") for each in slots]
    return replace(job, raw={**job.raw, "slots": dumped}, spec=job.spec.model_copy(update={"slots": slots}))


def spec_with_rows(store: Path) -> Mapping[str, Any] | None:
    """The spec in force in a store that may hold rows: the last logged one, or that of the newest commit.

    None where no pass was ever closed. Raises LogDamaged, LogTooNew.
    """
    history = read_history(store / "log")
    if history.spec is not None and (history.closed or _names(store)):
        return history.spec
    return newest_spec(store) if _names(store) else None


def _names(store: Path) -> list[str]:
    """The names of the commits; none for a path that cannot be a folder."""
    try:
        return Commits(store).names()
    except OSError:
        return []


def newest_spec(store: Path) -> Mapping[str, Any] | None:
    """The spec of the newest commit, or of the log where there is no commit; None where the store holds no run.

    A path that cannot be a folder holds no run; the claim of the store refuses it. Raises LogDamaged, LogTooNew.
    """
    commits = Commits(store)
    for name in reversed(_names(store)):
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
