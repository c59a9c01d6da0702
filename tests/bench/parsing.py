"""What stands before training, alone: the MultiSlot parser, a generator in each example; and whole jobs from a dict.

`python -m tests.bench.parsing` prints how fast generators answer; `python -m tests.bench --only pipes` prints all.
"""

import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pyarrow.json

from headrace.config import load_toml, validate
from headrace.dataset.formats.generator_answers import answer_schema
from headrace.dataset.formats.generator_columns import GeneratorSlot, JobSlots
from headrace.dataset.formats.multislot_parser import MultiSlotParser
from headrace.dataset.generator import DataGenerator
from headrace.dataset.spec.schema import Schema
from headrace.trainer.config import TrainerJob, WorkerConfig
from tests.bench.streams import Streams
from tests.bench.w1 import ROOT, job, make

EXAMPLES = ROOT / "deploy" / "examples"
NAMES = ["click", *(f"s{n}" for n in range(19))]


def run_job(spec: dict, folder: Path) -> dict:
    """Run one trainer with an embedded shard on `spec`; its report."""
    where = {"folder": folder, "store": folder, "live": folder / "live", "socket": folder / "role"}
    config = WorkerConfig(job=spec, rank=0, world=1, cores=2, **where)
    path = folder / "worker.json"
    path.write_text(config.model_dump_json())
    subprocess.run(
        [sys.executable, "-m", "headrace.trainer.train", "--config", str(path)],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    return json.loads((folder / "report.json").read_text())


def figures(cache: Path) -> dict[str, dict]:
    """Lines a second through the parser; samples a second through the generators."""
    return {
        "MultiSlot parser, one core": parser(cache),
        "generators, one core": generators(),
        "answers of 20 slots, one core": answers(),
        "JSON of 42 fields, MB a core second": columns(),
    }


def parser(cache: Path) -> dict[str, float]:
    """W1 text, 320 bytes a line."""
    folder = cache / "w1-text"
    make(folder, 200_000, text_parts=8)
    data = (folder / "part-000.txt").read_bytes()
    schema = Schema.of(validate(TrainerJob, job(64, folder, 1)).slots)
    MultiSlotParser(schema).parse(data)
    begin = time.perf_counter()
    MultiSlotParser(schema).parse(data)
    elapsed_s = time.perf_counter() - begin
    return {"lines_per_s": data.count(b"\n") / elapsed_s, "mb_per_s": len(data) / 1e6 / elapsed_s}


def generators() -> dict[str, float]:
    """Samples a second of each example's `generate_columns`, on made-up events."""
    rng = np.random.default_rng(1)
    shown = rng.integers(0, 5000, (2000, 12)).tolist()
    fields = ("user_id", "context_article", "last_click", "device_type", "is_sso", "is_subscriber", "gender")
    fields += ("postcode", "age", "hour_of_day", "day_of_week", "n_inview", "impression")
    news = [json.dumps(dict.fromkeys(fields, 3) | {"shown": s, "clicked": s[:1], "ts": 1}).encode() for s in shown]
    criteo = [("1\t" + "\t".join(["7"] * 13) + "\t" + "\t".join(["0a1b2c3d"] * 26)).encode()] * 5000
    return {
        "news_samples_per_s": _rate("news", "Impressions", news),
        "criteo_samples_per_s": _rate("criteo", "Clicks", criteo),
    }


class ByEvent(DataGenerator):
    """A mapping of lone values for each event."""

    def generate(self, event: bytes) -> Iterator[dict[str, int]]:
        yield dict(zip(NAMES, map(int, event.split(b"\t")), strict=True))


class ByEventInLists(DataGenerator):
    """The same, each value in a list of its own, as Paddle's generators have it."""

    def generate(self, event: bytes) -> Iterator[dict[str, list[int]]]:
        yield {name: [int(word)] for name, word in zip(NAMES, event.split(b"\t"), strict=True)}


class Prepared(DataGenerator):
    """Mappings that are there already, so that nothing but Headrace's own part is timed."""

    prepared: ClassVar[dict[bytes, dict[str, int]]] = {}

    def generate(self, event: bytes) -> tuple[dict[str, int]]:
        return (self.prepared[event],)


class ByColumn(DataGenerator):
    """An array for each slot."""

    def generate_columns(self, events: Sequence[bytes]) -> dict[str, np.ndarray]:
        words = np.array(b"\t".join(events).split(b"\t"), "S20").astype(np.uint64).reshape(len(events), -1)
        return {"event": np.arange(len(events))} | {name: words[:, n] for n, name in enumerate(NAMES)}


def answers(num_events: int = 8192, rounds: int = 5) -> dict[str, float]:
    """Samples a second from events to an answer of the Arrow protocol: a label and 19 sparse slots of one sign each."""
    signs = np.random.default_rng(1).integers(1 << 40, size=(num_events, len(NAMES)))
    events = ["\t".join(map(str, row)).encode() for row in signs.tolist()]
    samples = (dict(zip(NAMES, row, strict=True)) for row in signs.tolist())
    Prepared.prepared = dict(zip(events, samples, strict=True))
    slots = [GeneratorSlot(name, "sparse", "uint64", 0) for name in NAMES]
    slots[0] = GeneratorSlot(NAMES[0], "dense", "float", 1)
    made = {kind.__name__: kind() for kind in (Prepared, ByEvent, ByEventInLists, ByColumn)}
    took: dict[str, list[float]] = {name: [] for name in made}
    gc.freeze()  # no generator has so many objects of its own
    for _ in range(rounds):
        for name, generator in made.items():
            generator._slots = JobSlots(tuple(slots), drop=False)
            begin_s = time.process_time()
            for first in range(0, num_events, 1024):
                generator._answer(events[first : first + 1024], answer_schema(slots))
            took[name].append(time.process_time() - begin_s)
    gc.unfreeze()
    return {f"{name}_samples_per_s": num_events / statistics.median(each) for name, each in took.items()}


def columns() -> dict[str, float]:
    """The events of the world *videos* as samples, through the columns pipe; and as columns of pyarrow."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        streams, path = Streams(folder), folder / "videos.jsonl"
        streams.spec("videos")
        size_mb = path.stat().st_size / 1e6
        alone = pyarrow.json.ReadOptions(use_threads=False)
        pipe_s = _core_s(lambda: streams.read("videos"))
        pyarrow_s = _core_s(lambda: pyarrow.json.read_json(path, read_options=alone))
        return {"pipe": size_mb / pipe_s, "pyarrow": size_mb / pyarrow_s}


def _core_s(act: Callable[[], object], rounds: int = 5) -> float:
    """The median of some rounds, after one untimed."""
    found = []
    for _ in range(1 + rounds):
        begin_s = time.process_time()
        act()
        found.append(time.process_time() - begin_s)
    return statistics.median(found[1:])


def _rate(example: str, name: str, events: list[bytes]) -> float:
    generator = getattr(_module(EXAMPLES / example / "generator.py"), name)()
    slots = validate(TrainerJob, load_toml(EXAMPLES / example / "job.toml"), only_known=True).slots
    generator._slots = JobSlots(tuple(GeneratorSlot(each.name, "sparse", "uint64", 0) for each in slots), drop=False)
    begin, count = time.perf_counter(), 0
    for first in range(0, len(events), 1024):
        count += len(generator.generate_columns(events[first : first + 1024])["event"])
    return count / (time.perf_counter() - begin)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(json.dumps(answers(), indent=1))
