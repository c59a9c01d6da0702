"""The commands `predict` and `evaluate`. They read arguments; the other modules of this package do the work."""

import json
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.lifecycle import on_stop_signal
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import work_progress
from headrace.service.cli.targets import JobOrFile, Token, Url, Wait, only_here, path_of, remote_name, service_at

if TYPE_CHECKING:
    from headrace.service.spec.job import LoadedJob
    from headrace.trainer.predict.config import PredictionRequest

app = typer.Typer()

LIVE = "live"
"""The version that `trainer.predict.config` calls so; here again, since its module loads slowly."""
PREDICT_S = 7 * 86400.0
"""Longest time to wait for a service's prediction: as long as the service keeps an operation."""
Wire = Literal["float32", "bfloat16", "int8"]
"""The choices of pserver.config.Wire."""

Job = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.TOML", help="The job file; with --export also --spec.", show_default=False),
]
Spec = Annotated[
    Path | None,
    typer.Option("--spec", metavar="FILE", help="Parse events as this job file says, for an export that no job made."),
]
Input = Annotated[
    list[str], typer.Option("--input", metavar="FILE", help="Files of events, or globs. Repeat it for more.")
]
Root = Annotated[
    str | None,
    typer.Option("--root", metavar="ADDRESS", help="Where --input begins, if the files are in an object store."),
]
Topic = Annotated[
    str | None,
    typer.Option(
        "--topic", metavar="TOPIC[:PART=BEGIN-END,...]", help="Instead of files: a Kafka topic, or offsets of it."
    ),
]
VersionOf = Annotated[
    str,
    typer.Option(
        "--version", metavar="V", help='"live" (the newest commit), a version, a commit, or an export\'s address.'
    ),
]
Export = Annotated[
    str | None, typer.Option("--export", metavar="DIR", help="The export to predict with; or its address.")
]
Trainers = Annotated[
    int | None,
    typer.Option(
        "--trainers", min=1, max=64, metavar="N", help="Processes that predict. Default: 1; on the cluster, the job's."
    ),
]
On = Annotated[
    Literal["here", "cluster"],
    typer.Option("--on", help="Predict on this machine, or on the job's launcher, with the job's numbers of workers."),
]
Shards = Annotated[
    int | None,
    typer.Option(
        "--shards", min=0, max=64, metavar="N", help="Processes that hold the rows; 0, the default: in the one trainer."
    ),
]
Share = Annotated[
    float | None,
    typer.Option(
        "--share",
        min=0.01,
        max=1,
        metavar="PART",
        help="Part of the cores to use. Default: half while the job trains, else all.",
    ),
]
WireOf = Annotated[
    Wire, typer.Option("--wire", help="How rows travel from the processes that hold them; fewer bits round them.")
]


