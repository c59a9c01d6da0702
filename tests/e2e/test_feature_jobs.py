"""Features without a program: one job, and the same events in training, prediction, replica and serving."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.dataset.features.served_events import ServedFeatures
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.service.spec.job import load_job
from headrace.trainer.exports.onnx_model import DenseGraph
from headrace.trainer.replica.inference_messages import InvalidInference, RequestReader
from headrace.trainer.replica.serving_model import ServingModel
from tests.e2e.test_examples import EXAMPLES, headrace

SPEC = """
name = "shown"
[sources.events]
kind = "files"
paths = ["events.jsonl"]
event_time = { field = "ts", unit = "s" }
[pipe]
kind = "columns"
explode = "shown"
[[slots]]
name = "item"
from = "shown.id"
[[slots]]
name = "tags"
from = "user.tags"
values = "string"
default = "none"
max_len = 2
[[slots]]
name = "hour"
from = "ts"
time = "hour"
[[slots]]
name = "item_hour"
cross = ["item", "hour"]
[[slots]]
name = "price"
kind = "dense"
from = "shown.price"
log = true
default = 0
[[slots]]
name = "click"
kind = "meta"
from = "shown.id"
in = "clicked"
[[tasks]]
name = "ctr"
label = "click"
[tables.default]
dim = 4
[model]
name = "deepfm"
[model.settings]
hidden = [8]
[passes]
max_events = 200
[store]
path = "store"
[exports.serving]
golden = 32
"""


def event(draw: random.Random, number: int) -> str:
    shown = [{"id": draw.randrange(20), "price": draw.uniform(0, 9)} for _ in range(draw.randrange(1, 5))]
    for each in shown:
        if draw.random() < 0.2:
            del each["price"]
    clicked = [each["id"] for each in shown if each["id"] % 3 == draw.randrange(3)]
    user = {"tags": draw.sample(["a", "b", "ü"], draw.randrange(4))}
    return json.dumps({"ts": 1_700_000_000 + 60 * number, "user": user, "shown": shown, "clicked": clicked})


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("features"), random.Random(1)
    lines = [event(draw, number) for number in range(400)]
    lines[7] = '{"ts": 1, "shown": [{"id": -1}]}'
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "job.toml").write_text(SPEC)
    headrace("run", folder / "job.toml", "--set", "pipe.max_bad_fraction=1.0")
    return load_job(folder / "job.toml")


def trained_on(job) -> Samples:
    """The samples as the trainer reads them; a prediction job reads them by the same class."""
    opening = Opening(folder=job.folder, job="shown", seed=1, deadline=Deadline.after(10))
    source = open_source(job.spec.sources["events"], opening)
    (partition,) = source.partitions(Deadline.after(10))
    schema = Schema.of(job.spec.slots)
    reader = SegmentReader(source, job.spec.pipe, schema, job.spec.sources["events"], None, job.folder)
    try:
        segment = Segment(partition.name, 0, 0, partition.end)
        return Samples.concat(list(reader.read(0, [segment], PassTally())))
    finally:
        reader.close()


@pytest.mark.long
def test_all_make_the_same_features_of_the_same_events(job, tmp_path):
    wanted = trained_on(job)
    (done,) = job.store.glob("exports/serving/shown/*/*-base/_DONE")
    described = json.loads((done.parent / "model.json").read_text())
    lines = (job.folder / "events.jsonl").read_bytes().splitlines()
    good = [line for number, line in enumerate(lines) if number != 7]

    served, event_B = ServedFeatures(described["features"]).samples(good)  # as serve.py
    model = ServingModel(described, DenseGraph((done.parent / "dense.onnx").read_bytes()).open())
    reader = RequestReader(model, len(wanted))
    asked = reader.inputs({"events": [json.loads(line) for line in good]})  # as the replica
    as_texts = reader.inputs({"events": [line.decode() for line in good]})
    assert asked.events == as_texts.events == event_B.tolist()
    for (table,), signs, again in zip([model.tables], asked.signs, as_texts.signs, strict=True):
        for number, slot in enumerate(table.slots):
            column, begin, end = wanted.sparse[slot["name"]], *signs.offset_SB1[number, [0, -1]]
            for found in (
                signs.sign_N[begin:end],
                again.sign_N[begin:end],
                served[slot["name"]].combine_chunks().values,
            ):
                assert np.array_equal(np.asarray(found), column.values_N), slot["name"]
            assert np.array_equal(signs.offset_SB1[number] - begin, column.offset_B1)
    assert asked.dense["price"].tobytes() == as_texts.dense["price"].tobytes() == wanted.dense["price"].tobytes()
    with pytest.raises(InvalidInference, match="event 1: field 'shown.id': -1 is not a whole number"):
        reader.inputs({"events": [good[0].decode(), lines[7].decode()]})


@pytest.mark.long
def test_a_prediction_job_and_the_served_export_say_the_same(job, tmp_path):
    headrace("predict", job.folder / "job.toml", "--input", job.folder / "events.jsonl", "--output", tmp_path / "out")
    rows = pq.read_table(tmp_path / "out").sort_by([("offset", "ascending"), ("sample", "ascending")]).to_pylist()
    folder = job.store / "exports" / "serving" / "shown"
    lines = (job.folder / "events.jsonl").read_text().splitlines()
    good = tmp_path / "good.jsonl"
    good.write_text("\n".join(line for number, line in enumerate(lines) if number != 7))
    command = [sys.executable, EXAMPLES / "serving" / "serve.py", "--raw", "--events", good, folder]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    served = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(served) == len(rows) > 400
    assert np.allclose([each["ctr"] for each in served], [row["prediction.ctr"] for row in rows], atol=1e-6)
