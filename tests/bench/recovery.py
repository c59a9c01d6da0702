"""How long a job stands still after `kill -9` of a worker, and how fast it trains again what was not committed.

`python -m tests.bench.recovery --rows 1000000 [--shards 2] [--cache F]` runs in a process of its own and prints JSON.
A store with so many rows is trained and committed first, and kept below the cache. The job that goes on from there has
no further commits, so that each death leaves more passes to replay than the one before.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.codec import plain
from headrace.config import validate
from headrace.service.cluster.child import ForkingStarter, Starter, WorkerProcess
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.store import WORKERS, claimed
from headrace.service.cluster.supervision import RestartLimits
from headrace.service.cluster.worker_plan import preloaded
from headrace.service.spec.job import JobFile, LoadedJob
from tests.bench.w1 import NUM_DENSE, NUM_FIELDS, ROOT, job

PASS, PASSES_KILLED_AT = 8192, (20, 30)
"""Samples a pass; new passes of a generation after which it dies."""
POWER = 4
"""Many rows are touched in each pass: of 1 M, 134,000 by 213,000 ids."""
NEWER = sum(PASSES_KILLED_AT) + 100
"""Passes after those that made the rows: more than are trained."""
LOOK_S = 0.01
OFTEN = RestartLimits(max_restarts=10)


class Kept:
    """A starter that knows the workers started last by name."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self.children: dict[str, WorkerProcess] = {}

    def start(self, command: Sequence[str], folder: Path) -> WorkerProcess:
        """See Starter."""
        child = self.children[Path(command[-1]).stem] = self._starter.start(command, folder)
        return child


def samples_in(folder: Path, num_rows: int, *, grows: bool = True, power: int = POWER) -> tuple[Path, int]:
    """A MultiSlot file that touches `num_rows` keys once each, then some of them more often; passes of the former.

    `grows`: ids then meet fields in which they were not seen before, which makes new rows; else there are never more.
    `power`: the ids of later passes are uniform numbers to this power, so that low ones come more often.
    """
    making = -(-num_rows // NUM_FIELDS // PASS)
    path = folder / f"{'touching' if grows else 'again'}-{num_rows}{_suffix(power)}.txt"
    if not path.exists():
        draw = np.random.default_rng(1)
        dense = [f"{NUM_DENSE} " + " ".join(f"{x:.4f}" for x in draw.random(NUM_DENSE)) for _ in range(64)]
        with path.with_suffix(".part").open("w") as file:
            for number in range(making + NEWER):
                ids = np.arange(number * PASS * NUM_FIELDS, (number + 1) * PASS * NUM_FIELDS) % num_rows
                if number >= making:
                    ids = (num_rows * draw.random(PASS * NUM_FIELDS) ** power).astype(np.int64)
                    if not grows:
                        ids -= ids % NUM_FIELDS - np.arange(len(ids)) % NUM_FIELDS
                for n, row in enumerate((ids + 1).reshape(PASS, NUM_FIELDS).tolist()):
                    file.write(f"{dense[n % 64]} {' '.join(f'1 {sign}' for sign in row)} 1 {n % 4 == 0:d}\n")
        path.with_suffix(".part").rename(path)
    return path, making


def _suffix(power: int) -> str:
    return "" if power == POWER else f"-{power}"


def job_on(path: Path, store: Path, num_shards: int, pace_s: float = 0.0) -> LoadedJob:
    """W1's job, HID = 64 and adagrad by row, reading the file at `path`. A pass takes `pace_s` or longer."""
    raw = job(64, store, 1)
    raw |= {"passes": {"max_events": PASS}, "commit": {"every": "1d", "keep": 1}, "cluster": {"shards": num_shards}}
    raw["sources"] = {"rows": {"kind": "files", "paths": [str(path)]}}
    raw["slots"][0]["name"] = "dense"
    raw["tables"]["default"]["optimizer"]["per"] = "row"
    if pace_s:
        raw["pipe"] = {"command": ["sh", "-c", f"sleep {pace_s:g}; exec cat"]}
    return LoadedJob(spec=validate(JobFile, raw), raw=raw, folder=store.parent, store=store)


def run(loaded: LoadedJob, watch: Callable[["Watched"], None], *, standby: bool = False) -> None:
    """Run the job, watched by a thread, until that asks it to stop.

    `standby`: whether workers stand by when it is resized."""
    with ExitStack() as held:
        store = held.enter_context(claimed(loaded.store, loaded.spec.name, fresh=False))
        folder = held.enter_context(run_folder(store / WORKERS))
        kept = Kept(held.enter_context(ForkingStarter(preloaded(loaded.spec.cluster))))
        said: list[str] = []
        plans = GenerationPlans(loaded, folder, spare=standby)
        launcher = JobRunner(
            loaded.spec.name,
            plans.phases(),
            lambda worker, text: said.append(f"{worker}: {text}"),
            launcher=held.enter_context(ProcessLauncher(kept)),
            restarts=OFTEN,
            status_interval_s=LOOK_S,
            standbys=plans,
        )
        watched = Watched(launcher, kept)
        thread = threading.Thread(target=watch, args=(watched,), daemon=True)
        thread.start()
        outcome = launcher.run()
        assert outcome.code == 0, (outcome, said[-30:])
        thread.join(60)


@dataclass(frozen=True)
class Watched:
    """A job while it runs."""

    launcher: JobRunner
    kept: Kept

    def until(self, holds: Callable[[dict[str, Any]], bool], within_s: float = 600.0) -> tuple[float, dict[str, Any]]:
        """Wait for a status; when it was seen, and the status."""
        end_s = time.monotonic() + within_s
        while not holds(status := plain(self.launcher.status())):
            assert time.monotonic() < end_s, status
            time.sleep(LOOK_S)
        return time.monotonic(), status

    def stop(self) -> None:
        """Ask for the end."""
        os.kill(os.getpid(), signal.SIGINT)


def prepared(cache: Path, num_rows: int, num_shards: int, *, grows: bool = True, power: int = POWER) -> Path:
    """A store with a commit of so many rows; `grows`, `power`: see `samples_in`."""
    cache.mkdir(parents=True, exist_ok=True)
    path, making = samples_in(cache, num_rows, grows=grows, power=power)
    store = cache / f"{'recovery' if grows else 'resize'}-{num_rows}-{num_shards}{_suffix(power)}"
    if not (store / "report.json").exists():
        shutil.rmtree(store, ignore_errors=True)

        def watch(watched: Watched) -> None:
            watched.until(lambda status: status.get("version", 0) >= making)
            watched.stop()

        run(job_on(path, store, num_shards), watch)
    return store


def measure(cache: Path, num_rows: int, num_shards: int) -> dict[str, Any]:
    """Kill trainer and shard in turn."""
    base = prepared(cache, num_rows, num_shards)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=cache) as name:
        store = Path(name) / base.name
        shutil.copytree(base, store, copy_function=linked)
        path, _ = samples_in(cache, num_rows)

        def watch(watched: Watched) -> None:
            _, first = watched.until(lambda status: status.get("state") == "training")
            version = first["version"]
            for passes, worker in zip(
                PASSES_KILLED_AT, ["trainer-0", "shard-1" if num_shards else "trainer-0"], strict=True
            ):
                found[f"{worker} killed {passes} passes later"] = death(watched, worker, passes, version)
            watched.stop()

        run(job_on(path, store, num_shards), watch)
    deaths = list(found.values())
    return found | {
        "still_s_most": max(each["still_s"] for each in deaths),
        "replay_to_training": float(np.median([each["replay_to_training"] for each in deaths])),
    }


