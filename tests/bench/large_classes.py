"""Speed and memory of a softmax over many items by mode: `python -m tests.bench.large_classes`, as Markdown.

The dense part alone: a perceptron on 128 floats, items of 64 numbers, Adagrad, batches of 256 samples for each rank, on
gloo over loopback with one thread each. A rate is over the steps after the first; memory is the most of one rank, less
that of a process that has loaded torch.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.trainer.collectives.ranks import Ranks, SingleRank, TorchRanks
from headrace.trainer.dense.strategy import dense_strategy
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseAdagrad
from headrace.trainer.models.contract import Inputs, Shape, Targets
from headrace.trainer.models.next_item import NextItem
from headrace.trainer.models.settings import NextItemSettings

ROOT = Path(__file__).resolve().parents[2]
WIDTH, SAMPLES, CPU = 128, 256, torch.device("cpu")
MODES = {"full": {}, "divided": {}, "sampled": {"samples": 8192, "recall_at": ()}}


def peak_mib() -> int:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measure(mode: str, classes: int, steps: int, ranks: Ranks) -> dict[str, float]:
    """Samples a second of all ranks, and MiB of this one."""
    before, name = peak_mib(), "next"
    torch.manual_seed(3)
    given = {"recall_at": (10,), **MODES[mode]}
    model = NextItem(Shape((), (), (("x", WIDTH),), (name,)), NextItemSettings(classes=classes, mode=mode, **given))
    model.divide(ranks, CPU)
    config = DenseSection(optimizer=DenseAdagrad(kind="adagrad"))
    strategy = dense_strategy(model, config, ranks)
    draw, begin_s, ones = torch.Generator().manual_seed(ranks.rank), 0.0, torch.ones(SAMPLES)
    for step in range(steps + 1):
        if step == 1:
            begin_s = time.monotonic()
        dense, wanted = torch.randn(SAMPLES, WIDTH, generator=draw), torch.randint(classes, (SAMPLES,), generator=draw)
        inputs = Inputs({}, None, torch.zeros(SAMPLES, 0), {}, dense)
        targets = Targets({name: ones}, {name: ones}, {}, {name: wanted})
        strategy.clear()
        outputs = model(inputs)
        (model.losses(outputs, inputs, targets)[name].sum() / (SAMPLES * ranks.world)).backward()
        model.measures(outputs, inputs, targets)
        assert strategy.finite()
        strategy.after_backward(step, 1.0)
        strategy.wait()
        strategy.step()
    rate = steps * SAMPLES * ranks.world / (time.monotonic() - begin_s)
    return {"samples_per_s": rate, "mib": peak_mib() - before}


def as_rank(mode: str, classes: int, steps: int, rank: int, world: int, port: int) -> None:
    """Measure in this process, and print the result."""
    torch.set_num_threads(1)
    ranks: Ranks = SingleRank()
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
        ranks = TorchRanks(rank, world, store, "lo", CPU, 300.0)
    print(json.dumps(measure(mode, classes, steps, ranks)), flush=True)
    ranks.close()


def of_ranks(mode: str, classes: int, steps: int, world: int, port: int) -> dict[str, float]:
    """The rate of some ranks, and the memory of the one that needs most."""
    command = [sys.executable, "-m", "tests.bench.large_classes", "--rank"]
    started = [
        subprocess.Popen(
            [*command, json.dumps([mode, classes, steps, rank, world, port])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [json.loads(each.communicate()[0]) for each in started]
    return {"samples_per_s": min(each["samples_per_s"] for each in said), "mib": max(each["mib"] for each in said)}


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        as_rank(*json.loads(given.rank))
        return
    print("| items | mode | trainers | samples/s | MiB of a trainer |\n|---|---|---|---|---|", flush=True)
    for number, (classes, mode, world) in enumerate(product(given.classes, given.modes, given.worlds)):
        found = of_ranks(mode, classes, given.steps, world, 29_700 + number)
        print(f"| {classes:,} | {mode} | {world} | {found['samples_per_s']:,.0f} | {found['mib']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
