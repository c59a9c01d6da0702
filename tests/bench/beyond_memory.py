"""Training with more rows than memory: samples a second with a bounded table, against all rows in memory.

`python -m tests.bench.beyond_memory measure --rows 20000000 --hidden 400 [--memory 512MiB]` prints JSON, for a process
of its own; without --memory all rows are in memory. `make` in place of `measure` makes the store, kept in the cache.
The ids of a sample's 26 slots come from one range, ranks by Zipf's law, a permutation away from the ids.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.bench.commits import at_closes, trainer_with
from tests.bench.recovery import linked
from tests.bench.synthetic import MadeReader, Signs, in_turn
from tests.bench.w1 import BLOCK, NUM_FIELDS, ROOT, job

ROWS, MEMORY, EXPONENT = 20_000_000, "512MiB", 1.05
CURVE, CURVE_MEMORY = (1_000_000, 5_000_000, ROWS, 100_000_000), "2GiB"
MAKING_BATCHES, BATCHES, WARM_BATCHES, PASS_BATCHES = 8, 300, 100, 10
"""Of a pass while the rows are made; of a run, of its beginning that is not timed, and of a pass."""
DISK_BYTES_A_ROW = 300
"""Room for a store, for what compaction writes anew, and for what a run does."""
MEMORY_BYTES_A_ROW = 130
"""Room for rows in memory and their index."""
MULTIPLIER = 2_654_435_761
"""A prime: times a rank, modulo the rows, it permutes ranks."""


def zipf(num_rows: int) -> Signs:
    """Ids of a position by the continuous law between 0.5 and rows + 0.5: ranks are rounded."""
    power = 1 - EXPONENT
    low, high = 0.5**power, (num_rows + 0.5) ** power

    def signs(begin: int, end: int) -> np.ndarray:
        drawn = np.random.default_rng([1, begin]).random((NUM_FIELDS, end - begin))
        rank = np.rint((low + drawn * (high - low)) ** (1 / power)).astype(np.uint64) - np.uint64(1)
        return rank * np.uint64(MULTIPLIER) % np.uint64(num_rows) + np.uint64(1)

    return signs


def spec_of(hidden: int, store: Path, a_pass: int, memory: str | None) -> dict:
    """W1's job with adagrad by row, its 26 slots sharing rows."""
    spec = job(hidden, store, 1) | {"passes": {"max_events": a_pass * BLOCK}}
    spec["sources"]["rows"]["events"] = 10**11  # more than are trained
    spec["tables"]["default"]["optimizer"]["per"] = "row"
    spec["slots"][1]["share"] = "ids"
    if memory is not None:
        spec["tables"]["default"]["memory"] = memory
    return spec


def prepared(cache: Path, num_rows: int, hidden: int) -> tuple[Path, int]:
    """A folder with a store of so many rows, and the passes that made them."""
    passes = -(-num_rows // (MAKING_BATCHES * BLOCK * NUM_FIELDS))
    folder = cache / f"beyond-{num_rows}-{hidden}"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        memory = None if num_rows <= ROWS else CURVE_MEMORY
        spec = spec_of(hidden, folder, MAKING_BATCHES, memory) | {"commit": {"every_passes": 1, "keep": 1}}
        with trainer_with(spec, MadeReader(in_turn(num_rows)), 0, folder) as trainer:
            at_closes(trainer, lambda number: trainer.loop.drain() if number == passes else None)
            trainer.loop.run()
        shutil.rmtree(folder / "store" / "live")
        (folder / "made").touch()
    return folder, passes


def measure(cache: Path, num_rows: int, hidden: int, memory: str | None) -> dict[str, float]:
    """Samples a second after a warm-up, commits included."""
    base, first = prepared(cache, num_rows, hidden)
    last = first + BATCHES // PASS_BATCHES
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        shutil.copytree(base / "store", folder / "store", copy_function=linked)
        spec = spec_of(hidden, folder, PASS_BATCHES, memory)
        closes: list[tuple[float, int]] = []
        begin_s = time.perf_counter()
        with trainer_with(spec, MadeReader(zipf(num_rows)), 0, folder, generation=2) as trainer:
            opened_s = time.perf_counter() - begin_s
            progress = trainer.parts.progress

            def closed(number: int) -> None:
                closes.append((time.perf_counter(), progress.num_samples))
                if number == last:
                    trainer.loop.drain()

            at_closes(trainer, closed)
            trainer.loop.run()
            commit = trainer.committer.status()
            table = progress.status().tables["default"]
    warm, end = closes[WARM_BATCHES // PASS_BATCHES - 1], closes[-1]
    return {
        "samples_per_s": (end[1] - warm[1]) / (end[0] - warm[0]),
        "rows": table.rows,
        "table_mb": table.bytes / 1e6,
        "open_s": opened_s,
        "rss_mb": resident_mb(),
        "rows_of_last_commit": commit.rows,
    }


def resident_mb() -> float:
    """The most that this process had resident."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1e3


def figures(cache: Path) -> dict[str, dict]:
    """Both sides in turn, by name."""
    found = {}
    for hidden in (400, 64):
        run("make", cache, ROWS, hidden)
        bounded, whole = (run("measure", cache, ROWS, hidden, memory) for memory in (MEMORY, None))
        found[f"beyond memory, {ROWS // 1_000_000} M rows, hidden {hidden}"] = {
            "ratio": bounded["samples_per_s"] / whole["samples_per_s"],
            "memory": bounded,
            "all in memory": whole,
        } | ({"target": 0.75} if hidden == 400 else {})
    return found


def curve(cache: Path) -> dict[str, dict]:
    """The rate over a hundred times the rows, of one bound; beside it all rows in memory, where they fit."""
    found = {}
    cache.mkdir(parents=True, exist_ok=True)
    for rows in CURVE:
        if shutil.disk_usage(cache).free > rows * DISK_BYTES_A_ROW:
            run("make", cache, rows, 400)
            found[f"beyond memory, {rows / 1e6:g} M rows, {CURVE_MEMORY}"] = beside_memory(cache, rows)
            if rows != ROWS:
                shutil.rmtree(prepared(cache, rows, 400)[0])
    return found


def beside_memory(cache: Path, rows: int) -> dict:
    """The rate with a bound, and as a ratio to all rows in memory, where they fit."""
    bounded = run("measure", cache, rows, 400, CURVE_MEMORY)
    if rows * MEMORY_BYTES_A_ROW > free_memory():
        return {"memory": bounded, "all in memory": "left out: not enough memory"}
    whole = run("measure", cache, rows, 400)
    return {"ratio": bounded["samples_per_s"] / whole["samples_per_s"], "memory": bounded, "all in memory": whole}


def free_memory() -> int:
    """Bytes that this machine can give to a process."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:")


def run(what: str, cache: Path, num_rows: int, hidden: int, memory: str | None = None) -> dict:
    """What a fresh process prints."""
    command = [sys.executable, "-m", "tests.bench.beyond_memory", what, "--cache", str(cache), "--rows", str(num_rows)]
    command += ["--hidden", str(hidden), *(["--memory", memory] if memory else [])]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "measure"])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--hidden", type=int, default=400)
    parser.add_argument("--memory")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench")
    given = parser.parse_args()
    if given.what == "make":
        print(json.dumps({"store": str(prepared(given.cache, given.rows, given.hidden)[0])}))
    else:
        print(json.dumps(measure(given.cache, given.rows, given.hidden, given.memory)))
