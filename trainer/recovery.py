"""Where a chief begins: claims its generation, picks the newest sound commit, and says what must be replayed.

Reading commits is trainer.commits', the log trainer.log's; loading state into a trainer is trainer.saved's and the
shards'. What of a changed spec may go on is trainer.respec's decision.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.points import Point, reach
from trainer import respec
from trainer.blob.errors import BlobUnavailable
from trainer.chronicle import Logged
from trainer.commits import MANIFEST, Commit, CommitDamaged, Commits, NewerFormat, problems_of
from trainer.defaults import in_full
from trainer.history import History, HistoryMissing, Pass
from trainer.log import Log, Record, read
from trainer.mirror.content import lookup
from trainer.mirror.fetch import repair
from trainer.partitions import Known, Skip
from trainer.records import (
    GapOperation,
    Operation,
    RestoreOperation,
    SetOperation,
    SkipOperation,
    SpecOperation,
    Void,
)
from trainer.rewind import Lineage, known_partitions

CLAIM_S = 60.0
"""How long the store's lock may be held by others."""
MIRROR_S = 3600.0
"""How long reading from the mirror may take."""

log = logging.getLogger(__name__)


class NothingSound(MillraceError):
    """No commit can be restored, and the log does not reach back to the beginning."""


@dataclass(frozen=True)
class Beginning:
    """From where a trainer goes on."""

    timeline: str
    commit: Commit | None
    """To be restored; None: the initial state."""
    replay: Sequence[Logged]
    last_number: int
    """Highest number of a plan ever logged: it is not used again."""
    known: Mapping[str, Known] = field(default_factory=dict)
    """Partitions met before."""
    skips: Sequence[Skip] = ()
    """Ranges of partitions that an operator went past."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Commits that are damaged, and how."""
    joblog: Log | None = None
    """The log, claimed; None for a rerun, which only reads."""
    waiting: Sequence[Operation] = ()
    """Operations that act at the first new close, in order."""


def begin(
    store: Path,
    generation: int,
    spec: Mapping[str, Any],
    uri: str | None,
    facts: Mapping[str, Any],
    *,
    logged_only: bool = False,
    taken: Callable[[], int] = lambda: 0,
) -> Beginning:
    """Claim `generation` and decide where to go on; with `logged_only`, through the passes logged under `spec`.

    `taken` is the highest number of a timeline that others know of, asked where the store has no log yet.

    1. The claim: no older generation can change the store from here on.
    2. The newest commit of the timeline whose every byte is as written; files that are not come from the mirror.
    3. What the log says after it, to be run again exactly so.
    """
    commits, folder = Commits(store), store / "log"
    old = History.of(read(folder))
    timeline, base = (old.timeline, old.base) if old.timeline else _new_timeline(commits, uri, taken())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "at": now, **facts}
    joblog = Log.claim(folder, generation, Deadline.after(CLAIM_S), timeline=timeline, base=base, facts=facts)  # 1
    reach(Point.CLAIMED)
    try:
        return _chosen(joblog, commits, spec, uri, logged_only)  # 2, 3
    except MillraceError:
        joblog.close()
        raise


def _chosen(joblog: Log, commits: Commits, spec: Mapping[str, Any], uri: str | None, logged_only: bool) -> Beginning:
    """Steps 2 and 3 of `begin`."""
    records = read(joblog.folder)
    history = History.of(records)
    commit, passed_over = newest_sound(commits, Lineage.of(records), uri)
    for name in passed_over:
        log.warning("commit %s is damaged and passed over: %s", name, passed_over[name])
    found = after(history, commit, passed_over)
    if commit is not None or passed_over:
        chosen = None if commit is None else commit.name
        joblog.append(RestoreOperation(commit=chosen, passed_over=passed_over))
    with joblog.exclusive():
        discard(commits, list(passed_over))
    replay = _under_spec(joblog, history, commit, spec, found.replay, logged_only)
    waiting = [_settled(history, commit, spec, each) for each in history.waiting()]
    return replace(found, replay=replay, joblog=joblog, waiting=waiting)


