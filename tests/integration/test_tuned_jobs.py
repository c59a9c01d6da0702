"""A new job chooses its settings on the first events of its stream, and is from then on the job that has them in its
file: the same bits, after restarts, in reruns, on shards."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from headrace.deadline import Deadline
from tests.fakes.warm import warm_environment
from tests.integration.stream_job import SPEC, Run, headrace, write_job
from tests.jobs import changed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KILLS = 10
HELD = [
    "tables.default.optimizer={kind='adagrad', lr=0.05}",
    "dense.optimizer={kind='adam', lr=0.003}",
]
"""All that the job's file leaves out of what is tuned."""
SLOWLY = "import sys, time; [(time.sleep(0.05), print(each, end='', flush=True)) for each in sys.stdin]"
SLOW_PIPE = f"pipe.command=['python3', '-c', {SLOWLY!r}]"
"""Tuning takes 16 s at least."""
TUNED = changed(SPEC, {"tuning": {"events": 320, "settings": 2}, "train.tune": "auto"})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, spec=TUNED)


def chosen_by(job: Path, store: str = "store") -> list[dict]:
    return json.loads((job.parent / store / "tuning.json").read_text())["tried"]


def run(job: Path, *settings: str, **more) -> Run:
    found = headrace(job, *settings, timeout_s=300, **more)
    assert found.code == 0, found.output
    assert found.report is not None
    return found


def test_the_choice_holds_for_the_life_of_the_job(job):
    tuned = run(job)
    tried = chosen_by(job)
    assert [each["events"] for each in tried] == [320, 320]
    assert tried[0]["logloss"] < tried[1]["logloss"]
    assert tried[0]["keys"], "on this stream another setting than the defaults is the best"
    assert "tuning: 2 settings" in tuned.output
    assert "tuned in" in tuned.output
    assert not (job.parent / "store" / "tuning").exists()
    keys = [f"{key}={json.dumps(value)}" for key, value in tried[0]["keys"].items()]
    by_hand, plain = run(job, *keys, "train.tune=off", store="by-hand"), run(job, "train.tune=off", store="plain")
    assert tuned.report["digest"] == by_hand.report["digest"]
    assert tuned.report["digest"] != plain.report["digest"]
    assert not (job.parent / "plain" / "tuning.json").exists()

    (job.parent / "store" / "tuning.json").unlink()  # the log has it
    again = run(job)
    assert again.report["digest"] == tuned.report["digest"]
    assert "tuning:" not in again.output
    rerun = headrace(job, command="rerun", options=["--from", "0"], timeout_s=300)
    assert "3 of 3 passes are identical" in rerun.output


def test_shards_and_trainers_do_not_change_the_choice(job):
    one, two = run(job), run(job, "cluster.shards=2", store="two")
    run(job, "cluster.shards=2", "cluster.trainers=2", store="four")
    assert two.report["digest"] == one.report["digest"]
    assert chosen_by(job) == chosen_by(job, "two") == chosen_by(job, "four")


def test_a_launcher_killed_while_it_tunes_tunes_again_and_chooses_the_same(job):
    whole, draw = run(job), Random(7)
    store = job.parent / "killed"
    given = [word for setting in ("store.path=killed", SLOW_PIPE) for word in ("--set", setting)]
    command = [sys.executable, "-m", "headrace.service", "run", str(job), *given]
    for _ in range(KILLS):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=warm_environment(),
        )
        deadline = Deadline.after(60.0)
        while not (store / "tuning").exists() and process.poll() is None:
            deadline.check("the tuning")
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 3.0))
        process.kill()
        process.wait()
        assert not (store / "tuning.json").exists()
    assert run(job, store="killed").report["digest"] == whole.report["digest"]
    assert chosen_by(job, "killed") == chosen_by(job)
    assert not (store / "tuning").exists()


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--retry-stopped"], 75)])
def test_a_job_that_is_stopped_while_it_tunes_ends_as_a_stopped_job_does(job, options, code):
    slow = ["--set", "store.path=stopped", "--set", SLOW_PIPE]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.service", "run", str(job), *slow, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=warm_environment(),
        text=True,
    )
    try:
        deadline = Deadline.after(60.0)
        while not list((job.parent / "stopped" / "tuning").glob("*/log")):
            assert process.poll() is None
            deadline.check("the tuning")
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert "stopped while it tried settings" in output
    assert not (job.parent / "stopped" / "tuning").exists()


@pytest.mark.parametrize("settings", [["train.tune=off"], ["tuning.events=2000"], ["train.learn=false"], HELD])
def test_a_job_that_has_nothing_to_tune_begins_at_once(job, settings):
    found = run(job, *settings)
    assert "tun" not in found.output
    assert not list((job.parent / "store").glob("tuning*"))
