"""`millrace rewind` and `millrace skip`: what a stopped job does next. What they write is trainer.rewind's."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from service.lines import count
from service.past.choosing import begins_at, chosen, lineage
from service.past.commits import verified
from service.spec import LoadedJob
from service.store import stopped
from trainer.commits import Commit, CommitDamaged, Commits, order_of
from trainer.log import LogDamaged, read
from trainer.mirror.address import parse
from trainer.mirror.content import lookup
from trainer.partitions import Skip
from trainer.rewind import rewind, rewind_anew, skip

MIRROR_S = 300.0
"""How long the mirror may take to say what it holds."""


@dataclass(frozen=True)
class Rewound:
    """Where the next run goes on."""

    timeline: str
    commit: str
    version: int
    left: str | None
    """The commit up to which something is left behind; None: nothing is."""
    left_timeline: str
    damaged: str
    """Where a damaged log was found so; empty: it was not."""
    aside: Path | None
    """Where that log is kept."""


def rewind_job(job: LoadedJob, to: str) -> Rewound:
    """Have the next run go on from the commit that `to` means, on a new timeline.

    Raises CommitDamaged where it is not sound, SpecError where there is no such commit or the job runs.
    """
    with stopped(job.store, job.spec.name):
        commits, past = Commits(job.store), lineage(job.store)
        commit = chosen(job.store, to)
        if damage := verified(job.store, commit.name):
            wrong = "; ".join(f"{file} {problem}" for file, problem in damage.items())
            raise CommitDamaged(f"{commit.name}: {wrong}; `millrace commits verify` tells which commits are sound")
        left = begins_at(commits.names(), past)
        timeline = past.next_timeline([*commits.names(), *_mirrored(job)])
        damaged, aside = "", None
        try:
            read(job.store / "log")
        except LogDamaged as error:
            damaged, aside = f"{error.path.name}, byte {error.byte}", rewind_anew(job.store, commit, timeline)
        else:
            rewind(job.store, commit, timeline)
    behind = left if left != commit.name else None
    return Rewound(timeline, commit.name, commit.version, behind, past.timeline, damaged, aside)


def told_rewound(done: Rewound) -> Iterator[str]:
    """A rewind in lines."""
    if done.aside is not None:
        yield f"the log is damaged ({done.damaged}), and begun anew; the old one is in {done.aside}"
    begins = f"timeline {done.timeline} begins at commit {done.commit}, version {done.version}"
    yield f"{begins}; `millrace run` goes on there"
    if done.left is not None:
        yield (
            f"left behind: what came after it on timeline {done.left_timeline}, up to commit {done.left}. While that "
            f"is there, `millrace rewind --to {done.left}` comes back to it; `millrace commits pin` keeps it from "
            "being pruned"
        )


def _mirrored(job: LoadedJob) -> list[str]:
    """Names of the commits in the job's mirror."""
    if job.spec.store.mirror is None:
        return []
    catalog = lookup(parse(job.spec.store.mirror, job.folder).text, Deadline.after(MIRROR_S))
    return [commit.name for commit in catalog.commits]


def skip_job(job: LoadedJob, wanted: Skip, reason: str) -> list[int]:
    """Have the job go past some positions of a partition; which passes are withdrawn for it.

    Raises NotPossible where it has trained them, SpecError where there is no such range or the job runs.
    """
    if not reason.strip():
        raise MillraceError("--reason says nothing; the log keeps it for whoever asks later why events are missing")
    with stopped(job.store, job.spec.name):
        return list(skip(job.store, _newest(job), wanted, reason))


def told_skipped(wanted: Skip, withdrawn: list[int]) -> Iterator[str]:
    """A skip in lines."""
    yield (
        f"{wanted.partition}: {count(wanted.end - wanted.begin)} positions are gone past, {wanted.begin}-{wanted.end}; "
        "the next run reads on behind them"
    )
    if withdrawn:
        yield f"passes withdrawn, to be planned anew without them: {', '.join(map(str, withdrawn))}"


def _newest(job: LoadedJob) -> Commit | None:
    """The newest commit that led to the present and whose manifest can be read."""
    past = lineage(job.store)
    ours = [commit for commit in Commits(job.store).whole() if past.holds(commit.name)]
    return max(ours, key=lambda commit: order_of(commit.name), default=None)
