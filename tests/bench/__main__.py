"""`make bench`: every figure of the project in one run, as a table and as JSON in tests/bench/results.

`python -m tests.bench [NAME ...] [--rounds 5] [--rows 1000000]`; `--only NAME ...` is the same. Each training figure is
the median of ratios to the yardstick, the two run in turn.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench import admission as admitting
from tests.bench import aging as ageing
from tests.bench import bench_shards, beyond_memory, broker, job_log, load, parsing
from tests.bench import commits as committing
from tests.bench import exports as exporting
from tests.bench import freshness as freshening
from tests.bench import limit as limiting
from tests.bench import matmul as multiplying
from tests.bench import recovery as recovering
from tests.bench import resize as resizing
from tests.bench import serving as answering
from tests.bench.w1 import BLOCK, ROOT, baseline, job, make

RESULTS = ROOT / "tests" / "bench" / "results"
CACHE = ROOT / ".cache" / "bench"
AMD = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
TARGETS = {
    ("embedded", 64): 1.6 if AMD else 1.4,
    ("embedded", 400): 1.65 if AMD else 1.15,
    ("2 shards", 64): 1.1,
    ("2 shards", 400): 1.4 if AMD else 1.1,
}
"""Ratios of W1 to plain PyTorch, by place of the rows and width of the layers. MKL is far quicker on a Xeon."""
STEPS = {64: 175, 400: 100}


def processor() -> str:
    """The processor's name; on Linux with its make."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return names[0] if names else platform.machine()


