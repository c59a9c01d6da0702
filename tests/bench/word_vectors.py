"""The gain of exchanges after several batches, on vectors of words: `python -m tests.bench.word_vectors`, as Markdown.

The job of the example `words` over pairs that are made already, by 2 trainers and 2 shards: as `headrace run` starts
them on this machine, then on four test machines with links of each rate. The modes run in turn. A rate is over all
passes but the first, closes included; a ratio compares runs of one round on one network with `async`. Bytes are those
that trainers send to shards and receive from them. All processes share the cores of this machine, so keep it quiet.
Test machines need root and iproute2.
"""

import argparse
import importlib.util
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.bench.mode_rates import MIN_PASSES, closes_of
from tests.bench.w1 import ROOT
from tests.machines import network
from tests.machines.external_job import USUAL_TIMEOUT_S, ExternalJob, object_store

EXAMPLE = ROOT / "deploy" / "examples" / "words"
TRAINERS = SHARDS = 2
BATCH = 256
NUM_WORDS = 20_000
LOOPBACK = "loopback"
START_S = 120.0


def geo(k_steps: int, staleness: int = 0) -> tuple[str, ...]:
    """The settings of mode "geo"."""
    return ('train.mode="geo"', f"train.k_steps={k_steps}", f"train.staleness={staleness}")


MODES: Mapping[str, tuple[str, ...]] = {
    "`async`": ('train.mode="async"',),
    "`sync`": (),
    "`geo`, `k_steps = 1`": geo(1),
    "`geo`, `k_steps = 10`": geo(10),
    "`geo`, `k_steps = 10`, `staleness = 1`": geo(10, 1),
    "`geo`, `k_steps = 100`": geo(100),
    "`geo`, `k_steps = 100`, `staleness = 1`": geo(100, 1),
}
"""The first one is what the others are compared with."""


def module_of_example(name: str) -> Any:
    """A program of the example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_pairs(to: Path, count: int) -> None:
    """`count` pairs of neighbours in sentences of the example, in their order, as MultiSlot text."""
    made, corpus, left = module_of_example("generator").Pairs(), module_of_example("corpus"), count
    with to.open("w") as lines:
        while left:
            sentences = corpus.sentences(corpus.AT_ONCE, NUM_WORDS, left).tolist()
            columns = made.generate_columns([" ".join(map(str, each)).encode() for each in sentences])
            pairs = np.stack([columns["word"], columns["near"]], 1)[:left].tolist()
            lines.writelines(f"1 {word} 1 {near} 1 1\n" for word, near in pairs)
            left -= len(pairs)


def settings_of(steps: int, given: Sequence[str]) -> list[str]:
    """Of the job; a pass has so many batches of each trainer."""
    return [
        'sources.sentences.paths=["pairs.txt"]',
        'pipe={command=["cat"]}',
        f"passes.max_events={steps * TRAINERS * BATCH}",
        f"train.batch_size={BATCH}",
        "train.threads=1",
        'train.matmul="mkl"',
        f"tables.default.optimizer.lr={BATCH / 50}",
        'dense.strategy="shards"',
        "metrics.halves=false",
        'commit.every="1h"',
        "exports={}",
        *given,
    ]


@contextmanager
def here(folder: Path, settings: Sequence[str]) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A run on this machine: its store and its launcher."""
    words = [word for each in settings for word in ("--set", each)]
    size = ("--set", f"cluster.trainers={TRAINERS}", "--set", f"cluster.shards={SHARDS}", "--set", 'store.path="store"')
    command = [sys.executable, "-m", "headrace.service", "run", str(folder / "job.toml"), *words, *size]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield folder / "store", process
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(folder / "store", ignore_errors=True)


@contextmanager
def on_machines(folder: Path, settings: Sequence[str], rate: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run with each trainer and each shard on a machine of its own, behind a link of this rate."""
    with network.machines(TRAINERS + SHARDS + 1) as (*machines, disk), object_store(disk) as address:
        for machine in machines[:TRAINERS]:
            for name in ("job.toml", "pairs.txt"):
                shutil.copy(folder / name, machine.tmp)
        size = {"trainers": TRAINERS, "shards": SHARDS, "node_timeout_s": USUAL_TIMEOUT_S}
        with ExternalJob(machines[0], address("words"), *settings, **size) as job:
            token, launcher = job.token(), job.run()
            launcher.until("waits for", START_S)
            for machine in machines:
                machine.shape(rate=rate)
            for number, machine in enumerate(machines):
                job.agent(machine, "--role", "trainer" if number < TRAINERS else "shard", token=token)
            yield job.head.tmp / "store", launcher.process
            (folder / "output").write_text(launcher.said)


class Measured(NamedTuple):
    """What one run reaches."""

    samples_s: float
    sample_bytes: float


def measured(folder: Path, where: str, steps: int, passes: int, given: Sequence[str]) -> Measured:
    """One run."""
    settings = settings_of(steps, given)
    run = here(folder, settings) if where == LOOPBACK else on_machines(folder, settings, where)
    with run as (store, process):
        closes = [close.at_s for close in closes_of(store / "log", process)]
        if process.returncode == 0 and len(closes) == passes:
            report = json.loads((store / "report.json").read_text())
    if process.returncode or len(closes) < passes:
        raise RuntimeError((folder / "output").read_text()[-3000:])
    samples = (passes - 1) * steps * TRAINERS * BATCH
    return Measured(samples / (closes[-1] - closes[0]), sent_bytes(report) / report["samples"])


def sent_bytes(report: Mapping[str, Any]) -> float:
    """Bytes between trainers and shards, also those in memory that they share."""
    links = [link for name in report["links"] if name.startswith("trainer") for link in report["links"][name].items()]
    own = [link for peer, link in links if peer.startswith("shard")]
    return sum(value for link in own for name, value in link.items() if name.endswith("_bytes"))


def main() -> None:
    """Print a line for each network and mode: the median rate, and its ratio to the first mode with its range."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run that goes on is ended
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--network", nargs="*", default=[LOOPBACK, "1gbit", "100mbit"])
    arguments.add_argument("--mode", choices=MODES, nargs="*", default=list(MODES))
    arguments.add_argument("--steps", type=int, default=400, help="batches of each trainer in a pass")
    arguments.add_argument("--passes", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    if given.passes < MIN_PASSES:
        arguments.error(f"--passes is {given.passes}; at least {MIN_PASSES}")
    if any(each != LOOPBACK for each in given.network) and (reason := network.why_not()):
        arguments.error(f"no test machines: {reason}; --network {LOOPBACK} needs none")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(EXAMPLE / "job.toml", folder)
        write_pairs(folder / "pairs.txt", given.passes * given.steps * TRAINERS * BATCH)
        print("| network | mode | samples a second | of the first | bytes a sample |\n|---|---|---|---|---|")
        for where in given.network:
            rounds: list[list[Measured]] = []
            for _ in range(given.rounds):
                rounds.append([measured(folder, where, given.steps, given.passes, MODES[each]) for each in given.mode])
                print(json.dumps({where: rounds[-1]}), file=sys.stderr, flush=True)
            for number, mode in enumerate(given.mode):
                ratios = [runs[number].samples_s / runs[0].samples_s for runs in rounds]
                rate, size = (
                    statistics.median(found) for found in zip(*(runs[number] for runs in rounds), strict=True)
                )
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"| {where} | {mode} | {rate:,.0f} | {spread} | {size:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
