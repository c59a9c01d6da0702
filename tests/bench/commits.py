"""What commits cost training: the pause, the background writing, and the rate that is left.

`python -m tests.bench.commits pause --rows 1000000 [--shards 2]` and `python -m tests.bench.commits rate --npz F
--hidden 64 [--every 30] [--seconds 600]` run in a process of their own each, and print JSON. By default the rate is
looked at for a minute only, with commits of 200,000 rows every 15 s, twice as many as are asked for.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headrace.codec import plain
from headrace.trainer.config import WorkerConfig
from headrace.trainer.train.assembly import Trainer, open_trainer
from tests.bench.synthetic import MadeReader, in_turn
from tests.bench.training import SECRET, shards
from tests.bench.w1 import NUM_FIELDS, ROOT, ArrayReader, job

PAUSE_ASKED_MS, PAUSE_ASKED_MS_PER_1000 = 10.0, 0.3
DIRTY_ROWS = 200_000
"""About so many rows are dirty at each commit of the rate's run."""
REPEATS = 3


@contextmanager
def trainer_with(spec: dict, reader: object, num_shards: int, folder: Path, generation: int = 1) -> Iterator[Trainer]:
    """A trainer that keeps its store in `folder`/store, and commits when it is told."""
    store = folder / "store"
    store.mkdir(exist_ok=True)
    with shards(num_shards, spec, folder) as where:
        config = WorkerConfig(
            job=spec,
            folder=folder,
            store=store,
            rank=0,
            world=1,
            shards=tuple(where),
            secret=SECRET,
            generation=generation,
            live=store / "live",
            socket=folder / "role",
            cores=2,
        )
        with open_trainer(config, reader) as trainer:
            yield trainer


def at_closes(trainer: Trainer, act: Callable[[int], None]) -> None:
    """Have `act` called with its number after each pass, between passes."""
    told = trainer.parts.progress.closed

    def closed(plan: object, *more: object) -> None:
        told(plan, *more)
        act(plan.number)

    trainer.parts.progress.closed = closed


def committed(trainer: Trainer, version: int) -> dict:
    """Commit `version` while training waits; the committer's figures."""
    committer = trainer.committer
    if committer.due(version, ended=True):
        committer.begin(version, trainer.parts.dense.consolidate())
    while not committer.finish(version):
        time.sleep(0.001)
    return plain(committer.status())


def pause(num_rows: int, num_shards: int) -> dict[str, float]:
    """Pause of training and rows written a second and shard; of dim 16, adagrad by row, HID = 400."""
    a_pass = num_rows // 100 // NUM_FIELDS
    commits = [100]
    for passes in (1, 20):
        commits += [commits[-1] + passes * (n + 1) for n in range(REPEATS)]
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        spec = job(400, Path(name), 1) | {"passes": {"max_events": a_pass}, "commit": {"every": "1d"}}
        spec["tables"]["default"]["optimizer"]["per"] = "row"
        spec["sources"]["rows"]["events"] = commits[-1] * a_pass
        with trainer_with(spec, MadeReader(in_turn(a_pass * 100 * NUM_FIELDS)), num_shards, Path(name)) as trainer:
            at_closes(trainer, lambda n: n in commits and figures.update({n: committed(trainer, n)}))
            trainer.loop.run()
    found = {}
    for share, at in (("all", commits[:1]), ("1%", commits[1 : 1 + REPEATS]), ("20%", commits[1 + REPEATS :])):
        rows = figures[at[0]]["rows"]
        found[share] = {
            "rows": rows,
            "pause_ms": 1000 * float(np.median([figures[n]["pause_s"] for n in at])),
            "asked_ms": PAUSE_ASKED_MS + PAUSE_ASKED_MS_PER_1000 * rows / 1000,
            "written_k_rows_s_a_shard": float(
                np.median([rows / figures[n]["write_s"] / 1000 / max(num_shards, 1) for n in at])
            ),
        }
    return found


def rate(npz: Path, hidden: int, every_s: float, seconds: float) -> dict[str, float]:
    """Samples a second with a commit every so often, and without one for as long, in turn within one run."""
    with tempfile.TemporaryDirectory() as name:
        spec = job(hidden, Path(name), 1) | {"commit": {"every": "1d"}}
        spec["sources"]["rows"]["events"] = 10**11
        num_samples = touching(npz, DIRTY_ROWS)
        reader = ArrayReader(npz, num_samples)
        blocks: list[dict] = []
        with trainer_with(spec, reader, 0, Path(name)) as trainer:
            progress, committer = trainer.parts.progress, trainer.committer

            def look(version: int) -> None:
                now_s = time.perf_counter()
                if now_s - blocks[-1]["at"] < every_s if blocks else progress.num_samples < 2 * num_samples:
                    return
                if blocks and len(blocks) % 2 == 0 and now_s - blocks[0]["at"] >= seconds:
                    trainer.loop.drain()
                blocks.append({"at": now_s, "samples": progress.num_samples} | plain(committer.status()))
                if len(blocks) % 2:
                    committer.ask()

            at_closes(trainer, look)
            trainer.loop.run()
    rates = [(b["samples"] - a["samples"]) / (b["at"] - a["at"]) for a, b in itertools.pairwise(blocks)]
    with_commits, without = float(np.median(rates[::2])), float(np.median(rates[1::2]))
    return {
        "ratio": float(np.median([a / b for a, b in zip(rates[::2], rates[1::2], strict=True)])),
        "samples_per_s_with": with_commits,
        "samples_per_s_without": without,
        "rows_a_commit": blocks[-1]["rows"],
        "write_s": float(np.median([block["write_s"] for block in blocks[1::2]])),
        "pause_ms": 1000 * float(np.median([block["pause_s"] for block in blocks[1::2]])),
        "pause_ms_most": 1000 * max(block["pause_s"] for block in blocks[1::2]),
    }


def touching(npz: Path, num_rows: int) -> int:
    """How many of W1's samples touch about `num_rows` rows in all."""
    with np.load(npz) as data:
        signs = data["ids"].astype(np.uint64) + data["offsets"][None].astype(np.uint64)
    _, first_R = np.unique(signs, return_index=True)
    first_R.sort()
    return int(first_R[min(num_rows, len(first_R) - 1)]) // signs.shape[1]


def run(*arguments: str) -> dict:
    """A figure, in a fresh process."""
    command = [sys.executable, "-m", "tests.bench.commits", *arguments]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1])


def figures(npz: Path) -> dict[str, dict]:
    """Everything, by name."""
    found = {}
    for rows, num_shards in ((1_000_000, 0), (1_000_000, 2), (10_000_000, 0)):
        where = f"{num_shards} shards" if num_shards else "embedded"
        found[f"commit, {rows // 1_000_000} M rows, {where}"] = run(
            "pause", "--rows", str(rows), "--shards", str(num_shards)
        )
    return found | rates(npz)


def rates(npz: Path, *options: str) -> dict[str, dict]:
    """The rate that commits leave, by name."""
    found = {}
    for hidden in (64, 400):
        said = run("rate", "--npz", str(npz), "--hidden", str(hidden), *options)
        found[f"training with commits, hidden {hidden}"] = said | {"target": 0.85}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["pause", "rate"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--npz", type=Path)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between commits")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one run")
    given = parser.parse_args()
    if given.what == "pause":
        print(json.dumps(pause(given.rows, given.shards)))
    else:
        print(json.dumps(rate(given.npz, given.hidden, given.every, given.seconds)))
