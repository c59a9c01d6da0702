"""The commits of a job: list them, show one, pin and unpin, remove and prune. service.cli.commit_output prints."""

import os
import re
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.service.cluster.store import stopped
from headrace.service.history.commit_lookup import (
    LOCK_S,
    OF_COMMANDS,
    clear_ended,
    continue_from,
    find_commit,
    hold,
    lineage,
)
from headrace.trainer.checkpoint.commits import Commit, CommitDamaged, Commits, order_of
from headrace.trainer.journal.log import store_locked

PROGRESS = (("num_events", "events"), ("num_samples", "samples"), ("skipped_steps", "skipped steps"))
"""Counters of a manifest, and their names in text."""
HOLDER = re.compile(r"[A-Za-z0-9_-]{1,64}")
OF_WORK = re.compile(rf"(?:export|{OF_COMMANDS})-.*")
"""Holder names of exports and running commands. They release a commit themselves; a person cannot use these names."""


def entries_of(store: Path) -> list[dict[str, Any]]:
    """An entry for each commit, in order of time. "bytes": of all its files; "own_bytes": freed by its removal.

    "damaged": what is wrong with its manifest; other files are not read. "next": whether the next run begins there.
    """
    commits = Commits(store)
    holders, start = commits.holders(), continue_from(commits.names(), lineage(store))
    return [_entry(commits, name, holders.get(name, [])) | {"next": name == start} for name in commits.names()]


def _entry(commits: Commits, name: str, held_by: list[str]) -> dict[str, Any]:
    timeline, version, generation = order_of(name)
    entry: dict[str, Any] = {"name": name, "version": version, "timeline": f"t{timeline}", "generation": generation}
    entry |= dict.fromkeys(("made_at", "events", "rows", "bytes", "own_bytes", "damaged"))
    entry |= {"held_by": held_by}
    try:
        commit = commits.read(name)
    except CommitDamaged as error:
        return entry | {"damaged": str(error)}
    facts = {"rows": commit.num_rows, "bytes": commit.num_bytes, "own_bytes": _own_bytes(commit)}
    events = commit.state.get("progress", {}).get("num_events")
    return entry | facts | {"made_at": commit.manifest.made_at, "events": events}


def _own_bytes(commit: Commit) -> int:
    """Bytes of the files that no other commit shares."""
    found = (os.stat(path) for file in commit.files if (path := commit.folder / file).exists())
    return sum(each.st_size for each in found if each.st_nlink == 1)


def details_of(store: Path, text: str) -> dict[str, Any]:
    """The facts in the manifest of the commit that `text` means. Raises SpecError, CommitDamaged."""
    commit = find_commit(store, text)
    manifest, progress, holders = commit.manifest, commit.state.get("progress", {}), Commits(store).holders()
    return {
        **_entry(Commits(store), commit.name, holders.get(commit.name, [])),
        "next": commit.name == continue_from(Commits(store).names(), lineage(store)),
        "job": manifest.job,
        "parent": manifest.parent,
        "trainers": manifest.world,
        "log_from": commit.log_from,
        "progress": {key: progress[key] for key, _ in PROGRESS if key in progress},
        "rejected": {reason: n for reason, n in progress.get("rejected", {}).items() if n},
        "positions": dict(manifest.positions),
        "skips": [
            {"partition": name, "begin": begin, "end": end} for name, begin, end in commit.state.get("skips", ())
        ],
        "parts": [
            {
                "folder": part.folder,
                "buckets": list(part.buckets),
                "rows": {table: facts.rows for table, facts in part.tables.items()},
            }
            for part in commit.shards
        ],
        "files": len(commit.files),
        "made_with": dict(manifest.fingerprint),
    }


def pin(store: Path, name: str, who: str) -> str:
    """Keep a commit from being pruned until it is unpinned; return its name."""
    commit = find_commit(store, name)
    hold(Commits(store), commit.name, check_holder(_holder(who)))
    return commit.name


def unpin(store: Path, name: str, who: str) -> str:
    """Remove a pin from a commit; return its name."""
    commits = Commits(store)
    found = name if name in commits.holders() else find_commit(store, name).name
    if not commits.release(found, _holder(who)):
        holders = ", ".join(commits.holders().get(found, [])) or "nobody"
        raise HeadraceError(f"{found} is not held by {who}; it is held by {holders}")
    return found


def remove(store: Path, job: str, text: str) -> str:
    """Remove one commit of a stopped job; return its name. Raises HeadraceError if it is still needed."""
    with stopped(store, job):
        commits, name = Commits(store), find_commit(store, text).name
        clear_ended(store)
        if holders := commits.holders().get(name):
            raise HeadraceError(f"commit {name} is held by {', '.join(holders)}; remove their holds first")
        if name == continue_from(commits.names(), lineage(store)):
            raise HeadraceError(f"the next run begins at commit {name}; make another commit first")
        _check_on_disk(commits)
        lock = store_locked(store, Deadline.after(LOCK_S))
        commits.prune(0, lock, held=[each for each in commits.names() if each != name])
    return name


def check_holder(who: str) -> str:
    """Return `who`. Raises SpecError if it is the holder name of an export or of a running command."""
    if OF_WORK.fullmatch(who):
        problem = f"{who!r} is the holder name of an export or a running command; choose another name"
        raise SpecError(problem, "holder")
    return who


def _holder(who: str) -> str:
    if not HOLDER.fullmatch(who):
        raise SpecError(f"{who!r} may contain letters, digits, '_' and '-' only, at most 64", "--as")
    return who


def prune(store: Path, keep: int) -> list[str]:
    """Remove all commits except the newest `keep`, those held, and the one to continue from; return the names."""
    commits = Commits(store)
    if not commits.names():
        raise HeadraceError(f"{store} has no commit")
    _check_on_disk(commits)
    clear_ended(store)
    start = continue_from(commits.names(), lineage(store))
    lock = store_locked(store, Deadline.after(LOCK_S))
    return commits.prune(keep, lock, held=[start] if start else [])


def _check_on_disk(commits: Commits) -> None:
    """Raise HeadraceError where commits are in an object store: this disk is only a cache of them."""
    if uploaded := [commit.name for commit in commits.whole() if commit.objects]:
        raise HeadraceError(
            f"commit {uploaded[0]} is in the object store, where the running job removes it: see commit.keep and "
            "store.gc_grace"
        )
