"""A new job chooses its settings on the first events of its stream, and is from then on the job that has them in its
file: the same bits, after restarts, in reruns, on shards."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.side_process import MAX_STARTS
from headrace.service.cluster.tuning import Tuning
from headrace.service.spec.job import load_job
from headrace.trainer.tuning_status import TriedStatus, TuningStatus
from tests.fakes.warm import warm_environment
from tests.integration.hosted_service import CONFIG, HostedService, spec_of
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
"""Tuning takes 56 s at least."""
EVENTS = 1120
TUNED = changed(
    SPEC,
    {
        "tuning": {"events": EVENTS, "settings": 3},
        "train.tune": "auto",
        "tables.default.optimizer": {"kind": "adagrad", "lr": 0.05},
    },
)
"""Tries three times the rate of the dense part, which is clearly better on this stream, and a third of it."""


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
    assert [each["events"] for each in tried] == [EVENTS, EVENTS, EVENTS // 4]
    assert tried[0]["logloss"] < tried[1]["logloss"]
    assert tried[0]["keys"], "on this stream another setting than the defaults is the best"
    assert "tuning: 3 settings" in tuned.output
    assert "tuned in" in tuned.output
    assert [each["name"] for each in tuned.report["tuning"]["tried"]] == [each["name"] for each in tried]
    assert "settings that were tried, the chosen one first" in tuned.output
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


def test_a_launcher_killed_in_any_trial_chooses_the_same(job):
    whole = run(job)
    store = job.parent / "killed"
    command = [sys.executable, "-m", "headrace.service", "run", str(job), "--set", "store.path=killed"]
    for trial in (1, 2, 3, 4, 5):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=warm_environment())
        deadline = Deadline.after(120.0)
        try:
            while trial_of(store) < trial and not (store / "tuning.json").exists():
                assert process.poll() is None
                deadline.check("the trial")
                time.sleep(0.002)
        finally:
            process.kill()
            process.wait()
    assert run(job, store="killed").report["digest"] == whole.report["digest"]
    assert chosen_by(job, "killed") == chosen_by(job)


def trial_of(store: Path) -> int:
    """The trial that runs, if any does."""
    try:
        return json.loads((store / "tuning" / "progress.json").read_text())["trial"]
    except FileNotFoundError:
        return 0


class DyingStarter:
    """Starts a process that is killed at once, some times, before it starts what it is asked to."""

    def __init__(self, deaths: int) -> None:
        self._deaths = deaths

    def start(self, command, folder):
        self._deaths -= 1
        dies = ("sh", "-c", "kill -9 $$")
        return Spawner().start(dies if self._deaths >= 0 else command, folder)


def test_trials_that_are_killed_begin_anew_and_are_given_up_in_the_end(job, tmp_path):
    def tried(deaths: int) -> list[TriedStatus]:
        tuning = Tuning.of(load_job(job))
        private = tmp_path / f"private-{deaths}"
        private.mkdir()
        given = DyingStarter(deaths), threading.Event().wait, shown.append
        return tuning.tried(tmp_path / f"trials-{deaths}", private, *given)

    shown: list[TuningStatus] = []
    assert tried(0) == tried(MAX_STARTS - 1)
    assert {"starts", "reads the events"} <= {each.name for each in shown}
    with pytest.raises(SpecError, match="ended with code -9"):
        tried(MAX_STARTS)


def is_reading(job):
    return job["state"] == "tuning" and job["tuning"]["name"] == "reads the events"


def test_a_service_shows_the_trial_and_can_stop_the_job_meanwhile(tmp_path):
    slow = ["python3", "-c", SLOWLY]
    config = CONFIG.replace('[["cat"]]', json.dumps([["cat"], slow]))
    service = HostedService(tmp_path, config, own_forkserver=True)
    write_job(tmp_path / "data", num_lines=600)
    spec = spec_of(pipe={"command": slow}, tuning={"events": 320, "settings": 2})
    spec["train"] |= {"tune": "auto"}
    service.start()
    try:
        service.ask("POST", "/jobs", {"name": "one", "spec": spec, "base": str(tmp_path / "data")})
        service.until("/jobs/one", is_reading, within_s=300)
        service.ask("POST", "/jobs/one/stop")
        assert service.until("/jobs/one", lambda job: job["phase"] in ("stopped", "failed"))["phase"] == "stopped"
        assert not list((service.jobs / "one" / "store").glob("tuning*"))
    finally:
        service.clean_up()


def test_a_dry_tuning_changes_nothing_and_says_what_to_put_into_the_file(job):
    before = sorted(job.parent.rglob("*"))
    arguments = [str(job), "--newest", "--events", "240", "--json"]
    found = subprocess.run(
        [sys.executable, "-m", "headrace.service", "tune", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    tried = json.loads(found.stdout)
    assert [each["events"] for each in tried] == [240, 240, 60]
    assert "trial 1 of 5: as it is" in found.stderr
    assert sorted(job.parent.rglob("*")) == before


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
        while not (job.parent / "stopped" / "tuning" / "progress.json").exists():
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
