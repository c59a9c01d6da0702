"""Where a job finds the log and the commits from which it continues: on this disk. The other two ways extend it.

    CommitSource     this disk alone
    MirrorSource     this disk; a mirror fills an empty one, and repairs files
    ObjectSource     an object store is the truth, and this disk a cache

Before workers start, the launcher fetches what this disk lacks. Then rank 0 claims the log and chooses the newest sound
commit (trainer.rank0.recovery). What it commits goes back there: trainer.checkpoint.commit_store has the same ways.
Imports no torch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.signature import Signature
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.pserver.errors import PserverError
from headrace.trainer.checkpoint.commit_store import CommitStore
from headrace.trainer.checkpoint.commits import (
    MANIFEST,
    CheckedFiles,
    Commit,
    CommitDamaged,
    Commits,
    NewerFormat,
    problems_of,
)
from headrace.trainer.checkpoint.mirror import Mirror, MirrorCatalog, MirrorUploader
from headrace.trainer.checkpoint.object_store import ObjectCommits, ObjectStore, PreparedStore, complete_commit
from headrace.trainer.checkpoint.rewind import Lineage
from headrace.trainer.config import StoreSection
from headrace.trainer.journal.fence import FenceMoved, FenceSequence, LogMode
from headrace.trainer.journal.fenced_log import FencedLog, facts_with_id
from headrace.trainer.journal.log import Log
from headrace.trainer.journal.log_file import newest_generation

CLAIM_ROUNDS = 64
"""Times that a claim is decided anew because an older head wrote meanwhile."""
STORE_S = 3600.0
"""Longest time to read or write all that a restart needs."""

log = logging.getLogger(__name__)

Claiming = Callable[[Mapping[str, Any], int, FencedLog | None], Log]
"""Claims the log with the given facts, above the given number of a timeline, through the fence."""


class CommitSource:
    """One thread calls. Errors: BlobUnavailable, and SpecError where the store is another job's."""

    sequence: FenceSequence | None = None
    """The fence, where an object store is the truth."""

    def __init__(self, store: Path, checked: CheckedFiles | None = None) -> None:
        """`checked`: files that this process has found sound before."""
        self.store, self.commits, self._checked = store, Commits(store), checked
        self._unreachable: BlobUnavailable | None = None

    def catalog(self, deadline: Deadline) -> MirrorCatalog:
        """The commits of the mirror."""
        return MirrorCatalog([], {})

    def newest_claim(self, deadline: Deadline) -> int:
        """The newest generation that has claimed the job in an object store; 0: none has, or this disk is the truth."""
        return 0

    def fetch(self, say: Callable[[str], None], deadline: Deadline, *, fill: bool) -> int:
        """Fetch what the next run continues from, as far as this disk lacks it -> the newest generation elsewhere.

        `fill`: whether a mirror may fill an empty store. `say` tells people.
        """
        return 0

    def claim(self, facts: Mapping[str, Any], claim: Claiming) -> Log:
        """Claim the job."""
        return claim(facts, 0, None)

    def new_timeline(self, taken: int) -> tuple[str, str | None]:
        """The timeline of a store without a log: a new one, or one that begins at a commit from the mirror.

        `taken`: the highest number of a timeline that is used elsewhere.
        """
        whole = self.commits.whole()
        orders = [*(commit.order for commit in whole), *self.catalog(Deadline.after(STORE_S)).orders]
        last = max([taken, *(timeline for timeline, _, _ in orders)])
        return f"t{last + 1}", whole[-1].name if whole else None

    def newest_sound(self, lineage: Lineage) -> tuple[Commit | None, dict[str, str]]:
        """The newest sound commit that led to the present version; and the damage of newer ones, by name.

        Raises BlobUnavailable if no commit is sound and the mirror, which may repair one, does not answer; NewerFormat.
        """
        passed_over: dict[str, str] = {}
        for name in reversed(self.commits.names()):
            if not lineage.holds(name):
                continue
            try:
                commit = self.commits.read(name)
                problems = self._problems_of(commit)
            except NewerFormat:
                raise
            except CommitDamaged as error:
                passed_over[name] = str(error)
                continue
            if not problems:
                return commit, passed_over
            passed_over[name] = "; ".join(f"{file} {problem}" for file, problem in sorted(problems.items())[:3])
        if self._unreachable is not None:
            raise self._unreachable
        return None, passed_over

    def _problems_of(self, commit: Commit) -> dict[str, str]:
        """The damage of a commit, by file, after what this disk lacks was fetched. Raises CommitDamaged."""
        complete_commit(commit, Deadline.after(STORE_S))
        return problems_of(commit, self._checked)

    def discard(self, names: Sequence[str]) -> None:
        """Take damaged commits out of use; the next pruning removes their folders."""
        for name in names:
            (self.commits.folder / name / MANIFEST).rename(self.commits.folder / name / f"{MANIFEST}.damaged")

    def restorable(self, commit: Commit) -> Commit:
        """A commit as every process can restore it."""
        return commit

    def commit_store(self, joblog: Log, keep: int, base: Commit | None) -> CommitStore:
        """Where the next commits count: rank 0 keeps the newest `keep`. `base`: the commit that was restored."""
        return CommitStore(self.store)


