"""Recovery: rank 0 claims its generation, chooses the newest sound commit, and finds the passes to replay.

Commits are read by trainer.checkpoint.commits, checked and repaired by trainer.rank0.sound_commit, the log is read by
trainer.journal.log. State is loaded into a trainer by trainer.train.commit_state and the shards.
trainer.rank0.logged_specs knows under which spec passes were logged.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.trainer.checkpoint.commits import CheckedFiles, Commit, Commits
from headrace.trainer.checkpoint.handover import check_newest
from headrace.trainer.checkpoint.rewind import Lineage, known_partitions, matmuls_after
from headrace.trainer.journal.job_history import HistoryMissing, JobHistory, ReplayedPass
from headrace.trainer.journal.log import Log, LogFence, read
from headrace.trainer.journal.partitions import KnownPartition, SkippedRange
from headrace.trainer.journal.records import (
    GapOperation,
    MatmulOperation,
    Operation,
    RestoreOperation,
    SkipOperation,
)
from headrace.trainer.rank0.logged_specs import logged_pass, overrides_of, resettled, settled, specs_after, under_spec
from headrace.trainer.rank0.sound_commit import ObjectHead, discard_commits, new_timeline, newest_sound

CLAIM_S = 60.0
"""Longest wait for the store's lock."""

log = logging.getLogger(__name__)


class NoSoundCommit(HeadraceError):
    """No commit can be restored, and the log does not reach back to the first pass."""


@dataclass(frozen=True)
class RestartPoint:
    """The state from which a trainer continues."""

    timeline: str
    commit: Commit | None
    """The commit to restore; None: the initial state. Or what the generation before handed over, which is none."""
    replay: Sequence[ReplayedPass]
    last_number: int
    """Highest number of any logged plan; numbers are never reused."""
    known: Mapping[str, KnownPartition] = field(default_factory=dict)
    """Known partitions."""
    skips: Sequence[SkippedRange] = ()
    """Skipped ranges of partitions."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Damaged commits, each with its damage."""
    joblog: Log | None = None
    """The log, claimed; None for a rerun, which only reads."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that were set and hold at the commit, without those that the job file has changed since."""
    waiting: Sequence[Operation] = ()
    """Operations that act at the first new close, in order."""
    matmuls: Sequence[tuple[int, MatmulOperation]] = ()
    """The tables of kernels since the commit, each with the first pass that it holds for, in order."""
    closed: int = 0
    """The last closed pass."""
    head: ObjectHead | None = None
    """The object store that is the truth, if the disk is not."""
    base: Commit | None = None
    """The newest commit: that of `commit`, unless that was handed over."""


