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
from headrace.service.cluster.child import Starter, local_starter
from headrace.service.cluster.job_run import print_outcome, read_report
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.store import REPORT, RERUNS, WORKERS
from headrace.service.cluster.supervision import RestartLimits
from headrace.service.cluster.worker_plan import JobPlan, plan_job, preloaded
from headrace.service.history.commit_lookup import find_commit, lease, lineage
from headrace.service.monitor.lines import count
from headrace.service.monitor.shows import Show
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.rewind import NotPossible
from headrace.trainer.journal.job_history import JobHistory, LoggedPass
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.spec.changes import TRAINERS, significant_keys
from headrace.trainer.spec.defaults import fill_defaults


@dataclass(frozen=True)
class RerunPlan:
    """Passes to train again, all under one spec by one number of trainers."""

    commit: Commit | None
    """Where they begin; None: at the initial state."""
    passes: list[LoggedPass]
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
    courses, stores, passes = courses_of(job.store, commit), list[Path](), list[dict[str, Any]]()
    with ExitStack() as held:
        for course in courses:
            if course.commit is not None:
                held.enter_context(lease(Commits(job.store), course.commit.name, "rerun"))
        starter = held.enter_context(local_starter(preloaded(job.cluster) if len(courses) > 1 else ()))
        for course in courses:
            stores.append(_new_store(job.store / RERUNS))
            if (code := _train(job, course, stores[-1], show, starter)) != ExitCode.DRAINED:
                return code
            passes += compared_passes(course, read_report(stores[-1] / REPORT).get("compared", ()))
    identical = all(each["differences"] == [] for each in passes)
    kept = [] if identical and not keep else [str(store) for store in stores]
    if as_json:
        print(json.dumps({"passes": passes, "identical": identical, "store": kept[-1] if kept else None}, indent=2))
    else:
        print_comparison(courses[0], passes)
    if not kept:
        for store in stores:
            shutil.rmtree(store)
    elif not as_json:
        print(f"the rerun's store is kept: {', '.join(kept)}")
    return ExitCode.DRAINED if identical else ExitCode.FAILED


def _train(job: LoadedJob, course: RerunPlan, store: Path, show: Show, starter: Starter) -> int:
    """Train the passes of `course` again in `store`; the exit code."""
    again = replace_store(job, course, store)
    with run_folder(store / WORKERS) as folder, ProcessLauncher(starter) as workers:
        plan = plan_rerun(plan_job(again, folder / "g1", generation=1), job.store, course)
        # No restarts: the job's own state is safe, and a death is a finding.
        limits = RestartLimits(max_restarts=0)
        launcher = JobRunner(job.spec.name, [lambda _: plan], show.on_line, launcher=workers, restarts=limits)
        with show.watching(launcher.status):
            outcome = launcher.run()
    if outcome.code != ExitCode.DRAINED:
        print_outcome(outcome, launcher, {}, store / REPORT)
    return outcome.code


def courses_of(store: Path, commit: Commit | None) -> list[RerunPlan]:
    """The passes in the log after `commit`; those of another spec or number of trainers in a course of their own, which
    begins at the commit that a job makes before these change.

    Raises HistoryMissing, SpecError; NotPossible where that commit was pruned.
    """
    records = read_records(store / "log")
    past = lineage(store)
    if commit is not None and not past.holds(commit.name):
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
    commits = {each.version: each for each in Commits(store).whole() if past.holds(each.name)}
    courses = [RerunPlan(commit, [], _spec(history, commit, passes[0]))]
    for each in passes:
        spec, course = _spec(history, commit, each), courses[-1]
        resized = course.spec["cluster"]["trainers"] != spec["cluster"]["trainers"]
        if keys := [*significant_keys(course.spec, spec), *([TRAINERS] if resized else [])]:
            last = course.passes[-1].plan.number
            if last not in commits:
                raise NotPossible(
                    f"{', '.join(keys)} changed after pass {last}, and there is no commit of version {last} any more; "
                    f"begin at a commit of version {last} or later"
                )
            courses.append(course := RerunPlan(commits[last], [], spec))
        course.passes.append(each)
    return courses


def _spec(history: JobHistory, commit: Commit | None, each: LoggedPass) -> Mapping[str, Any]:
    """The spec in force for a pass, with its number of trainers."""
    spec = _in_force(history, commit, history.plans[each.plan.number].number)
    quiet = {**spec.get("commit", {}), "on_replay_mismatch": "warn"}  # the rerun compares every pass itself
    store = {"path": spec["store"]["path"]}  # no mirror: the rerun must not change the job's
    cluster = {**spec.get("cluster", {}), "trainers": len(each.plan.segments), "readers": 0}
    if cluster["trainers"] > 1:
        cluster["shards"] = cluster.get("shards") or None  # rows within the trainer need a shard among several
    return {**spec, "commit": quiet, "store": store, "cluster": cluster}


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


def plan_rerun(plan: JobPlan, store: Path, course: RerunPlan) -> JobPlan:
    """The plan, with trainers that replay the log in `store` instead of planning."""
    commit = None if course.commit is None else course.commit.name
    rerun = {"store": str(store), "commit": commit, "last": course.passes[-1].plan.number}
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
    """Print the comparison of each pass, of this course or of others of its job."""
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
