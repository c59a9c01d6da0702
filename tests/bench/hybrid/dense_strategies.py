"""Strategies of the dense part over slow links: `python -m tests.bench.hybrid.dense_strategies`, as Markdown.

The examples criteo and news, one pass over their data. Each test machine has `--per-machine` trainers and shards and a
link of `--rate`; the object store for commits is on one more machine. Rounds go through all strategies in turn. A rate
is a median over rounds, with the lowest and the highest ratio to the first strategy of the same round; the AUC is that
of the second half, each sample predicted before it is learnt. All processes share the cores of one machine. Needs root
and iproute2. `--also NAME SETTINGS` adds a strategy: `--also k2 'dense.strategy="local_sgd" dense.k_steps=2'`.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.errors import SpecError
from headrace.service.spec.job import load_job
from tests.bench.hybrid.linked_run import over_links, rate_of, sent_bytes
from tests.bench.living import EXAMPLES
from tests.bench.modes import FILES

BATCH = {"criteo": 64, "news": 256}
"""Samples of a step of one trainer."""
STRATEGIES: dict[str, str] = {
    "`all_reduce`": "",
    "`overlap`": "dense.overlap=true",
    "`accumulate = 4`": "dense.accumulate=4",
    "`compression = fp16`": 'dense.compression="fp16"',
    "`compression = bf16`": 'dense.compression="bf16"',
    "`compression = powersgd`, `rank = 4`": 'dense.compression="powersgd"',
    "`compression = dgc`, `sparsity = 0.99`": 'dense.compression="dgc" dense.dgc.sparsity=0.99',
    "`compression = dgc`, `sparsity = 0.999`": 'dense.compression="dgc"',
    "`hierarchy = 2`": "dense.hierarchy.group=2",
    "`local_sgd`, `k_steps = 4`": 'dense.strategy="local_sgd" dense.k_steps=4',
    "`local_sgd`, `k_steps = 16`": 'dense.strategy="local_sgd" dense.k_steps=16',
    "`local_sgd`, `k_steps = 16`, `begin = 40`": 'dense.strategy="local_sgd" dense.k_steps=16 dense.begin=40',
    "`local_sgd`, `k_steps = 8`, `adaptive`": 'dense.strategy="local_sgd" dense.k_steps=8 dense.adaptive=true',
    "`sharded`": 'dense.strategy="sharded"',
    "`sharded`, `group = 2`": 'dense.strategy="sharded" dense.group=2',
    "`shards`": 'dense.strategy="shards"',
}
"""Settings by strategy; the first one is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Bytes are those sent for a full batch of every trainer: with accumulate = k, a k-th of a step."""

    rate: float
    """Samples a second, closes included."""
    dense_bytes: float
    """From trainers to trainers: the dense part, and what a step agrees on."""
    all_bytes: float
    auc: float

    def __str__(self) -> str:
        return f"{self.rate:,.0f} samples/s; {self.dense_bytes:,.0f} of {self.all_bytes:,.0f} B; AUC {self.auc:.4f}"


def measured(example: str, trainers: int, rate: str, settings: Sequence[str], per_machine: int) -> Measured:
    """Train an example once over its data."""
    common = (f"train.batch_size={BATCH[example]}", "train.threads=1", "train.matmul=mkl", "commit.every='1h'")
    report = over_links(example, FILES[example][1], trainers, rate, [*common, *settings], per_machine)
    samples, step_samples = report["samples"], BATCH[example] * trainers
    dense, every = (found / samples * step_samples for found in sent_bytes(report))
    (task,) = report["halves"]["last"].values()
    return Measured(rate_of(report), dense, every, float(task["auc"]))


def known(example: str, strategies: Mapping[str, str]) -> dict[str, str]:
    """The strategies that the job file has; those that it does not have are named."""
    found = {}
    for name, settings in strategies.items():
        try:
            load_job(EXAMPLES / example / "job.toml", [*settings.split(), "store.path=never-made"])
        except SpecError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        else:
            found[name] = settings
    return found


def lines(example: str, found: Mapping[str, Sequence[Measured]]) -> str:
    """Lines of Markdown."""
    first, *_ = found.values()
    rows = []
    for name, runs in found.items():
        ratios = [run.rate / base.rate for run, base in zip(runs, first, strict=True)]
        rate, dense, every = (
            statistics.median(getattr(run, each) for run in runs) for each in ("rate", "dense_bytes", "all_bytes")
        )
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        aucs = sorted({f"{run.auc:.4f}" for run in runs})
        traffic = f"{dense / 1000:,.0f} | {every / 1000:,.0f}"
        rows.append(f"| {example}, {name} | {rate:,.0f} | {spread} | {traffic} | {', '.join(aucs)} |")
    return "\n".join(rows)


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--example", choices=FILES, nargs="*", default=list(FILES))
    arguments.add_argument("--strategy", choices=STRATEGIES, nargs="*", default=list(STRATEGIES))
    arguments.add_argument("--also", action="append", nargs=2, default=[], metavar=("NAME", "SETTINGS"))
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in every job")
    arguments.add_argument("--trainers", type=int, default=4)
    arguments.add_argument("--per-machine", type=int, default=1, help="trainers, and shards, of one machine")
    arguments.add_argument("--rate", default="100mbit", help="of each machine's link, both ways")
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    if given.trainers % given.per_machine:
        arguments.error(f"--trainers is {given.trainers}, no multiple of --per-machine {given.per_machine}")
    print(f"{given.trainers} trainers and shards, links of {given.rate}.\n")
    print(
        "| | samples a second | of the first | dense, KB a batch | all, KB a batch | AUC |\n|---|---|---|---|---|---|"
    )
    for example in given.example:
        common = (example, given.trainers, given.rate)
        strategies = known(example, {name: STRATEGIES[name] for name in given.strategy} | dict(given.also))
        found: dict[str, list[Measured]] = {name: [] for name in strategies}
        for name, settings in chain.from_iterable([strategies.items()] * given.rounds):
            found[name].append(measured(*common, [*given.set, *settings.split()], given.per_machine))
            print(f"<!-- {example}, {name}: {found[name][-1]} -->", file=sys.stderr, flush=True)
        print(lines(example, found), flush=True)


if __name__ == "__main__":
    main()
