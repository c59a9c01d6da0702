"""The local launcher with real processes that do as told."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.deadline import Deadline
from service.launcher.local import LocalLauncher
from service.launcher.process import MAX_LINE_CHARACTERS, TAIL_LINES
from service.launcher.run_folder import run_folder
from service.launcher.supervision import Limits

FAKES = Path(__file__).parents[1] / "fakes"
LIMITS = {"drain_s": 20.0, "finish_s": 20.0, "end_s": 0.5}
SHARD = [["note_pid"], ["address"], ["sleep"]]
TRAINER = [["note_pid"], ["spawn"], ["serve"], ["say", "up"], ["sleep"]]


def fake_plan(*arguments):
    sys.path.insert(0, str(FAKES))
    try:
        from launch import fake_plan
    finally:
        sys.path.remove(str(FAKES))
    return fake_plan(*arguments)


class World:
    """One launch: in this process (`run`), or in one of its own that can be killed (`launch`)."""

    def __init__(self, folder):
        self.folder = folder
        self.lines = []
        self.launcher = None
        self.process = None

    def run(self, shards, trainers, **limits):
        plan = fake_plan(self.folder, shards, trainers)
        with run_folder(plan.run_folder):
            self.launcher = LocalLauncher(
                plan,
                lambda worker, text: self.lines.append((worker, text)),
                limits=Limits(**{**LIMITS, **limits}),
                status_interval_s=0.05,
            )
            return self.launcher.run()

    def launch(self, shards, trainers, **limits):
        told = self.folder / "plan.json"
        content = {"folder": str(self.folder), "shards": shards, "trainers": trainers, "limits": {**LIMITS, **limits}}
        told.write_text(json.dumps(content))
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES / "launch.py"), str(told)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def until_said(self, text, times=1):
        """Read the launcher's output until it has held `text` so often."""
        for line in self.process.stdout:
            times -= text in line
            if times == 0:
                return
        raise AssertionError(f"the launcher ended without saying {text!r}")

    def rest(self):
        output, _ = self.process.communicate(timeout=20)
        return output

    def pids(self):
        return [int(line) for line in (self.folder / "pids").read_text().split()]

    def assert_nobody_left(self):
        deadline = Deadline.after(10)
        while left := [pid for pid in self.pids() if runs(pid)]:
            deadline.check(f"waiting for {left} to be gone")
            time.sleep(0.02)


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie waits for whoever adopted it


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    if world.process is not None:
        world.process.kill()
        world.process.communicate()
    if (tmp_path / "pids").exists():
        for pid in world.pids():
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_job_that_drains_ends_well_and_leaves_nothing(world):
    outcome = world.run([SHARD, SHARD], [[["note_pid"], ["spawn"], ["say", "hello"], ["exit", 0]]])
    assert (outcome.code, outcome.reason) == (0, "the stream is drained")
    assert ("trainer-0", "hello") in world.lines
    assert len(world.pids()) == 4  # two shards, the trainer and what it spawned
    world.assert_nobody_left()
    assert not (world.folder / "run").exists()


def test_trainers_are_told_the_addresses_of_all_shards(world):
    seen = {}

    plan = fake_plan(world.folder, [SHARD, SHARD], [[["await_file", str(world.folder / "go")], ["exit", 0]]])
    with run_folder(plan.run_folder):
        launcher = LocalLauncher(plan, lambda *_: None, limits=Limits(**LIMITS))
        start = launcher._start

        def looking(plan, config):
            start(plan, config)
            seen[plan.name] = config
            if plan.name == "trainer-0":
                path = world.folder / "run" / "trainer-0.json"
                seen["mode"] = stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)
                (world.folder / "go").touch()

        launcher._start = looking
        assert launcher.run().code == 0
    assert seen["trainer-0"]["shards"] == ["127.0.0.1:1", "127.0.0.1:1"]
    assert seen["mode"] == (0o600, 0o700)


@pytest.mark.parametrize(
    ("last_act", "code", "words"),
    [
        (["exit", 1], 1, "exit code 1"),
        (["exit", 2], 2, "exit code 2 (bad configuration)"),
        (["exit", 75], 75, "exit code 75 (unavailable or out of time)"),
        (["kill_self", 9], 1, "killed by SIGKILL"),
    ],
)
def test_a_trainers_death_ends_the_job_with_its_last_words(world, last_act, code, words):
    dying = [["note_pid"], ["spawn"], ["say", "alas"], last_act]
    outcome = world.run([SHARD], [TRAINER, dying])
    assert (outcome.code, outcome.reason) == (code, f"trainer-1 ended first: {words}")
    assert world.launcher.last_lines(outcome.first_dead) == ["alas"]
    world.assert_nobody_left()


