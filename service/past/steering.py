"""`millrace rewind` and `millrace skip`: what a stopped job does next. What they write is trainer.rewind's."""

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


def rewind_job(job: LoadedJob, to: str) -> None:
    """Have the next run go on from the commit that `to` means, on a new timeline; say what is left behind.

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
        try:
            read(job.store / "log")
        except LogDamaged as error:
            aside = rewind_anew(job.store, commit, timeline)
            print(
                f"the log is damaged ({error.path.name}, byte {error.byte}), and begun anew; the old one is in {aside}"
            )
        else:
            rewind(job.store, commit, timeline)
    print(f"timeline {timeline} begins at commit {commit.name}, version {commit.version}; `millrace run` goes on there")
    if left is not None and left != commit.name:
        print(
            f"left behind: what came after it on timeline {past.timeline}, up to commit {left}. While that is there, "
            f"`millrace rewind --to {left}` comes back to it; `millrace commits pin` keeps it from being pruned"
        )


def _mirrored(job: LoadedJob) -> list[str]:
    """Names of the commits in the job's mirror."""
    if job.spec.store.mirror is None:
        return []
    catalog = lookup(parse(job.spec.store.mirror, job.folder).text, Deadline.after(MIRROR_S))
    return [commit.name for commit in catalog.commits]


def skip_job(job: LoadedJob, wanted: Skip, reason: str) -> None:
    """Have the job go past some positions of a partition, and say which passes are withdrawn for it.

    Raises NotPossible where it has trained them, SpecError where there is no such range or the job runs.
    """
    if not reason.strip():
        raise MillraceError("--reason says nothing; the log keeps it for whoever asks later why events are missing")
    with stopped(job.store, job.spec.name):
        withdrawn = skip(job.store, _newest(job), wanted, reason)
    print(
        f"{wanted.partition}: {count(wanted.end - wanted.begin)} positions are gone past, {wanted.begin}-{wanted.end}; "
        "the next run reads on behind them"
    )
    if withdrawn:
        numbers = ", ".join(map(str, withdrawn))
        print(f"passes withdrawn, to be planned anew without them: {numbers}")


def _newest(job: LoadedJob) -> Commit | None:
    """The newest commit that led to the present and whose manifest can be read."""
    past = lineage(job.store)
    ours = [commit for commit in Commits(job.store).whole() if past.holds(commit.name)]
    return max(ours, key=lambda commit: order_of(commit.name), default=None)
