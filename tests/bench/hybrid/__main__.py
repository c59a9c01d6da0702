"""How much time all-reduce of the dense part saves against parameter servers: `python -m tests.bench.hybrid`.

Source: the PS-Hybrid paper. Its figures 7 to 9 are measured again, with its models at dim 128 on criteo, in machines
of tests with links of `--rate`. Rounds alternate between strategies, and a figure is the median. Prints Markdown. All
processes share the cores of one machine: where computing hides the wire, a lower `--rate` restores the paper's share.
Needs root and iproute2. Avazu, the paper's second set of data, is not to be had.
"""

import argparse
import statistics
from collections.abc import Sequence

from dataset.spec.schema import Schema
from service.spec.job import load_job
from tests.bench.hybrid.cluster import HERE, Cluster, Measured, measured
from trainer.control.job_spec import shape_of
from trainer.models.registry import load_model


def _deep_crossing(inner: int) -> tuple[str, ...]:
    return (f'model={{name="deep_crossing", settings={{hidden=[{inner}, {inner}, {inner}]}}}}',)


MODELS = {
    "dcn": ('model={name="dcn", settings={cross_layers=5, hidden=[256, 256, 256]}}',),
    "wide_deep": ('model={class="models:WideDeep"}',),
    "deep_crossing": _deep_crossing(128),
    "deep_crossing_1024": _deep_crossing(1024),
    "small": ('model={name="wide_deep", settings={hidden=[128, 64]}}', "tables.default.dim=8"),
}
"""Settings by the name of a model. The last one is not of the paper: it shows modes where messages are small."""
ON_SERVERS = 'dense.strategy="shards"'
STRATEGIES: dict[str, tuple[str, ...]] = {
    "hybrid": (),
    "servers": (ON_SERVERS,),
    "servers, async": (ON_SERVERS, 'train.mode="async"'),
    "hybrid, staleness 1": ("train.staleness=1",),
    "hybrid, bfloat16": ("cluster.wire=bfloat16",),
    "hybrid, staleness 1, bfloat16": ("train.staleness=1", "cluster.wire=bfloat16"),
    "servers, geo": (ON_SERVERS, 'train.mode="geo"', "train.k_steps=10"),
}
"""Settings by strategy; the first one saves time against the others, or loses it."""


def table(model: str, cluster: Cluster, strategies: Sequence[str], steps: int, rounds: int) -> str:
    """Lines of Markdown for a model."""
    found: dict[str, list[Measured]] = {strategy: [] for strategy in strategies}
    for _ in range(rounds):
        for strategy in strategies:
            given = ("train.matmul=mkl", *MODELS[model], *STRATEGIES[strategy])
            found[strategy].append(measured(cluster, steps, given))
            print(f"<!-- {model}, {strategy}: {found[strategy][-1]} -->", flush=True)
    first = {name: _median(found[strategies[0]], name) for name in ("step_ms", "all_mb", "trainers_mb")}
    lines = []
    for strategy, results in found.items():
        step, traffic = _median(results, "step_ms"), _median(results, "all_mb")
        cells = [f"{_median(results, name):.0f}" for name in ("step_ms", "compute_ms", "wire_ms")]
        dense = traffic - (first["all_mb"] - first["trainers_mb"])
        cells += [f"{traffic:.1f}", f"{dense / dense_traffic_mb(model, strategy, cluster.trainers):.2f}"]
        saved = f"{100 * (1 - first['step_ms'] / step):.0f} %" if strategy != strategies[0] else ""
        cells += [f"{_median(results, 'auc'):.4f}", saved]
        lines.append(f"| {model}, {cluster.trainers} | {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def dense_traffic_mb(model: str, strategy: str, trainers: int) -> float:
    """Traffic of the dense part in a step by the paper's formula, sent and received by all nodes."""
    job = load_job(HERE / "job.toml", [*MODELS[model], "store.path=never-made"]).spec
    shape = shape_of(Schema.of(job.slots), job.tables, [task.name for task in job.tasks])
    parameters = sum(each.numel() for each in load_model(job.model, shape, HERE).parameters())
    times = trainers if ON_SERVERS in STRATEGIES[strategy] else trainers - 1
    return 4 * parameters * times * 4 / 1e6


def _median(results: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(result, name) for result in results)


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    arguments.add_argument("--strategy", choices=STRATEGIES, nargs="*", default=list(STRATEGIES))
    arguments.add_argument("--trainers", type=int, nargs="*", default=[8])
    arguments.add_argument("--rate", default="1gbit", help="of each machine's link, both ways, such as 100mbit")
    arguments.add_argument("--delay-ms", type=float, default=0.0, help="of the link of every second trainer")
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    print(f"Links of {given.rate}, one delayed by {given.delay_ms:g} ms. Times in ms a step, traffic in MB a step.\n")
    print(
        "| model, trainers | | step | computing | exchange | traffic | dense, by formula | AUC | saved by the first |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in given.model:
        for trainers in given.trainers:
            cluster = Cluster(trainers=trainers, rate=given.rate, delay_ms=given.delay_ms)
            print(table(model, cluster, given.strategy, given.steps, given.rounds), flush=True)


if __name__ == "__main__":
    main()
