"""Forks a job: another job begins with its whole state at a commit: rows, dense weights, metrics, stream positions.

`headrace import` brings a model into a job with its own stream. A fork has the same spec and continues with the same
events. The files of a commit never change, so both stores share them by hard links.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.durable import REAL, writing
from headrace.errors import SpecError
from headrace.service.cluster.store import claimed
from headrace.service.history.commit_lookup import lease
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import (
    Commit,
    CommitDamaged,
    Commits,
    manifest_fields,
    sync_tree,
    write_manifest,
)

LEASE = "predict0"
"""The holder of the commit meanwhile; names are those of service.history.commit_lookup."""
UNFINISHED = ".forking"
"""Suffix of the commit's folder until it is complete. Such a folder counts as no commit."""


def fork(store: Path, name: str, twin: LoadedJob) -> Commit:
    """Copy the commit `name` of the job in `store` to the empty store of `twin`; the new commit.

    The next run of `twin` begins a timeline there, as after a fetch from a mirror. Raises SpecError, CommitDamaged,
    Unwritable, and HeadraceError where the commit was pruned.
    """
    commits = Commits(store)
    with lease(commits, name, LEASE), claimed(twin.store, twin.spec.name, fresh=False) as theirs:
        if Commits(theirs).names():
            raise SpecError(f"{theirs} holds commits already; a fork is for an empty store", "store.path")
        return _copied(commits.read(name), theirs, twin)


def _copied(commit: Commit, store: Path, twin: LoadedJob) -> Commit:
    """1. Link the files under an unfinished name. 2. Write the new job's manifest. 3. Rename: the commit exists."""
    commits = Commits(store)
    unfinished, there = commits.folder / f"{commit.name}{UNFINISHED}", commits.folder / commit.name
    shutil.rmtree(unfinished, ignore_errors=True)
    with writing(unfinished):
        for path in commit.files:  # 1
            (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            if not (commit.folder / path).exists():
                raise CommitDamaged(f"{commit.name}: {path} is gone; `headrace commits verify` says more")
            _shared(commit.folder / path, unfinished / path)
        for folder in (path for path in unfinished.rglob("*") if path.is_dir()):
            REAL.sync_folder(folder)
        write_manifest(unfinished, _manifest(commit, twin))  # 2
        REAL.make_folder(store / "log")  # readers of commits take the lock in it
        REAL.rename(unfinished, there)  # 3
        sync_tree(there.parent)
    return commits.read(commit.name)


def _manifest(commit: Commit, twin: LoadedJob) -> Mapping[str, Any]:
    forked = {"job": commit.manifest.job, "commit": commit.name}
    state = {**commit.state, "spec": twin.full, "forked": forked}
    return {**manifest_fields(commit), "job": twin.spec.name, "parent": None, "state": state}


def _shared(path: Path, target: Path) -> None:
    """Link `path` as `target`; copy it where the two are on different disks."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