def rate(npz: Path, hidden: int, num_shards: int, steps: int) -> float:
    """Samples a second of W1 in a fresh process."""
    command = [sys.executable, "-m", "tests.bench.training", "--npz", str(npz), "--hidden", str(hidden)]
    command += ["--shards", str(num_shards), "--steps", str(steps)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return float(json.loads(printed.splitlines()[-1])["samples_per_s"])


def w1(rounds: int, rows: int) -> dict[str, dict]:
    """W1 through the embedded shard and through two shards, as ratios to plain PyTorch."""
    npz = make(CACHE / f"w1-{rows}", rows)
    found = {}
    for hidden, steps in STEPS.items():
        rates: dict[str, list[float]] = {"plain PyTorch": [], "embedded": [], "2 shards": []}
        for _ in range(rounds):
            rates["plain PyTorch"].append(baseline(npz, hidden, steps))
            rates["embedded"].append(rate(npz, hidden, 0, steps))
            rates["2 shards"].append(rate(npz, hidden, 2, steps))
        theirs = rates.pop("plain PyTorch")
        for where, ours in rates.items():
            ratios = sorted(our / their for our, their in zip(ours, theirs, strict=True))
            found[f"W1 {where}, hidden {hidden}"] = {
                "ratio": statistics.median(ratios),
                "spread": [ratios[0], ratios[-1]],
                "target": TARGETS[where, hidden],
                "samples_per_s": statistics.median(ours),
                "pytorch_samples_per_s": statistics.median(theirs),
            }
    return found


def text(rounds: int, rows: int) -> dict[str, dict]:
    """MultiSlot text files -> `cat` -> training, hidden 64, all in one trainer."""
    folder = CACHE / "w1-text"
    make(folder, 200_000, text_parts=8)
    spec = job(64, folder, 0)
    spec["sources"] = {"rows": {"kind": "files", "paths": [str(folder / "part-*.txt")]}}
    spec["slots"][0]["name"], spec["passes"] = "dense", {"max_events": 10 * BLOCK}
    rates = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            begin = time.perf_counter()
            report = parsing.run_job(spec, Path(name))
            rates.append((report["samples"] / report["wall_s"], time.perf_counter() - begin))
    return {"text -> cat -> training": {"samples_per_s": statistics.median(r for r, _ in rates), "target": 150_000}}


def kafka(rounds: int, rows: int) -> dict[str, dict]:
    """The same events from Kafka and from a file -> `cat` -> training, in turn, hidden 64, all in one trainer."""
    return {"Kafka -> cat -> training, against a file": broker.figures(rounds)}


def shards(rounds: int, rows: int) -> dict[str, dict]:
    """Rows' kernels, the exchange of 28,000 rows, memory per million rows."""
    return {
        "rows: kernels, one core": bench_shards.kernels(),
        "exchange of 28,000 rows": bench_shards.exchange_28k(),
        "the same, 2 shards, by kind of wire": bench_shards.wire(rounds),
        "memory": bench_shards.memory_per_million_rows() | {"target_mb": 120},
    }


def pipes(rounds: int, rows: int) -> dict[str, dict]:
    """The parser and the examples' generators alone."""
    return parsing.figures(CACHE)


def matmul(rounds: int, rows: int) -> dict[str, dict]:
    """Matrix products by MKL and by oneDNN."""
    return multiplying.figures(rounds)


def limit(rounds: int, rows: int) -> dict[str, dict]:
    """The limit of this machine for W1, and the product's share of it on each road."""
    return limiting.figures(CACHE, rounds, rows, STEPS)


def commits(rounds: int, rows: int) -> dict[str, dict]:
    """What commits cost training."""
    return committing.figures(make(CACHE / f"w1-{rows}", rows))


def long_commits(rounds: int, rows: int) -> dict[str, dict]:
    """Ten minutes with commits of 200,000 rows every 30 s, and without them, in turn."""
    return committing.rates(make(CACHE / f"w1-{rows}", rows), "--every", "30", "--seconds", "600")


def recovery(rounds: int, rows: int) -> dict[str, dict]:
    """How long a job stands still after a death, and how fast it replays."""
    return recovering.figures(CACHE)


def resize(rounds: int, rows: int) -> dict[str, dict]:
    """How long training stands still when a job is resized."""
    return resizing.figures(CACHE)


def memory(rounds: int, rows: int) -> dict[str, dict]:
    """Training with more rows than memory."""
    return beyond_memory.figures(CACHE)


def memory_curve(rounds: int, rows: int) -> dict[str, dict]:
    """The same with more and more rows."""
    return beyond_memory.curve(CACHE)


def admission(rounds: int, rows: int) -> dict[str, dict]:
    """Keys a second that admission decides."""
    return admitting.figures()


def aging(rounds: int, rows: int) -> dict[str, dict]:
    """What a day's tick and a shrink keep waiting, and how fast rows go."""
    return ageing.figures(CACHE)


def exports(rounds: int, rows: int) -> dict[str, dict]:
    """How long exports take, and what they cost training."""
    return exporting.figures(CACHE) | exporting.rates(CACHE, make(CACHE / f"w1-{rows}", rows))


def serving(rounds: int, rows: int) -> dict[str, dict]:
    """How fast a replica answers while versions come."""
    return {"replica: requests of one sample, one core": answering.figures(num_rows=rows)}


def freshness(rounds: int, rows: int) -> dict[str, dict]:
    """How soon events can be asked about."""
    return {"event -> servable, 2,000 events/s": freshening.figures()}


def readers(rounds: int, rows: int) -> dict[str, dict]:
    """What a service's readers cost training, and how soon they are answered."""
    return load.figures()


def logs(rounds: int, rows: int) -> dict[str, dict]:
    """How fast a job's log is read, whole and page by page."""
    return job_log.figures()


PARTS: dict[str, Callable[[int, int], dict[str, dict]]] = {
    "pipes": pipes,
    "shards": shards,
    "matmul": matmul,
    "text": text,
    "kafka": kafka,
    "w1": w1,
    "commits": commits,
    "recovery": recovery,
    "resize": resize,
    "memory": memory,
    "admission": admission,
    "aging": aging,
    "exports": exports,
    "serving": serving,
    "freshness": freshness,
    "load": readers,
    "log": logs,
}
LONG_PARTS = {"limit": limit, "long-commits": long_commits, "memory-curve": memory_curve}
"""Asked for by name only; `make soak` asks for some."""


def main() -> None:
    """Run the parts asked for; print and keep the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help="the same as --only")
    arguments.add_argument("--only", nargs="*", choices=sorted(PARTS | LONG_PARTS), default=[])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    given = arguments.parse_args()
    if unknown := set(given.names) - set(PARTS | LONG_PARTS):
        arguments.error(f"unknown {sorted(unknown)}; known {sorted(PARTS | LONG_PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what a part has started is ended
    console = Console()
    results: dict[str, dict] = {}
    for part in [*given.names, *given.only] or sorted(PARTS):
        console.print(f"{part} ...")
        results |= (PARTS | LONG_PARTS)[part](given.rounds, given.rows)
    table = Table("what", "figures", title=f"{processor()}, {os.cpu_count()} cores")
    for name, figures in results.items():
        table.add_row(name, json.dumps(figures, indent=1).strip("{}\n").replace('"', ""))
    console.print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(results, indent=2))
    console.print(f"kept as {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
