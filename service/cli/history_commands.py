"""The commands for a job's log and commits, and rewind, skip and rerun. The work is done in the other modules."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deadline import Deadline
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel, PanelledGroup
from headrace.service.cli.targets import JobOrFile, Token, Url, path_of, remote_name, service_at

if TYPE_CHECKING:
    from headrace.service.spec.job import LoadedJob

COMMIT_S = 900.0
"""Longest time for a commit of a service's job: more than a job's default deadline for one."""
app = typer.Typer()
commits = typer.Typer(cls=PanelledGroup, no_args_is_help=True, help="List, verify, pin and prune commits of a job.")
app.add_typer(commits, name="commits", rich_help_panel=Panel.OPERATE)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A commit's name, or its version.", show_default=False)]
Holder = Annotated[str, typer.Option("--as", metavar="WHO", help="Name of the holder; a commit may have several.")]


def load_run(job: Path, overrides: list[str]) -> "LoadedJob":
    """Load a job whose store contains a run of it. Raises SpecError."""
    from headrace.service.cluster.store import check_run
    from headrace.service.spec.job import load_job

    loaded = load_job(job, overrides)
    check_run(loaded.store, loaded.spec.name)
    return loaded


@app.command(rich_help_panel=Panel.LOOK)
def log(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Print only the newest records, this many.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the job's log: every claim, plan, operation and close.

    Example: headrace log job.toml --last 20
    """
    from headrace.service.history.log_text import print_log

    print_log(load_run(job, overrides).store / "log", last=last, as_json=as_json)


@app.command(rich_help_panel=Panel.LOOK)
def tensorboard(
    job: SpecFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where TensorBoard looks: `tensorboard --logdir DIR`.")],
    overrides: Overrides = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", help="Go on with each new close, until Ctrl-C.")] = False,
) -> None:
    """Write the figures of each close in a job's log as event files of TensorBoard.

    Example: headrace tensorboard job.toml runs/clicks
    """
    from headrace.lifecycle import stop_flag
    from headrace.service.history.event_files import EVERY_S, EventFiles

    files = EventFiles(load_run(job, overrides).store / "log", folder)
    with stop_flag() as stopping:
        print(f"{files.write_on()} closes in {folder}", flush=True)
        while follow and not stopping.wait(EVERY_S):
            files.write_on()
    files.close()