def death(watched: Watched, worker: str, passes: int, committed: int) -> dict[str, float]:
    """Kill a worker after so many new passes; how the job came back."""
    begin_s, first = watched.until(lambda status: status["state"] == "training")
    begin_s, first = watched.until(lambda status: status["version"] > first["version"] + 1)  # warm
    end_s, last = watched.until(lambda status: status["version"] >= first["version"] + passes)
    rate = (last["samples"] - first["samples"]) / (end_s - begin_s)
    killed_s, generation = time.monotonic(), last["generation"]
    watched.kept.children[worker].kill()
    noticed_s, _ = watched.until(lambda status: status["state"] == "restarting")
    replays_s, _ = watched.until(lambda status: status["state"] == "replaying" and status["generation"] > generation)
    warm_s, warm = watched.until(lambda status: status["version"] > committed)
    trains_s, new = watched.until(lambda status: status["state"] == "training")
    closed_s, _ = watched.until(lambda status: status["version"] > new["version"])
    return {
        "still_s": closed_s - killed_s - (trains_s - replays_s),
        "to_notice_s": noticed_s - killed_s,
        "to_replay_s": replays_s - killed_s,
        "replay_s": trains_s - replays_s,
        "first_new_pass_s": closed_s - trains_s,
        "training_samples_per_s": rate,
        "replay_to_training": (new["samples"] - warm["samples"]) / (trains_s - warm_s) / rate,
    }


def linked(source: str, copy: str) -> None:
    """Copy a file of a store; what a commit holds is linked."""
    (os.link if "/commits/" in source else shutil.copy2)(source, copy)


def figures(cache: Path) -> dict[str, dict]:
    """Everything, by name."""
    found = {}
    for num_rows, asked_s in ((1_000_000, 5.0), (10_000_000, 15.0)):
        for num_shards in (0, 2):
            command = [sys.executable, "-m", "tests.bench.recovery", "--cache", str(cache)]
            command += ["--rows", str(num_rows), "--shards", str(num_shards)]
            said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
            where = f"{num_shards} shards" if num_shards else "embedded"
            targets = {"still_s_target": asked_s, "replay_to_training_target": 1.0}
            found[f"recovery, {num_rows // 1_000_000} M rows, {where}"] = json.loads(said.splitlines()[-1]) | targets
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench")
    given = parser.parse_args()
    print(json.dumps(measure(given.cache, given.rows, given.shards), indent=1).replace("\n", " "))