@app.command("predict", rich_help_panel=Panel.SERVE)
def predict_(
    job: Job = None,
    input_: Input = [],  # noqa: B006  # typer copies it
    root: Root = None,
    output: Annotated[
        str, typer.Option("--output", metavar="DIR", help="Folder for the Parquet, or an address in an object store.")
    ] = ...,  # type: ignore[assignment]
    version: VersionOf = LIVE,
    export: Export = None,
    spec: Spec = None,
    topic: Topic = None,
    on: On = "here",
    columns: Annotated[
        str, typer.Option("--columns", metavar="A,B", help='Slots to copy to the output, or "event_time".')
    ] = "",
    outputs: Annotated[
        str, typer.Option("--outputs", metavar="A,B", help="Tensors of the model to write. Default: the predictions.")
    ] = "",
    trainers: Trainers = None,
    shards: Shards = None,
    share: Share = None,
    wire: WireOf = "float32",
    segment_events: Annotated[
        int,
        typer.Option(
            "--segment-events", min=1, metavar="N", help="Events of one output file. A crash repeats unfinished files."
        ),
    ] = 20_000,
    overrides: Overrides = [],  # noqa: B006
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Predict events with one version of the model, and write Parquet. A killed prediction continues when run again.

    With a job's name at a service, files and folders are the service's.

    Example: headrace predict job.toml --input "day-8/*.gz" --output predictions
    """
    from headrace.service.monitor.lines import count
    from headrace.service.predict.prediction import summary_of_prediction
    from headrace.trainer.predict.output_files import PredictionOutput

    remote = None if job is None else remote_name(job, url)
    local_input = input_of(input_, topic, root)
    request = {
        "input": local_input if remote is None or topic or root else {"paths": input_},
        "output": place_of(output, here=remote is None),
        "columns": _names(columns),
        "outputs": _names(outputs),
        "segment_events": segment_events,
        **_common(version, export, trainers, shards, share, wire, on),
    }
    if remote is None:
        manifest = _run(_job_of(job, spec, overrides), request)
    else:
        with service_at(url, token) as client:
            deadline = Deadline.after(PREDICT_S)
            with work_progress("predicting") as progress:
                path = path_of("jobs", remote, "predictions")
                manifest = client.carry_out(path, request, deadline, lambda text: progress(None, text))
    if as_json:
        print(json.dumps(manifest, indent=2))
        return
    print(f"{output}: {count(manifest['samples'])} samples of {count(manifest['events'])} events")
    for line in summary_of_prediction(
        manifest, PredictionOutput(request["output"]).metrics() if remote is None else None
    ):
        print_printable(line)


@app.command("try", rich_help_panel=Panel.SERVE)
def try_(
    job: JobOrFile,
    example: Annotated[bool, typer.Option("--example", help="Print a recent event of the job; read none.")] = False,
    overrides: Overrides = [],  # noqa: B006
    timeout: Wait = 300.0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Predict a few events with a job's newest commit: samples, features, predictions, and ids without a row.

    Events come from standard input, one a line as in the job's source. The job need not run; nothing is learnt.

    Example: headrace try job.toml --example | headrace try job.toml
    """
    from headrace.service.predict.event_trials import MAX_TEXT, EventTrials, events_of, trial_lines

    text = "" if example else sys.stdin.buffer.read(4 * MAX_TEXT + 1).decode(errors="replace")
    events, deadline = events_of(text, needed=not example), Deadline.after(timeout)
    if (name := remote_name(job, url)) is not None:
        only_here(overrides=overrides)
        with service_at(url, token) as client:
            found = client.post_once_ready(path_of("jobs", name, "try"), {"events": text, "example": example}, deadline)
    else:
        from headrace.service.spec.job import load_job

        with closing(EventTrials()) as trials:
            found = trials.ask(str(job), load_job(job, overrides), events, deadline, example=example)
    if as_json:
        print(json.dumps(found, indent=2))
    elif not example:
        print_printable(*trial_lines(found), sep="\n")
    elif found["example"] is None:
        raise SpecError("no recent event can be printed as a line of text now", "--example")
    else:
        print_printable(found["example"])


@app.command(rich_help_panel=Panel.SERVE)
def evaluate(
    job: Job = None,
    input_: Input = [],  # noqa: B006
    root: Root = None,
    version: VersionOf = LIVE,
    export: Export = None,
    spec: Spec = None,
    topic: Topic = None,
    on: On = "here",
    scratch: Annotated[
        str | None,
        typer.Option(
            "--scratch", metavar="PLACE", help="Where parts are meanwhile, for machines: see the documentation."
        ),
    ] = None,
    trainers: Trainers = None,
    shards: Shards = None,
    share: Share = None,
    wire: WireOf = "float32",
    shuffle: Annotated[
        list[str],
        typer.Option(
            "--shuffle", metavar="SLOT", help="Give the model other samples' values of a slot. Repeat it for more."
        ),
    ] = [],  # noqa: B006
    worth: Annotated[
        bool, typer.Option("--worth", help="Shuffle each slot in turn, and print the loss of each metric.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure one version of the model on events that it has not learned, and print the metrics only.

    Example: headrace evaluate job.toml --input "day-8/*.gz"
    """
    from headrace.service.predict import prediction
    from headrace.service.predict.prediction import summary_of_prediction
    from headrace.trainer.predict.output_files import PredictionOutput

    loaded = _job_of(job, spec, overrides)
    request = {"input": input_of(input_, topic, root), "shuffle": shuffle, "worth": worth}
    with new_place(scratch) as output:
        common = _common(version, export, trainers, shards, share, wire, on)
        manifest = _run(loaded, {**request, **common, "output": output})
        found = PredictionOutput(output).metrics() or {}
    if worth:
        losses = prediction.losses_of(found)
        print(json.dumps(losses, indent=2)) if as_json else print(*prediction.format_losses(losses), sep="\n")
        return
    if as_json:
        print(json.dumps({"version": manifest["version"], "metrics": found}, indent=2))
        return
    for line in summary_of_prediction(manifest, found):
        print_printable(line)


@contextmanager
def new_place(scratch: str | None) -> Iterator[str]:
    """A new place for an output in a folder or an object store, or in a folder of this machine; removed at the end."""
    from headrace.trainer.predict.output_files import PredictionOutput

    if scratch is None:
        with tempfile.TemporaryDirectory(prefix="headrace-evaluate-") as folder:
            yield str(Path(folder) / "predictions")
        return
    place, name = place_of(scratch, here=True), f"headrace-evaluate-{secrets.token_hex(8)}"
    if "://" in place:
        address = urlsplit(place)
        output = address._replace(path=f"{address.path.rstrip('/')}/{name}").geturl()
    else:  # in a folder's name "#" and "?" mean nothing
        output = str(Path(place) / name)
    try:
        yield output
    finally:
        PredictionOutput(output).remove()


def request_of_words(words: Sequence[str]) -> "tuple[Mapping[str, Any], PredictionRequest]":
    """The options and the request of a `headrace predict` that runs elsewhere, of its words. Raises SpecError."""
    from headrace.config import validate
    from headrace.trainer.predict.config import PredictionRequest

    given = typer.main.get_group(app).commands["predict"].make_context("predict", [*words]).params
    common = _common(*(given[each] for each in ("version", "export", "trainers", "shards", "share", "wire", "on")))
    place = place_of(str(given["output"]), here=False)
    asked = {"input": input_of(given["input_"], given["topic"], given["root"]), "output": place, **common}
    return given, validate(PredictionRequest, asked)


def _common(
    version: str,
    export: str | None,
    trainers: int | None,
    shards: int | None,
    share: float | None,
    wire: Wire,
    on: str,
) -> dict[str, Any]:
    if export is not None and version != LIVE:
        raise SpecError("give --version or --export, not both")
    workers = {} if trainers is None else {"trainers": trainers}
    where = {} if on == "here" else {"on": on}
    return {"version": export or version, **workers, **where, "shards": shards, "share": share, "wire": wire}


def _job_of(job: Path | None, spec: Path | None, overrides: Sequence[str]) -> "LoadedJob":
    from headrace.service.spec.job import load_job

    if (job is None) == (spec is None):
        raise SpecError(
            "give the job file; with --export it may be --spec: an export does not say how events are parsed, nor of "
            "which class its model is"
        )
    return load_job(job or spec or Path(), overrides)


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def place_of(output: str, *, here: bool) -> str:
    """The output as the request names it. Raises SpecError for an address that names no place."""
    try:
        return parse(output).text if "://" in output else str(Path(output).absolute()) if here else output
    except ValueError as error:
        raise SpecError(str(error), "--output") from None


def input_of(paths: Sequence[str], topic: str | None, root: str | None = None) -> dict[str, Any]:
    """The request's input. Relative paths start at `root`, or in the current folder. Raises SpecError."""
    if bool(paths) == bool(topic):
        raise SpecError("give --input FILE, or --topic")
    if address := next((path for path in paths if "://" in path), None):
        raise SpecError(f"{address!r}: give the address as --root, and files relative to it", "--input")
    if root is not None and topic:
        raise SpecError("is where --input begins; a topic has none", "--root")
    if root is not None:
        return {"paths": [*paths], "root": root}
    if paths:
        return {"paths": [str(Path(path).expanduser().absolute()) for path in paths]}
    name, colon, text = str(topic).partition(":")
    ranges: dict[str, list[int]] = {}
    for part in text.split(",") if colon else ():
        number, equals, span = part.partition("=")
        begin, dash, end = span.partition("-")
        if not (equals and dash and number.isdecimal() and begin.isdecimal() and end.isdecimal()):
            raise SpecError(f"{part!r} is not of the form PARTITION=BEGIN-END", "--topic")
        ranges[number] = [int(begin), int(end)]
    return {"kafka": {"topic": name, **({"ranges": ranges} if colon else {})}}


def _run(job: "LoadedJob", raw: dict[str, Any]) -> dict[str, Any]:
    from headrace.config import validate
    from headrace.service.predict.prediction import predict
    from headrace.trainer.predict.config import PredictionRequest
    from headrace.trainer.predict.prediction_plan import with_absolute_paths

    request = with_absolute_paths(validate(PredictionRequest, raw), Path.cwd())
    with work_progress("predicting") as progress, cancelled_by_signal() as cancelled, _as_option():
        return predict(job, request, progress, cancelled, on_line=_print_line)


@contextmanager
def _as_option() -> Iterator[None]:
    """An error about missing files names the option."""
    try:
        yield
    except SpecError as error:
        if error.path.startswith("input.paths"):
            from headrace.trainer.predict.prediction_plan import error_at

            raise error_at(error, "--input") from None
        raise


@contextmanager
def cancelled_by_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set."""
    cancelled = threading.Event()
    with on_stop_signal(cancelled.set):
        yield cancelled


def _print_line(worker: str, text: str) -> None:
    from headrace.service.monitor.lines import labelled

    print_printable(labelled(worker, text), file=sys.stderr, flush=True)
