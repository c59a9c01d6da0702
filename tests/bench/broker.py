"""The same events from Kafka and from a file, through `cat`, into training: the two run in turn.

A broker with one topic of PARTITIONS runs on the same cores. EVENTS lines of 8 slots, about 70 bytes each, are in the
topic and in a file. Each run is one trainer with an embedded shard and a wide_deep model of 64 x 64.

`python -m tests.bench.broker [--rounds 5] [--readers librdkafka kafka-python]` prints the figures as JSON.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.bench.parsing import run_job
from tests.bench.w1 import BLOCK
from tests.kafka.cluster import Cluster, why_not

EVENTS, PARTITIONS, SPARSE = 600_000, 4, 7
TARGET = 0.6
READERS = ("librdkafka", "kafka-python")


def lines() -> list[bytes]:
    """The events: a label and one sign in each of SPARSE slots; few signs are frequent."""
    draw = np.random.default_rng(1)
    signs = (200_000 * draw.random((EVENTS, SPARSE)) ** 3).astype(np.int64) + 1_000_000 * np.arange(1, SPARSE + 1)
    labels = draw.random(EVENTS) < 0.25
    return [
        b"1 %d " % label + b" ".join(b"1 %d" % sign for sign in row)
        for label, row in zip(labels.tolist(), signs.tolist(), strict=True)
    ]


def spec_of(source: dict) -> dict:
    """The job."""
    return {
        "name": "road",
        "sources": {"events": source},
        "pipe": {"command": ["cat"]},
        "slots": [{"name": "label", "kind": "meta"}, {"names": [f"s{{1..{SPARSE}}}"]}],
        "tasks": [{"name": "click", "label": "label"}],
        "tables": {"default": {"dim": 16, "first_order": False, "optimizer": {"kind": "adagrad", "per": "element"}}},
        "model": {"name": "wide_deep", "settings": {"hidden": [64, 64]}},
        "train": {"batch_size": BLOCK},
        "passes": {"max_events": 10 * BLOCK},
        "metrics": {"halves": False},
    }


@contextlib.contextmanager
def filled(events: Sequence[bytes], folder: Path) -> Iterator[tuple[Cluster, str]]:
    """A broker, and its topic with the events in turn over the partitions."""
    cluster = Cluster(folder / "kafka")
    try:
        cluster.start()
        topic = cluster.create_topic(PARTITIONS)
        with contextlib.closing(cluster.producer(linger_ms=20, batch_size=1 << 18)) as producer:
            for number, value in enumerate(events):
                producer.send(topic, value=value, partition=number % PARTITIONS)
            producer.flush(timeout=120)
        yield cluster, topic
    finally:
        cluster.kill()


def rate(source: dict) -> float:
    """Samples a second of a job in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        report = run_job(spec_of(source) | {"store": {"path": name}}, Path(name))
        assert report["samples"] == EVENTS, report
        return report["samples"] / report["wall_s"]


def figures(rounds: int, readers: Sequence[str] = READERS[:1]) -> dict:
    """Rates of each reader and of the file, and their ratios, with the least and the greatest."""
    if reason := why_not():
        return {"left out": reason}
    events = lines()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "events.txt").write_bytes(b"\n".join(events) + b"\n")
        files = {"kind": "files", "paths": [str(folder / "events.txt")]}
        with filled(events, folder) as (cluster, topic):
            options = {"bootstrap_servers": cluster.servers}
            kafka = {"kind": "kafka", "topics": [topic], "options": options, "end": "latest"}
            return in_turn(rounds, files, {reader: kafka for reader in readers})


def in_turn(rounds: int, files: dict, sources: dict[str, dict]) -> dict:
    """Each of `sources` beside the file, round by round."""
    rate(files)  # what is compiled once
    pairs: dict[str, list[tuple[float, float]]] = {reader: [] for reader in sources}
    for _ in range(rounds):
        beside = rate(files)
        for reader, source in sources.items():
            pairs[reader].append((rate(source), beside))
    found = {"events_bytes": 70, "target": TARGET}
    for reader, rates in pairs.items():
        ratios = sorted(ours / file for ours, file in rates)
        found[reader] = {
            "ratio": statistics.median(ratios),
            "least": ratios[0],
            "greatest": ratios[-1],
            "samples_per_s": statistics.median(ours for ours, _ in rates),
            "file_samples_per_s": statistics.median(file for _, file in rates),
        }
    return found


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--readers", nargs="*", choices=READERS, default=READERS[:1])
    given = arguments.parse_args()
    print(json.dumps(figures(given.rounds, given.readers), indent=1))
