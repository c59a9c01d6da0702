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
    (settings := tmp_path / "settings.toml").write_text(
        "[wide]\ntrain.batch_size = 32\n[narrow.train]\nbatch_size = 16\n"
    )
    words = ["sweep", str(job), "--settings", str(settings), "--set", "train.threads=1", "--after", "1", "--jobs", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "headrace.service", *words, "--json"], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    first, second = json.loads(ran.stdout)
    assert json.loads((tmp_path / "runs" / "sweep" / "sweep.json").read_text()) == [first, second]
    assert second["against_first"]["parts"] == 6 and first["against_first"] is None
    assert {each["metric"] for each in second["against_first"]["results"]} >= {"auc", "logloss"}
    alone = run(job, tmp_path / "alone", "train.batch_size=16", "train.threads=1")
    assert alone.metrics["life"]["ctr"]["auc"] == second["metrics"]["ctr"]["auc"]
    swept = json.loads((tmp_path / "runs" / "sweep" / "01" / "report.json").read_text())
    assert second["last_half"]["ctr"]["auc"] == swept["halves"]["last"]["ctr"]["auc"] != second["metrics"]["ctr"]["auc"]
    assert swept["digest"] == alone.digest, "samples from disk are the pipe's"
    assert not (tmp_path / "runs" / "sweep" / "samples").exists()
