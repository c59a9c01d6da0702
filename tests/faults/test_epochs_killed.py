"""Two epochs and what follows, shuffled, killed in the middle of the second epoch: as if nothing had happened."""

import pytest

from millrace.failpoints import Failpoint
from service.faults.deaths import CHIEF, AtFailpoint
from service.faults.injection import Deaths, run
from service.spec.job import load_job
from tests.faults.test_kills import report, said_by
from tests.integration.epoch_job import write_epoch_job
from tests.integration.stream_job import millrace

HISTORY, LATER, PASS = 300, 100, 60
DEATHS = [AtFailpoint(CHIEF, Failpoint.PLAN_LOGGED, 8)]
"""In the second epoch, which is passes 6 to 10."""


def ended(folder, store, deaths, *settings):
    """The report and the closes of a run by two trainers."""
    said: list[str] = []
    keys = f"store.path={store}", "commit={every='600s', every_passes=3, keep=20}", "passes.shuffle=true"
    job = load_job(folder / "job.toml", [*keys, "cluster={trainers=2, shards=1}", "train.threads=1", *settings])
    planned = Deaths(job.store, iter(deaths))
    assert run(job, planned, said_by(said)).code == 0, said[-20:]
    assert [died.death for died in planned.died] == deaths
    return report(job.store), planned.closes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_epochs_that_are_killed_and_run_again_have_the_same_bits(tmp_path):
    job = write_epoch_job(tmp_path)
    calm, closes = ended(tmp_path, "calm", [], "passes.keep=1GiB")
    assert ended(tmp_path, "killed", DEATHS) == (calm, closes), "neither deaths nor kept samples change a bit"
    bad_history, bad = HISTORY // 50, (HISTORY + LATER) // 50
    assert calm["events"] == 2 * HISTORY + LATER and calm["samples"] == calm["events"] - bad_history - bad
    assert calm["metrics"]["life"]["ctr"]["count"] == HISTORY + LATER - bad, "the second epoch is not measured"
    assert calm["positions"]["history:history/1.jsonl#epoch=2"] == calm["positions"]["history:history/1.jsonl"] > 0
    days = [closes[number]["day"] for number in sorted(closes)]
    assert days == sorted(days) and days[4] == days[9] == 1 and days[-1] == 2, "days stand still in the second epoch"
    again = millrace(job, "cluster={trainers=2, shards=1}", store="killed", command="rerun", options=["--from", "0"])
    assert again.code == 0, again.output