class MirrorSource(CommitSource):
    """The mirror is connected to when it is needed."""

    def __init__(self, store: Path, checked: CheckedFiles | None, address: str, signature: Signature) -> None:
        """`address`: of the mirror, whole."""
        super().__init__(store, checked)
        self._address, self._signature = address, signature

    def _mirror(self, deadline: Deadline) -> Mirror:
        return Mirror.open(self._address, deadline, self._signature)

    def catalog(self, deadline: Deadline) -> MirrorCatalog:
        return self._mirror(deadline).catalog(deadline)

    def fetch(self, say: Callable[[str], None], deadline: Deadline, *, fill: bool) -> int:
        """The newest commit of the mirror, into a store without any."""
        if not fill or newest_generation(self.store / "log"):
            return 0
        mirror = self._mirror(deadline)
        if not self.commits.names():  # else fetched by a run that was killed before its first claim
            catalog = mirror.catalog(deadline)
            if not catalog.commits and not catalog.damaged:
                return 0
            fetched = mirror.fetch(self.store, self._signature.job, deadline)
            for reason in fetched.passed_over:
                say(f"skipped in the mirror: {reason}")
            say(f"continuing from the mirror, at commit {fetched.name}, on a new timeline")
        return mirror.newest_generation(deadline)

    def _problems_of(self, commit: Commit) -> dict[str, str]:
        """After damaged files were restored from the mirror, if it answers."""
        problems = super()._problems_of(commit)
        if not problems:
            return {}
        deadline = Deadline.after(STORE_S)
        try:
            self._mirror(deadline).repair(commit, sorted(problems), deadline)
        except BlobUnavailable as error:
            self._unreachable = error
            return problems
        log.warning("commit %s: %d damaged files were restored from the mirror", commit.name, len(problems))
        return problems_of(commit)

    def commit_store(self, joblog: Log, keep: int, base: Commit | None) -> CommitStore:
        """The restored commit is copied first: its upload may not have ended before."""

        def check_generation() -> None:
            with joblog.exclusive():
                pass

        holders = self.commits.holders
        uploader = MirrorUploader(self._address, self.store, keep, holders, check_generation, self._signature)
        if base is not None:
            uploader.offer(base)
        return uploader


class ObjectSource(MirrorSource):
    """Commits whose files are on this disk alone, from before the object store was the truth, are read as mirrored."""

    def __init__(
        self, store: Path, checked: CheckedFiles | None, objects: ObjectStore, generation: int, section: StoreSection
    ) -> None:
        super().__init__(store, checked, objects.address, objects.signature)
        self._objects, self._section = objects, section
        self.sequence: FenceSequence = objects.sequence(generation)

    def newest_claim(self, deadline: Deadline) -> int:
        return self.sequence.catch_up(deadline).generation

    def _prepared(self, deadline: Deadline) -> PreparedStore:
        history, job = self.sequence.catch_up(deadline), self._signature.job
        return self._objects.prepare(self.store, job, history, deadline)

    def fetch(self, say: Callable[[str], None], deadline: Deadline, *, fill: bool) -> int:
        """The log and the manifests that count; files of commits follow when they are needed."""
        before = newest_generation(self.store / "log")
        found = self._prepared(deadline)
        place = f"commit {found.newest}" if found.newest else "the initial state"
        if found.log_lost:
            say(f"the log was on another disk; continuing at {place}, on a new timeline")
        elif newest_generation(self.store / "log") > before:
            say(f"the log is complete from the object store; continuing at {place}, on the same timeline")
        return found.history.generation

    def claim(self, facts: Mapping[str, Any], claim: Claiming) -> Log:
        """After records of an older head that came first, all is read and decided again.

        1. Complete the store on this disk. 2. Claim: first in the fence, then on this disk.
        """
        for _ in range(CLAIM_ROUNDS - 1):
            try:
                return self._claim(facts, claim)
            except FenceMoved as error:
                log.info("%s; reading again", error)
        return self._claim(facts, claim)

    def _claim(self, facts: Mapping[str, Any], claim: Claiming) -> Log:
        found = self._prepared(Deadline.after(STORE_S))  # 1
        if found.log_lost:
            log.warning(
                "the log of timeline %s was on another disk, so this job continues on a new timeline: from %s",
                found.history.timeline,
                found.newest or "its initial state",
            )
        known, mode = facts_with_id(dict(facts), self.store / "log"), LogMode(self._section.log_mirror)
        return claim(known, found.history.highest, FencedLog(self.sequence, mode))  # 2

    def _problems_of(self, commit: Commit) -> dict[str, str]:
        if commit.objects:
            return self._objects.problems_of(commit, Deadline.after(STORE_S))
        problems = super()._problems_of(commit)
        if self._unreachable is not None:  # an older commit would need the same store
            raise self._unreachable
        return problems

    def restorable(self, commit: Commit) -> Commit:
        """Uploaded, if it is on this disk alone."""
        if commit.objects:
            return Commit(commit.folder, msgspec.structs.replace(commit.manifest, objects_at=self._address))
        try:
            return self._objects.adopt(commit, self.sequence.generation, Deadline.after(STORE_S))
        except PserverError:
            log.error("commit %s was made with parts in a folder, and cannot be uploaded now", commit.name)
            raise

    def commit_store(self, joblog: Log, keep: int, base: Commit | None) -> CommitStore:
        return ObjectCommits(self.store, self._objects, self.sequence, base, self._section.gc_grace)


def open_source(
    section: StoreSection,
    store: Path,
    job: str,
    folder: Path,
    deadline: Deadline,
    *,
    generation: int = 0,
    checked: CheckedFiles | None = None,
) -> CommitSource:
    """The source of a job with this section, whose relative paths start at `folder`. `store`: its folder on this disk.

    `generation`: of the rank 0 that asks; 0: another process, which claims nothing. Connects to an object store.
    """
    if section.mirror is None:
        return CommitSource(store, checked)
    address, signature = parse(section.mirror, folder).text, Signature.of(section.key, job, folder)
    if section.parts == "shared":
        return MirrorSource(store, checked, address, signature)
    return ObjectSource(store, checked, ObjectStore.open(address, deadline, signature), generation, section)