def again(store: Path, name: str | None) -> Beginning:
    """Where a rerun of another store's log begins: at a commit, or at the initial state; nothing is written there."""
    history = History.of(read(store / "log"))
    commit = None if name is None else Commits(store).read(name)
    found = after(history, commit, {})
    return Beginning(history.timeline, commit, [each for each in found.replay if each.close], 0, found.known)


def _new_timeline(commits: Commits, uri: str | None, taken: int) -> tuple[str, str | None]:
    """The timeline of a store without a log: begun anew, or from a commit that came from the mirror."""
    whole = commits.whole()
    last = max([taken, *(commit.order[0] for commit in whole)])
    if uri is not None:
        last = max([last, *(timeline for timeline, _, _ in lookup(uri, Deadline.after(MIRROR_S)).orders)])
    return f"t{last + 1}", whole[-1].name if whole else None


def newest_sound(commits: Commits, lineage: Lineage, uri: str | None) -> tuple[Commit | None, dict[str, str]]:
    """The newest commit that led to the present and reads back as written, and why newer ones do not.

    Raises BlobUnavailable where none is sound, and the mirror, which may mend one, does not answer; and NewerFormat.
    """
    passed_over: dict[str, str] = {}
    unreachable: BlobUnavailable | None = None
    for name in reversed(commits.names()):
        if not lineage.holds(name):
            continue
        try:
            commit = commits.read(name)
            problems = problems_of(commit)
            if problems and uri is not None:
                repair(uri, commit.folder, commit.manifest, sorted(problems), Deadline.after(MIRROR_S))
                log.warning("commit %s: %d damaged files are replaced from the mirror", name, len(problems))
                problems = problems_of(commit)
        except NewerFormat:
            raise
        except CommitDamaged as error:
            passed_over[name] = str(error)
            continue
        except BlobUnavailable as error:
            unreachable = error
        if not problems:
            return commit, passed_over
        passed_over[name] = "; ".join(f"{file} {problem}" for file, problem in sorted(problems.items())[:3])
    if unreachable is not None:
        raise unreachable
    return None, passed_over


def after(history: History, commit: Commit | None, passed_over: Mapping[str, str]) -> Beginning:
    """What the log says after a commit; what it says of partitions and skips in all."""
    state: Mapping[str, Any] = {} if commit is None else commit.state
    version = 0 if commit is None else commit.version
    operations = history.operations_by_version()
    try:
        replay = [
            _logged(history, commit, each, operations.get(each.plan.number, ())) for each in history.after(version)
        ]
    except HistoryMissing as error:
        if commit is not None:
            raise
        raise NothingSound(
            "no commit can be restored, and the log does not reach back to the first pass: "
            + ("; ".join(f"{name}: {how}" for name, how in passed_over.items()) or "there is no commit")
            + "; put a whole copy of a commit's folder back, name a store.mirror that holds one, or start with --fresh"
        ) from error
    skips = [Skip(*each) for each in state.get("skips", ())]
    skips += [
        operation.content.skip
        for operation in history.operations
        if isinstance(operation.content, SkipOperation | GapOperation)
    ]
    last = max(version, history.last_number)
    known = known_partitions(history, commit)
    return Beginning(history.timeline, commit, replay, last, known, list(dict.fromkeys(skips)), passed_over)


def _logged(history: History, commit: Commit | None, each: Pass, operations: Sequence[Record[Operation]]) -> Logged:
    planned_at = history.plans[each.plan.number].number
    if each.close is None:
        return Logged(each.plan, planned_at, None)
    spec = spec_at(history, commit, each.record) or {}
    settled = [_settled(history, commit, spec, operation) for operation in operations]
    return Logged(each.plan, planned_at, each.close, each.record, settled)


