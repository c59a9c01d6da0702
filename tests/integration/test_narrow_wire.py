"""Jobs whose rows and gradients travel in fewer bits: equal bits wherever rows live, fewer bytes, equal replays."""

import os
import signal

import pyarrow.parquet as pq
import pytest

from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = pytest.mark.long

NARROW = "cluster.wire=bfloat16"
SLOW_PIPE = 'pipe.command=["sh", "-c", "sleep 1; cat"]'
"""Each pass takes a second at least: no job ends before it is killed."""
LEARNT = SPEC.replace(
    "dim = 4\n", 'dim = 4\ndefault_row = "learnt"\nadmission = [{ kind = "count", n = 3, exact = true }]\n'
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Keys without a row read a learnt default row, so their mark travels, too."""
    return write_job(tmp_path_factory.mktemp("narrow"), spec=LEARNT)


@pytest.fixture(scope="module")
def embedded(job):
    ended = headrace(job, NARROW, store="embedded")
    assert ended.code == 0, ended.output
    return ended.report


@pytest.mark.parametrize("shards", [1, 3])
def test_a_job_ends_with_the_same_bits_on_any_number_of_shards(job, embedded, shards):
    found = headrace(job, NARROW, f"cluster.shards={shards}", store=f"on-{shards}")
    assert found.report["digest"] == embedded["digest"], found.output


def test_the_bits_are_others_than_those_of_float32_and_the_model_is_as_good(job, embedded):
    plain = headrace(job, store="plain").report
    assert plain["digest"] != embedded["digest"]
    wide, narrow = (report["metrics"]["life"]["ctr"]["auc"] for report in (plain, embedded))
    assert narrow == pytest.approx(wide, abs=0.01)


def test_a_killed_shard_changes_nothing(job, embedded):
    running = RunningJob(job, job.parent / "killed", NARROW, SLOW_PIPE, "cluster.shards=2", "commit.every_passes=1")
    try:
        running.until_said("training")
        os.kill(running.workers()["shard-1"], signal.SIGKILL)
        code, said = running.end(100)
    finally:
        running.kill()
    assert code == 0 and "restarting, 1 of 5" in said, said
    assert running.report["digest"] == embedded["digest"]


def test_the_bytes_between_trainers_and_shards_fall(job):
    total = {}
    for wire in ("float32", "bfloat16"):
        settings = ("cluster.trainers=2", "cluster.shards=2", "tables.default.dim=64", f"cluster.wire={wire}")
        links = headrace(job, *settings, store=f"bytes-{wire}").report["links"]
        total[wire] = [
            sum(
                links[f"trainer-{rank}"][f"shard-{shard}"][f"shared_{way}_bytes"] for rank in (0, 1) for shard in (0, 1)
            )
            for way in ("sent", "received")
        ]
    (wide_sent, wide_received), (sent, received) = total["float32"], total["bfloat16"]
    assert received == wide_received / 2  # rows alone
    assert 0.5 < sent / wide_sent < 0.53  # gradients of 65 numbers, with shows and clicks in float32


GEO = ("train.mode=geo", "train.k_steps=2", "dense.optimizer.kind=sgd", "tables.default.optimizer.kind=sgd")


@pytest.mark.parametrize(
    "mode",
    [("train.mode=sync",), *(pytest.param(mode, marks=pytest.mark.slow) for mode in (("train.mode=async",), GEO))],
    ids=["sync", "async", "geo"],
)
def test_every_mode_trains_with_rows_that_travel_in_half_the_bits(tmp_path, mode):
    """One trainer: without shard processes and with two, the slices of the dense part among the rows."""
    found = []
    for shards in (0, 2):
        dense = 'dense.strategy="shards"'
        ended = headrace(write_job(tmp_path), NARROW, dense, f"cluster.shards={shards}", *mode, store=f"on-{shards}")
        assert ended.code == 0, ended.output
        found.append(ended.report)
    assert found[0]["digest"] == found[1]["digest"] and found[0]["metrics"]["life"]["ctr"]["auc"] > 0.5


@pytest.mark.slow
def test_another_wire_between_two_runs_is_logged_and_no_fork(job, tmp_path):
    both = write_job(tmp_path, spec=LEARNT)
    last = tmp_path / "part-2.txt"
    last.rename(tmp_path / "later")
    first = headrace(both, "cluster.shards=1")
    assert first.code == 0, first.output
    (tmp_path / "later").rename(last)
    second = headrace(both, NARROW, "cluster.shards=1")
    assert second.code == 0 and "orked" not in second.output, second.output
    logged = headrace(both, command="log", options=("--json",)).output
    assert "bfloat16" in logged
    again = headrace(both, NARROW, command="rerun", options=("--from", "2"))  # with its rows in the trainer
    assert again.code == 0 and "1 of 1 passes are identical" in again.output, again.output


@pytest.mark.slow
def test_predictions_with_a_wire_do_not_depend_on_the_number_of_processes(job, embedded):
    outputs = {}
    for wire in ("float32", "bfloat16", "int8"):
        for trainers, shards in ((1, 0), (2, 2)):
            folder = job.parent / f"predicted-{wire}-{shards}"
            words = ("--input", str(job.parent / "part-0.txt"), "--output", str(folder), "--wire", wire)
            more = ("--trainers", str(trainers), "--shards", str(shards))
            ended = headrace(job, store="embedded", command="predict", options=(*words, *more))
            assert ended.code == 0, ended.output
            (part,) = folder.glob("part-*.parquet")
            outputs[wire, shards] = pq.read_table(part).column("prediction.ctr").to_pylist()
    for wire in ("float32", "bfloat16", "int8"):
        assert outputs[wire, 0] == outputs[wire, 2]
    wide, half, eighth = (outputs[wire, 0] for wire in ("float32", "bfloat16", "int8"))
    assert wide != half != eighth != wide
    assert half == pytest.approx(wide, abs=0.01) and eighth == pytest.approx(wide, abs=0.01)
