"""Slots with `pairs` have the same crosses in training, predictions, servers of exports and replicas."""

import json
import subprocess
import sys
import threading

import pytest

from headrace.config import validate
from headrace.deadline import Deadline
from headrace.service.predict.prediction import predict
from headrace.service.spec.job import load_job
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from tests.contract.predict_world import rows_of
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.integration.test_kept_state import SERVE, request_of
from tests.jobs import changed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PAIRED = changed(
    SPEC,
    {"tables.weights": {"dim": 0}, "exports.whole": {"clock": "wall"}},
    slots=[{"name": "both", "table": "weights", "pairs": [["a", "b"], ["history", "a"]]}],
)


def test_predictions_servers_and_replicas_make_the_same_crosses(tmp_path):
    path = write_job(tmp_path, num_lines=200, spec=PAIRED)
    run = headrace(path, timeout_s=400)
    assert run.code == 0, run.output
    job = load_job(path)
    columns = ["d", "a", "b", "history", "group", "both"]
    raw = {"input": {"paths": ["part-0.txt"]}, "output": str(tmp_path / "out"), "columns": columns}
    predict(job, validate(PredictionRequest, raw), lambda *_: None, threading.Event())
    rows = rows_of(tmp_path / "out").to_pylist()
    wanted = pytest.approx([row["prediction.ctr"] for row in rows], abs=1e-6)
    assert all(len(row["both"]) == 1 + len(row["history"]) for row in rows)
    exports = job.store / "exports" / "whole" / "small"
    events = [{name: row[name] for name in ("d", "a", "b", "history", "group")} for row in rows]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    command = [sys.executable, str(SERVE), str(exports), "--events", str(tmp_path / "events.jsonl")]
    served = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert served.returncode == 0, served.stderr
    assert [json.loads(line)["ctr"] for line in served.stdout.splitlines()] == wanted
    state = ReplicaState(2, 1 << 30)
    handler = InferenceHandler(state, ReplicaMetrics(state), 1024, 1 << 20)
    (cache := tmp_path / "cache").mkdir()
    state.apply(ExportUpdates(str(exports), cache).next(Deadline.after(20)))
    inputs = [each for each in json.loads(request_of(rows))["inputs"] if each["name"] != "group"]
    status, answer, _ = handler.infer("small", None, json.dumps({"inputs": inputs}).encode())
    assert status == 200, answer
    assert json.loads(answer)["outputs"][0]["data"] == wanted
