"""What a mode of consistency costs in AUC: `python -m tests.bench.modes` trains criteo and news in each, as Markdown.

The examples as shipped, one pass over their data, by 1, 2 and 4 trainers with as many shards. A figure is the AUC of
the second half, each sample predicted before it is learnt. It does not depend on how fast the machine is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.living import DATA, EXAMPLES
from tests.bench.w1 import ROOT

ASYNC = ("train.mode=async", "dense.strategy=shards")
SGD = (
    "dense.strategy=shards",
    'dense.optimizer={kind="sgd",lr=0.05}',
    'tables.default.optimizer={kind="sgd",lr=1.0}',
    'tables.default.first_order_optimizer={kind="sgd",lr=1.0}',
)
"""Rates at which both examples learn well with sgd."""
MODES = {
    "`staleness = 0`": ("train.staleness=0",),
    "`staleness = 1`": ("train.staleness=1",),
    "`staleness = 4`": ("train.staleness=4",),
    "`async`": ASYNC,
    "`async`, `merge.pushes = 2`": (*ASYNC, "train.merge={pushes=2}"),
    "`sync`, all sgd": SGD,
    "`geo`, `k_steps = 1`": (*SGD, "train.mode=geo", "train.k_steps=1"),
    "`geo`, `k_steps = 10`": (*SGD, "train.mode=geo", "train.k_steps=10"),
    "`wire = bfloat16`": ("cluster.wire=bfloat16",),
}
"""The settings of each mode."""
FILES = {
    "criteo": ("sources.lines.paths", DATA / "criteo" / "criteo_80k.txt.gz"),
    "news": ("sources.impressions.paths", DATA / "ebnerd" / "impressions.jsonl.gz"),
}
"""The key of each example that names its events, and where they are."""


def auc(example: str, trainers: int, settings: Sequence[str]) -> float:
    """The AUC of the second half of an example's events, by so many trainers and shards; 1: with embedded rows."""
    key, events = FILES[example]
    shards = trainers if trainers > 1 else 0
    with tempfile.TemporaryDirectory() as store:
        given = [f'{key}=["{events}"]', f"store.path={store}", f"cluster={{trainers={trainers}, shards={shards}}}"]
        more = [word for setting in (*given, "train.matmul=mkl", *settings) for word in ("--set", setting)]
        command = [sys.executable, "-m", "headrace.service", "run", str(EXAMPLES / example / "job.toml"), *more]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if ended.returncode:
            raise RuntimeError(f"{example}, {settings}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        (task,) = json.loads((Path(store) / "report.json").read_text())["halves"]["last"].values()
        return float(task["auc"])


def main() -> None:
    """Print a line for each mode asked for, as it is known."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--example", choices=FILES, nargs="*", default=list(FILES))
    arguments.add_argument("--mode", choices=MODES, nargs="*", default=list(MODES))
    arguments.add_argument("--trainers", type=int, nargs="*", default=[1, 2, 4])
    given = arguments.parse_args()
    print("| | " + " | ".join(f"{trainers} trainer{'s' * (trainers > 1)}" for trainers in given.trainers) + " |")
    print("|---" * (1 + len(given.trainers)) + "|")
    for example in given.example:
        for mode in given.mode:
            found = [f"{auc(example, trainers, MODES[mode]):.4f}" for trainers in given.trainers]
            print(f"| {example}, {mode} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
