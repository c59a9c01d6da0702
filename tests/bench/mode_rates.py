"""The gain in speed of each mode of consistency: `python -m tests.bench.mode_rates`, as Markdown.

W1 as text through `cat`, by `--trainers` over 2 shards as `headrace run` starts them, in each mode in turn. A rate is
over all passes but the first, closes included; a ratio compares two runs of one round with each other. Cores that are
busy are those of the whole machine meanwhile, so keep it quiet. Where the time of rank 0 went is said on stderr.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.w1 import BLOCK, ROOT, job, make

SGD = {"dense": "shards", "dense_optimizer": {"kind": "sgd", "lr": 0.05}}
MODES: Mapping[str, Mapping[str, Any]] = {
    "`sync`, dense by all-reduce": {},
    "`sync`, `staleness = 1`": {"staleness": 1},
    "`sync`, dense on shards": {"dense": "shards"},
    "`async`": {"mode": "async", "dense": "shards"},
    "`async`, `merge.pushes = 2`": {"mode": "async", "dense": "shards", "merge": {"pushes": 2}},
    "`sync`, all sgd": SGD,
    "`geo`, `k_steps = 4`": {**SGD, "mode": "geo", "k_steps": 4},
}
"""The settings of each mode in `train`; the first one asked for is what the others are compared with."""
POLL_S = 0.01
MIN_PASSES = 3
"""The first one is left out, and a rate needs two closes more."""


class Close(NamedTuple):
    """The end of a pass."""

    at_s: float
    busy_s: float
    """Core seconds that the machine has spent since it was started."""


class Speed(NamedTuple):
    """What one run reaches."""

    samples_s: float
    cores: float
    """How many cores were busy."""


def speed(texts: Path, hidden: int, trainers: int, pass_events: int, settings: Mapping[str, Any]) -> Speed:
    """One run, measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = job(hidden, folder / "store", 1)
        spec["sources"] = {"rows": {"kind": "files", "paths": [str(texts / "part-*.txt")]}}
        spec["passes"]["max_events"] = pass_events
        spec["train"] = {"batch_size": 1024, "threads": 1, "matmul": "mkl", **settings}
        if settings.get("dense_optimizer"):
            spec["tables"]["default"]["optimizer"] = {"kind": "sgd", "lr": 1.0}
        spec["cluster"] = {"trainers": trainers, "shards": 2}
        spec["commit"] = {"every": "1h"}
        given = [word for key, value in spec.items() for word in ("--set", f"{key}={toml(value)}")]
        (folder / "job.toml").write_text("")
        command = [sys.executable, "-m", "headrace.service", "run", str(folder / "job.toml"), *given]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            closes = closes_of(folder / "store" / "log", process)
        if process.returncode or len(closes) < MIN_PASSES:
            raise RuntimeError((folder / "output").read_text()[-2000:])
        spent = json.loads((folder / "store" / "report.json").read_text())["time_s"]
        print(f"{settings}: {spent}", file=sys.stderr, flush=True)
        spent_s, busy_s = closes[-1].at_s - closes[0].at_s, closes[-1].busy_s - closes[0].busy_s
        return Speed((len(closes) - 1) * pass_events / spent_s, busy_s / spent_s)


def closes_of(log: Path, process: subprocess.Popen[bytes]) -> list[Close]:
    """The closes of a run, until the process ends."""
    seen: list[Close] = []
    while process.poll() is None:
        found = sum(path.read_bytes().count(b'"kind":"close"') for path in log.glob("*.log"))
        if found > len(seen):
            seen += [Close(time.perf_counter(), busy_s())] * (found - len(seen))
        time.sleep(POLL_S)
    return seen


def busy_s() -> float:
    """Core seconds that the machine has spent in user and system mode since it was started."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def toml(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def main() -> None:
    """Print a line for each mode: the median rate, its ratio to the first one with the lowest and highest, cores."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--mode", choices=MODES, nargs="*", default=list(MODES))
    arguments.add_argument("--trainers", type=int, default=2)
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--pass-events", type=int, default=4 * BLOCK)
    arguments.add_argument("--passes", type=int, default=10)
    given = arguments.parse_args()
    if given.passes < MIN_PASSES:
        arguments.error(f"--passes is {given.passes}; at least {MIN_PASSES}")
    of_all = (given.hidden, given.trainers, given.pass_events)
    with tempfile.TemporaryDirectory() as name:
        folder = make(Path(name), given.passes * given.pass_events, text_parts=2).parent
        rounds: list[list[Speed]] = []
        for _ in range(given.rounds):
            rounds.append([speed(folder, *of_all, MODES[each]) for each in given.mode])
            print(f"{[round(found.samples_s) for found in rounds[-1]]}", file=sys.stderr, flush=True)
    print("| mode | samples a second | of the first | cores busy |\n|---|---|---|---|")
    for number, mode in enumerate(given.mode):
        ratios = [speeds[number].samples_s / speeds[0].samples_s for speeds in rounds]
        samples_s, cores = (statistics.median(found) for found in zip(*[each[number] for each in rounds], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {mode} | {samples_s:,.0f} | {spread} | {cores:.2f} |")


if __name__ == "__main__":
    main()
