"""The memories of a job are used wherever its model is: in predictions, by servers of exports, replicas."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config import validate
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.predict.event_trials import EventTrials
from headrace.service.predict.prediction import predict
from headrace.service.spec.job import load_job
from headrace.service.tables.row import explain, format_explanation
from headrace.trainer.exports.materialize import materialize
from headrace.trainer.exports.reader import chain_of, open_export
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.replica.candidate_ranking import CandidateRanker
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.serving.item_catalogue import ItemCatalogue
from tests.contract.predict_world import content, rows_of
from tests.faults.test_histories_killed import WITH_HISTORIES
from tests.integration.followed_job import FollowedJob, by_count
from tests.integration.stream_job import headrace, write_job
from tests.integration.test_replica import Replica

SERVE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "serving" / "serve.py"
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


COLUMNS = ["d", "a", "b", "history", "group", "clicked"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job that has trained all of its lines, with a stream of deltas, and one with a base at the end."""
    path = write_job(tmp_path_factory.mktemp("ended"), num_lines=200, spec=WITH_HISTORIES)
    streams = "exports={steps={delta='10ms', clock='wall', on_late='wait'}, whole={clock='wall'}}"
    run = headrace(path, streams, "passes.max_events=120")
    assert run.code == 0, run.output
    return load_job(path, [streams])


def by_hand(folder):
    """The last seven signs of slot "b" that each sign of slot "a" clicked, and how often it was shown and clicked."""
    clicked, counts = {}, {}
    for part in sorted(folder.glob("part-*.txt")):
        for line in part.read_text().splitlines():
            words = line.split()  # 2 x y 1 a 1 b n history.. 1 click 1 group
            a, b = int(words[4]), int(words[6])
            shows, clicks = counts.get(a, (0, 0))
            counts[a] = shows + 1, clicks + int(words[-3])
            if words[-3] == "1":
                clicked[a] = [*clicked.get(a, []), b][-7:]
    return clicked, counts


def predicted(job, output, **asked):
    raw = {"input": {"paths": ["part-0.txt"]}, "output": str(output), "segment_events": 50, "columns": COLUMNS}
    request = validate(PredictionRequest, {**raw, "outputs": ["ctr", "slot.clicked"], **asked})
    return predict(job, request, lambda *_: None, threading.Event())


@pytest.fixture(scope="module")
def live(ended, tmp_path_factory):
    """Samples with what the newest version says of them."""
    output = tmp_path_factory.mktemp("live") / "out"
    predicted(ended, output)
    return output


def without_memories(row):
    """An event as a server gets it: the slots that the job fills are left out."""
    return {name: row[name] for name in ("d", "a", "b", "history", "group")}


def test_a_prediction_reads_histories_and_counters_as_of_the_version(ended, live, tmp_path):
    clicked, _ = by_hand(ended.folder)
    rows = rows_of(live).to_pylist()
    assert len(rows) > 150
    assert all(row["clicked"] == clicked.get(row["a"][0], []) for row in rows)
    assert any(any(row["slot.clicked"]) for row in rows)
    predicted(ended, tmp_path / "two", trainers=2, shards=2)
    assert content(tmp_path / "two") == content(live)


def test_pasted_events_are_predicted_as_a_prediction_job_does(ended, live):
    rows, lines = rows_of(live).to_pylist(), (ended.folder / "part-0.txt").read_text().splitlines()
    known = {str(row["b"][0]) for row in rows}
    with closing(EventTrials()) as trials:
        found = trials.ask("it", ended, lines[:70], Deadline.after(60))
        again = trials.ask("it", ended, ["2 0 0 1 3 1 987654 0 1 0 1 7", "x"], Deadline.after(60))
        example = trials.ask("it", ended, [], Deadline.after(60), example=True)["example"]
        with pytest.raises(SpecError, match="holds no run"):
            trials.ask("other", replace(ended, store=ended.folder / "none"), [], Deadline.after(60))
    assert example in [line for part in ended.folder.glob("part-*.txt") for line in part.read_text().splitlines()]
    assert found["example"] is None, "none was asked for"
    assert found["commit"] == rows_commit(live) and len(found["samples"]) == 70 and not found["rejected"]
    for sample, row in zip(found["samples"], rows, strict=False):
        assert sample["predictions"]["ctr"] == pytest.approx(row["prediction.ctr"], rel=1e-5)
        slots = {each["name"]: each for each in sample["slots"]}
        assert slots["clicked"]["values"] == [str(each) for each in row["clicked"]]
        assert slots["b"]["values"] == [str(row["b"][0])] and not slots["b"]["missing"]
    [sample] = again["samples"]
    missing = {each["name"]: each["missing"] for each in sample["slots"]}
    assert missing["b"] == ["987654"] and "987654" not in known and missing["a"] == []
    [rejected] = again["rejected"]
    assert rejected["events"] == 1 and rejected["first"].startswith("output line 2: unparsable")
    assert not [*ended.store.glob("reruns/*")], "nothing is left in the store"