@dataclass(frozen=True)
class Recovery:
    """The recovery of a generation of trainers."""

    store: Path
    generation: int
    spec: Mapping[str, Any]
    _: KW_ONLY
    mirror: str | None = None
    """The address of the mirror, or of the object store that is the truth."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Logged with the claim."""
    world: int = 1
    """Number of trainers."""
    logged_only: bool = False
    """Only through passes that were logged under `spec` for as many trainers."""
    taken: Callable[[], int] = lambda: 0
    """Returns the highest number of a timeline that is used elsewhere; called if the store has no log yet."""
    head: ObjectHead | None = None
    """The object store that is the truth, if the disk is not."""
    checked: CheckedFiles | None = None
    """Files of commits that this process has found sound before."""
    handed: Commit | None = None
    """The state that the generation before handed over to this one, in place of a commit."""

    def begin(self) -> RestartPoint:
        """Claim the generation and decide where to continue.

        1. Claim: from here on no older generation can change the store.
        2. Choose the newest commit of the timeline with every byte as written; damaged files are restored from the
        mirror.
        3. Read the log after that commit: these passes are replayed exactly.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "at": now, **self.facts}
        if self.head is None:
            joblog = self._claimed(facts, 0, None)  # 1
        else:
            joblog = self.head.claimed(self.store, facts, self._claimed)
        failpoint(Failpoint.CLAIMED)
        try:
            return self._chosen(joblog)  # 2, 3
        except HeadraceError:
            joblog.close()
            raise

    def _claimed(self, facts: Mapping[str, Any], highest: int, fence: LogFence | None) -> Log:
        folder = self.store / "log"
        old = JobHistory.of(read(folder))
        if old.timeline:
            timeline, base = old.timeline, old.base
        else:
            mirror = self.mirror if self.head is None else None
            timeline, base = new_timeline(Commits(self.store), mirror, max(self.taken(), highest))
        deadline = Deadline.after(CLAIM_S)
        return Log.claim(folder, self.generation, deadline, timeline=timeline, base=base, facts=facts, fence=fence)

    def _chosen(self, joblog: Log) -> RestartPoint:
        """Steps 2 and 3 of `begin`."""
        commits, spec, head, records = Commits(self.store), self.spec, self.head, read(joblog.folder)
        history = JobHistory.of(records)
        commit, passed_over = newest_sound(commits, Lineage.of(records), self.mirror, head, self.checked)
        for name in passed_over:
            log.warning("commit %s is damaged; an older one is used: %s", name, passed_over[name])
        base = commit
        if self.handed is not None:
            commit = check_newest(history, self.handed)
        found = after(history, commit, passed_over)
        if self.handed is None and (commit is not None or passed_over):
            chosen = None if commit is None else commit.name
            joblog.append(RestoreOperation(commit=chosen, passed_over=passed_over))
        with joblog.exclusive():
            discard_commits(commits, list(passed_over))
        logged = [resettled(history, commit, spec, each) for each in found.replay]
        replay = under_spec(joblog, history, commit, spec, self.world, logged, self.logged_only)
        waiting = [settled(history, commit, spec, each) for each in history.waiting()]
        overrides = overrides_of(commit, spec, () if self.logged_only else specs_after(history, commit))
        if head is not None and commit is not None:
            found = replace(found, commit=head.restorable(commit))
            base = found.commit
        return replace(found, replay=replay, joblog=joblog, waiting=waiting, overrides=overrides, head=head, base=base)


def rerun_point(store: Path, name: str | None, spec: Mapping[str, Any]) -> RestartPoint:
    """The beginning of a rerun of another store's log under `spec`: a commit, or the initial state. Writes nothing."""
    history = JobHistory.of(read(store / "log"))
    commit = None if name is None else Commits(store).read(name)
    found = after(history, commit, {})
    replay = [each for each in found.replay if each.close]
    overrides = overrides_of(commit, spec)
    return replace(found, replay=replay, last_number=0, skips=(), passed_over={}, overrides=overrides)


def after(history: JobHistory, commit: Commit | None, passed_over: Mapping[str, str]) -> RestartPoint:
    """The passes in the log after a commit; and all known partitions and skipped ranges."""
    state: Mapping[str, Any] = {} if commit is None else commit.state
    version = 0 if commit is None else commit.version
    operations = history.operations_by_version()
    try:
        replay = [
            logged_pass(history, commit, each, operations.get(each.plan.number, ())) for each in history.after(version)
        ]
    except HistoryMissing as error:
        if commit is not None:
            raise
        raise NoSoundCommit(
            "no commit can be restored, and the log does not reach back to the first pass: "
            + ("; ".join(f"{name}: {how}" for name, how in passed_over.items()) or "there is no commit")
            + "; restore a whole copy of a commit, set store.mirror to a mirror with one, or start with --fresh"
        ) from error
    skips = [SkippedRange(*each) for each in state.get("skips", ())]
    skips += [
        operation.content.skip
        for operation in history.operations
        if isinstance(operation.content, SkipOperation | GapOperation)
    ]
    last = max(version, history.last_number)
    known = known_partitions(history, commit)
    return RestartPoint(
        history.timeline,
        commit,
        replay,
        last,
        known,
        list(dict.fromkeys(skips)),
        passed_over,
        matmuls=matmuls_after(history, commit),
        closed=max(version, history.closed),
        base=commit,
    )