def test_a_worker_that_ignores_sigterm_is_killed(world):
    stubborn = [["note_pid"], ["ignore_term"], ["address"], ["sleep"]]
    outcome = world.run([stubborn], [[["note_pid"], ["exit", 1]]])
    assert outcome.first_dead == "trainer-0"
    world.assert_nobody_left()


def test_a_shard_that_dies_before_it_is_up_is_told(world):
    outcome = world.run([[["say", "no port"], ["exit", 1]]], [TRAINER])
    assert outcome.reason == "shard-0 ended first: exit code 1"
    assert world.launcher.last_lines("shard-0") == ["no port"]
    assert world.launcher.last_lines("trainer-0") == []


def test_a_program_that_does_not_exist_is_told(world):
    plan = fake_plan(world.folder, [], [[]])
    object.__setattr__(plan.trainers[0], "command", ("/no/such/program",))
    with run_folder(plan.run_folder):
        outcome = LocalLauncher(plan, lambda *_: None).run()
    assert (outcome.code, outcome.first_dead) == (1, "trainer-0")
    assert outcome.reason.startswith("trainer-0: cannot be started: ")


def test_only_so_much_of_a_workers_output_is_kept(world):
    says = [["say", str(number)] for number in range(TAIL_LINES + 5)]
    world.run([], [[*says, ["say", "x" * (MAX_LINE_CHARACTERS + 1)], ["exit", 1]]])
    tail = world.launcher.last_lines("trainer-0")
    assert len(tail) == TAIL_LINES
    assert tail[-2:] == ["x" * MAX_LINE_CHARACTERS, "x"]
    assert len(world.lines) == TAIL_LINES + 7


def test_the_status_is_the_chiefs(world):
    plan = fake_plan(world.folder, [], [[["serve"], ["await_file", str(world.folder / "go")], ["exit", 0]]])

    with run_folder(plan.run_folder):
        launcher = LocalLauncher(plan, lambda *_: None, limits=Limits(**LIMITS), status_interval_s=0.02)
        assert launcher.status() == {"job": "fake", "state": "starting"}
        take_event = launcher._take_event

        def looking():
            take_event()
            if launcher.status()["state"] == "training":
                (world.folder / "go").touch()

        launcher._take_event = looking
        assert launcher.run().code == 0
    assert launcher.status() == {"job": "fake", "state": "training", "shards": []}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_chief_to_finish_and_ends_well(world, number):
    chief = [["note_pid"], ["serve"], ["say", "up"], ["await_drain"], ["say", "closing"], ["exit", 0]]
    world.launch([SHARD], [chief])
    world.until_said("up")
    world.process.send_signal(number)
    said = world.rest()
    assert world.process.returncode == 0, said
    assert "closing" in said
    assert "outcome 0 stopped after the pass in training" in said
    world.assert_nobody_left()


def test_a_signal_before_the_chief_is_up_still_reaches_it(world):
    go = world.folder / "go"
    chief = [["note_pid"], ["say", "up"], ["await_file", str(go)], ["serve"], ["await_drain"], ["exit", 0]]
    world.launch([], [chief])
    world.until_said("up")
    world.process.send_signal(signal.SIGINT)
    go.touch()
    assert "outcome 0 stopped after the pass in training" in world.rest()


def test_a_second_signal_kills_at_once(world):
    world.launch([SHARD], [TRAINER], drain_s=1000.0)
    world.until_said("up")
    world.process.send_signal(signal.SIGINT)
    world.process.send_signal(signal.SIGTERM)
    assert "outcome 1 stopped at the second request, in the middle of a pass" in world.rest()
    world.assert_nobody_left()


def test_a_chief_that_does_not_drain_in_time_is_ended(world):
    world.launch([SHARD], [TRAINER], drain_s=0.3)
    world.until_said("up")
    world.process.send_signal(signal.SIGINT)
    assert "outcome 1 asked to stop, not ended after 0.3 s" in world.rest()
    world.assert_nobody_left()


def test_kill_9_of_the_launcher_leaves_no_orphan(world):
    world.launch([SHARD, SHARD], [TRAINER, TRAINER])
    world.until_said("up", times=2)
    assert len(world.pids()) == 6
    host, port = (world.folder / "run" / "trainer-0.address").read_text().split(":")
    world.process.kill()
    world.assert_nobody_left()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))


@pytest.mark.parametrize("victim", [0, -1])
def test_kill_9_of_a_worker_ends_the_others_and_is_named(world, victim):
    world.launch([[["note_pid"], ["address"], ["sleep"]]], [TRAINER])
    world.until_said("up")
    shard, trainer, _ = world.pids()
    os.kill(shard if victim == 0 else trainer, signal.SIGKILL)
    name = "shard-0" if victim == 0 else "trainer-0"
    assert f"outcome 1 {name} ended first: killed by SIGKILL" in world.rest()
    world.assert_nobody_left()
