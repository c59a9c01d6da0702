"""`headrace run`: reads arguments; see service.server.foreground_run."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.lifecycle import ExitCode
from headrace.service.cli.arguments import Health, Overrides, SpecFile
from headrace.service.cli.panels import Panel

app = typer.Typer()

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Remove the run in the store and start again; default: continue it.")
]
Listen = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve the API, for example at 127.0.0.1:8080.")
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Answer Prometheus at this address: /metrics, without tokens."),
]
RetryStopped = Annotated[
    bool,
    typer.Option(
        "--retry-stopped",
        help="After a signal end with exit code 75, so that an orchestrator starts the job again. Workers that joined "
        "end with it, too.",
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        "--log-dir", metavar="DIR", help="Also write the output of each worker to a file there: trainer-0.log."
    ),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", help="Write the figures of each close there, for TensorBoard."),
]
Trace = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="steps=N[,after=M]",
        help="Record a timeline of N steps of every worker, after the first M, as trace.json of the store. Open it in "
        "Perfetto.",
    ),
]


@app.command(rich_help_panel=Panel.TRAIN)
def run(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    fresh: Fresh = False,
    listen: Listen = None,
    trace: Trace = None,
    health: Health = None,
    metrics: Metrics = None,
    log_dir: LogDir = None,
    tensorboard: TensorBoard = None,
    retry_stopped: RetryStopped = False,
) -> None:
    """Run a job in the foreground until its stream ends, or Ctrl-C.

    Example: headrace run job.toml --set train.batch_size=256
    """
    from headrace.service.cluster.child import early_forkserver

    with early_forkserver() as end_early:
        from headrace.service.monitor.display import choose_show
        from headrace.service.server.foreground_run import run_job
        from headrace.service.spec.job import load_job
        from headrace.timeline import parse_window

        window = None if trace is None else parse_window(trace)
        stopped = ExitCode.RETRY if retry_stopped else ExitCode.DRAINED
        loaded = load_job(job, overrides)
        if loaded.spec.cluster.launcher != "local":
            end_early()
        show = choose_show(ends=all(source.ends for source in loaded.spec.sources.values()))
        outcome = run_job(
            loaded,
            show,
            fresh=fresh,
            listen=listen,
            trace=window,
            health=health,
            metrics=metrics,
            log_dir=log_dir,
            tensorboard=tensorboard,
            stopped=stopped,
        )
    raise typer.Exit(outcome.code)
