"""`headrace spec`: checks a job file, prints the schema, compares job files, and proposes one from sample events."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import SpecError, Unwritable
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel, PanelledGroup
from headrace.service.cli.targets import JobOrFile, Token, Url, remote_name, service_at

app = typer.Typer()
spec = typer.Typer(
    cls=PanelledGroup, no_args_is_help=True, help="Check a job file; compare two; print the schema; propose one."
)
app.add_typer(spec, name="spec", rich_help_panel=Panel.TRAIN)

New = Annotated[Path, typer.Argument(metavar="NEW.TOML", help="The changed job file.", show_default=False)]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show what the store of NEW.TOML would carry over: rows, weights, shapes."),
]


@spec.command()
def check(job: SpecFile, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """List every problem that would stop the job from starting on this machine, with its key.

    Exit code 2 if something is wrong.

    Example: headrace spec check job.toml
    """
    from headrace.service.jobs.preflight import checked
    from headrace.service.spec.job import load_job

    loaded = load_job(job, overrides)
    found, cluster = checked(loaded), loaded.spec.cluster
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    print(f"{job} is valid")
    trainers = cluster.trainers if (span := cluster.elastic) is None else f"{span.min} to {span.max}"
    print(f"job {loaded.spec.name}; trainers {trainers}; shards {cluster.num_shards or 'embedded'}")
    print(f"store {loaded.store}")
    if found.missing_data is not None:
        print(f"note: a run is refused until there is data: {found.missing_data}")


@spec.command()
def schema() -> None:
    """Print the JSON Schema of job files.

    Example: headrace spec schema > job.schema.json
    """
    from headrace.service.spec.job import JobFile

    print(json.dumps(JobFile.model_json_schema(), indent=2))


@spec.command()
def diff(
    old: JobOrFile,
    new: New,
    dry_run: DryRun = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show for each key that differs whether it changes while the job runs, at a restart, or needs a new model.

    JOB is the old job file; or with --url the name of a job, for what runs there. Exit code 1 where a new model is
    needed.

    Example: headrace spec diff job.toml new.toml --dry-run
    """
    from headrace.service.cluster.store_defaults import numbered_by, with_defaults_alone, with_store_defaults
    from headrace.service.jobs.spec_difference import carried_over, changes_between, format_carried, format_changes
    from headrace.service.spec.job import job_of, load_job
    from headrace.trainer.spec.change_classes import ChangeClass

    after = with_defaults_alone(load_job(new))
    if (name := remote_name(old, url)) is not None:
        with service_at(url, token) as client:
            before = job_of(client.get(f"jobs/{name}/spec")["spec"], new.resolve().parent)
    else:
        before = load_job(old)
    then = with_defaults_alone(before).full
    changes = changes_between(then, numbered_by(after, then).full)
    refused = any(each.change is ChangeClass.NEW for each in changes)
    carried = carried_over(with_store_defaults(load_job(new))) if dry_run and not refused else None
    if as_json:
        found = {"changes": [each._asdict() for each in changes]}
        print(json.dumps(found | ({} if carried is None else {"carried_over": carried.message()}), indent=2))
    else:
        print_printable(*format_changes(changes), *(() if carried is None else format_carried(carried)), sep="\n")
    raise typer.Exit(1 if refused else 0)


@spec.command()
def infer(
    events: Annotated[
        Path,
        typer.Argument(metavar="EVENTS.JSONL", help="JSON objects, one a line; plain or gzip.", show_default=False),
    ],
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1_000_000, metavar="N", help="Number of lines to read.")
    ] = 20_000,
    out: Annotated[Path | None, typer.Option("--out", metavar="JOB.TOML", help="A new file; default: stdout.")] = None,
    measured: Annotated[
        bool,
        typer.Option("--measured/--guessed", help="Measure on the events what slots and further features are worth."),
    ] = True,
) -> None:
    """Propose a job file for events: slots, label, time; and crosses, counters and histories that pay.

    The proposal has pipe.kind = "columns", so that no program is needed. It is a guess, for a person to check.

    Example: headrace spec infer events.jsonl --out job.toml
    """
    from headrace.service.planning.event_sample import EventSample
    from headrace.service.planning.job_text import infer_job

    sample = EventSample(events, limit)
    proposal = infer_job(sample, Path.cwd() if out is None else out.resolve().parent, measured=measured)
    if out is None:
        print_printable(proposal.text.removesuffix("\n"))
    else:
        _write_new(out, proposal.text)
    print_printable(f"{sample.num_events:,} events read, {sample.num_bad:,} bad lines", file=sys.stderr)
    for line in (*sample.bad_lines, *(f"fill in {each}" for each in proposal.missing)):
        print_printable(f"note: {line}", file=sys.stderr)


def _write_new(path: Path, text: str) -> None:
    """Write a file that must not exist."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SpecError(f"{path} exists; name a new file, or remove it") from None
    except OSError as error:
        raise Unwritable(path, error) from None
