"""Two epochs and what follows, shuffled, killed in the middle of the second epoch: as if nothing had happened."""

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from tests.faults.test_kills import report, said_by
from tests.integration.epoch_job import write_epoch_job
from tests.integration.stream_job import headrace

pytestmark = pytest.mark.usefixtures("warm")

HISTORY, LATER, PASS = 300, 100, 60
DEATHS = [AtFailpoint(RANK_0, Failpoint.PLAN_LOGGED, 8)]
"""In the second epoch, which is passes 6 to 10."""


def ended(folder):
    """The report and the closes of a run by two trainers with all deaths."""
    said: list[str] = []
    keys = "commit={every='600s', every_passes=3, keep=20}", "passes.shuffle=true"
    job = load_job(folder / "job.toml", [*keys, "cluster={trainers=2, shards=1}", "train.threads=1"])
    planned = Deaths(job.store, iter(DEATHS))
    assert run(job, planned, said_by(said)).code == 0, said[-20:]
    assert [died.death for died in planned.died] == DEATHS
    return report(job.store), planned.closes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_epochs_that_are_killed_and_run_again_have_the_same_bits(tmp_path):
    job = write_epoch_job(tmp_path)
    found, closes = ended(tmp_path)
    bad_history, bad = HISTORY // 50, (HISTORY + LATER) // 50
    assert found["events"] == 2 * HISTORY + LATER and found["samples"] == found["events"] - bad_history - bad
    assert found["metrics"]["life"]["ctr"]["count"] == HISTORY + LATER - bad, "the second epoch is not measured"
    assert found["positions"]["history:history/1.jsonl#epoch=2"] == found["positions"]["history:history/1.jsonl"] > 0
    assert sorted(closes) == list(range(1, 2 * HISTORY // PASS + -(-LATER // PASS) + 1)), "no pass is cut anew"
    days = [closes[number]["day"] for number in sorted(closes)]
    assert days == sorted(days) and days[4] == days[9] == 1 and days[-1] == 2, "days stand still in the second epoch"
    again = headrace(job, "cluster={trainers=2, shards=1}", command="rerun", options=["--from", "0"])
    assert again.code == 0, f"a run of the same log without deaths has the same bits\n{again.output}"
