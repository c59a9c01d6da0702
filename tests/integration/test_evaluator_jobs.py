"""The evaluator beside a job that trains: its scores are those of `headrace evaluate`, and kills change nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.trainer.exports.scores import Scores
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = pytest.mark.timeout(1800)
EVALUATOR = """
[commit]
every_passes = 1
keep = 100
[evaluator]
input = { paths = ["part-1.txt"] }
priority = "normal"
share = 1.0
"""


def evaluated(job: Path, version: int, *overrides: str) -> dict:
    """By the command, on the same events."""
    settings = [part for override in overrides for part in ("--set", override)]
    command = (
        sys.executable,
        "-m",
        "headrace.service",
        "evaluate",
        str(job),
        "--input",
        str(job.parent / "part-1.txt"),
    )
    told = subprocess.run(
        [*command, "--version", str(version), "--json", *settings],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return json.loads(told.stdout)["metrics"]


@pytest.mark.long
@pytest.mark.parametrize("store", [(), ('store.parts="object"', 'store.mirror="objects"')], ids=["shared", "object"])
def test_each_version_has_the_score_that_evaluate_gives_and_the_report_has_the_newest(tmp_path, store):
    job = write_job(tmp_path, num_lines=150, spec=SPEC + EVALUATOR)
    ended = headrace(job, *store, timeout_s=900)
    assert ended.code == 0, ended.output
    scores = Scores(tmp_path / "store")
    found = {each.version: each for each in scores.by_commit().values()}
    newest = ended.report["passes"]
    assert newest in found and not [each.error for each in found.values() if each.error]
    assert found[newest].metrics == evaluated(job, newest, *store)
    assert ended.report["evaluator"]["tasks"]["ctr"]["auc"] == found[newest].metrics["tasks"]["ctr"]["auc"]
    assert f"evaluator: AUC ctr: version {newest} " in ended.output
    assert list((tmp_path / "store/evaluator/work").iterdir()) == []


def evaluators(store: Path) -> list[int]:
    """Numbers of the evaluator's processes of a store."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"headrace.service.predict.evaluator" in words and str(store / "workers").encode() in b" ".join(words):
            found.append(int(path.parent.name))
    return found


CUES = (r"scoring t1", r"part 0 is complete", r"scored t1")
KILLS = 10


@pytest.mark.slow
def test_killed_ten_times_each_version_has_one_line_and_training_is_that_of_a_job_without_it(tmp_path):
    """Kills on cue: as a version begins, between parts, and when its line was just written."""
    spec = SPEC.replace("max_events = 400", "max_events = 60")
    for name in ("plain", "killed"):
        (tmp_path / name).mkdir()
    plain = write_job(tmp_path / "plain", num_lines=200, spec=spec)
    digest = headrace(plain, timeout_s=900).report["digest"]
    job = write_job(tmp_path / "killed", num_lines=200, spec=spec + EVALUATOR)
    store, running = tmp_path / "killed/store", RunningJob(job, tmp_path / "killed")
    killed, cues = set(), 0
    deadline = Deadline.after(1500)
    while len(killed) < KILLS:
        deadline.check("killing the evaluator")
        running.until_said(CUES[cues % len(CUES)], within_s=300)
        cues += 1
        for pid in evaluators(store):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    code, output = running.end(within_s=900)
    assert code == 0, output
    lines = [json.loads(line) for line in (store / "evaluator/scores.jsonl").read_text().splitlines()]
    commits = sorted(path.name for path in (store / "commits").iterdir() if re.match(r"t1-", path.name))
    assert sorted(line["commit"] for line in lines) == commits and len(killed) >= KILLS
    assert not [line["error"] for line in lines if line["error"]]
    report = json.loads((store / "report.json").read_text())
    assert report["digest"] == digest and report["evaluator"]["scored"] == len(commits)
