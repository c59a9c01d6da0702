"""Runs old versions of a job again without learning, over the events that came after them: `headrace freshness`.

Each run is a fork of a commit in a folder of its own, which is removed at the end. The job may run meanwhile.
service.history.version_ages compares.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.lifecycle import ExitCode
from headrace.service.cluster.job_run import JobRun, open_run
from headrace.service.cluster.runtime import OnLine
from headrace.service.history.commit_lookup import lineage, scratch
from headrace.service.history.fork_of_job import fork
from headrace.service.history.paired_test import MIN_PARTS
from headrace.service.history.version_ages import AgedPart, aged_parts, spread
from headrace.service.spec.job import LoadedJob, job_of
from headrace.service.spec.side_groups import with_own_groups
from headrace.trainer.checkpoint.commits import Commit, Commits, order_of
from headrace.trainer.job_status import Status
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read_history

LOOK_S = 0.2
"""Interval of checks whether a run has read enough."""
SUFFIX = "-frozen"
MAX_NAME = 64
LEFT_OUT = ("exports", "commit", "predict", "evaluator", "guards", "cluster")
"""Sections that a frozen run does without: one trainer on this machine, which holds the rows."""


class FrozenRunFailed(HeadraceError):
    """A frozen run did not end well."""


def frozen_parts(job: LoadedJob, most: int, horizon_s: float, on_line: OnLine) -> list[AgedPart]:
    """Parts of at most `most` old versions, over events up to `horizon_s` after each. Main thread only.

    Raises SpecError where the job has no event time, or keeps no commit with closed passes after it.
    """
    require("torch", "training")
    if job.spec.store.parts == "object":
        raise SpecError('is "object"; old versions are run again from a folder alone: not built', "store.parts")
    if any(source.event_time.kind == "none" for source in job.spec.sources.values()):
        raise SpecError("the age of a version is counted in event time: give the events one", "sources.*.event_time")
    history, past = read_history(job.store / "log"), lineage(job.store)
    names = {order_of(name)[1]: name for name in Commits(job.store).names() if past.holds(name)}
    usable = [version for version in sorted(names) if _num_after(history, version) >= MIN_PARTS]
    if not usable:
        raise SpecError(
            f"no commit has {MIN_PARTS} closed passes after it; keep older ones with commit.keep, or with "
            "`headrace commits pin`, and give passes a smaller max_events",
            "commit.keep",
        )
    found: list[AgedPart] = []
    for version in spread(usable, most):
        with scratch(job.store, "read0") as folder:
            found += _parts_of(job, history, names[version], folder, horizon_s, on_line)
    return found


def _num_after(history: JobHistory, version: int) -> int:
    return sum(number > version and each.content.samples > 0 for number, each in history.closes.items())


def _parts_of(
    job: LoadedJob, history: JobHistory, name: str, folder: Path, horizon_s: float, on_line: OnLine
) -> list[AgedPart]:
    twin = frozen_of(job, folder)
    commit = fork(job.store, name, twin)
    time_s = commit.state["closer"].get("latest_s")
    if time_s is None:
        return []
    events = _events_up_to(history, commit, time_s + horizon_s)
    with open_run(twin, on_line) as run, _drained_after(run, events):
        outcome = run.run()
    if outcome.code != ExitCode.DRAINED:
        raise FrozenRunFailed(f"version {commit.version} cannot be run again: {outcome.reason}")
    parts = aged_parts(commit.version, time_s, commit.manifest.positions, history, read_history(folder / "log"))
    return [part for part in parts if part.age_s <= horizon_s]


def frozen_of(job: LoadedJob, store: Path) -> LoadedJob:
    """The job in another store, with a model that stays as it is."""
    raw = {key: value for key, value in job.whole().items() if key not in LEFT_OUT}
    train = {key: value for key, value in raw.get("train", {}).items() if key != "learn_until"}
    metrics = {**raw.get("metrics", {}), "halves": False}
    name = f"{job.spec.name[: MAX_NAME - len(SUFFIX)]}{SUFFIX}"
    raw = with_own_groups(raw, job.spec, SUFFIX)
    whole = {**raw, "name": name, "train": {**train, "learn": False}, "metrics": metrics, "store": {"path": str(store)}}
    return replace(job_of(whole, job.folder), kernels=job.kernels)


def _events_up_to(history: JobHistory, commit: Commit, until_s: float) -> int:
    """Events of the job's life up to the first close at `until_s`."""
    total = int(commit.state["progress"]["num_events"])
    for number in sorted(history.closes):
        close = history.closes[number].content
        if number > commit.version:
            total += close.events
            if close.event_time_s is not None and close.event_time_s >= until_s:
                break
    return total


@contextmanager
def _drained_after(run: JobRun, events: int) -> Iterator[None]:
    """Meanwhile, stop the run after its pass once it has read so many events of the job's life."""
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(run.status, run.launcher.drain, events, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(status: Callable[[], Status], drain: Callable[[], None], events: int, done: threading.Event) -> None:
    while not done.wait(LOOK_S):
        if (status().events or 0) >= events:
            drain()
            return
