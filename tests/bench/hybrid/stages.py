"""A deep tower on one trainer, on two that sum gradients, and in two stages: `python -m tests.bench.hybrid.stages`.

The example criteo with `--layers` layers of `--width`, the first `--events` of its events. On this machine, then on two
test machines with a link of `--rate`, as Markdown. All processes share the cores of one machine. Rounds go through all
strategies in turn; the memory is that of a process in the mean over its time, and the largest. Needs root and iproute2,
or `--rate none`.
"""

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tests.bench.hybrid.linked_run import over_links, rate_of, sent_bytes
from tests.bench.living import EXAMPLES
from tests.bench.modes import FILES
from tests.bench.w1 import ROOT

POLL_S = 0.05
STAGES = 'dense.strategy="pipeline"'
STRATEGIES: dict[str, tuple[int, str]] = {
    "one trainer": (1, ""),
    "`all_reduce`": (2, ""),
    "`pipeline`, `micro_batches = 1`": (2, f"{STAGES} dense.pipeline.micro_batches=1"),
    "`pipeline`, `micro_batches = 4`": (2, STAGES),
    "`pipeline`, `micro_batches = 4`, `gpipe`": (2, f'{STAGES} dense.pipeline.schedule="gpipe"'),
    "`pipeline`, `micro_batches = 8`": (2, f"{STAGES} dense.pipeline.micro_batches=8"),
}
"""Trainers and settings; the first one is what the others are compared with."""


def some_events(folder: Path, number: int) -> Path:
    """The first events of the example."""
    path = folder / "data" / FILES["criteo"][1].name
    path.parent.mkdir()
    with gzip.open(FILES["criteo"][1]) as events, gzip.open(path, "wb", 1) as some:
        some.writelines(islice(events, number))
    return path


def here(events: Path, trainers: int, settings: Sequence[str]) -> tuple[float, list[tuple[float, float]]]:
    """Samples a second, and the median and the largest memory of each trainer, MiB."""
    with tempfile.TemporaryDirectory() as store:
        given = [f'sources.lines.paths=["{events}"]', f"store.path={store}", *settings]
        given.append(f"cluster={{trainers={trainers}, shards=1}}")
        command = [sys.executable, "-m", "headrace.service", "run", str(EXAMPLES / "criteo" / "job.toml")]
        command += [word for setting in given for word in ("--set", setting)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        seen: list[list[float]] = [[] for _ in range(trainers)]
        while process.poll() is None:
            for rank, memory in _memory(store):
                seen[rank].append(memory)
            time.sleep(POLL_S)
        if process.returncode:
            raise RuntimeError(f"{given} ended with {process.returncode}")
        return rate_of(json.loads((Path(store) / "report.json").read_text())), [
            (statistics.median(each), max(each)) for each in seen
        ]


def _memory(store: str) -> list[tuple[int, float]]:
    """Rank and MiB of the trainers of a job."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            named = re.search(re.escape(store) + r"\S*/trainer-(\d+)\.json", (place / "cmdline").read_text())
            said = re.search(r"VmRSS:\s+(\d+)", (place / "status").read_text()) if named else None
        except OSError:
            continue
        if named and said:
            found.append((int(named[1]), int(said[1]) / 1024))
    return found


def over_a_link(events: Path, trainers: int, rate: str, settings: Sequence[str]) -> tuple[float, float]:
    """Samples a second, and KB from trainer to trainer for each sample; a trainer and a shard on each machine."""
    report = over_links("criteo", events, trainers, rate, settings)
    between_trainers, _ = sent_bytes(report)
    return rate_of(report), between_trainers / report["samples"] / 1000


def lines(found: Mapping[str, Sequence[tuple[float, Any]]]) -> str:
    """Lines of Markdown: the rate, as a share of the first, and what was measured beside it in the last round."""
    first, *_ = found.values()
    rows = []
    for name, runs in found.items():
        ratios = [run[0] / base[0] for run, base in zip(runs, first, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        beside = runs[-1][1]
        said = f"{beside:,.1f}" if isinstance(beside, float) else ", ".join(f"{a:,.0f} to {b:,.0f}" for a, b in beside)
        rows.append(f"| {name} | {statistics.median(run[0] for run in runs):,.0f} | {spread} | {said} |")
    return "\n".join(rows)


def main() -> None:
    """Print two tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--strategy", choices=STRATEGIES, nargs="*", default=list(STRATEGIES))
    arguments.add_argument("--events", type=int, default=20_000)
    arguments.add_argument("--layers", type=int, default=7)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--rate", default="100mbit", help='of each machine\'s link, both ways; "none": here alone')
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    common = [
        f"model.settings.hidden={[given.width] * given.layers}",
        f"passes.max_events={given.events // 4}",
        *("train.threads=1", "train.matmul=mkl", "commit.every='1h'"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        events = some_events(Path(folder), given.events)
        for place in ("here", *([given.rate] if given.rate != "none" else [])):
            found: dict[str, list[tuple[float, Any]]] = {name: [] for name in given.strategy}
            for name in chain.from_iterable([given.strategy] * given.rounds):
                trainers, more = STRATEGIES[name]
                settings = [*common, *more.split()]
                run = here(events, trainers, settings) if place == "here" else None
                found[name].append(run or over_a_link(events, trainers, given.rate, settings))
                print(f"<!-- {place}, {name}: {found[name][-1]} -->", file=sys.stderr, flush=True)
            beside = "memory of trainers, MiB" if place == "here" else "KB between trainers for a sample"
            print(f"\n| {place} | samples/s | of the first | {beside} |\n|---|---|---|---|\n{lines(found)}", flush=True)


if __name__ == "__main__":
    main()
