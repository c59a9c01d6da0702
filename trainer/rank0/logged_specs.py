"""The specs of a log: under which spec, and by how many trainers, each pass was logged, and what is in force now.

The log holds the spec as an operation, and the number of a pass's trainers in its plan. Each logged pass is replayed as
it was logged, before another spec or another number of trainers acts. trainer.spec.changes compares specs;
trainer.rank0.recovery chooses the commit.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import HeadraceError
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.rewind import Lineage
from headrace.trainer.journal.job_history import JobHistory, LoggedPass, ReplayedPass
from headrace.trainer.journal.log import Log, LogRecord, read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import Operation, ResizeOperation, SetOperation, SpecOperation, Void
from headrace.trainer.spec import changes
from headrace.trainer.spec.defaults import fill_defaults


def logged_pass(
    history: JobHistory, commit: Commit | None, each: LoggedPass, operations: Sequence[LogRecord[Operation]]
) -> ReplayedPass:
    """A pass of the log, to replay; its operations act as they did."""
    planned_at = history.plans[each.plan.number].number
    if each.close is None:
        return ReplayedPass(each.plan, planned_at, None)
    spec = spec_at(history, commit, each.record) or {}
    acting = [settled(history, commit, spec, operation, each.record) for operation in operations]
    return ReplayedPass(each.plan, planned_at, each.close, each.record, acting)


def settled(
    history: JobHistory,
    commit: Commit | None,
    spec: Mapping[str, Any],
    operation: LogRecord[Operation],
    before: int = sys.maxsize,
) -> Operation:
    """An operation as it acts under `spec`: a set or resize loses the keys that the job file has changed since.

    `before`: the record at which it acts; none for an operation that waits.
    """
    if not isinstance(operation.content, SetOperation | ResizeOperation):
        return operation.content
    specs = _specs_since(history, commit, operation.number, before, spec)
    return replace(operation.content, keys=_remaining(operation.content.keys, specs))


def resettled(history: JobHistory, commit: Commit | None, spec: Mapping[str, Any], each: ReplayedPass) -> ReplayedPass:
    """The pass with its resizes as they act under the present `spec`: no result of a pass depends on them."""
    specs = _specs_since(history, commit, each.closed_at, sys.maxsize, spec)
    operations = [
        replace(operation, keys=_remaining(operation.keys, specs))
        if isinstance(operation, ResizeOperation)
        else operation
        for operation in each.operations
    ]
    return replace(each, operations=operations)


def _specs_since(
    history: JobHistory, commit: Commit | None, record: int, before: int, spec: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The spec in force at `record`, those logged after it and before another record, and `spec`."""
    logged = [each for number, each in history.specs(before) if number > record]
    return [spec_at(history, commit, record) or spec, *logged, spec]


