"""The commit and the log from which a job continues, wherever they count: on this disk or in an object store.

Chooses the newest sound commit after a crash, and restores damaged files from the mirror or the object store. Where the
object store is the truth, ObjectHead claims the job through the fence. trainer.rank0.recovery decides where the job
continues.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.signature import Signature
from headrace.deadline import Deadline
from headrace.pserver.errors import PserverError
from headrace.trainer.checkpoint.commits import (
    MANIFEST,
    CheckedFiles,
    Commit,
    CommitDamaged,
    Commits,
    NewerFormat,
    problems_of,
)
from headrace.trainer.checkpoint.mirror import Mirror
from headrace.trainer.checkpoint.object_store import ObjectStore, PreparedStore, complete_commit
from headrace.trainer.checkpoint.rewind import Lineage
from headrace.trainer.journal.fence import FenceMoved, FenceSequence, LogMode
from headrace.trainer.journal.fenced_log import FencedLog, facts_with_id
from headrace.trainer.journal.log import Log

CLAIM_ROUNDS = 64
"""Times that a claim is decided anew because an older head wrote meanwhile."""
STORE_S = 3600.0
"""Longest time to read or write all that a restart needs."""
MIRROR_S = 3600.0
"""Time limit to read from the mirror."""

log = logging.getLogger(__name__)

Claiming = Callable[[Mapping[str, Any], int, FencedLog | None], Log]
"""Claims the log with the given facts, above the given number of a timeline, through the fence."""


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """The head of a job whose object store is the truth: it claims through the fence, and fetches commits."""

    store: ObjectStore
    sequence: FenceSequence
    mode: LogMode
    job: str

    @classmethod
    def open(cls, address: str, generation: int, mode: str, signature: Signature) -> "ObjectHead":
        """Connect. Raises BlobUnavailable, and SpecError where the store cannot do what is needed."""
        store = ObjectStore.open(address, Deadline.after(STORE_S), signature)
        return cls(store, store.sequence(generation), LogMode(mode), signature.job)

    def prepared(self, store: Path) -> PreparedStore:
        """Complete the store on this disk."""
        deadline = Deadline.after(STORE_S)
        return self.store.prepare(store, self.job, self.sequence.catch_up(deadline), deadline)

    def claimed(self, store: Path, facts: Mapping[str, Any], claim: Claiming) -> Log:
        """Claim the job. After records of an older head that came first, all is read and decided again.

        1. Complete the store on this disk. 2. Claim: first in the fence, then on this disk.
        """
        for _ in range(CLAIM_ROUNDS - 1):
            try:
                return self._claimed(store, facts, claim)
            except FenceMoved as error:
                log.info("%s; reading again", error)
        return self._claimed(store, facts, claim)

    def _claimed(self, store: Path, facts: Mapping[str, Any], claim: Claiming) -> Log:
        found = self.prepared(store)  # 1
        if found.log_lost:
            log.warning(
                "the log of timeline %s was on another disk, so this job continues on a new timeline: from %s",
                found.history.timeline,
                found.newest or "its initial state",
            )
        known = facts_with_id(dict(facts), store / "log")
        return claim(known, found.history.highest, FencedLog(self.sequence, self.mode))  # 2

    def problems_of(self, commit: Commit) -> dict[str, str]:
        """The damage of a commit, by file, after what this disk lacks was fetched."""
        return self.store.problems_of(commit, Deadline.after(STORE_S))

    def restorable(self, commit: Commit) -> Commit:
        """A commit as every process can restore it: uploaded, if it is on this disk alone."""
        if commit.objects:
            return Commit(commit.folder, msgspec.structs.replace(commit.manifest, objects_at=self.store.address))
        try:
            return self.store.adopt(commit, self.sequence.generation, Deadline.after(STORE_S))
        except PserverError:
            log.error("commit %s was made with parts in a folder, and cannot be uploaded now", commit.name)
            raise


def newest_sound(
    commits: Commits,
    lineage: Lineage,
    uri: str | None,
    head: ObjectHead | None = None,
    checked: CheckedFiles | None = None,
) -> tuple[Commit | None, dict[str, str]]:
    """The newest sound commit that led to the present version; and the damage of newer ones, by name.

    `checked`: files that this process has found sound before.

    Raises BlobUnavailable if no commit is sound and the mirror, which may repair one, does not answer; NewerFormat.
    """
    passed_over: dict[str, str] = {}
    unreachable: BlobUnavailable | None = None
    for name in reversed(commits.names()):
        if not lineage.holds(name):
            continue
        try:
            commit = commits.read(name)
            uploaded = head is not None and bool(commit.objects)
            if head is None:
                complete_commit(commit, Deadline.after(MIRROR_S))
            problems = head.problems_of(commit) if head is not None and uploaded else problems_of(commit, checked)
            if problems and uri is not None and not uploaded:
                _mirror(uri).repair(commit, sorted(problems), Deadline.after(MIRROR_S))
                log.warning("commit %s: %d damaged files were restored from the mirror", name, len(problems))
                problems = problems_of(commit)
        except NewerFormat:
            raise
        except CommitDamaged as error:
            passed_over[name] = str(error)
            continue
        except BlobUnavailable as error:
            if head is not None:
                raise
            unreachable = error
        if not problems:
            return commit, passed_over
        passed_over[name] = "; ".join(f"{file} {problem}" for file, problem in sorted(problems.items())[:3])
    if unreachable is not None:
        raise unreachable
    return None, passed_over


def discard_commits(commits: Commits, names: Sequence[str]) -> None:
    """Take damaged commits out of use; the next pruning removes their folders."""
    for name in names:
        (commits.folder / name / MANIFEST).rename(commits.folder / name / f"{MANIFEST}.damaged")


def new_timeline(commits: Commits, uri: str | None, taken: int) -> tuple[str, str | None]:
    """The timeline of a store without a log: a new one, or one that begins at a commit from the mirror."""
    whole = commits.whole()
    last = max([taken, *(commit.order[0] for commit in whole)])
    if uri is not None:
        last = max([last, *(timeline for timeline, _, _ in _mirror(uri).catalog(Deadline.after(MIRROR_S)).orders)])
    return f"t{last + 1}", whole[-1].name if whole else None


def _mirror(uri: str) -> Mirror:
    return Mirror.open(uri, Deadline.after(MIRROR_S))
