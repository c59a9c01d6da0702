"""The statistics of rows that a job learns with are used wherever its model is: in predictions, by servers of exports,
replicas. They have faded for days, and have the same bits everywhere."""

import json
import os
import runpy
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.deadline import Deadline
from headrace.service.spec.job import load_job
from headrace.trainer.exports.materialize import materialize
from headrace.trainer.exports.reader import chain_of, open_export
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from tests.contract.predict_world import content, rows_of
from tests.faults.test_statistics_killed import KNOWING
from tests.integration.followed_job import FollowedJob, by_count
from tests.integration.stream_job import FIRST_S, headrace, write_job
from tests.integration.test_kept_state import predicted, request_of
from tests.integration.test_replica import Replica
from tests.jobs import changed

SERVE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "serving" / "serve.py"
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

DAYS = 5
TIMED = changed(
    KNOWING,
    {"sources.lines.event_time": {"slot": "time"}, "tables.default.decay": 0.83},
    slots=[{"name": "time", "kind": "meta", "type": "int64"}],
)
COLUMNS = ["d", "a", "b", "history", "known"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job that has trained all of its lines over some days, with a stream of deltas, and one of bases."""
    path = write_job(tmp_path_factory.mktemp("ended"), num_parts=1, num_lines=500, spec=TIMED)
    for part in path.parent.glob("part-*.txt"):
        lines = part.read_text().splitlines()
        times = (FIRST_S + number * DAYS * 86_400 // len(lines) for number in range(len(lines)))
        part.write_text("".join(f"{line} 1 {at_s}\n" for line, at_s in zip(lines, times, strict=True)))
    streams = "exports={steps={delta='10ms', clock='wall', on_late='wait'}, whole={clock='wall'}}"
    run = headrace(path, streams, "passes.max_events=120")
    assert run.code == 0, run.output
    return load_job(path, [streams])


@pytest.fixture(scope="module")
def live(ended, tmp_path_factory):
    """Samples with what the newest version says of them."""
    output = tmp_path_factory.mktemp("live") / "out"
    predicted(ended, output, columns=COLUMNS, outputs=["ctr"])
    return output


def bits(column):
    return np.array(column.to_pylist(), np.float32).tobytes()


def test_a_prediction_has_faded_statistics_on_any_number_of_workers(ended, live, tmp_path):
    known = np.array(rows_of(live)["known"].to_pylist())
    counts = np.expm1(known[:, 0])
    assert len(known) > 150 and np.unique(counts).size > 15
    assert np.abs(counts - counts.round()).max() > 0.1, "no whole numbers, so they have faded"
    predicted(ended, tmp_path / "two", columns=COLUMNS, outputs=["ctr"], trainers=2, shards=2)
    assert content(tmp_path / "two") == content(live)


def test_a_prediction_by_an_export_says_the_same(ended, live, tmp_path):
    export = open_export(str(ended.store / "exports" / "steps" / "small"), tmp_path)
    assert export.kind == "delta"
    predicted(ended, tmp_path / "out", columns=COLUMNS, outputs=["ctr"], version=export.place.address)
    assert rows_of(tmp_path / "out").equals(rows_of(live))


def test_deltas_replay_to_the_statistics_of_a_base(ended, tmp_path):
    steps, whole = (open_export(str(ended.store / "exports" / name / "small"), tmp_path) for name in ("steps", "whole"))
    assert steps.kind == "delta" and whole.kind == "base" and steps.manifest["positions"] == whole.manifest["positions"]
    days = [each.manifest["statistics"]["a"]["day"] for each in chain_of(steps)]
    assert days == sorted(days) and days[-1] > days[0]
    materialize(steps, tmp_path / "out")
    again = open_export(str(tmp_path / "out"), tmp_path)
    assert again.manifest["statistics"] == whole.manifest["statistics"] and len(whole.manifest["statistics"]) == 2
    for name in ("statistics-a-0.parquet", "statistics-history-0.parquet"):
        assert pq.read_table(again.file(name)).equals(pq.read_table(whole.file(name))), name


def test_the_example_of_a_server_fills_the_slot_with_the_same_bits(ended, live):
    rows = rows_of(live)
    example = runpy.run_path(str(SERVE))
    server = example["Server"]([ended.store / "exports" / "steps" / "small"])
    signs = {name: rows[name].cast(pa.list_(pa.uint64())) for name in ("a", "b", "history")}
    samples = pa.table({"d": rows["d"], **signs})
    assert bits(server.filled(samples)["known"]) == bits(rows["known"])
    assert server.predict(samples)["ctr"] == pytest.approx(rows["prediction.ctr"].to_pylist(), abs=1e-6)


def test_a_replica_of_exports_fills_the_slot_with_the_same_bits(ended, live, tmp_path):
    state = ReplicaState(2, 1 << 30)
    handler = InferenceHandler(state, ReplicaMetrics(state), 1024, 1 << 20)
    update = ExportUpdates(str(ended.store / "exports" / "steps" / "small"), tmp_path).next(Deadline.after(20))
    state.apply(update)
    assert_filled_as_sent(lambda request: answered(handler, request), live)


def answered(handler, request):
    status, answer, _ = handler.infer("small", None, json.dumps(request).encode())
    assert status == 200, answer
    return json.loads(answer)


def assert_filled_as_sent(answer, live):
    """A request without the slot has the answer of one that sends the floats of the prediction."""
    rows = [{"group": 0, **row} for row in rows_of(live).to_pylist()]
    left_out = json.loads(request_of(rows))
    left_out["inputs"] = [each for each in left_out["inputs"] if each["name"] != "group"]
    floats = [value for row in rows for value in row["known"]]
    sent = {"name": "known", "datatype": "FP32", "shape": [len(rows), 4], "data": floats}
    filled, given = (answer({"inputs": each}) for each in (left_out["inputs"], [*left_out["inputs"], sent]))
    assert filled["outputs"] == given["outputs"]
    other = answer({"inputs": [*left_out["inputs"], {**sent, "data": [0.0] * len(floats)}]})
    assert other["outputs"] != given["outputs"], "the model looks at them"
    wanted = pytest.approx([row["prediction.ctr"] for row in rows], abs=1e-6)
    assert filled["outputs"][0]["data"] == wanted
    return filled


@pytest.mark.slow
def test_a_replica_follows_the_statistics_of_a_job_that_is_killed(tmp_path):
    followed = FollowedJob(tmp_path, 3, by_count(KNOWING))
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
        ended = load_job(followed.spec, [f"store.path={job.store}"])
        predicted(ended, tmp_path / "out", columns=COLUMNS, outputs=["ctr"])
        filled = assert_filled_as_sent(lambda asked: replica.get("/v2/models/small/infer", asked), tmp_path / "out")
        assert filled["model_version"] == "3" and replica.end() == 0
    finally:
        job.kill()
        replica.process.kill()
