"""The commands for a job's log and commits, and rewind, skip and rerun. The work is done in the other modules."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.deadline import Deadline
from headrace.printable import print_printable
from headrace.service.cli import commit_output
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.targets import JobOrFile, Token, Url, remote_name, service_at
from headrace.service.client import job_actions
from headrace.service.cluster.store import check_run, stopped
from headrace.service.history import commit_list as work
from headrace.service.history import paired_test
from headrace.service.history import rewind as steering
from headrace.service.history.commit_request import make_commit
from headrace.service.history.log_text import print_log
from headrace.service.history.rerun import rerun_job
from headrace.service.monitor.display import choose_show
from headrace.service.spec.job import LoadedJob, load_job
from headrace.trainer.control.commit_store import Commits
from headrace.trainer.control.job_log import SkippedRange

past = typer.Typer()
commits = typer.Typer(no_args_is_help=True, help="A job's commits: list, verify, pin, prune.")
past.add_typer(commits, name="commits")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A commit's name, or its version.", show_default=False)]
Holder = Annotated[str, typer.Option("--as", metavar="WHO", help="Name of the holder; a commit may have several.")]


def load_run(job: Path, overrides: list[str]) -> LoadedJob:
    """Load a job whose store contains a run of it. Raises SpecError."""
    loaded = load_job(job, overrides)
    check_run(loaded.store, loaded.spec.name)
    return loaded


@past.command()
def log(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    last: Annotated[int | None, typer.Option(min=1, help="Print only the newest records, this many.")] = None,
    as_json: Json = False,
) -> None:
    """Print the job's log: every claim, plan, operation and close."""
    print_log(load_run(job, overrides).store / "log", last=last, as_json=as_json)


@commits.command("list")
def list_(job: SpecFile, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Print the commits, oldest first."""
    commit_output.list_commits(load_run(job, overrides).store, as_json=as_json)


@commits.command()
def show(job: SpecFile, name: Name, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Print what a commit contains; as JSON, its whole manifest."""
    commit_output.show_commit(load_run(job, overrides).store, name, as_json=as_json)


@commits.command()
def verify(
    job: SpecFile,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this commit, by name or version.")] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Read every part of every commit back, and count the rows; exit code 1 if one is damaged."""
    commit_output.verify_commits(load_run(job, overrides).store, name, as_json=as_json)


@commits.command()
def pin(job: SpecFile, name: Name, overrides: Overrides = [], who: Holder = "pin") -> None:  # noqa: B006
    """Keep a commit from being pruned."""
    print(f"{work.pin(load_run(job, overrides).store, name, who)} is held by {who}")


@commits.command()
def unpin(job: SpecFile, name: Name, overrides: Overrides = [], who: Holder = "pin") -> None:  # noqa: B006
    """Remove a pin, so that the commit can be pruned."""
    print(f"{work.unpin(load_run(job, overrides).store, name, who)} is no longer held by {who}")


@commits.command()
def prune(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest to keep; default: commit.keep.")
    ] = None,
) -> None:
    """Remove all commits of a stopped job except the newest and the pinned ones."""
    loaded = load_run(job, overrides)
    with stopped(loaded.store, loaded.spec.name):
        removed = work.prune(loaded.store, keep or loaded.spec.commit.keep)
    for name in removed:
        print(f"{name} is removed")
    print(f"{len(removed)} commits removed, {len(Commits(loaded.store).names())} left")


@past.command()
def commit(job: JobOrFile, overrides: Overrides = [], url: Url = None, token: Token = None) -> None:  # noqa: B006
    """Have a running job make a commit now, and wait for it."""
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            print(job_actions.commit(client, name, Deadline.after(job_actions.COMMIT_S)))
        return
    loaded = load_run(job, overrides)
    print(make_commit(loaded.store, Deadline.after(loaded.spec.commit.deadline)))


@past.command()
def rewind(
    job: SpecFile,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="A commit's name, or its version.")],
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Have a stopped job continue from a commit, on a new timeline; later events are trained again as new passes."""
    for line in steering.format_rewound(steering.rewind_job(load_run(job, overrides), to)):
        print_printable(line)


@past.command()
def skip(
    job: SpecFile,
    partition: Annotated[str, typer.Argument(help="Its name, as in `headrace log`.", show_default=False)],
    begin: Annotated[int, typer.Argument(help="The first position to skip.", show_default=False)],
    end: Annotated[int, typer.Argument(help="The position after the last one.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log.")],
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Have a stopped job skip a bad range of a partition that it has not trained yet."""
    wanted = SkippedRange(partition, begin, end)
    for line in steering.format_skipped(wanted, steering.skip_job(load_run(job, overrides), wanted, reason)):
        print_printable(line)


@past.command()
def rerun(
    job: SpecFile,
    start: Annotated[str, typer.Option("--from", metavar="NAME", help="A commit, by name or version; 0: the start.")],
    overrides: Overrides = [],  # noqa: B006
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the rerun's store even if all passes are identical.")
    ] = False,
) -> None:
    """Train the job's log again in another store, and compare the digests of every pass; exit code 1 if one differs."""
    raise typer.Exit(rerun_job(load_run(job, overrides), start, choose_show(), keep=keep))


@past.command()
def compare(
    first: SpecFile,
    second: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The spec of the other job.", show_default=False)],
    after: Annotated[int, typer.Option("--after", min=0, help="Leave out the first parts, this many.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare how well two jobs predicted the same events, with a paired test over passes; reads their logs only."""
    ours, theirs = (load_run(job, []).store / "log" for job in (first, second))
    found = paired_test.compare_jobs(ours, theirs, after)
    if as_json:
        print(json.dumps(found.message(), indent=2))
    else:
        for line in paired_test.format_comparison(found):
            print_printable(line)
