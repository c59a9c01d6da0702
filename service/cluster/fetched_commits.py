"""Fetches what a run of a job continues from, where its disk lacks it: from the object store, or from the mirror."""

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.service.cluster.runtime import LAUNCHER, OnLine
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.checkpoint.mirror import Mirror
from headrace.trainer.checkpoint.object_store import ObjectStore
from headrace.trainer.journal.log_file import newest_generation

FETCH_S = 3600.0
"""Longest time to fetch a commit."""


class HeadReplaced(HeadraceError):
    """Another head runs the job now."""

    exit_code = 75

    def __init__(self, job: str, claimed: int, last: int) -> None:
        super().__init__(
            f"generation {claimed} of {job} was claimed on another machine, after generation {last} of this one: that "
            "head has the job, and this one ends; nothing is lost"
        )


def check_fresh(job: LoadedJob) -> None:
    """Raise SpecError where the object store is the truth and holds a run: a fresh one needs another prefix."""
    if job.spec.store.parts == "object" and (claimed := _newest_generation(job)):
        raise SpecError(
            f"{job.spec.store.mirror} holds a run, up to generation {claimed}, and --fresh removes only folders: "
            "choose another prefix, or remove this one with the tools of your object store",
            "store.mirror",
        )


def fetch_commits(job: LoadedJob, on_line: OnLine, *, fresh: bool) -> int:
    """Fetch what the next run continues from, as far as this disk lacks it -> the newest generation elsewhere.

    From the object store, where that is the truth; from the mirror into a store without a commit, unless `fresh`.
    """
    if job.spec.store.parts == "object":
        return prepare_store(job, on_line)
    return 0 if fresh else fetch_from_mirror(job, on_line)


def prepare_store(job: LoadedJob, on_line: OnLine) -> int:
    """Complete the store on this disk from the object store -> the newest generation there."""
    before = newest_generation(job.store / "log")
    deadline = Deadline.after(FETCH_S)
    store = _object_store(job, deadline)
    found = store.prepare(job.store, job.spec.name, store.sequence().catch_up(deadline), deadline)
    place = f"commit {found.newest}" if found.newest else "the initial state"
    if found.log_lost:
        on_line(LAUNCHER, f"the log was on another disk; continuing at {place}, on a new timeline")
    elif newest_generation(job.store / "log") > before:
        on_line(LAUNCHER, f"the log is complete from the object store; continuing at {place}, on the same timeline")
    return found.history.generation


def check_head(job: LoadedJob, last: int) -> None:
    """Raise HeadReplaced where another head has claimed the job since the generation `last` of this one."""
    if last and job.spec.store.parts == "object":
        claimed = _newest_generation(job)
        if claimed > last:
            raise HeadReplaced(job.spec.name, claimed, last)


def fetch_from_mirror(job: LoadedJob, on_line: OnLine) -> int:
    """Fetch the newest commit of `store.mirror` into a store without any, so that the job continues from it.

    -> the newest generation in the mirror; 0 where nothing was fetched.
    """
    if job.spec.store.mirror is None or newest_generation(job.store / "log"):
        return 0
    deadline = Deadline.after(FETCH_S)
    mirror = Mirror.of(job.spec.store, job.spec.name, job.folder, deadline)
    if Commits(job.store).names():  # fetched by a run that was killed before its first claim
        return mirror.newest_generation(deadline)
    catalog = mirror.catalog(deadline)
    if not catalog.commits and not catalog.damaged:
        return 0
    fetched = mirror.fetch(job.store, job.spec.name, deadline)
    for reason in fetched.passed_over:
        on_line(LAUNCHER, f"skipped in the mirror: {reason}")
    on_line(LAUNCHER, f"continuing from the mirror, at commit {fetched.name}, on a new timeline")
    return fetched.generation


def _newest_generation(job: LoadedJob) -> int:
    """The newest generation that has claimed the job in its object store; 0 if none has."""
    deadline = Deadline.after(FETCH_S)
    return _object_store(job, deadline).sequence().catch_up(deadline).generation


def _object_store(job: LoadedJob, deadline: Deadline) -> ObjectStore:
    return ObjectStore.of(job.spec.store, job.spec.name, job.folder, deadline)
