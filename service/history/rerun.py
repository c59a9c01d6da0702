"""`headrace rerun`: trains a job's log again in a separate store, and compares every close with the logged one.

It reads the job's log and one commit, which it holds meanwhile; the job may run. trainer.rank0.replay_log compares.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import SpecError
from headrace.extras import require
from headrace.lifecycle import ExitCode
from headrace.pserver.consistency.policy import policy_of
from headrace.pserver.consistency.sync import Sync
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.job_run import print_outcome, read_report
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.store import REPORT, RERUNS, WORKERS
from headrace.service.cluster.supervision import RestartLimits
from headrace.service.cluster.worker_plan import JobPlan, plan_job
from headrace.service.history.commit_lookup import find_commit, lease, lineage
from headrace.service.monitor.lines import count
from headrace.service.monitor.shows import Show
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.rewind import NotPossible
from headrace.trainer.journal.job_history import JobHistory, LoggedPass
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.spec.changes import significant_keys
from headrace.trainer.spec.defaults import fill_defaults


@dataclass(frozen=True)
class RerunPlan:
    """The passes to train again."""

    commit: Commit | None
    """Where the rerun begins; None: at the initial state."""
    passes: Sequence[LoggedPass]
    """The closed passes after `commit`."""
    spec: Mapping[str, Any]
    """The spec in force for all of them."""

    @property
    def alike(self) -> str:
        """The word for passes in which nothing that is compared differs: not everything is in async and geo."""
        repeatable = policy_of(self.spec.get("train", {}).get("mode", Sync.name)).repeatable
        return "identical" if repeatable else "equal in their counts"


def rerun_job(job: LoadedJob, start: str, show: Show, *, keep: bool, as_json: bool = False) -> int:
    """Train the passes after commit `start` again, and print for each whether it is identical.

    Returns the exit code: 1 if a pass differs or was not compared. The rerun's store is removed if all are identical,
    unless `keep`.
    """
    require("torch", "training")
    commit = None if start == "0" else find_commit(job.store, start)
    with ExitStack() as held:
        if commit is not None:
            held.enter_context(lease(Commits(job.store), commit.name, "rerun"))
        course = course_of(job.store, commit)
        store = _new_store(job.store / RERUNS)
        again = replace_store(job, course, store)
        folder = held.enter_context(run_folder(store / WORKERS))
        plan = plan_rerun(plan_job(again, folder / "g1", generation=1), job.store, commit)
        # No restarts: the job's own state is safe, and a death is a finding.
        limits = RestartLimits(max_restarts=0)
        workers = held.enter_context(ProcessLauncher(Spawner()))
        launcher = JobRunner(job.spec.name, [lambda _: plan], show.on_line, launcher=workers, restarts=limits)
        with show.watching(launcher.status):
            outcome = launcher.run()
    if outcome.code != ExitCode.DRAINED:
        print_outcome(outcome, launcher, {}, store / REPORT)
        return outcome.code
    passes = compared_passes(course, read_report(store / REPORT).get("compared", ()))
    identical = all(each["differences"] == [] for each in passes)
    kept = None if identical and not keep else str(store)
    if as_json:
        print(json.dumps({"passes": passes, "identical": identical, "store": kept}, indent=2))
    else:
        print_comparison(course, passes)
    if kept is None:
        shutil.rmtree(store)
    elif not as_json:
        print(f"the rerun's store is kept: {store}")
    return ExitCode.DRAINED if identical else ExitCode.FAILED


def course_of(store: Path, commit: Commit | None) -> RerunPlan:
    """The passes in the log after `commit`. Raises HistoryMissing, SpecError, NotPossible if the spec changes."""
    records = read_records(store / "log")
    if commit is not None and not lineage(store).holds(commit.name):
        raise SpecError(f"commit {commit.name} did not lead to the present state; the log has no passes after it")
    history, version = JobHistory.of(records), 0 if commit is None else commit.version
    if commit is None and history.base is not None:
        raise NotPossible(
            f"timeline {history.timeline} began at commit {history.base}; begin at that commit, or at one that "
            "led to it (see `headrace commits list`)"
        )
    passes = [each for each in history.after(version) if each.close is not None]
    if not passes:
        raise NotPossible(f"nothing was closed after version {version}; there is nothing to compare")
    return RerunPlan(commit, passes, _spec(history, commit, passes))


def _spec(history: JobHistory, commit: Commit | None, passes: Sequence[LoggedPass]) -> Mapping[str, Any]:
    """The spec in force for `passes`, with their number of trainers. Raises NotPossible if it changes among them."""
    numbers = [each.plan.number for each in passes]
    first, *others = [_in_force(history, commit, history.plans[number].number) for number in numbers]
    for last, spec in zip(numbers, others, strict=False):
        if keys := significant_keys(first, spec):
            raise NotPossible(
                f"{', '.join(keys)} changed after pass {last}, and a rerun uses one spec; "
                f"begin at a commit of version {last} or later"
            )
    trainers = len(passes[0].plan.segments)
    if other := next(
        (n for n, each in zip(numbers, passes[1:], strict=False) if len(each.plan.segments) != trainers), 0
    ):
        raise NotPossible(
            f"the number of trainers changed after pass {other}, and a rerun uses one number; begin at a commit of "
            f"version {other} or later"
        )
    quiet = {**first.get("commit", {}), "on_replay_mismatch": "warn"}  # the rerun compares every pass itself
    store = {"path": first["store"]["path"]}  # no mirror: the rerun must not change the job's
    return {**first, "commit": quiet, "store": store, "cluster": {**first.get("cluster", {}), "trainers": trainers}}


def _in_force(history: JobHistory, commit: Commit | None, record: int) -> Mapping[str, Any]:
    """The spec in force when the plan in record `record` was made."""
    specs = [spec for _, spec in history.specs(before=record)]
    if not specs and commit is None:
        raise NotPossible("the log no longer has the spec of its first passes; begin at a commit")
    assert commit is not None or specs
    return fill_defaults(specs[-1] if specs else commit.state["spec"])  # type: ignore[union-attr]


def replace_store(job: LoadedJob, course: RerunPlan, store: Path) -> LoadedJob:
    """The job with the spec of the course, in another store."""
    return job.under(course.spec, store)


def plan_rerun(plan: JobPlan, store: Path, commit: Commit | None) -> JobPlan:
    """The plan, with trainers that replay the log in `store` instead of planning."""
    rerun = {"store": str(store), "commit": None if commit is None else commit.name}
    return replace(plan, trainers=tuple(replace(t, config={**t.config, "rerun": rerun}) for t in plan.trainers))


def compared_passes(course: RerunPlan, compared: Iterable[tuple[int, Sequence[str]]]) -> list[dict[str, Any]]:
    """Of each pass: "pass", "events", and "differences": none if it is identical, null if it was not compared."""
    found = {int(number): list(differences) for number, differences in compared}
    return [
        {"pass": each.plan.number, "events": each.close.events, "differences": found.get(each.plan.number)}
        for each in course.passes
        if each.close is not None
    ]


def print_comparison(course: RerunPlan, passes: Sequence[Mapping[str, Any]]) -> None:
    """Print the comparison of each pass."""
    for each in passes:
        differences = each["differences"]
        result = "not compared" if differences is None else "; ".join(differences) or course.alike
        print(f"pass {each['pass']}: {count(each['events'])} events: {result}")
    num_identical = sum(each["differences"] == [] for each in passes)
    print(f"{count(num_identical)} of {count(len(passes))} passes are {course.alike}")


def _new_store(folder: Path) -> Path:
    """A new folder with the next free number."""
    folder.mkdir(exist_ok=True)
    while True:
        number = max((int(path.name) for path in folder.glob("[0-9]*")), default=0) + 1
        try:
            (folder / str(number)).mkdir()
        except FileExistsError:  # another rerun took the number
            continue
        return folder / str(number)
