"""How far the defaults of learning are from the best settings: progressive AUC of five streams under many settings.

`python -m tests.bench.defaults` trains each stream once for each setting, with the model deepfm and the defaults for
all that a setting does not name, and prints Markdown. `--keep` goes on where a run was interrupted, `--for 60` stops
after so many seconds, `--only news` takes one stream. No figure depends on how fast it goes.

*clicks*, *news* and *criteo* are the first samples of the examples; *steady* and *hasty* are the clicks example on
two further worlds: a small one in which nothing changes, and a large one whose items live for minutes.
"""

import argparse
import copy
import gzip
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace.config import load_toml, validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.rank0.parts import source_of
from headrace.trainer.train.assembly import open_trainer
from tests.bench.w1 import ROOT

EXAMPLES = ROOT / "deploy" / "examples"
DATA = Path(os.environ.get("HEADRACE_DATA", ROOT.parent / "shared" / "data"))
RESULTS = ROOT / "tests" / "bench" / "results" / "defaults.json"
TOLERANCE = 0.004
"""Of AUC: how far a default may be from the best setting of a stream."""
FILES = {"news": ("ebnerd/impressions.jsonl.gz", 5_000), "criteo": ("criteo/criteo_80k.txt.gz", 60_000)}
"""Data of an example, and how many lines of it are taken: about 60,000 samples."""
WORLDS: dict[str, dict[str, Any]] = {
    "clicks": {},
    "steady": {"users": 300, "items": 100, "item_life": 10_000_000, "drift": 0.0},
    "hasty": {"users": 50_000, "items": 5_000, "item_life": 4_000, "drift": 20.0},
}
WORLD_EVENTS = 12_000
STREAMS = (*FILES, *WORLDS)


@dataclass(frozen=True)
class Setting:
    """What is tried; the rest has its default."""

    batch: int
    row_lr: float
    dense_lr: float
    dim: int | None = None
    init_range: float | None = None
    initial: float | None = None
    """Of Adagrad's accumulator; then gradients are scaled by shows, so that it means the same in every batch."""

    @property
    def name(self) -> str:
        """What differs from the defaults, and what always does."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name} {value:g}" for name, value in given if value is not None]
        return ", ".join(shown if self.initial is None else [*shown, "by show"])

    def sections(self) -> dict[str, dict[str, Any]]:
        """The job's sections `tables.default` and `train`."""
        table: dict[str, Any] = {"optimizer": {"kind": "adagrad", "lr": self.row_lr}}
        if self.initial is not None:
            table["optimizer"]["initial"] = self.initial
            table["grad_scale"] = "show"
        table |= {} if self.dim is None else {"dim": self.dim}
        table |= {} if self.init_range is None else {"init_range": self.init_range}
        dense = {"kind": "adam", "lr": self.dense_lr}
        train = {"batch_size": self.batch, "dense_optimizer": dense, "device": "cpu", "threads": 1}
        return {"table": table, "train": train}


OLD, NEW = Setting(1024, 0.05, 0.001), Setting(64, 0.05, 0.003)
"""The defaults of set 1 (see trainer.spec.defaults), and those of set 2."""
SCALED = Setting(64, 0.1, 0.003, initial=1.0)
SETTINGS = [
    OLD,
    *(Setting(64, row_lr, dense_lr) for row_lr in (0.05, 0.02) for dense_lr in (0.003, 0.01, 0.001)),
    Setting(64, 0.03, 0.003),
    SCALED,
    *(replace(SCALED, row_lr=0.05, initial=initial) for initial in (1.0, 0.1)),
    *(Setting(batch, 0.05, 0.003) for batch in (128, 256, 1024)),
    *(replace(NEW, dim=dim) for dim in (8, 32)),
    *(replace(NEW, init_range=init_range) for init_range in (0.001, 0.05)),
]


