"""The head of a job whose object store is the truth: it claims through the fence, and restores commits from there.

trainer.rank0.recovery decides where the job continues.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.blob.signature import Signature
from headrace.deadline import Deadline
from headrace.pserver.errors import PserverError
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.checkpoint.object_store import ObjectStore, PreparedStore
from headrace.trainer.fence.fence_records import LogMode
from headrace.trainer.fence.fence_sequence import FenceMoved, FenceSequence
from headrace.trainer.fence.fenced_log import FencedLog, facts_with_id
from headrace.trainer.journal.log import Log

CLAIM_ROUNDS = 64
"""Times that a claim is decided anew because an older head wrote meanwhile."""
STORE_S = 3600.0
"""Longest time to read or write all that a restart needs."""

log = logging.getLogger(__name__)

Claiming = Callable[[Mapping[str, Any], int, FencedLog | None], Log]
"""Claims the log with the given facts, above the given number of a timeline, through the fence."""


@dataclass(frozen=True, slots=True)
class ObjectHead:
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