def rows_commit(output):
    return json.loads((output / "_manifest.json").read_text())["version"]["commit"]


def test_a_prediction_by_an_export_says_the_same(ended, live, tmp_path):
    export = open_export(str(ended.store / "exports" / "steps" / "small"), tmp_path)
    assert export.kind == "delta"
    predicted(ended, tmp_path / "out", version=export.place.address)
    assert rows_of(tmp_path / "out").equals(rows_of(live))


def test_explain_tells_what_the_job_remembers_of_a_sign(ended):
    clicked, counts = by_hand(ended.folder)
    known = explain(ended, "a", "3", Deadline.after(60))
    remembers = {"clicked": {"history": clicked[3]}, "counts": {"counters": {"all": list(counts[3])}}}
    assert known["remembers"] == remembers
    text = "\n".join(format_explanation(known))
    assert f"slot clicked remembers of it, newest last: {' '.join(map(str, clicked[3]))}" in text
    assert f"slot counts counts of it, up to its newest sample: all {counts[3][0]} shows, {counts[3][1]} clicks" in text
    assert "remembers" not in explain(ended, "b", "3", Deadline.after(60))


def test_deltas_replay_to_the_histories_and_counters_of_a_base(ended, tmp_path):
    steps, whole = (open_export(str(ended.store / "exports" / name / "small"), tmp_path) for name in ("steps", "whole"))
    assert steps.kind == "delta" and whole.kind == "base" and steps.manifest["positions"] == whole.manifest["positions"]
    assert len(chain_of(steps)) > 2 and "without_histories" not in steps.manifest
    materialize(steps, tmp_path / "out")
    again = open_export(str(tmp_path / "out"), tmp_path)
    for kind in ("histories", "counters"):
        assert again.manifest[kind] == whole.manifest[kind] and len(whole.manifest[kind]) == 2
    names = [name for name in whole.files if name.startswith(("histories-", "counters-"))]
    assert len(names) == 4
    for name in names:
        assert pq.read_table(again.file(name)).equals(pq.read_table(whole.file(name))), name


def test_the_example_of_a_server_fills_what_events_leave_out(ended, live, tmp_path):
    rows = rows_of(live).to_pylist()
    lines = [json.dumps(without_memories(row)) for row in rows]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    folder = ended.store / "exports" / "steps" / "small"
    command = [sys.executable, str(SERVE), str(folder), "--events", str(tmp_path / "events.jsonl")]
    served = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert served.returncode == 0, served.stderr
    found = [json.loads(line)["ctr"] for line in served.stdout.splitlines()]
    assert found == pytest.approx([row["prediction.ctr"] for row in rows], abs=1e-6)


def request_of(rows):
    inputs = [
        {"name": name, "datatype": "UINT64", "shape": [len(rows), 1], "data": [row[name] for row in rows]}
        for name in ("a", "b", "group")
    ]
    signs = [sign for row in rows for sign in row["history"]]
    inputs.append({"name": "history", "datatype": "UINT64", "shape": [len(signs)], "data": signs})
    lengths = [len(row["history"]) for row in rows]
    inputs.append({"name": "history.lengths", "datatype": "INT64", "shape": [len(rows)], "data": lengths})
    inputs.append({"name": "d", "datatype": "FP32", "shape": [len(rows), 2], "data": [row["d"] for row in rows]})
    return json.dumps({"inputs": inputs}).encode()


def test_a_replica_of_exports_fills_what_a_request_leaves_out(ended, live, tmp_path):
    state = ReplicaState(2, 1 << 30)
    handler = InferenceHandler(state, ReplicaMetrics(state), 1024, 1 << 20)
    updates = ExportUpdates(str(ended.store / "exports" / "steps" / "small"), tmp_path)
    update = updates.next(Deadline.after(20))
    state.apply(update)
    rows = rows_of(live).to_pylist()
    status, answer, _ = handler.infer("small", None, request_of(rows))
    assert status == 200, answer
    assert json.loads(answer)["outputs"][0]["data"] == pytest.approx([row["prediction.ctr"] for row in rows], abs=1e-6)
    late = {"name": "event_time", "datatype": "INT64", "shape": [len(rows)], "data": [10**400] * len(rows)}
    with_times = {"inputs": [*json.loads(request_of(rows))["inputs"], late]}
    status, answer, _ = handler.infer("small", None, json.dumps(with_times).encode())
    assert status == 400 and b"event_time: a number is too large" in answer
    state.apply(replace(update, version=update.version + 1, whole=True, memories=frozenset()))
    status, answer, _ = handler.infer("small", None, request_of(rows))
    assert status == 400 and b"came without histories: send its signs" in answer


