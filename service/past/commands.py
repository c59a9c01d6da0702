"""The commands by which people look at a job's past and steer by it. Reads arguments; the work is done beside it."""

from pathlib import Path
from typing import Annotated

import typer

from millrace.deadline import Deadline
from millrace.printable import say
from service.arguments import Json, Overrides, SpecFile
from service.display import show_here
from service.past import commits as work
from service.past import steering
from service.past.asking import make_commit
from service.past.records import print_log
from service.past.rerun import rerun_job
from service.remote import acting
from service.remote.asking import JobOrFile, Token, Url, remote_name, service_at
from service.spec import LoadedJob, load_job
from service.store import check_run, stopped
from trainer.commits import Commits
from trainer.partitions import Skip

past = typer.Typer()
commits = typer.Typer(no_args_is_help=True, help="A job's commits: what is there, whether it is sound, what is kept.")
past.add_typer(commits, name="commits")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A commit's name, or its version.", show_default=False)]
Holder = Annotated[str, typer.Option("--as", metavar="WHO", help="Who keeps it; each may.")]


def ran(job: Path, overrides: list[str]) -> LoadedJob:
    """The job of a spec, whose store holds a run of it."""
    loaded = load_job(job, overrides)
    check_run(loaded.store, loaded.spec.name)
    return loaded


@past.command()
def log(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    last: Annotated[int | None, typer.Option(min=1, help="Print only so many records, the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Print what happened: every claim, plan, operation and close of the job's log."""
    print_log(ran(job, overrides).store / "log", last=last, as_json=as_json)


@commits.command("list")
def list_(job: SpecFile, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Print the commits, oldest first."""
    work.list_commits(ran(job, overrides).store, as_json=as_json)


@commits.command()
def show(job: SpecFile, name: Name, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Print what a commit holds; as JSON, its whole manifest."""
    work.show_commit(ran(job, overrides).store, name, as_json=as_json)


@commits.command()
def verify(
    job: SpecFile,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one, by name or version.")] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Read every part of every commit back, and count the rows; exit code 1 where one is damaged."""
    work.verify_commits(ran(job, overrides).store, name, as_json=as_json)


@commits.command()
def pin(job: SpecFile, name: Name, overrides: Overrides = [], who: Holder = "pin") -> None:  # noqa: B006
    """Keep a commit from being pruned."""
    print(f"{work.pin(ran(job, overrides).store, name, who)} is kept by {who}")


@commits.command()
def unpin(job: SpecFile, name: Name, overrides: Overrides = [], who: Holder = "pin") -> None:  # noqa: B006
    """Let a pinned commit go, when its turn comes to be pruned."""
    print(f"{work.unpin(ran(job, overrides).store, name, who)} is no longer kept by {who}")


@commits.command()
def prune(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest stay; unless given, commit.keep.")
    ] = None,
) -> None:
    """Remove all but the newest commits and the pinned ones, of a job that is stopped."""
    loaded = ran(job, overrides)
    with stopped(loaded.store, loaded.spec.name):
        gone = work.prune(loaded.store, keep or loaded.spec.commit.keep)
    for name in gone:
        print(f"{name} is removed")
    print(f"{len(gone)} commits removed, {len(Commits(loaded.store).names())} left")


@past.command()
def commit(job: JobOrFile, overrides: Overrides = [], url: Url = None, token: Token = None) -> None:  # noqa: B006
    """Have a running job make a commit now, and wait until it is there."""
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            print(acting.commit(client, name, Deadline.after(acting.COMMIT_S)))
        return
    loaded = ran(job, overrides)
    print(make_commit(loaded.store, Deadline.after(loaded.spec.commit.deadline)))


@past.command()
def rewind(
    job: SpecFile,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="A commit's name, or its version.")],
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Have a stopped job go on from a commit, on a new timeline: what came after it is trained again as new passes."""
    for line in steering.told_rewound(steering.rewind_job(ran(job, overrides), to)):
        say(line)


@past.command()
def skip(
    job: SpecFile,
    partition: Annotated[str, typer.Argument(help="Its name, as `millrace log` has it.", show_default=False)],
    begin: Annotated[int, typer.Argument(help="The first position to go past.", show_default=False)],
    end: Annotated[int, typer.Argument(help="The position after the last one.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; the log keeps it.")],
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Have a stopped job go past a bad range of a partition, which it has not trained yet."""
    wanted = Skip(partition, begin, end)
    for line in steering.told_skipped(wanted, steering.skip_job(ran(job, overrides), wanted, reason)):
        say(line)


@past.command()
def rerun(
    job: SpecFile,
    start: Annotated[str, typer.Option("--from", metavar="NAME", help="A commit, by name or version; 0: the start.")],
    overrides: Overrides = [],  # noqa: B006
    keep: Annotated[bool, typer.Option("--keep", help="Keep the rerun's store, even if all is identical.")] = False,
) -> None:
    """Train the job's log again beside it, and compare the digests of every pass; exit code 1 where one differs."""
    raise typer.Exit(rerun_job(ran(job, overrides), start, show_here(), keep=keep))
