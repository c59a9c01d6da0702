"""Jobs on the local launcher, with real processes that follow a script."""

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace as plan_replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.blob.blob_errors import BlobUnavailable
from headrace.deadline import Deadline
from headrace.errors import SpecError, Unavailable, Unwritable
from headrace.failpoints import ArmedFailpoint, Failpoint
from headrace.process import unbuffered
from headrace.retry import Backoff
from headrace.rpc.role import RoleClient
from headrace.service.cluster import child, job_runner, supervision
from headrace.service.cluster.child import ForkingStarter, Spawner, early_forkserver, local_starter
from headrace.service.cluster.fetched_commits import HeadReplaced
from headrace.service.cluster.local import MAX_LINE_CHARACTERS, ProcessLauncher
from headrace.service.cluster.meeting import Meeting
from headrace.service.cluster.runtime import PYTHON, TAIL_LINES, WorkerRole
from headrace.service.cluster.warm import warm_forkserver
from headrace.trainer.job_status import StallStatus, Status
from headrace.trainer.rank0.resize_messages import PrepareWorkers, encode_message
from headrace.warm_forkserver import VARIABLE
from tests.fakes.launch import PRELOAD, fake_launcher, fake_plan, fake_worker, starting

ROOT = Path(__file__).parents[2]
LIMITS = {"drain_s": 20.0, "finish_s": 20.0, "end_s": 0.5, "settle_s": 0.2}
SHARD = [["note_pid"], ["address"], ["sleep"]]
TRAINER = [["note_pid"], ["spawn"], ["serve"], ["say", "up"], ["sleep"]]


