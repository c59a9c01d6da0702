"""Memory of reading a packed file whose events are large, measured in a process of its own."""

import gzip
import json
import random
import subprocess
import sys

import pytest

NUM_EVENTS, EVENT_BYTES = 400, 1_000_000
READ = """
import json, resource, sys
from pathlib import Path

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.config import ColumnsPipe, MetaSlot, SparseSlot
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline

section = FilesSource(kind="files", paths=("events.jsonl.gz",))
opening = Opening(folder=Path.cwd(), job="job", seed=1, deadline=Deadline.after(30))
source = open_source(section, opening)
(partition,) = source.partitions(Deadline.after(30))
schema = Schema.of([SparseSlot(name="user"), MetaSlot(kind="meta", name="click")])
reader = SegmentReader(source, ColumnsPipe(kind="columns"), schema, section, None, Path.cwd(), memory=64 << 20)
peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
segment = Segment(partition.name, 0, 0, int(sys.argv[1]))
num = sum(len(samples) for samples in reader.read(1, [segment], PassTally()))
reader.close()
print(json.dumps([num, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before]))
"""


@pytest.mark.long
def test_a_pass_of_large_events_takes_the_memory_of_its_parts(tmp_path):
    numbers = random.Random(3)
    with gzip.open(tmp_path / "events.jsonl.gz", "wt", compresslevel=4) as file:
        for number in range(NUM_EVENTS):
            text = "".join(numbers.choice("abcdefgh") for _ in range(4_000)) * (EVENT_BYTES // 4_000)
            file.write(json.dumps({"user": number % 50, "click": number % 2, "text": text}) + "\n")
    command = [sys.executable, "-c", READ, str(NUM_EVENTS)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    num, grown_kb = json.loads(ran.stdout)
    assert num == NUM_EVENTS
    assert grown_kb < 160_000, "read whole, the pass takes more than its 400 MB of text"
