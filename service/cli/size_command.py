"""`headrace size`: estimates memory, disk, network and cores of a job for a daily number of events."""

import json
import sys
from typing import Annotated

import typer

from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel

app = typer.Typer()

GIB = 1 << 30
MAX_SAMPLE = 10_000_000
"""As service.planning.job_size has it."""

Events = Annotated[
    float, typer.Option("--events", min=1, max=1e15, metavar="N", help="Events a day, as in 2e9.", show_default=False)
]
Ids = Annotated[
    float | None,
    typer.Option("--ids", min=1, max=1e15, metavar="N", help="Rows of all tables. Default: as the sample's ids grow."),
]
Days = Annotated[
    float, typer.Option("--days", min=1, max=36_500, metavar="N", help="Estimate the size after this many days.")
]
Sample = Annotated[int, typer.Option("--sample", min=1_000, max=MAX_SAMPLE, metavar="N", help="Events to measure.")]
Memory = Annotated[
    float, typer.Option("--shard-memory", min=1, max=65_536, metavar="GIB", help="Memory of a shard, in GiB.")
]
Peak = Annotated[
    float, typer.Option("--peak", min=1, max=100, metavar="RATIO", help="Rate of the busiest hour over the average.")
]


@app.command(rich_help_panel=Panel.TRAIN)
def size(
    job: SpecFile,
    events: Events,
    ids: Ids = None,
    days: Days = 30,
    sample: Sample = 100_000,
    shard_memory: Memory = 64,
    peak: Peak = 2,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    as_json: Json = False,
) -> None:
    """Estimate memory, disk, network and cores for a daily number of events, from a measured sample.

    It reads the first events of the stream through the pipe, trains them with one trainer and one shard in a store
    beside the job's, and removes that store.

    Example: headrace size job.toml --events 2e9 --days 30
    """
    from headrace.service.jobs.preflight import check_run
    from headrace.service.planning.job_size import Demand, format_size, size_job, size_message
    from headrace.service.planning.stream_facts import read_stream_facts
    from headrace.service.planning.training_facts import alone, measure_training
    from headrace.service.spec.job import load_job

    loaded = alone(load_job(job, overrides))
    check_run(loaded, fresh=True)
    print_printable(f"reading up to {sample:,} events through the pipe ...", file=sys.stderr)
    stream = read_stream_facts(loaded, sample)
    print_printable(f"training {stream.events:,} events with one trainer and one shard ...", file=sys.stderr)
    training = measure_training(loaded, stream.events)
    demand = Demand(events_a_day=events, days=days, ids=ids, peak=peak, machine_bytes=int(shard_memory * GIB))
    found = size_job(load_job(job, overrides).spec, stream, training, demand)
    if as_json:
        print(json.dumps(size_message(found, training), indent=2))
    else:
        print_printable(*format_size(found), sep="\n")