@pytest.mark.slow
def test_a_replica_follows_histories_and_counters_of_a_job_that_is_killed(tmp_path):
    followed = FollowedJob(tmp_path, 3, by_count(WITH_HISTORIES))
    job = followed.start("cluster={trainers=2, shards=2}", "train.threads=1")
    try:
        replica = Replica(tmp_path, "--store", str(job.store))
        for version in (1, 2, 3):
            followed.arrive(version)
            replica.until(version)
            if version == 2:
                for worker in ("trainer-1", "shard-0"):
                    os.kill(job.workers()[worker], signal.SIGKILL)
        job.process.send_signal(signal.SIGTERM)
        code, said = job.end()
        assert code == 0, said
        predicted(load_job(followed.spec, [f"store.path={job.store}"]), tmp_path / "out")
        rows = rows_of(tmp_path / "out").to_pylist()
        answer = replica.get("/v2/models/small/infer", json.loads(request_of(rows)))
        wanted = pytest.approx([row["prediction.ctr"] for row in rows], abs=1e-6)
        assert answer["model_version"] == "3" and answer["outputs"][0]["data"] == wanted
        assert any(row["clicked"] for row in rows)
        assert replica.end() == 0
    finally:
        job.kill()
        replica.process.kill()


COLUMNS_JOB = """
name = "columns"

[sources.lines]
kind = "files"
paths = ["part-*.jsonl"]
event_time = { field = "ts", unit = "s" }

[pipe]
kind = "columns"

[[slots]]
names = ["user", "item"]

[[slots]]
name = "clicked"
pooling = "mean"
history = { key = "user", of = "item", last = 5, when = "click" }

[[slots]]
name = "shown"
kind = "dense"
counters = { key = "item", windows = ["10m", "all"], click = "click" }

[[slots]]
name = "click"
kind = "meta"

[[tasks]]
name = "ctr"
label = "click"

[tables.default]
dim = 4

[model]
name = "deepfm"
[model.settings]
hidden = [8]

[train]
batch_size = 32

[passes]
max_events = 60

[exports.serving]

[store]
path = "store"
"""


@pytest.mark.slow
def test_raw_events_are_served_with_histories_and_counters_at_their_times(tmp_path):
    draw, begin_s = np.random.default_rng(4), 1_700_000_000
    events = [
        {"user": int(draw.integers(15)), "item": int(draw.integers(20)), "click": int(draw.integers(2)), "ts": at}
        for at in range(begin_s, begin_s + 6000, 25)
    ]
    (tmp_path / "part-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "job.toml").write_text(COLUMNS_JOB)
    run = headrace(tmp_path / "job.toml")
    assert run.code == 0, run.output
    job = load_job(tmp_path / "job.toml")
    predicted(job, tmp_path / "out", input={"paths": ["part-0.jsonl"]}, columns=[], outputs=["ctr"])
    wanted = pytest.approx(rows_of(tmp_path / "out")["prediction.ctr"].to_pylist(), abs=1e-6)
    folder, state = job.store / "exports" / "serving" / "columns", ReplicaState(2, 1 << 30)
    state.apply(ExportUpdates(str(folder), tmp_path / "fetched").next(Deadline.after(20)))
    handler = InferenceHandler(state, ReplicaMetrics(state), 1024, 1 << 20)
    request = {"events": events, "event_time": [event["ts"] for event in events]}
    status, answer, _ = handler.infer("columns", None, json.dumps(request).encode())
    assert status == 200 and json.loads(answer)["outputs"][0]["data"] == wanted
    items = pa.table({"item": range(20)})
    catalogue = ItemCatalogue(items["item"].combine_chunks(), np.arange(20, dtype=np.uint64), {}, {}, items)
    users, found = [{"user": event["user"]} for event in events], [np.array([event["item"]]) for event in events]
    _, scores = CandidateRanker(state).score(users, catalogue, found, None, request["event_time"])
    assert np.concatenate(scores).tolist() == wanted, "candidates are ranked as of the same times"
    del request["event_time"]  # windows end now, and nothing is in them
    status, answer, _ = handler.infer("columns", None, json.dumps(request).encode())
    assert status == 200 and json.loads(answer)["outputs"][0]["data"] != wanted
    command = [sys.executable, str(SERVE), "--raw", "--time", "ts", "--events", str(tmp_path / "part-0.jsonl")]
    served = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert served.returncode == 0, served.stderr
    assert [json.loads(line)["ctr"] for line in served.stdout.splitlines()] == wanted
