"""A job whose model sees the statistics of rows, after deaths and with shards, is the same as an undisturbed one."""

import pyarrow.parquet as pq
import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
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
def test_three_trainers_know_what_one_knows(tmp_path):
    write_job(tmp_path, num_lines=200, spec=KNOWING)
    three = job_at(tmp_path, "three", "cluster={trainers=3, shards=2}", "train.threads=1", "exports={serving={}}")
    ended(three)
    assert exported(three) == counted_by_hand(tmp_path)[0]
