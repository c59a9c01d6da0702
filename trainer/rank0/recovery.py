"""Recovery: rank 0 claims its generation, chooses the newest sound commit, and finds the passes to replay.

Commits are found, checked and repaired by trainer.checkpoint.commit_source, the log is read by trainer.journal.log.
State is loaded into a trainer by trainer.train.commit_state and the shards.
trainer.rank0.logged_specs knows under which spec passes were logged.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.trainer.checkpoint.commit_source import CommitSource
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.handover import check_newest
from headrace.trainer.checkpoint.rewind import Lineage, known_partitions, matmuls_after
from headrace.trainer.config import Rerun
from headrace.trainer.journal.fence import FenceSequence
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
from headrace.trainer.rank0.logged_specs import (
    log_chosen,
    logged_pass,
    overrides_of,
    resettled,
    settled,
    specs_after,
    under_spec,
)

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
    source: CommitSource | None = None
    """Where log and commits are; None for a rerun."""
    base: Commit | None = None
    """The newest commit: that of `commit`, unless that was handed over."""

    @property
    def fence(self) -> FenceSequence | None:
        """The fence, where an object store is the truth."""
        return None if self.source is None else self.source.sequence


@dataclass(frozen=True)
class Recovery:
    """The recovery of a generation of trainers."""

    store: Path
    generation: int
    spec: Mapping[str, Any]
    _: KW_ONLY
    source: CommitSource | None = None
    """Where log and commits are; None: in `store` alone."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Logged with the claim."""
    world: int = 1
    """Number of trainers."""
    logged_only: bool = False
    """Only through passes that were logged under `spec` for as many trainers."""
    taken: Callable[[], int] = lambda: 0
    """Returns the highest number of a timeline that is used elsewhere; called if the store has no log yet."""
    handed: Commit | None = None
    """The state that the generation before handed over to this one, in place of a commit."""
    chosen: Mapping[str, int] | None = None
    """The numbers of workers, by key, of a job whose launcher chooses them: logged where they are new."""

    def begin(self) -> RestartPoint:
        """Claim the generation and decide where to continue.

        1. Claim: from here on no older generation can change the store.
        2. Choose the newest commit of the timeline with every byte as written; damaged files are restored from the
        mirror.
        3. Read the log after that commit: these passes are replayed exactly.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "at": now, **self.facts}
        source = CommitSource(self.store) if self.source is None else self.source
        joblog = source.claim(facts, partial(self._claimed, source))  # 1
        failpoint(Failpoint.CLAIMED)
        try:
            return self._chosen(joblog, source)  # 2, 3
        except HeadraceError:
            joblog.close()
            raise

    def _claimed(self, source: CommitSource, facts: Mapping[str, Any], highest: int, fence: LogFence | None) -> Log:
        folder = self.store / "log"
        old = JobHistory.of(read(folder))
        if old.timeline:
            timeline, base = old.timeline, old.base
        else:
            timeline, base = source.new_timeline(max(self.taken(), highest))
        deadline = Deadline.after(CLAIM_S)
        return Log.claim(folder, self.generation, deadline, timeline=timeline, base=base, facts=facts, fence=fence)

    def _chosen(self, joblog: Log, source: CommitSource) -> RestartPoint:
        """Steps 2 and 3 of `begin`."""
        spec, records = self.spec, read(joblog.folder)
        history = JobHistory.of(records)
        commit, passed_over = source.newest_sound(Lineage.of(records))
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
            source.discard(list(passed_over))
        logged = [resettled(history, commit, spec, each) for each in found.replay]
        replay = under_spec(joblog, history, commit, spec, self.world, logged, self.logged_only)
        waiting = [settled(history, commit, spec, each) for each in history.waiting()]
        if self.chosen is not None and not self.logged_only:
            waiting += log_chosen(joblog, history, commit, spec, self.chosen, self.generation)
        overrides = overrides_of(commit, spec, () if self.logged_only else specs_after(history, commit))
        if commit is not None and commit is base:
            base = commit = source.restorable(commit)
        found = replace(found, commit=commit, base=base, source=source, joblog=joblog)
        return replace(found, replay=replay, waiting=waiting, overrides=overrides)


def rerun_point(rerun: Rerun, spec: Mapping[str, Any]) -> RestartPoint:
    """The beginning of a rerun of another store's log under `spec`: a commit, or the initial state. Writes nothing."""
    history = JobHistory.of(read(rerun.store / "log"))
    commit = None if rerun.commit is None else Commits(rerun.store).read(rerun.commit)
    found = after(history, commit, {})
    replay = [each for each in found.replay if each.close and each.plan.number <= rerun.last]
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