class World:
    """One launch: in this process (`run`), or in one of its own that can be killed (`launch`)."""

    def __init__(self, folder, starter, held):
        self.folder, self.starter, self.held = folder, starter, held
        self.lines = []
        self.launcher = None
        self.process = None

    @cached_property
    def workers(self):
        """The launcher of a job that runs in this process."""
        return self.held.enter_context(ProcessLauncher(self.starter))

    def make(self, shards, trainers, max_restarts=0, standbys=None, **limits):
        self.launcher = fake_launcher(
            self.folder,
            shards,
            trainers,
            lambda worker, text: self.lines.append((worker, text)),
            {**LIMITS, **limits},
            max_restarts,
            launcher=self.workers,
            standbys=standbys,
        )
        return self.launcher

    def run(self, *told, **limits):
        return self.make(*told, **limits).run()

    def launch(self, shards, trainers, max_restarts=0, **limits):
        told = self.folder / "plan.json"
        workers = {"folder": str(self.folder), "shards": shards, "trainers": trainers}
        workers["forked"] = isinstance(self.starter, ForkingStarter)
        told.write_text(json.dumps({**workers, "limits": {**LIMITS, **limits}, "max_restarts": max_restarts}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.launch", str(told)], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def until_said(self, text, times=1):
        """Read the launcher's output until `text` has occurred `times` times."""
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

    def assert_nobody_left(self, *more):
        deadline = Deadline.after(10)
        while left := [pid for pid in (*self.pids(), *more) if runs(pid)]:
            deadline.check(f"waiting for {left} to be gone")
            time.sleep(0.02)


@contextmanager
def when(true, act):
    """Call `act` on a thread as soon as `true()`."""

    def wait():
        deadline = Deadline.after(20)
        while not true():
            deadline.check("waiting")
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie waits for whoever adopted it


@pytest.fixture(scope="module")
def forking():
    """The forkserver of all tests; that of a launcher in a process of its own is another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with starting(True) as starter:
            yield starter


@pytest.fixture
def world(tmp_path, request, monkeypatch):
    """Its workers are forked, unless its parameter says otherwise."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    starter = request.getfixturevalue("forking") if getattr(request, "param", True) else Spawner()
    with ExitStack() as held:
        yield (world := World(tmp_path, starter, held))
    if world.process is not None:
        world.process.kill()
        world.process.communicate()
    if (tmp_path / "pids").exists():
        for pid in world.pids():
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


spawned_or_forked = pytest.mark.parametrize("world", [False, True], indirect=True, ids=["spawned", "forked"])
"""For what depends on how a process was started: its output, signals, its end."""


@spawned_or_forked
def test_a_job_that_drains_ends_well_and_leaves_nothing(world):
    outcome = world.run([SHARD, SHARD], [[["note_pid"], ["spawn"], ["say", "hello"], ["exit", 0]]])
    assert (outcome.code, outcome.reason) == (0, "the stream is drained")
    assert ("trainer-0", "hello") in world.lines
    assert len(world.pids()) == 4  # two shards, the trainer and what it spawned
    world.assert_nobody_left()
    assert list((world.folder / "run").iterdir()) == []


def test_trainers_get_the_addresses_of_all_shards(world):
    seen = {}
    launcher = world.make(
        [SHARD, SHARD], [[["say_config", "shards"], ["await_file", str(world.folder / "go")], ["exit", 0]]]
    )

    def on_line(worker, text):
        path = world.folder / "run" / "g1" / "trainer-0.json"
        seen["shards"] = json.loads(text)
        seen["mode"] = stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)
        (world.folder / "go").touch()

    launcher._on_line = on_line
    assert launcher.run().code == 0
    assert seen["shards"] == ["127.0.0.1:1", "127.0.0.1:1"]
    assert seen["mode"] == (0o600, 0o700)


@pytest.mark.parametrize(
    ("world", "last_act", "code", "words"),
    [
        (True, ["exit", 1], 1, "exit code 1"),
        (True, ["exit", 2], 2, "exit code 2 (bad configuration)"),
        (True, ["exit", 70], 70, "exit code 70 (a bug)"),
        (True, ["exit", 75], 75, "exit code 75 (unavailable or out of time)"),
        (True, ["kill_self", 9], 70, "killed by SIGKILL"),
        (False, ["exit", 2], 2, "exit code 2 (bad configuration)"),
        (False, ["kill_self", 9], 70, "killed by SIGKILL"),
    ],
    indirect=["world"],
)
def test_a_trainers_death_ends_the_job_with_its_last_words(world, last_act, code, words):
    dying = [["note_pid"], ["spawn"], ["say", "alas"], last_act]
    outcome = world.run([SHARD], [TRAINER, dying])
    assert (outcome.code, outcome.reason) == (code, f"trainer-1 ended first: {words}")
    assert world.launcher.last_lines(outcome.first_dead) == ["alas"]
    world.assert_nobody_left()


@spawned_or_forked
def test_a_worker_that_ignores_sigterm_is_killed(world):
    stubborn = [["note_pid"], ["ignore_term"], ["address"], ["sleep"]]
    outcome = world.run([stubborn], [[["note_pid"], ["exit", 1]]])
    assert outcome.first_dead == "trainer-0"
    world.assert_nobody_left()


@spawned_or_forked
def test_a_shard_that_dies_before_it_is_up_is_named(world):
    outcome = world.run([[["say", "no port"], ["exit", 1]]], [TRAINER])
    assert outcome.reason == "shard-0 ended first: exit code 1"
    assert world.launcher.last_lines("shard-0") == ["no port"]
    assert world.launcher.last_lines("trainer-0") == []


@spawned_or_forked
def test_a_program_that_does_not_exist_is_reported(world):
    plan = fake_plan(world.folder, [], [[]])
    object.__setattr__(plan.trainers[0], "command", ("/no/such/program",))
    launcher = world.make([], [])
    launcher._phases = [lambda last: plan]
    outcome = launcher.run()
    assert (outcome.code, outcome.first_dead) == (75, "trainer-0")
    assert outcome.reason.startswith("trainer-0: cannot be started: ")


@spawned_or_forked
def test_only_so_much_of_a_workers_output_is_kept(world):
    says = [["say", str(number)] for number in range(TAIL_LINES + 5)]
    world.run([], [[*says, ["say", "x" * (MAX_LINE_CHARACTERS + 1)], ["exit", 1]]])
    tail = world.launcher.last_lines("trainer-0")
    assert len(tail) == TAIL_LINES
    assert tail[-2:] == ["x" * MAX_LINE_CHARACTERS, "x"]
    assert len(world.lines) == TAIL_LINES + 7


def test_the_status_is_the_rank0s(world):
    launcher = world.make([], [[["serve"], ["await_file", str(world.folder / "go")], ["exit", 0]]])
    known = Status(job="fake", restarts=0)
    assert launcher.status() == replace(known, step="The launcher reads the newest commit and plans the workers.")
    with when(lambda: launcher.status().state == "training", (world.folder / "go").touch):
        assert launcher.run().code == 0
    assert launcher.status() == replace(known, state="training")


def test_the_status_names_workers_whose_certificates_were_not_renewed(world, monkeypatch):
    monkeypatch.setattr(Meeting, "unrenewed", lambda _: {"trainer-0": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)})
    launcher = world.make([], [[["serve"], ["await_file", str(world.folder / "go")], ["exit", 0]]])
    assert launcher.status().unrenewed == {}
    with when(lambda: launcher.status().state == "training", (world.folder / "go").touch):
        assert launcher.run().code == 0
    assert launcher.status().unrenewed == {"trainer-0": "2026-01-02 03:04:05 UTC"}


