"""The rows that a prediction reads: a commit of the job, leased meanwhile, or an export turned into one.

trainer.predict.export_commit reads the export.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.relative_names import shown
from headrace.service.cluster.store import check_run
from headrace.service.exports.export_list import open_streams
from headrace.service.history.commit_lookup import continue_from, find_commit, lease, lineage
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import VERSION, Commit, CommitDamaged, Commits, hash_of
from headrace.trainer.config import TrainerJob
from headrace.trainer.predict.config import LIVE
from headrace.trainer.predict.export_commit import as_commit
from headrace.trainer.predict.prediction_plan import names_commit
from headrace.trainer.spec.defaults import fill_defaults

DENSE = "dense.safetensors"
_numbers = itertools.count(1)
"""Numbers of the leases of this process: it may run several predictions at a time."""


@dataclass(frozen=True, slots=True)
class PredictionVersion:
    """The version that a prediction reads."""

    commit: Path
    """Folder of the commit: the job's own, or one made of an export."""
    description: Mapping[str, Any]
    """Its description, for people and for a rerun; equal in every run."""


@contextmanager
def version_of(
    job: LoadedJob,
    text: str,
    before: Mapping[str, Any] | None,
    scratch: Path,
    *,
    here: bool = True,
    deadline: Deadline | None = None,
) -> Iterator[PredictionVersion]:
    """The version that `text` names, held while the context lasts. `before`: the description from an earlier run.

    `here`: this disk gets the rows of an object store; otherwise each shard fetches its own. `deadline`: a commit is to
    be there by then, and nothing is fetched. Raises SpecError, CommitDamaged, ExportUnusable.
    """
    commits = Commits(job.store)
    if (address := _export(job, text, before)) is not None:
        if not here:
            raise SpecError(
                'names an export, and with store.parts = "object" no folder is seen by all machines, to which its rows '
                'could go: name a commit, or predict with on = "here"',
                "version",
            )
        commit, description = as_commit(address, job.spec, job.full, scratch)
        yield PredictionVersion(commit, description)
        return
    name = str(before["commit"]) if before is not None else _named(job.store, text)
    if name not in commits.names():
        raise SpecError(
            f"the commit {name}, with which parts were predicted, was pruned; remove the output and begin anew",
            "version",
        )
    with lease(commits, name, f"predict{next(_numbers)}", rows=here, deadline=deadline):
        found = commits.read(name)
        check_fits(found, job)
        check_dense(found)
        facts = {"commit": name, "job": found.manifest.job, "timeline": found.timeline, "version": found.version}
        yield PredictionVersion(found.folder, facts)


def _export(job: LoadedJob, text: str, before: Mapping[str, Any] | None) -> str | None:
    """The address of the export that `text` names; None: it names a commit."""
    if not names_commit(text):
        return text
    check_run(job.store, job.spec.name)
    if before is not None:
        return _exported_by(job, before["export"]) if "export" in before else None
    if VERSION.fullmatch(text) is None:
        return None
    try:
        find_commit(job.store, text)
    except SpecError as error:
        if (address := own_export(job, text)) is not None:
            return address
        raise SpecError(f"{error}; nor is there a complete export of this version", "version") from None
    return None


def _exported_by(job: LoadedJob, address: object) -> str:
    """`address`, which an unfinished output names, if it is that of an export of the job. Raises SpecError."""
    for name in job.spec.exports:
        with open_streams(job, name) as [stream]:
            for each in stream.present():
                if stream.outlet.url(each.path) == address:
                    return str(address)
    raise SpecError(
        f"{shown(address)}, with which parts were predicted, is no export of the job; remove the output and begin anew",
        "version",
    )


def own_export(job: LoadedJob, version: str) -> str | None:
    """The address of the only complete export of `version`, from the newest timeline that has one; None: no export.

    Raises SpecError where several streams have one, Unavailable where a destination does not answer.
    """
    found: dict[str, str] = {}
    for name in job.spec.exports:
        with open_streams(job, name) as [stream]:
            paths = [each.path for each in stream.present() if each.complete and each.order[1] == int(version)]
            if paths:
                found[name] = stream.outlet.url(paths[-1])
    if len(found) > 1:
        addresses = "; ".join(f"{name}: {address}" for name, address in found.items())
        raise SpecError(
            f"version {version} is exported by several streams; name one by its address: {addresses}", "version"
        )
    return next(iter(found.values()), None)


def _named(store: Path, text: str) -> str:
    if text != LIVE:
        return find_commit(store, text).name
    newest = continue_from(Commits(store).names(), lineage(store))
    if newest is None:
        raise SpecError(f"{store} holds no commit yet; `headrace commit` has the running job make one", "version")
    return newest


def check_dense(commit: Commit) -> None:
    """Raise CommitDamaged unless the dense weights have their hash. Rows are checked when they are read."""
    wanted = commit.files[DENSE]
    try:
        sound = hash_of(commit.folder / DENSE) == wanted
    except OSError:
        sound = False
    if not sound:
        raise CommitDamaged(f"{commit.name}: {DENSE} is not as it was written; `headrace commits verify` says more")


def check_fits(commit: Commit, job: LoadedJob) -> None:
    """Raise SpecError where the commit was made with other slots, tables, tasks or another model."""
    then = validate(TrainerJob, fill_defaults(commit.state["spec"]), only_known=True)
    now = validate(TrainerJob, job.full, only_known=True)
    for what, ours, theirs in (
        ("slots", Schema.of(now.slots), Schema.of(then.slots)),
        ("tasks", now.tasks, then.tasks),
        ("model", now.model, then.model),
        ("tables", _shapes(now), _shapes(then)),
    ):
        if ours != theirs:
            raise SpecError(f"commit {commit.name} was made with other {what}; give the job file of that time", what)


def _shapes(job: TrainerJob) -> dict[str, tuple[int, bool]]:
    return {name: (table.dim, table.first_order) for name, table in job.tables.items()}
