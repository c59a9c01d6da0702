"""A replica behind a link of 1 Mbit/s: training goes as fast as without it, memory is bounded, and it catches up.

`pytest -s` prints the measured figures.
"""

import json
import signal
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.deadline import Deadline
from headrace.pserver.config import TableSection
from headrace.pserver.feed.publisher import MAX_WAITING_BYTES
from headrace.service.spec.launchers import LOCAL
from headrace.trainer.journal.records import RecordKind
from tests.integration.test_feed import committed
from tests.machines.external_job import HEADRACE, PORT, started
from tests.machines.feed_follower import digest_of
from tests.machines.test_replica_joining import give, join_token, options, process_of

pytestmark = pytest.mark.slow

SPEC = """
name = "wide"
seed = 3

[sources.lines]
kind = "files"
paths = ["lines.txt"]
follow = true
poll = "10ms"

[pipe]
command = ["cat"]

[[slots]]
names = ["items", "words"]

[[slots]]
name = "click"
kind = "meta"

[[tasks]]
name = "ctr"
label = "click"

[tables.default]
dim = 64

[model]
name = "lr"

[passes]
max_events = 400
cut = "count"

[commit]
every = "600s"

[cluster]
shards = 1

[store]
path = "store"
"""
EVENTS, IDS, KEYS = 400, 10, 4000
PASS_BYTES = 1_300_000
"""Least bytes that a pass changes, in some 5,000 rows: 10 s of the slow link. A second has 20 such passes."""
ROUNDS, BLOCK = 5, 60
"""Passes of a measurement."""
LEAST_RATIO = 0.6
"""Of the speed with a replica and without: where training waits for the link the ratio is below 0.05."""
FLOOD_BYTES = 3 * MAX_WAITING_BYTES
SLACK_MB = 64
"""Of growth that has other causes: rows that are copied and encoded, and what the allocator keeps."""


def lines_of_a_pass():
    random = np.random.default_rng(1)
    for _ in range(EVENTS):
        ids = " ".join(map(str, random.integers(1, KEYS, IDS)))
        words = " ".join(map(str, random.integers(KEYS, 2 * KEYS, IDS)))
        yield f"{IDS} {ids} {IDS} {words} 1 {random.integers(0, 2)}\n"


class Stream:
    """The lines of a job, and how many of its passes are closed."""

    def __init__(self, machine):
        self._lines, self._log = machine.tmp / "lines.txt", machine.tmp / "store" / "log"
        self._pass = "".join(lines_of_a_pass())
        self._lines.write_text("")
        self.num_passes = 0

    def train(self, num_passes):
        """Let some passes come, and wait until they are closed; passes a second."""
        begin_s = time.monotonic()
        self.arrive(num_passes)
        self.await_closed()
        return num_passes / (time.monotonic() - begin_s)

    def arrive(self, num_passes):
        with self._lines.open("a") as lines:
            lines.write(self._pass * num_passes)
        self.num_passes += num_passes

    def await_closed(self):
        deadline = Deadline.after(120)
        while self._num_closed() < self.num_passes:
            deadline.check(f"the close of {self.num_passes} passes")
            time.sleep(0.02)

    def _num_closed(self):
        kind = f'"{RecordKind.CLOSE}"'.encode()
        return sum(file.read_bytes().count(kind) for file in self._log.glob("*.log"))


class Measured:
    """Memory of the workers that serve the feed, in MiB."""

    def __init__(self, head):
        self._pids = {name: process_of(head, name) for name in ("shard-0", "trainer-0")}
        self.before = self._now("VmRSS")

    def grown(self):
        """The most that each has had since its start, less what it had when this was made."""
        return {name: most - self.before[name] for name, most in self._now("VmHWM").items()}

    def _now(self, figure):
        texts = {name: Path(f"/proc/{pid}/status").read_text() for name, pid in self._pids.items()}
        lines = {
            name: next(line for line in text.splitlines() if line.startswith(figure)) for name, text in texts.items()
        }
        return {name: int(line.split()[1]) / 1024 for name, line in lines.items()}


class Replica:
    """Follows the feed on a machine."""

    def __init__(self, machine, at):
        self._machine, before = machine, machine.carried()[1]
        self.output = started(machine, "-m", "tests.machines.feed_follower", at, "/tmp/token")
        deadline = Deadline.after(60)
        while machine.carried()[1] - before < 200_000:  # rows are on their way
            deadline.check(f"the feed reaches the replica: {self.output.said}")
            time.sleep(0.05)

    def end(self):
        """End it, and wait until the job has noticed: nothing more comes."""
        self.output.kill()
        arrived = -1
        while (now := self._machine.carried()[1]) != arrived:
            arrived = now
            time.sleep(0.3)


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


def ratios(stream, other, at):
    """The speed with a slow replica over that without it, in rounds that take turns with the order."""
    for number in range(ROUNDS):
        speed = {}
        for with_replica in (number % 2 == 0, number % 2 == 1):
            replica = Replica(other, at) if with_replica else None
            speed[with_replica] = stream.train(BLOCK)
            if replica is not None:
                assert "trouble" not in replica.output.said
                replica.end()
        yield speed[True] / speed[False]


def test_a_replica_behind_a_slow_link_costs_no_speed_and_bounded_memory_and_catches_up(held, machines, tmp_path):
    head, other = machines(2)
    (head.tmp / "job.toml").write_text(SPEC)
    stream = Stream(head)
    words, at = options(head, 1, LOCAL), f"{head.address}:{PORT}"
    give(other, join_token(head, *words))
    other.shape(rate="1mbit")
    job = started(head, *HEADRACE, "run", "job.toml", *words)
    held.callback(job.kill)
    stream.train(BLOCK)
    memory = Measured(head)
    found = sorted(ratios(stream, other, at))
    print(f"speed with it over speed without it: {[round(ratio, 2) for ratio in found]}")
    assert statistics.median(found) > LEAST_RATIO
    replica = Replica(other, at)
    held.callback(replica.output.kill)
    stream.train(FLOOD_BYTES // PASS_BYTES)
    grown = memory.grown()
    print(f"memory grew by {grown} MiB, of {MAX_WAITING_BYTES >> 20} MiB that may wait")
    assert max(grown.values()) < (MAX_WAITING_BYTES >> 20) + SLACK_MB
    job.until("it is too slow for the live feed: ")
    since_s = time.monotonic()
    last = json.loads(replica.output.until(f'"version": {stream.num_passes},', 120))
    versions = replica.output.said.count('"version"')
    late_s = time.monotonic() - since_s
    print(f"it had version {last['version']} {late_s:.1f} s after the last pass, and {versions} versions in all")
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 0, job.said
    version, rows, tensors = committed(head.tmp / "store", tmp_path / "live", TableSection(dim=64))
    tensors = {name: value.tobytes() for name, value in tensors.items()}
    assert (last["version"], last["digest"]) == (version, digest_of(rows, tensors))
    assert versions < stream.num_passes / 10, "it jumps over most versions"