@commits.command("list")
def list_(job: SpecFile, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Print the commits, oldest first.

    Example: headrace commits list job.toml
    """
    from headrace.service.cli import commit_output

    commit_output.list_commits(load_run(job, overrides).store, as_json=as_json)


@commits.command()
def show(job: SpecFile, name: Name, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Print the content of a commit; as JSON, its whole manifest.

    Example: headrace commits show job.toml 17
    """
    from headrace.service.cli import commit_output

    commit_output.show_commit(load_run(job, overrides).store, name, as_json=as_json)


@commits.command()
def verify(
    job: SpecFile,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this commit, by name or version.")] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Read every part of every commit back, and count the rows. Exit code 1 if one is damaged.

    Example: headrace commits verify job.toml
    """
    from headrace.service.cli import commit_output

    commit_output.verify_commits(load_run(job, overrides).store, name, as_json=as_json)


@commits.command()
def pin(
    job: SpecFile,
    name: Name,
    overrides: Overrides = [],  # noqa: B006
    who: Holder = "pin",
    as_json: Json = False,
) -> None:
    """Keep a commit from being pruned.

    Example: headrace commits pin job.toml 17 --as friday
    """
    from headrace.service.history import commit_list

    pinned = commit_list.pin(load_run(job, overrides).store, name, who)
    print(json.dumps({"name": pinned, "holder": who}) if as_json else f"{pinned} is held by {who}")


@commits.command()
def unpin(
    job: SpecFile,
    name: Name,
    overrides: Overrides = [],  # noqa: B006
    who: Holder = "pin",
    as_json: Json = False,
) -> None:
    """Remove a pin, so that the commit can be pruned.

    Example: headrace commits unpin job.toml 17 --as friday
    """
    from headrace.service.history import commit_list

    freed = commit_list.unpin(load_run(job, overrides).store, name, who)
    print(json.dumps({"name": freed, "no_longer": who}) if as_json else f"{freed} is no longer held by {who}")


@commits.command()
def prune(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    keep: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many of the newest to keep; default: commit.keep of the job file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove all commits of a stopped job except the newest and the pinned ones.

    Example: headrace commits prune job.toml --keep 3
    """
    from headrace.service.cluster.store import stopped
    from headrace.service.history import commit_list
    from headrace.trainer.checkpoint.commits import Commits

    loaded = load_run(job, overrides)
    with stopped(loaded.store, loaded.spec.name):
        removed = commit_list.prune(loaded.store, keep or loaded.spec.commit.keep)
    left = Commits(loaded.store).names()
    if as_json:
        print(json.dumps({"removed": removed, "left": left}, indent=2))
        return
    for name in removed:
        print(f"{name} is removed")
    print(f"{len(removed)} commits removed, {len(left)} left")


@app.command(rich_help_panel=Panel.OPERATE)
def commit(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Make a commit of a running job now. Waits until it is complete, and prints its name.

    Example: headrace commit job.toml
    """
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            made = client.carry_out(path_of("jobs", name, "commits"), None, Deadline.after(COMMIT_S))["name"]
    else:
        from headrace.service.history.commit_request import make_commit

        loaded = load_run(job, overrides)
        made = make_commit(loaded.store, Deadline.after(loaded.spec.commit.deadline))
    print(json.dumps({"name": made}) if as_json else made)


@app.command(rich_help_panel=Panel.OPERATE)
def rewind(
    job: SpecFile,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="A commit's name, or its version.")],
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make a stopped job continue from a commit, on a new timeline. Later events are trained again, as new passes.

    Example: headrace rewind job.toml --to 17
    """
    from headrace.service.history.rewind import format_rewound, rewind_job

    done = rewind_job(load_run(job, overrides), to)
    if as_json:
        print(json.dumps(done.message(), indent=2))
        return
    for line in format_rewound(done):
        print_printable(line)


@app.command(rich_help_panel=Panel.OPERATE)
def skip(
    job: SpecFile,
    partition: Annotated[str, typer.Argument(help="Its name, as in `headrace log`.", show_default=False)],
    begin: Annotated[int, typer.Argument(help="The first position to skip.", show_default=False)],
    end: Annotated[int, typer.Argument(help="The position after the last one.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log.")],
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make a stopped job skip a bad range of a partition that it has not trained yet.

    Example: headrace skip job.toml clicks/0 5000 5100 --reason "wrong labels"
    """
    from headrace.service.history.rewind import format_skipped, skip_job
    from headrace.trainer.journal.partitions import SkippedRange

    wanted = SkippedRange(partition, begin, end)
    void = skip_job(load_run(job, overrides), wanted, reason)
    if as_json:
        print(json.dumps({"partition": partition, "begin": begin, "end": end, "void_passes": void}, indent=2))
        return
    for line in format_skipped(wanted, void):
        print_printable(line)


@app.command(rich_help_panel=Panel.OPERATE)
def rerun(
    job: SpecFile,
    start: Annotated[str, typer.Option("--from", metavar="NAME", help="A commit, by name or version; 0: the start.")],
    overrides: Overrides = [],  # noqa: B006
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the rerun's store even if all passes are identical.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train the job's log again in another store, and compare every pass. Exit code 1 if one differs.

    Example: headrace rerun job.toml --from 17
    """
    from headrace.service.history.rerun import rerun_job
    from headrace.service.monitor.display import choose_show
    from headrace.service.monitor.shows import PlainShow

    show = PlainShow() if as_json else choose_show()  # plain text goes to standard error
    raise typer.Exit(rerun_job(load_run(job, overrides), start, show, keep=keep, as_json=as_json))


@app.command(rich_help_panel=Panel.LOOK)
def compare(
    first: SpecFile,
    second: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The other job file.", show_default=False)],
    after: Annotated[
        int, typer.Option("--after", min=0, metavar="N", help="Leave out the first parts, this many.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compare how well two jobs predicted the same events, with a paired test over passes. Reads their logs only.

    Example: headrace compare job.toml other.toml
    """
    from headrace.codec import plain
    from headrace.service.history import paired_test

    ours, theirs = (load_run(job, []).store / "log" for job in (first, second))
    found = paired_test.compare_jobs(ours, theirs, after)
    if as_json:
        print(json.dumps(plain(found), indent=2))
    else:
        for line in paired_test.format_comparison(found):
            print_printable(line)
