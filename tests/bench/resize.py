"""How long training stands still when a job is resized, and how long it takes until the new workers train.

`python -m tests.bench.resize --rows 1000000 [--restart] [--pace 1] [--power 24] [--cache F]` runs in a process of its
own and prints JSON. It goes on from a store with so many rows on two shards, whose stream makes no new ones, and is
resized mid-stream: 2 -> 3 -> 1 -> 2 shards, then 1 -> 3 -> 2 trainers. With `--restart` the old workers end before the
new ones start. With `--pace` the stream brings a pass in so many seconds, so that the new workers find free cores.
`--power`: how unevenly ids are drawn (tests.bench.recovery). With 4, the worst case here, a pass of 213,000 ids touches
134,000 of 1 M rows; with 24, where the id of rank n comes about n^-0.96 as often as the first, 42,000.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.rpc.job_client import JobClient
from tests.bench.recovery import POWER, Watched, job_on, linked, prepared, run, samples_in
from tests.bench.w1 import ROOT

SIZES: tuple[Mapping[str, int], ...] = (
    {"shards": 3},
    {"shards": 1},
    {"shards": 2},
    {"trainers": 3},
    {"trainers": 2},
)
PASSES_BETWEEN = 8
"""Passes that are trained between two resizes, beside the first one."""
TARGETS_S = {1_000_000: 0.2, 10_000_000: 1.0}
"""The longest pause of training that is aimed at, by rows."""


def measure(
    cache: Path,
    num_rows: int,
    *,
    standby: bool,
    sizes: Sequence[Mapping[str, int]] = SIZES,
    pace_s: float = 0.0,
    power: int = POWER,
) -> dict[str, Any]:
    base = prepared(cache, num_rows, 2, grows=False, power=power)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=cache) as name:
        store = Path(name) / base.name
        shutil.copytree(base, store, copy_function=linked)
        path, _ = samples_in(cache, num_rows, grows=False, power=power)

        def watch(watched: Watched) -> None:
            watched.until(lambda status: status.get("state") == "training")
            before = Closes.watched(watched)
            for number, size in enumerate(sizes):
                ((key, workers),) = size.items()
                found[f"{number + 1}: {workers} {key}"], before = resized(watched, store, size, before)
            watched.stop()

        run(job_on(path, store, 2, pace_s), watch, standby=standby)
    steps = list(found.values())
    return found | {
        "pause_s_most": max(each["pause_s"] for each in steps),
        "slowest_pass_s_most": max(each["slowest_pass_s"] for each in steps),
        "moved_s_most": max(each["moved_s"] for each in steps),
    }


def resized(
    watched: Watched, store: Path, size: Mapping[str, int], closes: "Closes"
) -> tuple[dict[str, float], "Closes"]:
    """Resize, and watch some passes of the new workers; `closes` are those of the workers before them.

    The pause is the time between the last close of the old workers and the first one of the new, beyond that of a usual
    pass of the new; the slowest pass is one of those that the old workers trained meanwhile.
    """
    _, first = watched.until(lambda status: status["state"] == "training" and bool(status.get("version")))
    generation, usual_s = first["generation"], closes.usual_s
    asked_s = time.monotonic()
    with JobClient(store).rank0() as client:
        operation = {"op": "resize", "id": uuid.uuid4().hex, **size}
        client.operate({"do": "ask", "operation": operation}, Deadline.after(30))
    watched.until(lambda status: closes.saw(status) > 0 and status["generation"] > generation)
    last = max(closes.at_s)
    moved_s, _ = watched.until(lambda status: closes.saw(status) > 0 and max(closes.at_s) > last)
    *before, (gap_s, passes) = closes.gaps()
    slowest_s = max((each_s - num * usual_s for each_s, num in before[PASSES_BETWEEN:]), default=0.0)
    after = Closes.watched(watched)
    found = {
        "pause_s": max(0.0, gap_s - passes * after.usual_s),
        "slowest_pass_s": max(0.0, slowest_s),
        "moved_s": moved_s - asked_s,
        "usual_pass_s": after.usual_s,
    }
    return found, after


class Closes:
    """When each close was seen first."""

    def __init__(self) -> None:
        self.at_s: dict[int, float] = {}

    @classmethod
    def watched(cls, watched: Watched) -> "Closes":
        """Those of some passes from now on."""
        found = cls()
        watched.until(lambda status: status["state"] == "training" and found.saw(status) >= PASSES_BETWEEN + 2)
        return found

    @property
    def usual_s(self) -> float:
        """How long a pass takes from close to close, without the first ones: those begin beside a commit."""
        return statistics.median(gap_s / passes for gap_s, passes in self.gaps()[2:])

    def saw(self, status: Mapping[str, Any]) -> int:
        """Note the newest close of a status; the number of closes seen."""
        self.at_s.setdefault(int(status.get("version") or 0), time.monotonic())
        return len(self.at_s)

    def gaps(self) -> list[tuple[float, int]]:
        """Seconds from each close to the next one that was seen, and the passes in between."""
        pairs = pairwise(sorted(self.at_s.items()))
        return [(after_s - before_s, number - last) for (last, before_s), (number, after_s) in pairs]


def figures(cache: Path) -> dict[str, dict]:
    """Everything, by name."""
    found = {}
    for num_rows, target_s in TARGETS_S.items():
        for form in ((), ("--restart",)):
            command = [sys.executable, "-m", "tests.bench.resize", "--cache", str(cache), "--rows", str(num_rows)]
            said = subprocess.run([*command, *form], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
            name = f"resize, {num_rows // 1_000_000} M rows{', by a restart' if form else ''}"
            found[name] = json.loads(said.splitlines()[-1]) | {"pause_s_target": target_s}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds")
    parser.add_argument("--power", type=int, default=POWER)
    parser.add_argument("--only", type=int, help="number of the one size to measure, from 1")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench")
    given = parser.parse_args()
    chosen = SIZES if given.only is None else SIZES[given.only - 1 : given.only]
    how = {"standby": not given.restart, "sizes": chosen, "pace_s": given.pace, "power": given.power}
    result = measure(given.cache, given.rows, **how)
    print(json.dumps(result, indent=1).replace("\n", " "))
