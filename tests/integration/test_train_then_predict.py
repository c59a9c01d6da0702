"""A job that predicts once it has trained: killed in the middle, a run that is repeated ends as one that was not."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from headrace.deadline import Deadline
from tests.contract.predict_world import content
from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = pytest.mark.timeout(900)
PREDICT = """
[predict]
input = { paths = ["part-1.txt"] }
output = "predicted"
columns = ["a"]
outputs = ["ctr", "slot.b"]
segment_events = 20
"""


@pytest.mark.long
def test_once_the_stream_is_drained_the_newest_version_predicts_and_the_report_tells_of_it(tmp_path):
    ended, output = (
        headrace(write_job(tmp_path, num_lines=60, spec=SPEC + PREDICT), timeout_s=250),
        tmp_path / "predicted",
    )
    assert ended.code == 0 and "predicted 53 samples of 53 events" in ended.output
    assert (output / "_DONE").exists()
    predicted, manifest = ended.report["predict"], json.loads((output / "_manifest.json").read_text())
    assert (predicted["events"], predicted["rejected"]) == (53, {})
    assert predicted["metrics"] == json.loads((output / "_metrics.json").read_text())
    assert manifest["version"]["version"] == ended.report["passes"]


@pytest.mark.slow
def test_killed_while_it_predicts_a_run_that_is_repeated_goes_on_and_then_there_is_nothing_to_do(tmp_path):
    job, output = write_job(tmp_path, num_lines=100, spec=SPEC + PREDICT), tmp_path / "predicted"
    told = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "headrace.service", "run", str(job)], **told)
    deadline = Deadline.after(250)
    while not list(output.glob("part-*.parquet")):
        deadline.check("waiting for a part")
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    ended = headrace(job, timeout_s=250)
    assert ended.code == 0 and (output / "_DONE").exists()
    before = content(output)
    again = headrace(job, timeout_s=250)
    assert again.code == 0 and "is done already" in again.output and content(output) == before
    assert again.report["predict"] == ended.report["predict"]
