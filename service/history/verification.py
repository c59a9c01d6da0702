"""Verifies that a commit is what was written: reads every byte back, opens every shard's tables and counts their rows.

Tables are opened in a restored copy, because RocksDB writes to a folder that it opens, and a commit must not change.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace import documents
from headrace.pserver.errors import PserverError
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.store.rocks_store import HEADER, RocksRowStore
from headrace.service.history.commit_lookup import lease, scratch
from headrace.trainer.checkpoint.commits import MANIFEST, Commit, CommitDamaged, Commits, problems_of


@dataclass(frozen=True)
class CommitCheck:
    """The result of reading a commit back."""

    name: str
    damage: Mapping[str, str]
    """Damage by file or table."""
    shared: Mapping[str, list[str]]
    """By damaged file: the other commits that share it."""
    files: int
    rows: int

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


def check_commit(store: Path, name: str) -> CommitCheck:
    """Read a commit back. The commit is held meanwhile."""
    commits, damage = Commits(store), damage_in(store, name)
    if MANIFEST in damage:
        return CommitCheck(name, damage, {}, 0, 0)
    commit = commits.read(name)
    others = [other for other in commits.whole() if other.name != name] if damage else []
    shared = {file: list(commits_sharing(commit, file, others)) for file in damage}
    return CommitCheck(name, damage, shared, len(commit.files), commit.num_rows)


def damage_in(store: Path, name: str) -> dict[str, str]:
    """Damage of a commit by file or table; empty if it is sound. The commit is held meanwhile."""
    commits = Commits(store)
    try:
        with lease(commits, name, "verify"), scratch(store) as folder:
            return damage_of(commits.read(name), folder)
    except CommitDamaged as error:
        return {MANIFEST: str(error)}


def damage_of(commit: Commit, scratch: Path) -> dict[str, str]:
    """Damage of `commit` by file or table; empty if it is sound.

    Tables are opened in `scratch`, a path on the commit's disk; the folder is created and removed.
    """
    found = problems_of(commit)
    for part in commit.shards:
        for table, facts in part.tables.items():
            below = f"{part.folder}/{table}"
            if not any(file.startswith(f"{below}/") for file in found):
                problem = _problem_of_table(commit.folder / below, facts.rows, part, scratch)
                if problem is not None:
                    found[below] = problem
    return found


def _problem_of_table(folder: Path, num_rows: int, part: ShardCommitPart, scratch: Path) -> str | None:
    try:
        num_words = documents.read_object(folder / HEADER)["words"]
        rows = RocksRowStore.open(scratch, folder, num_words=num_words)
        try:
            counted = sum(len(keys_U) for keys_U, _ in rows.scan())
            inside = sum(len(keys_U) for keys_U, _ in rows.scan(*part.buckets))
        finally:
            rows.close()
    except (PserverError, OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be opened: {error}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if counted != num_rows:
        return f"has {counted:,} rows, but the manifest says {num_rows:,}"
    return None if inside == counted else f"has {counted - inside:,} rows of buckets that belong to other shards"


def commits_sharing(commit: Commit, file: str, others: Iterable[Commit]) -> Iterator[str]:
    """Names of the `others` that share the file on disk, and so its damage."""
    ours = _inode(commit.folder / file)
    for other in others:
        wanted = commit.files.get(file)
        candidates = [name for name, stored in other.files.items() if stored == wanted]
        if ours is not None and any(_inode(other.folder / name) == ours for name in candidates):
            yield other.name


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
