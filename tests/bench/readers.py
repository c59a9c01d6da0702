"""A pass through a slow generator, read by the trainer itself and by readers: rate, CPU time at the trainer, bytes.

`python -m tests.bench.readers [--samples 40000] [--rate 10000]`. The generator, in Python with MultiSlot text, makes so
many samples a second in each process. It sleeps rather than computes, in place of cores that this machine lacks. A
sample has 24 sparse slots of one sign, which look random, and a label.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.config import validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.reader.client import ReaderCaller, RemoteParts
from headrace.dataset.reader.config import ReaderProcess
from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline

GENERATOR = """
import sys, time
from headrace import DataGenerator

class Slow(DataGenerator):
    number = 0

    def generate(self, event):
        self.number += 1
        if self.number % 100 == 0:
            time.sleep(100 / {rate})
        first = int(event) * 11400714819323198485
        signs = {{name: [first * (index + 1) % 2**62] for index, name in enumerate({names})}}
        yield signs | {{"click": [1.0]}}

Slow().run()
"""
NAMES = [f"s{number}" for number in range(24)]


def config_of(folder: Path, processes: int, readers: int) -> dict[str, Any]:
    """The configuration of the first reader."""
    return {
        "reader": 0,
        "num_readers": max(1, readers),
        "num_ranks": 1,
        "name": "slow",
        "seed": 1,
        "sources": {"lines": {"kind": "files", "paths": ["lines.txt"]}},
        "pipe": {"command": ["python", "slow.py"], "processes": processes},
        "slots": [*({"name": name} for name in NAMES), {"name": "click", "kind": "meta"}],
        "memory": 512 << 20,
        "folder": str(folder),
        "secret": "s",
    }


def measured(folder: Path, num: int, readers: int, processes: int) -> dict[str, float]:
    """The figures of one pass of `num` samples."""
    raw = config_of(folder, processes, readers)
    config = validate(ReaderProcess, raw)
    schema, parts = Schema.of(config.slots), None
    with ExitStack() as held:
        if readers:
            sockets = [folder / f"reader-{number}.socket" for number in range(readers)]
            for number, socket in enumerate(sockets):
                started(folder, raw | {"reader": number, "socket": str(socket)}, held)
            caller = ReaderCaller(rank=0, generation=1, secret="s")  # noqa: S106
            parts = RemoteParts([f"unix:{socket}" for socket in sockets], caller, schema, processes)
        opening = Opening(folder=folder, job="slow", seed=1, deadline=Deadline.after(30), known=None)
        source = open_sources(config.sources, opening)
        reader = SegmentReader(source, config.pipe, schema, SourceSet(config.sources), None, folder, parts=parts)
        held.callback(reader.close)
        list(reader.read(1, [Segment("lines.txt", 0, 0, 1_000)], PassTally()))  # kernels are compiled
        own_s, begin_s = cpu_s(), time.monotonic()
        tally = PassTally()
        list(reader.read(2, [Segment("lines.txt", 0, 0, num)], tally))
        took_s, used_s = time.monotonic() - begin_s, cpu_s() - own_s
        links = {} if parts is None else parts.links()
        received = sum(each["received_bytes"] for each in links.values()) * num / (num + 1_000)
    return {
        "readers": readers,
        "processes": processes,
        "samples_s": round(num / took_s),
        "trainer_cpu_us_per_sample": round(1e6 * used_s / num, 1),
        "bytes_per_sample": round(received / num, 1),
    }


def started(folder: Path, raw: dict[str, Any], held: ExitStack) -> None:
    """A reader process, which serves at its socket."""
    path = folder / f"reader-{raw['reader']}.json"
    Path(raw["socket"]).unlink(missing_ok=True)
    path.write_text(json.dumps(raw))
    words = [sys.executable, "-m", "headrace.dataset.reader", "--config", str(path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    held.callback(process.wait)
    held.callback(process.kill)
    deadline = Deadline.after(60)
    while not os.path.exists(raw["socket"]):
        deadline.check("starting a reader")
        time.sleep(0.05)


def cpu_s() -> float:
    """CPU seconds of this process and of the commands that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Print the figures, one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--rate", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(GENERATOR.format(rate=given.rate, names=NAMES))
        (folder / "lines.txt").write_text("".join(f"{number}\n" for number in range(given.samples)))
        for readers, processes in ((0, 1), (1, 1), (2, 2), (2, 4)):
            print(json.dumps(measured(folder, given.samples, readers, processes)), flush=True)


if __name__ == "__main__":
    main()
