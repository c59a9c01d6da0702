"""Fetches what a run of a job continues from, where its disk lacks it, unless another head has the job."""

from functools import partial

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.service.cluster.runtime import LAUNCHER, OnLine
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commit_source import CommitSource, open_source

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


def source_of(job: LoadedJob, deadline: Deadline) -> CommitSource:
    """Where the job's commits are. Raises BlobUnavailable, and SpecError where the object store cannot be used."""
    return open_source(job.spec.store, job.store, job.spec.name, job.folder, deadline)


def check_fresh(job: LoadedJob) -> None:
    """Raise SpecError where the object store is the truth and holds a run: a fresh one needs another prefix."""
    deadline = Deadline.after(FETCH_S)
    if claimed := source_of(job, deadline).newest_claim(deadline):
        raise SpecError(
            f"{job.spec.store.mirror} holds a run, up to generation {claimed}, and --fresh removes only folders: "
            "choose another prefix, or remove this one with the tools of your object store",
            "store.mirror",
        )


def check_head(job: LoadedJob, last: int) -> None:
    """Raise HeadReplaced where another head has claimed the job since the generation `last` of this one."""
    deadline = Deadline.after(FETCH_S)
    if last and (claimed := source_of(job, deadline).newest_claim(deadline)) > last:
        raise HeadReplaced(job.spec.name, claimed, last)


def fetch_commits(job: LoadedJob, on_line: OnLine, *, fresh: bool) -> int:
    """Fetch what the next run continues from, as far as this disk lacks it -> the newest generation elsewhere."""
    deadline = Deadline.after(FETCH_S)
    return source_of(job, deadline).fetch(partial(on_line, LAUNCHER), deadline, fill=not fresh)