@pytest.mark.parametrize(("world", "number"), [(False, signal.SIGINT), (True, signal.SIGTERM)], indirect=["world"])
def test_a_signal_asks_the_rank0_to_finish_and_ends_well(world, number):
    rank0 = [["note_pid"], ["serve"], ["say", "up"], ["await_drain"], ["say", "closing"], ["exit", 0]]
    world.launch([SHARD], [rank0])
    world.until_said("up")
    world.process.send_signal(number)
    said = world.rest()
    assert world.process.returncode == 0, said
    assert "closing" in said
    assert "outcome 0 stopped after the pass in training" in said
    world.assert_nobody_left()


def test_a_signal_before_the_rank0_is_up_still_reaches_it(world):
    go = world.folder / "go"
    rank0 = [["note_pid"], ["say", "up"], ["await_file", str(go)], ["serve"], ["await_drain"], ["exit", 0]]
    world.launch([], [rank0])
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


def test_a_rank0_that_does_not_drain_in_time_is_ended(world):
    world.launch([SHARD], [TRAINER], drain_s=0.3)
    world.until_said("up")
    world.process.send_signal(signal.SIGINT)
    assert "outcome 1 asked to stop, not ended after 0.3 s" in world.rest()
    world.assert_nobody_left()


@spawned_or_forked
def test_kill_9_of_the_launcher_leaves_no_orphan(world):
    world.launch([SHARD, SHARD], [TRAINER, TRAINER])
    world.until_said("up", times=2)
    assert len(world.pids()) == 6
    address = f"unix:{world.folder}/run/g1/trainer-0.socket"
    world.process.kill()
    world.assert_nobody_left()
    with closing(RoleClient(address, "s")) as client, pytest.raises(Unavailable):
        client.status(Deadline.after(5))


@pytest.mark.parametrize(("world", "victim"), [(False, 0), (True, -1)], indirect=["world"])
def test_kill_9_of_a_worker_ends_the_others_and_is_named(world, victim):
    world.launch([[["note_pid"], ["address"], ["sleep"]]], [TRAINER])
    world.until_said("up")
    shard, trainer, _ = world.pids()
    os.kill(shard if victim == 0 else trainer, signal.SIGKILL)
    name = "shard-0" if victim == 0 else "trainer-0"
    assert f"outcome 70 {name} ended first: killed by SIGKILL" in world.rest()
    world.assert_nobody_left()


# -- restarted


DYING = [["note_pid"], ["spawn"], ["serve"], ["in_generation", 1, "kill_self", 9]]


@spawned_or_forked
def test_a_worker_that_dies_is_started_again_with_all_others(world):
    outcome = world.run([SHARD], [[*DYING, ["say_config", "generation"], ["exit", 0]]], max_restarts=1)
    assert (outcome.code, outcome.reason) == (0, "the stream is drained")
    assert ("trainer-0", "2") in world.lines
    told = "trainer-0 ended first: killed by SIGKILL"
    assert ("launcher", f"{told}; restarting, 1 of 1") in world.lines
    status = world.launcher.status()
    assert (status.restarts, status.last_death, status.last_error) == (1, told, "")
    assert len(world.pids()) == 6  # in each generation: a shard, the trainer, and what it spawned
    world.assert_nobody_left()
    assert list((world.folder / "run").iterdir()) == []


class NoRoom:
    """Plans of generations that stand by: there is no room for any."""

    def __init__(self, asked):
        self.asked = asked

    def beside(self, last, resize, trainers, shards):
        with self.asked.open("a") as file:
            file.write(f"{resize} beside {last}\n")
        raise Unavailable("no room")


