"""A job whose model sees the statistics of rows, after deaths and with shards, is the same as an undisturbed one."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.dataset.spec.schema import Schema
from headrace.failpoints import Failpoint
from headrace.keys import key_of_reference
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.predict.commit_statistics import CommitStatistics
from tests.faults.test_histories_killed import counted_by_hand, ended, job_at
from tests.integration.stream_job import SPEC, write_job
from tests.jobs import changed

KNOWN = {"name": "known", "kind": "dense", "statistics": {"of": ["a", "history"]}}
KNOWING = changed(SPEC, {"metrics.gauc_by": None}, slots=[KNOWN])
DEATHS = (
    AtFailpoint("shard-1", Failpoint.PARTLY_PUSHED, 5),
    AtFailpoint(RANK_0, Failpoint.CLOSED, 2),
)


def exported(job):
    """Shows and clicks of each row of slot "a" in the one export, by sign."""
    (path,) = (job.store / "exports" / "serving").rglob("statistics-a-*.parquet")
    rows = pq.read_table(path).to_pydict()
    assert set(rows["slot"]) == {"a"}
    return {sign: [*counts] for sign, *counts in zip(rows["sign"], rows["show"], rows["click"], strict=True)}


def committed(job, scratch):
    """The same in the newest commit."""
    schema, commit = Schema.of(job.spec.slots), Commits(job.store).whole()[-1]
    keys_U = np.array([key_of_reference(sign, schema.by_name["a"].group) for sign in range(20)], np.uint64)
    with CommitStatistics(commit, schema, job.spec.tables, scratch) as known:
        return dict(enumerate(known.of("statistics-a", keys_U).tolist()))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_job_with_shards_learns_the_same_from_statistics_as_a_calm_one(tmp_path):
    write_job(tmp_path, num_lines=200, spec=KNOWING)
    calm, killed = (job_at(tmp_path, "calm", "exports={serving={}}"), job_at(tmp_path, "killed", "cluster.shards=2"))
    one, _ = ended(calm)
    other, _ = ended(killed, DEATHS)
    assert one["digest"] == other["digest"]
    by_hand, _ = counted_by_hand(tmp_path)
    assert exported(calm) == by_hand


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_trainer_learns_the_same_from_statistics_in_async(tmp_path):
    write_job(tmp_path, num_lines=200, spec=KNOWING)
    both = ("cluster.shards=1", "dense.strategy=shards")
    sync, other = job_at(tmp_path, "sync", *both), job_at(tmp_path, "async", *both, "train.mode=async")
    assert ended(sync)[0]["digest"] == ended(other)[0]["digest"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_trainers_in_geo_count_what_is_in_the_log(tmp_path):
    sgd = {"optimizer": {"kind": "sgd", "lr": 0.1}}
    geo = {"tables.default": sgd, "dense": sgd | {"strategy": "shards"}, "train": {"mode": "geo", "k_steps": 3}}
    write_job(tmp_path, num_lines=200, spec=changed(KNOWING, geo))
    job = job_at(tmp_path, "geo", "cluster={trainers=2, shards=1}", "train.threads=1")
    ended(job)
    assert committed(job, tmp_path / "scratch") == counted_by_hand(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_trainers_know_what_one_knows(tmp_path):
    write_job(tmp_path, num_lines=200, spec=KNOWING)
    three = job_at(tmp_path, "three", "cluster={trainers=3, shards=2}", "train.threads=1", "exports={serving={}}")
    ended(three)
    assert exported(three) == counted_by_hand(tmp_path)[0]