class Remembered:
    """A reader that reads each pass once and then repeats its samples; see dataset.loader.batch_loader.PassReader."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader
        self._passes: dict[tuple[Segment, ...], tuple[list[Samples], PassTally]] = {}

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """See Reader."""
        key = tuple(segments)
        if key not in self._passes:
            own = PassTally()
            self._passes[key] = list(self._reader.read(pass_number, segments, own)), own
        blocks, own = self._passes[key]
        for field in fields(own):
            setattr(tally, field.name, copy.deepcopy(getattr(own, field.name)))
        yield from blocks

    def close(self) -> None:
        """The next run reads from it, too."""


def spec_of(stream: str, folder: Path) -> dict[str, Any]:
    """The job of a stream with defaults for all that learning depends on."""
    example = stream if stream in FILES else "clicks"
    raw = load_toml(EXAMPLES / example / "job.toml")
    (source,) = raw["sources"]
    if stream in FILES:
        path, num_lines = FILES[stream]
        events = folder / f"{stream}.txt"
        with gzip.open(DATA / path, "rb") as packed, events.open("wb") as part:
            part.writelines(itertools.islice(packed, num_lines))
        raw["sources"][source]["paths"] = [str(events)]
    else:
        raw["sources"][source] |= {"events": WORLD_EVENTS, "rate": 0.0, "partitions": 1, **WORLDS[stream]}
    raw["pipe"]["command"] = [sys.executable, str(EXAMPLES / example / "generator.py")]
    raw["store"] = {"path": "store"}
    for section in ("passes", "train", "tables"):
        raw.pop(section, None)
    raw["model"] = {"name": "deepfm"}
    return raw


class Bench:
    """Streams and what each setting gives on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spec = cache(lambda stream: spec_of(stream, folder))
        self._reader = cache(self._opened)

    def _opened(self, stream: str) -> Remembered:
        raw = self.spec(stream)
        job = validate(TrainerJob, raw)
        source = source_of(self._config(raw), job)
        section = next(iter(job.sources.values()))
        return Remembered(SegmentReader(source, job.pipe, Schema.of(job.slots), section, None, self._folder))

    def _config(self, raw: Mapping[str, Any]) -> WorkerConfig:
        store = Path(tempfile.mkdtemp(dir=self._folder))
        where = {"folder": self._folder, "store": store, "live": store / "live", "socket": store / "role"}
        return WorkerConfig(job=dict(raw), rank=0, world=1, cores=1, **where)

    def auc(self, stream: str, setting: Setting) -> float:
        """Progressive AUC over the whole stream."""
        sections = setting.sections()
        raw = self.spec(stream) | {"tables": {"default": sections["table"]}, "train": sections["train"]}
        with open_trainer(self._config(raw), self._reader(stream)) as trainer:
            trainer.loop.run()
            auc: float = trainer.parts.observer.report()["life"]["ctr"]["auc"]
            return auc


def table_of(results: Mapping[str, Mapping[str, float]]) -> str:
    """AUC below the best of its stream, for each setting; those that are near enough everywhere come first."""
    streams = [stream for stream in STREAMS if results.get(stream)]
    best = {stream: max(results[stream].values()) for stream in streams}
    names = [each.name for each in SETTINGS if all(each.name in results[stream] for stream in streams)]
    lost = {name: {stream: best[stream] - results[stream][name] for stream in streams} for name in names}
    lines = [f"| setting | {' | '.join(streams)} | worst |", "|---" * (len(streams) + 2) + "|"]
    lines += [f"| best AUC | {' | '.join(f'{best[stream]:.4f}' for stream in streams)} | |"]
    for name in sorted(names, key=lambda name: max(lost[name].values())):
        worst = max(lost[name].values())
        cells = " | ".join(f"-{lost[name][stream]:.4f}" for stream in streams)
        lines.append(f"| {name} | {cells} | -{worst:.4f}{'' if worst > TOLERANCE else ' (near)'} |")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", nargs="*", choices=STREAMS, default=STREAMS)
    arguments.add_argument("--keep", action="store_true", help="figures that are there are not made again")
    arguments.add_argument("--for", dest="for_s", type=float, default=float("inf"), help="stop after so many seconds")
    given = arguments.parse_args()
    results: dict[str, dict[str, float]] = json.loads(RESULTS.read_text()) if given.keep and RESULTS.exists() else {}
    end_s = time.monotonic() + given.for_s
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        for setting, stream in itertools.product(SETTINGS, given.only):
            known = results.setdefault(stream, {})
            if setting.name in known or time.monotonic() > end_s:
                continue
            known[setting.name] = bench.auc(stream, setting)
            print(stream, setting.name, f"{known[setting.name]:.4f}", file=sys.stderr, flush=True)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))
    print(table_of(results))


if __name__ == "__main__":
    main()