def test_a_generation_prepares_no_resize_that_the_one_before_it_was_asked_for(world):
    """Its rank 0 does not know of it, and would not commit for it; whoever asked asks again."""
    plans = NoRoom(world.folder / "asked")
    asked = encode_message(PrepareWorkers("a", shards=2, trainers=1)).hex()
    rank0 = [
        ["in_generation", 1, "serve", {"resizing": {"shards": 2}}, asked],
        ["in_generation", 1, "await_file", str(plans.asked)],
        ["in_generation", 1, "kill_self", 9],
        ["exit", 0],
    ]
    assert world.run([], [rank0], max_restarts=1, standbys=plans).code == 0
    assert plans.asked.read_text() == "a beside 1\n"
    assert world.launcher.status().resizing is None


@pytest.mark.parametrize("code", [70, 75])
def test_an_exit_that_may_pass_is_tried_again(world, code):
    outcome = world.run([SHARD], [[["in_generation", 1, "exit", code], ["exit", 0]]], max_restarts=1)
    assert outcome.code == 0


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_that_would_come_again_is_not_tried_again(world, code):
    outcome = world.run([SHARD], [[["in_generation", 1, "exit", code], ["exit", 0]]], max_restarts=1)
    assert outcome.code == code
    assert world.launcher.status().restarts == 0


def test_restarts_are_bounded_and_the_end_lists_them(world):
    outcome = world.run([SHARD], [[["note_pid"], ["say", "alas"], ["kill_self", 11]]], max_restarts=2)
    assert outcome.code == 70
    assert outcome.reason == (
        "the workers died 3 times within 600 s, more than cluster.max_restarts = 2 allows: "
        "trainer-0 ended first: killed by SIGSEGV (3 x)"
    )
    assert world.launcher.last_lines(outcome.first_dead) == ["alas"]
    world.assert_nobody_left()


@spawned_or_forked
def test_nothing_of_the_old_generation_is_left_when_the_next_starts(world):
    """Also of a worker that is stopped."""
    stopped = [["note_pid"], ["spawn"], ["address"], ["in_generation", 1, "kill_self", signal.SIGSTOP], ["sleep"]]
    rank0 = [["note_pid"], ["serve"], ["in_generation", 1, "kill_self", 9], ["exit", 0]]
    left = []
    launcher = world.make([stopped], [rank0], max_restarts=1)
    (first,) = launcher._phases

    def plan(last):
        if last == 1:
            left.extend(pid for pid in world.pids() if runs(pid))
            left.extend((world.folder / "run").iterdir())
        return first(last)

    launcher._phases = [plan]
    assert launcher.run().code == 0
    assert left == []


def test_a_stop_between_generations_ends_well(world, monkeypatch):
    """It ends at once, although the pause is ten seconds."""
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", supervision.MAX_PAUSE_S)
    died = [["note_pid"], ["kill_self", 9]]
    launcher = world.make([], [died], max_restarts=1000)

    def restarting():
        return launcher.status().state == "restarting" and launcher.status().restarts >= 2

    with when(restarting, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        outcome = launcher.run()
    assert (outcome.code, outcome.reason) == (0, "stopped while its workers were restarted")
    world.assert_nobody_left()


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (HeadReplaced("fake", 5, 1), (75, "generation 5 of fake was claimed on another machine")),
        (SpecError("is wrong", "store.mirror"), (2, "store.mirror: is wrong")),
        (RuntimeError("a bug"), (70, "the launcher failed")),
    ],
    ids=lambda each: type(each).__name__,
)
def test_agents_hear_why_no_generation_can_be_planned(world, monkeypatch, error, end):
    launcher, heard = world.make([], []), []

    def plan(last):
        raise error

    launcher._phases = [plan]
    monkeypatch.setattr(world.workers, "end", lambda code, reason: heard.append((code, reason)))
    with pytest.raises(type(error)):
        launcher.run()
    ((code, reason),) = heard
    assert code == end[0] and reason.startswith(end[1])


def without_store(launcher, monkeypatch, *, times):
    """The second generation cannot be planned so many times."""
    monkeypatch.setattr(job_runner, "STORE_PAUSES", Backoff((0.01,), endless=True))
    (first,) = launcher._phases
    seen = []

    def plan(last):
        if last == 1 and len(seen) < times:
            seen.append(launcher.status().stalled)
            raise BlobUnavailable("store s3://b", "connecting", "no route")
        return first(last)

    launcher._phases = [plan]
    return seen


