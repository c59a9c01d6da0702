"""`headrace rewind` and `headrace skip` for a stopped job. trainer.checkpoint.rewind writes the records."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.service.cluster.fetched_commits import source_of
from headrace.service.cluster.store import stopped
from headrace.service.history.commit_lookup import continue_from, find_commit, lineage
from headrace.service.history.verification import damage_in
from headrace.service.monitor.lines import count
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, CommitDamaged, Commits, order_of
from headrace.trainer.checkpoint.rewind import rewind, rewind_anew, skip
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log_file import LogDamaged
from headrace.trainer.journal.partitions import SkippedRange

MIRROR_S = 300.0
"""Longest time to list the mirror."""


@dataclass(frozen=True)
class RewindResult:
    """Where the next run continues after a rewind."""

    timeline: str
    commit: str
    version: int
    left: str | None
    """The last commit that the rewind leaves behind; None: there is none."""
    left_timeline: str
    damaged: str
    """The place of damage in the log; empty if it is sound."""
    aside: Path | None
    """The folder that keeps the damaged log."""

    def message(self) -> dict[str, str | int | None]:
        """As JSON."""
        return {**asdict(self), "aside": None if self.aside is None else str(self.aside)}


def rewind_job(job: LoadedJob, to: str) -> RewindResult:
    """Have the next run continue from the commit that `to` means, on a new timeline.

    Raises CommitDamaged if the commit is not sound, SpecError if there is no such commit or the job runs.
    """
    with stopped(job.store, job.spec.name):
        deadline = Deadline.after(MIRROR_S)
        source = source_of(job, deadline)
        source.fetch(lambda _: None, deadline, fill=False)
        commits, past = Commits(job.store), lineage(job.store)
        commit = find_commit(job.store, to)
        if damage := damage_in(job.store, commit.name):
            wrong = "; ".join(f"{file} {problem}" for file, problem in damage.items())
            raise CommitDamaged(f"{commit.name}: {wrong}; `headrace commits verify` shows which commits are sound")
        left = continue_from(commits.names(), past)
        mirrored = source.catalog(Deadline.after(MIRROR_S)).commits
        timeline = past.next_timeline([*commits.names(), *(each.name for each in mirrored)])
        damaged, aside = "", None
        try:
            read_records(job.store / "log")
        except LogDamaged as error:
            damaged, aside = f"{error.path.name}, byte {error.byte}", rewind_anew(job.store, commit, timeline)
        else:
            rewind(job.store, commit, timeline)
    behind = left if left != commit.name else None
    return RewindResult(timeline, commit.name, commit.version, behind, past.timeline, damaged, aside)


def format_rewound(done: RewindResult) -> Iterator[str]:
    """A rewind as lines of text."""
    if done.aside is not None:
        yield f"the log is damaged ({done.damaged}); a new one is started, and the old one is in {done.aside}"
    begins = f"timeline {done.timeline} begins at commit {done.commit}, version {done.version}"
    yield f"{begins}; `headrace run` continues there"
    if done.left is not None:
        yield (
            f"left behind: the versions after it on timeline {done.left_timeline}, up to commit {done.left}. While "
            f"that exists, `headrace rewind --to {done.left}` returns to it; `headrace commits pin` keeps it from "
            "being pruned"
        )


def skip_job(job: LoadedJob, wanted: SkippedRange, reason: str) -> list[int]:
    """Have the job skip some positions of a partition; return the numbers of the passes that become void.

    Raises NotPossible if the job has trained the positions, SpecError if there is no such range or the job runs.
    """
    if not reason.strip():
        raise HeadraceError("--reason is empty; the log keeps it to explain later why events are missing")
    with stopped(job.store, job.spec.name):
        return list(skip(job.store, _newest(job), wanted, reason))


def format_skipped(wanted: SkippedRange, void: list[int]) -> Iterator[str]:
    """A skip as lines of text."""
    yield (
        f"{wanted.partition}: {count(wanted.end - wanted.begin)} positions are skipped, {wanted.begin}-{wanted.end}; "
        "the next run continues after them"
    )
    if void:
        yield f"void passes, to be planned again without them: {', '.join(map(str, void))}"


def _newest(job: LoadedJob) -> Commit | None:
    """The newest readable commit that led to the present state."""
    past = lineage(job.store)
    ours = [commit for commit in Commits(job.store).whole() if past.holds(commit.name)]
    return max(ours, key=lambda commit: order_of(commit.name), default=None)