def overrides_of(
    commit: Commit | None, spec: Mapping[str, Any], between: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The overrides at `commit` that remain under `spec`. `between`: the specs logged after the commit, in order."""
    if commit is None:
        return {}
    overrides: Mapping[str, Any] = commit.state.get("operations", {}).get("overrides", {})
    return _remaining(overrides, [fill_defaults(commit.state["spec"]), *between, spec])


def specs_after(history: JobHistory, commit: Commit | None) -> list[Mapping[str, Any]]:
    """The specs logged after `commit`, in order."""
    return [each.content.spec for each in _operations_after(history, commit) if isinstance(each.content, SpecOperation)]


def _operations_after(history: JobHistory, commit: Commit | None) -> list[LogRecord[Operation]]:
    """The operations that `commit` does not hold, in order."""
    version = 0 if commit is None else commit.version
    found = history.operations_by_version().items()
    return [record for acts_at, records in found if acts_at is None or acts_at > version for record in records]


def _remaining(overrides: Mapping[str, Any], specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The overrides that remain after each change from one spec to the next."""
    found = dict(overrides)
    for old, new in pairwise(specs):
        found = changes.remaining(found, old, new)
    return found


def under_spec(
    joblog: Log,
    history: JobHistory,
    commit: Commit | None,
    spec: Mapping[str, Any],
    world: int,
    replay: Sequence[ReplayedPass],
    logged_only: bool,
) -> Sequence[ReplayedPass]:
    """The passes to replay under `spec` with `world` trainers.

    A new spec is logged. Plans without a close that are for another spec or number of trainers are withdrawn first.
    """

    def differ(each: ReplayedPass) -> list[str]:
        keys = changes.significant_keys(spec_at(history, commit, each.planned_at) or spec, spec)
        return [*keys, *_other_world(each.plan, world)]

    if logged_only:
        return list(takewhile(lambda each: not differ(each), replay))
    for each in replay:
        if each.close and (keys := differ(each)):
            raise HeadraceError(
                f"passes must be replayed as they were logged before {', '.join(keys)} may change; start the job again"
            )
    old = spec_in_force(history, commit)
    keys = [] if old is None else changes.significant_keys(old, spec, learnt=_learnt(history, commit))
    # The newest plan first: after a crash, no plan is left after a withdrawn one. Then the spec: no plan is left that
    # was made under the old one.
    kept = list(replay)
    while kept and kept[-1].close is None and (reasons := keys or _other_world(kept[-1].plan, world)):
        joblog.append(Void(number=kept.pop().plan.number, reason=f"changed: {', '.join(reasons)}"))
    if old is None or changes.changed_keys(old, spec):
        joblog.append(SpecOperation(spec=spec))
    return kept


def _other_world(plan: PassPlan, world: int) -> list[str]:
    """The key of the number of trainers, where the plan is for another number than `world`."""
    return [] if len(plan.segments) == world else [changes.TRAINERS]


def _learnt(history: JobHistory, commit: Commit | None) -> bool:
    """True if the store may hold rows: not if no pass was ever closed, as after a failed start."""
    return commit is not None or history.closed > 0


def spec_in_force(history: JobHistory, commit: Commit | None) -> Mapping[str, Any] | None:
    """The last logged spec; the commit's, if that record is pruned. None for a job that never began."""
    return spec_at(history, commit, sys.maxsize)


def spec_at(history: JobHistory, commit: Commit | None, record: int) -> Mapping[str, Any] | None:
    """The full spec in force when the record number `record`, which is after `commit`, was written."""
    specs = history.specs(before=record)
    if not specs and commit is None:
        return None
    return fill_defaults(specs[-1][1] if specs or commit is None else commit.state["spec"])


class LoggedUnder(NamedTuple):
    """How logged passes were trained."""

    spec: Mapping[str, Any]
    world: int
    """Number of trainers."""


def replay_first(store: Path, spec: Mapping[str, Any], world: int) -> LoggedUnder | None:
    """How logged passes must be replayed and committed before `spec` and `world` trainers may act; None: at once.

    Call again after that. Raises SpecError for a change that is never allowed. Read-only, for the launcher.
    """
    history, newest = _in_store(store)
    version = 0 if newest is None else newest.version
    changes.significant_keys(spec_in_force(history, newest) or spec, spec, learnt=_learnt(history, newest))
    closed = [plan for number, plan in sorted(history.plans.items()) if version < number <= history.closed]
    specs = [spec_at(history, newest, plan.number) or spec for plan in closed]
    differ = any(_other_world(plan.content, world) for plan in closed) or any(
        changes.significant_keys(old, spec) for old in specs
    )
    return LoggedUnder(specs[0], len(closed[0].content.segments)) if differ else None


def resized(store: Path, spec: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of workers, by key, that the newest resize gave the job; it need not have acted yet.

    Without those that the job file has changed since; `spec` is the present one. Read-only, for the launcher.
    """
    return _numbers_in_force(*_in_store(store), spec)


def log_chosen(
    joblog: Log,
    history: JobHistory,
    commit: Commit | None,
    spec: Mapping[str, Any],
    numbers: Mapping[str, int],
    generation: int,
) -> list[ResizeOperation]:
    """Log a resize where the launcher of an elastic job has chosen other `numbers` of workers than the log has."""
    found = _numbers_in_force(history, commit, spec)
    most = found.get(changes.MOST_TRAINERS, spec["cluster"]["trainers"]["max"])
    if found.get(changes.TRAINERS, most) == numbers[changes.TRAINERS]:
        return []
    resize = ResizeOperation(id=f"elastic-{generation}", keys=numbers)
    joblog.append(resize)
    return [resize]


def _numbers_in_force(history: JobHistory, commit: Commit | None, spec: Mapping[str, Any]) -> dict[str, int]:
    before = spec if commit is None else fill_defaults(commit.state["spec"])
    found = overrides_of(commit, before)
    for record in _operations_after(history, commit):
        match record.content:
            case ResizeOperation(keys=keys):
                found |= keys
            case SpecOperation(spec=logged):
                found, before = changes.remaining(found, before, logged), logged
    found = changes.remaining(found, before, spec)
    return {key: number for key, number in found.items() if key in changes.OF_RESIZES}


def _in_store(store: Path) -> tuple[JobHistory, Commit | None]:
    """The history in a store, and its newest whole commit that led to the present version."""
    records = read(store / "log")
    lineage = Lineage.of(records)
    return JobHistory.of(records), next((c for c in reversed(Commits(store).whole()) if lineage.holds(c.name)), None)