def test_a_generation_is_planned_once_the_object_store_can_be_reached(world, monkeypatch):
    launcher = world.make([], [[["note_pid"], ["in_generation", 1, "kill_self", 9], ["exit", 0]]], max_restarts=1)
    seen = without_store(launcher, monkeypatch, times=3)
    assert launcher.run().code == 0
    waits = "the workers start once the object store can be reached: store s3://b: connecting: no route"
    assert seen == [None, *[StallStatus(waits_for="store", text=waits)] * 2]
    assert not launcher.status().stalled
    assert [text for worker, text in world.lines if worker == "launcher"][1:] == [
        waits, "the object store is reached again",
    ]  # fmt: skip
    assert launcher.status().restarts == 1


def test_a_stop_ends_the_wait_for_the_object_store(world, monkeypatch):
    launcher = world.make([], [[["note_pid"], ["kill_self", 9]]], max_restarts=1)
    seen = without_store(launcher, monkeypatch, times=1_000_000)

    def waits():
        return "can be reached" in launcher.lacks()

    with when(waits, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        outcome = launcher.run()
    assert (outcome.code, outcome.reason) == (0, "stopped while its workers were restarted")
    assert launcher.stopped and len(seen) >= 1
    world.assert_nobody_left()


def test_a_death_after_a_stop_was_asked_is_not_restarted(world):
    world.launch([SHARD], [[["note_pid"], ["serve"], ["say", "up"], ["await_drain"], ["kill_self", 9]]], max_restarts=3)
    world.until_said("up")
    world.process.send_signal(signal.SIGINT)
    assert "killed by SIGKILL; not restarted, for the job was asked to stop" in world.rest()


def test_faults_reach_their_worker_in_their_generation(world):
    asked = []
    rank0 = [["serve"], ["say_config", "faults"], ["kill_self", 9]]
    launcher = world.make([], [rank0], max_restarts=1)

    def faults(generation, worker):
        asked.append((generation, worker))
        return [ArmedFailpoint(point=Failpoint.CLOSED, hit=generation)]

    launcher._faults = faults
    launcher.run()
    assert asked == [(1, "trainer-0"), (2, "trainer-0")]
    assert [json.loads(text) for worker, text in world.lines if worker == "trainer-0"] == [
        [{"point": "closed", "hit": 1}], [{"point": "closed", "hit": 2}],
    ]  # fmt: skip


def test_phases_follow_one_another_where_they_drain(world):
    world.make([], [])
    phases = [[["say", "first"], ["exit", 0]], [["say", "second"], ["exit", 1]], [["say", "third"], ["exit", 0]]]
    world.launcher._phases = [
        lambda last, do=do: fake_plan(world.folder, [], [do], last + 1) for do in phases
    ]  # fmt: skip
    assert world.launcher.run().code == 1
    assert [text for _, text in world.lines] == ["first", "second"]


class FullFirst(ProcessLauncher):
    """A launcher whose disk is full when it starts a reader again for the first time."""

    tries = 0

    def start(self, specs, generation, **told):
        if [each.name for each in specs] == ["reader-1"]:
            self.tries += 1
            if self.tries == 1:
                raise Unwritable(specs[0].run_folder, OSError(28, "No space left on device"))
            (specs[0].folder / "again").touch()
        return super().start(specs, generation, **told)


def test_a_reader_that_cannot_be_started_again_for_want_of_disk_does_not_end_the_job(world):
    world.workers = world.held.enter_context(FullFirst(world.starter))
    up, again = str(world.folder / "up"), str(world.folder / "again")
    world.make([], [])
    plan = fake_plan(world.folder, [], [[["serve"], ["write", up, ""], ["await_file", again], ["exit", 0]]])
    scripts = [[["address"], ["sleep"]], [["address"], ["await_file", up], ["kill_self", 9]]]
    readers = [
        fake_worker(world.folder, plan.run_folder, WorkerRole.READER, number, do) for number, do in enumerate(scripts)
    ]
    world.launcher._phases = [lambda _: plan_replace(plan, readers=tuple(readers))]
    assert world.launcher.run().code == 0
    said = [text for name, text in world.lines if name == "launcher"]
    text = f"{plan.run_folder} cannot be written: No space left on device; make room on this disk, or repair it"
    told = "reader-1 does not run ({}): the others take over until it is started"
    assert said[:3] == [
        told.format("killed by SIGKILL"),
        told.format(f"cannot be started: {text}"),
        "reader-1 is started",
    ]


# -- the forkserver


@pytest.fixture(scope="module")
def warm():
    """Variables by which a launcher finds a warm forkserver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with warm_forkserver(PRELOAD) as variables:
            yield variables


@pytest.fixture(params=["own", "warm"])
def has_its_own(request, monkeypatch):
    """The launcher of a process has a forkserver of its own, or one that a warm forkserver forked: whether it has."""
    for name, text in request.getfixturevalue("warm").items() if request.param == "warm" else ():
        monkeypatch.setenv(name, text)
    return request.param == "own"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def forkserver_of(world):
    """Its process number: it is the parent of workers."""
    return parent_of(world.pids()[0])


@pytest.mark.usefixtures("has_its_own")
def test_kill_9_of_the_forkserver_is_a_death_like_any_other(world):
    rank0 = [["note_pid"], ["spawn"], ["serve"], ["say", "up"], ["in_generation", 1, "sleep"], ["exit", 0]]
    world.launch([SHARD], [rank0], max_restarts=1)
    world.until_said("up")
    first = world.pids()
    forkserver = forkserver_of(world)
    os.kill(forkserver, signal.SIGKILL)
    world.until_said("ended first: killed by SIGKILL; restarting, 1 of 1")
    assert "outcome 0 the stream is drained" in world.rest()
    assert len(world.pids()) == 2 * len(first)
    world.assert_nobody_left(forkserver)


def test_kill_9_of_the_launcher_ends_the_forkserver_and_workers_that_are_stopped(world, has_its_own):
    world.launch([SHARD], [TRAINER])
    world.until_said("up")
    forkserver = forkserver_of(world)
    assert (parent_of(forkserver) == world.process.pid) == has_its_own
    for pid in world.pids():
        os.kill(pid, signal.SIGSTOP)
    world.process.kill()
    world.assert_nobody_left(forkserver)


def test_a_stopped_forkserver_does_not_keep_a_job_from_ending(world, monkeypatch):
    monkeypatch.setattr("headrace.service.cluster.child.TOLD_S", 0.2)
    rank0 = [["note_pid"], ["spawn"], ["serve"], ["say", "up"], ["sleep"]]
    launcher, stopped = world.make([SHARD], [rank0]), []

    def stop_and_kill():
        stopped.append(forkserver_of(world))
        os.kill(stopped[0], signal.SIGSTOP)
        os.kill(world.pids()[1], signal.SIGKILL)

    with when(lambda: ("trainer-0", "up") in world.lines, stop_and_kill):
        outcome = launcher.run()
    assert outcome.code == 70
    world.assert_nobody_left(*stopped)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_launcher_that_gives_up_leaves_neither_forkserver_nor_traceback(warm, is_there):
    """It closes the connection before its forkserver is there, or with the answer unread."""
    (address,) = warm.values()
    request = {"prefix": sys.prefix, "environment": unbuffered(os.environ), "folder": os.getcwd(), "preload": []}
    output, given = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control, open(output) as printed:
        control.connect(address)
        socket.send_fds(control, [json.dumps(request).encode()], [given, given])
        os.close(given)
        assert not is_there or select.select([control], [], [], 30)[0]
        control.close()
        assert printed.read() == "", "read to its end: the forkserver is gone"


def children():
    """The process numbers of this process's children."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if parent_of(entry.name) == os.getpid():
                found.add(int(entry.name))
    return found


@pytest.fixture
def without_warm(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(child, "OF_ANY_JOB", PRELOAD)
    return children()


def test_the_first_starter_takes_a_forkserver_that_was_started_early(without_warm, tmp_path):
    with early_forkserver():
        (early,) = children() - without_warm
        with local_starter(PRELOAD) as starter, local_starter(PRELOAD):
            assert len(children() - without_warm) == 2, "the second one has its own"
            worker = starter.start((*PYTHON, "http.server", "0", "--bind", "127.0.0.1"), tmp_path)
            with worker.output:
                assert parent_of(worker.started.result()[0]) == early
                worker.kill()
                worker.wait()
            worker.release()
    assert children() == without_warm


def test_a_forkserver_that_nobody_takes_is_gone_at_once(without_warm):
    with early_forkserver() as end:
        assert len(children() - without_warm) == 1
        end()
        assert children() == without_warm
    with pytest.raises(KeyError), early_forkserver():
        raise KeyError("the job file is wrong")
    assert children() == without_warm


def test_where_there_is_a_warm_forkserver_none_is_started_early(warm, without_warm, monkeypatch):
    for name, text in warm.items():
        monkeypatch.setenv(name, text)
    with early_forkserver():
        assert children() == without_warm
