"""One timed training of W1 in a process of its own: `python -m tests.bench.training --npz F --hidden 64 --shards 0`.

Prints one JSON object. The rate is over all passes but the first, closes included, and so is the CPU time of a step, of
all threads: it tells two versions apart also on a machine that others use.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

from headrace.config import parse_value
from headrace.trainer.config import WorkerConfig
from headrace.trainer.train.assembly import open_trainer
from tests.bench.w1 import BLOCK, ArrayReader, job
from tests.fakes.rendezvous import RendezvousHere

SECRET = "bench"


@contextmanager
def shards(num_shards: int, spec: dict, folder: Path) -> Iterator[list[str]]:
    """Shard processes; their addresses."""
    processes, names = [], [f"shard-{number}" for number in range(num_shards)]
    rendezvous = RendezvousHere(folder, *names)
    for number in range(num_shards):
        config = folder / f"shard-{number}.json"
        told = {"shard": number, "num_shards": num_shards, "num_ranks": 1, "tables": spec["tables"], "seed": 1}
        told |= {
            "secret": SECRET,
            "socket": str(folder / f"shard-{number}.socket"),
            "live": str(folder / f"live-{number}"),
        }
        told["launcher"] = rendezvous.contact(names[number]).model_dump(mode="json")
        config.write_text(json.dumps(told))
        command = [sys.executable, "-m", "headrace.pserver", "--config", str(config)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    try:
        yield [rendezvous.address(name) for name in names]
    finally:
        rendezvous.close()
        for process in processes:
            process.terminate()
            process.wait()


def train(
    npz: Path,
    hidden: int,
    num_shards: int,
    steps: int,
    staleness: int,
    settings: Sequence[str] = (),
    *,
    cores: int = 2,
    profiled: bool = False,
) -> dict:
    """Samples a second, and where they ended. `settings`: KEY=VALUE of the spec, as on the command line."""
    spec = job(hidden, Path(), steps)
    spec["train"]["staleness"] = staleness
    for setting in settings:
        path, _, text = setting.partition("=")
        *parents, last = path.split(".")
        reduce(lambda node, name: node.setdefault(name, {}), parents, spec)[last] = parse_value(text)
    with tempfile.TemporaryDirectory() as name, shards(num_shards, spec, Path(name)) as where:
        folder = Path(name)
        config = WorkerConfig(
            job=spec | {"store": {"path": name}},
            folder=folder,
            store=folder,
            rank=0,
            world=1,
            shards=tuple(where),
            secret=SECRET,
            live=folder / "live",
            socket=folder / "role",
            cores=cores,
        )
        with open_trainer(config, ArrayReader(npz)) as trainer:
            progress, closes = trainer.parts.progress, []
            closed = progress.closed

            def note(*arguments: object) -> None:
                closed(*arguments)
                closes.append((time.perf_counter(), time.process_time(), progress.num_samples))

            progress.closed = note
            # torch is loaded by the trainer, which says first how its threads wait
            with sys.modules["torch"].profiler.profile() if profiled else nullcontext() as profile:
                trainer.loop.run()
            life = trainer.parts.observer.report()["life"]["click"]
            spent_s = progress.spent.seconds()
        (begin_s, begin_cpu_s, before), (end_s, end_cpu_s, after) = closes[0], closes[-1]
        return {
            "samples_per_s": (after - before) / (end_s - begin_s),
            "cpu_ms_a_step": 1e3 * (end_cpu_s - begin_cpu_s) / ((after - before) / BLOCK),
            "seconds": spent_s,
            "auc": life["auc"],
            "logloss": life["logloss"],
            **({} if profile is None else profile_of(profile, steps)),
        }


def profile_of(profile: Any, steps: int) -> dict[str, float]:
    """Of torch.profiler.profile: by step, a GPU's time, the calls that wait for it, and the operations of torch."""
    events = profile.key_averages()
    waits = sum(each.count for each in events if "Synchronize" in each.key)
    kernels_ms = sum(each.self_device_time_total for each in events) / 1e3
    operations = sum(each.count for each in events if each.key.startswith("aten::"))
    return {
        "waits_a_step": waits / steps,
        "kernel_ms_a_step": kernels_ms / steps,
        "operations_a_step": operations / steps,
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--npz", type=Path, required=True)
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--shards", type=int, default=0)
    arguments.add_argument("--steps", type=int, default=175)
    arguments.add_argument("--staleness", type=int, default=0)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments.add_argument("--cores", type=int, default=2)
    arguments.add_argument("--profile", action="store_true", help="count a GPU's time, and the calls that wait for it")
    given = arguments.parse_args()
    size, more = (given.hidden, given.shards, given.steps, given.staleness, given.set), given.cores
    print(json.dumps(train(given.npz, *size, cores=more, profiled=given.profile)))