def _settled(
    history: History, commit: Commit | None, spec: Mapping[str, Any], operation: Record[Operation]
) -> Operation:
    """An operation as it acts under `spec`: a set loses the keys that the job file has changed since."""
    if not isinstance(operation.content, SetOperation):
        return operation.content
    before = spec_at(history, commit, operation.number) or spec
    return replace(operation.content, keys=respec.kept(operation.content.keys, before, spec))


def overrides_of(commit: Commit | None, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What was set while the job ran, as it holds at `commit` under `spec`."""
    if commit is None:
        return {}
    overrides: Mapping[str, Any] = commit.state.get("operations", {}).get("overrides", {})
    return respec.kept(overrides, in_full(commit.state["spec"]), spec)


def _under_spec(
    joblog: Log,
    history: History,
    commit: Commit | None,
    spec: Mapping[str, Any],
    replay: Sequence[Logged],
    logged_only: bool,
) -> Sequence[Logged]:
    """What is replayed under `spec`, which is logged where it is new; plans that were never closed are void then."""

    def differ(each: Logged) -> list[str]:
        return respec.significant(spec_at(history, commit, each.planned_at) or spec, spec)

    if logged_only:
        return list(takewhile(lambda each: not differ(each), replay))
    for each in replay:
        if each.close and (keys := differ(each)):
            raise MillraceError(
                f"passes must be replayed under the spec they were trained under before {', '.join(keys)} may change; "
                "start the job again"
            )
    old = spec_in_force(history, commit)
    if old is not None and not respec.changed(old, spec):
        return replay
    keys = [] if old is None else respec.significant(old, spec, learnt=_learnt(history, commit))
    # The newest goes first: after a crash none is left that goes on behind one withdrawn. Then the spec: none is left
    # that was planned under the one before.
    for each in reversed(replay if keys else ()):
        if not each.close:
            joblog.append(Void(number=each.plan.number, reason=f"changed: {', '.join(keys)}"))
    joblog.append(SpecOperation(spec=spec))
    return [each for each in replay if each.close] if keys else replay


def _learnt(history: History, commit: Commit | None) -> bool:
    """Whether rows may have been made that a restart keeps: not where no pass was ever closed, as in a failed start."""
    return commit is not None or history.closed > 0


def spec_in_force(history: History, commit: Commit | None) -> Mapping[str, Any] | None:
    """The last one logged; once that record is pruned, the commit's. None for a job that never began."""
    return spec_at(history, commit, sys.maxsize)


def spec_at(history: History, commit: Commit | None, record: int) -> Mapping[str, Any] | None:
    """The spec in force when the log's record number `record`, of after `commit`, was written, in full."""
    specs = history.specs(before=record)
    if not specs and commit is None:
        return None
    return in_full(specs[-1][1] if specs or commit is None else commit.state["spec"])


def replay_first(store: Path, spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The spec under which logged passes must be trained, and committed, before `spec` may act; None: it may at once.

    To be asked again then. Raises SpecError where it never may. Reads only, for whoever starts the workers.
    """
    records = read(store / "log")
    history, lineage = History.of(records), Lineage.of(records)
    newest = next((each for each in reversed(Commits(store).whole()) if lineage.holds(each.name)), None)
    version = 0 if newest is None else newest.version
    respec.significant(spec_in_force(history, newest) or spec, spec, learnt=_learnt(history, newest))
    closed = [plan for number, plan in sorted(history.plans.items()) if version < number <= history.closed]
    specs = [spec_at(history, newest, plan.number) or spec for plan in closed]
    return specs[0] if any(respec.significant(old, spec) for old in specs) else None


def discard(commits: Commits, names: Sequence[str]) -> None:
    """Take damaged commits out of use; the next pruning removes what is left of them."""
    for name in names:
        (commits.folder / name / MANIFEST).rename(commits.folder / name / f"{MANIFEST}.damaged")
