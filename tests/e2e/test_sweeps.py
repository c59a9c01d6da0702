"""`headrace sweep` as a user runs it: several settings over the samples of the first run."""

import json
import subprocess
import sys

import pytest

from tests.integration.epoch_job import write_epoch_job
from tests.integration.trainer_here import run


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_settings_of_a_sweep_give_what_each_gives_alone(tmp_path):
    job = write_epoch_job(tmp_path)
    words = ["sweep", str(job), "--set", "train.batch_size=32,16", "--set", "train.threads=1", "--jobs", "2", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "headrace.service", *words], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    first, second = json.loads(ran.stdout)
    assert json.loads((tmp_path / "runs" / "sweep" / "sweep.json").read_text()) == [first, second]
    assert second["against_first"]["parts"] == 7 and first["against_first"] is None
    assert {each["metric"] for each in second["against_first"]["results"]} >= {"auc", "logloss"}
    alone = run(job, tmp_path / "alone", "train.batch_size=16", "train.threads=1")
    assert alone.metrics["life"]["ctr"]["auc"] == second["metrics"]["ctr"]["auc"]
    swept = json.loads((tmp_path / "runs" / "sweep" / "01" / "report.json").read_text())
    assert swept["digest"] == alone.digest, "samples from disk are the pipe's"
    assert not (tmp_path / "runs" / "sweep" / "samples").exists()
