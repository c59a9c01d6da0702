"""The streams that models and settings are compared on: their jobs, and their samples, which are read once.

A job has the slots of its example, or of its world, and the defaults for all that learning depends on. *clicks*, *news*
and *criteo* are the first samples of the examples; *steady* and *hasty* are the clicks example on two further worlds: a
small one in which nothing changes, and a large one whose items live for minutes. The others are of tests.bench.worlds.
"""

import gzip
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import load_toml, validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.rank0.parts import source_of
from tests.bench import worlds
from tests.bench.w1 import ROOT

EXAMPLES = ROOT / "deploy" / "examples"
DATA = Path(os.environ.get("HEADRACE_DATA", ROOT.parent / "shared" / "data"))
FILES = {"news": ("ebnerd/impressions.jsonl.gz", 5_000), "criteo": ("criteo/criteo_80k.txt.gz", 60_000)}
"""Data of an example, and how many lines of it are taken: about 60,000 samples."""
CLICKS: dict[str, dict[str, Any]] = {
    "clicks": {},
    "steady": {"users": 300, "items": 100, "item_life": 10_000_000, "drift": 0.0},
    "hasty": {"users": 50_000, "items": 5_000, "item_life": 4_000, "drift": 20.0},
}
CLICKS_EVENTS = 12_000
"""Of five samples each."""
WORLD_SAMPLES = {name: 60_000 for name in worlds.WORLDS} | {"rare": 160_000}
CHOOSING = (*FILES, *CLICKS, *worlds.CHOOSING)
"""Streams that defaults may be chosen by."""
STREAMS = (*CHOOSING, *worlds.HELD_OUT)
ASK_S = 60.0


class Remembered:
    """A reader that reads the one partition of a stream once, and then cuts its segments out of memory; see
    dataset.loader.batch_loader.PassReader."""

    def __init__(self, reader: SegmentReader, whole: Segment) -> None:
        blocks = list(reader.read(0, [whole], tally := PassTally()))
        assert not tally.rejected, f"events are rejected: {tally.first_of}"
        self.samples = Samples.concat(blocks)
        """All of them, with `event_B` ascending."""

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        event_B = self.samples.event_B
        for segment in segments:
            begin, end = np.searchsorted(event_B, [segment.begin, segment.end]).tolist()
            tally.num_events += len(np.unique(event_B[begin:end]))
            tally.num_samples += end - begin
            yield self.samples.slice(begin, end)

    def close(self) -> None:
        """The next run reads from it, too."""


def spec_of(stream: str, folder: Path) -> dict[str, Any]:
    """The job of a stream, whose events are written into `folder` where they are not simulated as they are read."""
    if stream in worlds.WORLDS:
        events = folder / f"{stream}.jsonl"
        with events.open("wb") as file:
            file.writelines(worlds.events(worlds.make(stream, WORLD_SAMPLES[stream])))
        source = {"kind": "files", "paths": [str(events)], "event_time": {"field": "ts", "unit": "s"}}
        return {**worlds.job_of(stream), "sources": {stream: source}, "store": {"path": "store"}}
    example = stream if stream in FILES else "clicks"
    raw = load_toml(EXAMPLES / example / "job.toml")
    (source,) = raw["sources"].values()
    if stream in FILES:
        path, num_lines = FILES[stream]
        events = folder / f"{stream}.txt"
        with gzip.open(DATA / path, "rb") as packed, events.open("wb") as part:
            part.writelines(itertools.islice(packed, num_lines))
        source["paths"] = [str(events)]
    else:
        source |= {"events": CLICKS_EVENTS, "rate": 0.0, "partitions": 1, **CLICKS[stream]}
    raw["pipe"]["command"] = [sys.executable, str(EXAMPLES / example / "generator.py")]
    raw["store"] = {"path": "store"}
    for section in ("passes", "train", "dense", "tables"):
        raw.pop(section, None)
    raw["model"] = {"name": "deepfm"}
    return raw


def is_here(stream: str) -> bool:
    """Whether the data of a stream are on this machine."""
    return stream not in FILES or (DATA / FILES[stream][0]).exists()


class Streams:
    """Jobs and samples of streams, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spec = cache(lambda stream: spec_of(stream, folder))
        self.reader = cache(self.read)

    def samples(self, stream: str) -> Samples:
        """All samples of a stream in its order."""
        return self.reader(stream).samples

    def config(self, raw: Mapping[str, Any]) -> WorkerConfig:
        """A trainer of one core for a job, in a new store."""
        store = Path(tempfile.mkdtemp(dir=self._folder))
        where = {"folder": self._folder, "store": store, "live": store / "live", "socket": store / "role"}
        return WorkerConfig(job=dict(raw), rank=0, world=1, cores=1, **where)

    def read(self, stream: str) -> Remembered:
        """Read all of a stream."""
        raw = self.spec(stream)
        job = validate(TrainerJob, raw)
        source, section = source_of(self.config(raw), job, known=()), next(iter(job.sources.values()))
        (partition,) = source.partitions(Deadline.after(ASK_S))
        whole = Segment(partition.name, partition.number, partition.begin, partition.end, partition.identity)
        reader = SegmentReader(source, job.pipe, Schema.of(job.slots).emitted, section, None, self._folder)
        try:
            return Remembered(reader, whole)
        finally:
            reader.close()
