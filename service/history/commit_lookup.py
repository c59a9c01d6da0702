"""Finds the commit that a person means, and keeps it from being pruned while a command reads it.

A lease and a scratch folder are named after the process; the next command on the same machine removes those of killed
processes.
"""

import itertools
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.service.cluster.store import RERUNS
from headrace.trainer.checkpoint.commits import VERSION, Commit, CommitDamaged, Commits, order_of
from headrace.trainer.checkpoint.object_store import complete_commit
from headrace.trainer.checkpoint.rewind import Lineage, claims
from headrace.trainer.journal.log import store_locked

FETCH_S = 3600.0
"""Longest time to fetch the files of a commit."""
LOCK_S = 60.0
"""Longest time a running worker may hold the store's lock."""
_HOST = re.sub(r"\W", "_", socket.gethostname())
OF_COMMANDS = r"(?:verify|rerun|(?:predict|read)\d*)"
"""Pattern of the holder names of running commands, up to the dash before machine and process."""
_numbers = itertools.count(1)
"""Of the reads of this process, which may run side by side."""
_OURS = re.compile(rf"{OF_COMMANDS}-{_HOST}-(\d+)")


# Find


def lineage(store: Path) -> Lineage:
    """The versions that led to the present one, even if the log is damaged."""
    return Lineage.of(claims(store / "log"))


def find_commit_name(names: list[str], text: str, past: Lineage) -> str:
    """The commit called `text`; or the newest commit of version `text` that led to the present state.

    `names` are in order of time. Raises SpecError if there is none.
    """
    if text in names:
        return text
    known = f"there are: {', '.join(names[-20:])}" if names else "there are no commits"
    if VERSION.fullmatch(text) is None:
        raise SpecError(f"there is no commit {text!r:.100}; {known}")
    found = [name for name in names if order_of(name)[1] == int(text)]
    ours = [name for name in found if past.holds(name)]
    if ours:
        return ours[-1]
    if found:
        raise SpecError(f"version {text} exists on another timeline only; name the commit: {', '.join(found)}")
    raise SpecError(f"there is no commit of version {text}; {known}")


def find_commit(store: Path, text: str) -> Commit:
    """The commit in `store` that `text` means; see `find_commit_name`. Raises SpecError, CommitDamaged."""
    commits = Commits(store)
    names = commits.names()
    return commits.read(text if text in names else find_commit_name(names, text, lineage(store)))


def continue_from(names: list[str], past: Lineage) -> str | None:
    """The commit where a run begins: the newest of `names` on the present timeline, or the one it began at.

    `names` are in order of time. None if there is none.
    """
    timeline, base = past.timeline, past.bases.get(past.timeline)
    ours = (name for name in reversed(names) if not timeline or name == base or name.startswith(f"{timeline}-"))
    return next(ours, None)


# Hold


def hold(commits: Commits, name: str, who: str, deadline: Deadline | None = None) -> None:
    """Keep a commit from being pruned. Takes the store's lock, as pruning does. Raises DeadlineExceeded."""
    with store_locked(commits.folder.parent, deadline or Deadline.after(LOCK_S)):
        if name not in commits.names():
            raise HeadraceError(f"commit {name} was just pruned; `headrace commits list` shows the others")
        commits.hold(name, who)


def reader() -> str:
    """A name for the lease and the folder of one read of this process: "read1", then "read2", and so on."""
    return f"read{next(_numbers)}"


@contextmanager
def lease(
    commits: Commits, name: str, what: str, *, rows: bool = True, deadline: Deadline | None = None
) -> Iterator[None]:
    """Keep a commit from being pruned while the context is open; all of its files are on this disk then, or without
    `rows` all but those.

    `what`: "verify", "rerun", "predict<number>", "read<number>". Raises CommitDamaged where an object store lacks
    a file of it. `deadline`: for the store's lock; nothing is fetched then, and SpecError says that files are missing.
    """
    clear_ended(commits.folder.parent)
    who = _holder_name(what)
    hold(commits, name, who, deadline)
    try:
        if deadline is None:
            _complete(commits, name, rows=rows)
        else:
            _check_here(commits.read(name))
        yield
    finally:
        commits.release(name, who)


def _complete(commits: Commits, name: str, *, rows: bool) -> None:
    try:
        commit = commits.read(name)
    except CommitDamaged:  # of the manifest: its reader says so
        return
    complete_commit(commit, Deadline.after(FETCH_S), rows=rows)


def _check_here(commit: Commit) -> None:
    """Raise SpecError where files of an uploaded commit are not on this disk. They are not read."""
    if commit.manifest.objects_at is None:
        return
    for path, file in commit.files.items():
        target = commit.folder / path
        if not target.is_file() or target.stat().st_size != file.num_bytes:
            raise SpecError(
                f"files of commit {commit.name} are in the object store alone; `headrace commits verify` brings them"
            )


@contextmanager
def scratch(store: Path, what: str = "verify") -> Iterator[Path]:
    """A path on the store's disk for a folder that does not exist yet; removed at the end. `what`: as in `lease`."""
    clear_ended(store)
    path = store / RERUNS / _holder_name(what)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def clear_ended(store: Path) -> None:
    """Remove the leases and scratch folders of ended processes of this machine."""
    for path in (*(store / RERUNS).glob("verify-*"), *(store / RERUNS).glob("read*-*")):
        if _has_ended(path.name):
            shutil.rmtree(path, ignore_errors=True)
    commits = Commits(store)
    for name, holders in commits.holders().items():
        for who in filter(_has_ended, holders):
            commits.release(name, who)


def _holder_name(what: str) -> str:
    return f"{what}-{_HOST}-{os.getpid()}"


def _has_ended(who: str) -> bool:
    """Whether a holder is a command of this machine whose process has ended."""
    ours = _OURS.fullmatch(who)
    if ours is None:
        return False
    try:
        os.kill(int(ours[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process; it exists
        return False
    return False
