"""What every launcher promises, with real processes. To add one: its entry in LAUNCHERS, and one line in OPEN below."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.errors import Unwritable
from headrace.identity.authority import open_authority
from headrace.identity.join_token import FILE, open_token
from headrace.service.cli.worker_command import RANKS
from headrace.service.cluster.child import Spawner, local_starter
from headrace.service.cluster.external import ExternalLauncher, JoinPoint
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.ray_launcher import RayLauncher
from headrace.service.cluster.runtime import TAIL_LINES, CannotStart, WorkerRole
from headrace.service.spec.launchers import EXTERNAL, LAUNCHERS, RAY
from tests import ray_cluster
from tests.fakes.launch import PRELOAD, fake_worker

ROOT = Path(__file__).parents[2]
RAY_CLUSTER = "HEADRACE_TEST_RAY"
"""Variable with the address of the tests' Ray cluster."""
ORPHANING = [["note_pid"], ["spawn"], ["say", "up"], ["sleep"]]


@contextmanager
def forked():
    with local_starter(PRELOAD) as starter, ProcessLauncher(starter) as launcher:
        yield launcher


@contextmanager
def from_nothing():
    with ProcessLauncher(Spawner()) as launcher:
        yield launcher


class Agents:
    """An orchestrator: a thread that starts agents in processes of their own while the launcher waits for workers."""

    def __init__(self, folder):
        self.point = join_point(folder)
        self.processes, self.closing, self.thread = [], threading.Event(), None

    def watch(self, launcher):
        self.thread = threading.Thread(target=self._watch, args=(launcher,))
        self.thread.start()

    def _watch(self, launcher):
        token_file = str(self.point.token_file)
        command = [
            sys.executable,
            "-m",
            "headrace.service",
            "worker",
            "--join",
            launcher.address,
            "--token-file",
            token_file,
        ]
        command += ["--wait", "3s"]
        environment = {name: value for name, value in os.environ.items() if name not in RANKS}
        while not self.closing.wait(0.05):
            alive = sum(process.poll() is None for process in self.processes)
            if (waits := launcher.waits_for()) and alive < int(re.search(r"of (\d+)", waits)[1]):
                self.processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT))

    def end(self):
        self.closing.set()
        self.thread.join()
        assert {process.wait(30) for process in self.processes} <= {0, 75}


def join_point(folder):
    authority = open_authority(folder, "job")
    open_token(folder, authority)
    point = {"token_file": folder / FILE, "authority": authority, "certifies": False}
    return JoinPoint(listen="127.0.0.1:0", node_timeout_s=3.0, **point)


@contextmanager
def on_ray():
    with tempfile.TemporaryDirectory() as folder:
        with RayLauncher(join_point(Path(folder)), os.environ[RAY_CLUSTER]) as launcher:
            try:
                yield launcher
            finally:
                launcher.end(0, "the test is over")


@contextmanager
def with_agents():
    with tempfile.TemporaryDirectory() as folder:
        agents = Agents(Path(folder))
        with ExternalLauncher(agents.point) as launcher:
            agents.watch(launcher)
            try:
                yield launcher
            finally:
                launcher.end(0, "the test is over")
                agents.end()


OPEN = {
    "local": forked,
    "local, not forked": from_nothing,
    "external": with_agents,
    "ray": on_ray,
}
"""Ways to open each known launcher."""


class World:
    """A launcher, and all that it reported."""

    def __init__(self, launcher, folder):
        self.launcher, self.folder = launcher, folder
        self.lines, self.exits = [], []
        self.exited = threading.Condition()
        self.handles = []

    def spec(self, number, *do, role=WorkerRole.TRAINER):
        return fake_worker(self.folder, self.folder, role, number, list(do))

    def start(self, *specs, generation=1):
        for spec in specs:
            (self.folder / f"{spec.name}.json").unlink(missing_ok=True)  # as each generation has a folder of its own
        self.launcher.prepare(specs, generation)
        until(lambda: self.launcher.waits_for() is None)
        handles = self.launcher.start(
            specs, generation, on_line=lambda name, text: self.lines.append((name, text)), on_exit=self.note_exit
        )
        self.handles += handles
        return handles

    def note_exit(self, name, code):
        with self.exited:
            self.exits.append((name, code))
            self.exited.notify_all()

    def until_exits(self, number):
        with self.exited:
            assert self.exited.wait_for(lambda: len(self.exits) >= number, 60)

    def until_said(self, *lines):
        until(lambda: set(lines) <= set(self.lines))

    def pids(self):
        return [int(line) for line in (self.folder / "pids").read_text().split()]


def until(condition):
    deadline = Deadline.after(60)
    while not condition():
        deadline.check("waiting")
        time.sleep(0.005)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


NAMES = [pytest.param(name, marks=pytest.mark.long) if name in (EXTERNAL, RAY) else name for name in OPEN]
IN_CI = [
    pytest.param(RAY, marks=pytest.mark.slow) if each == RAY else name for each, name in zip(OPEN, NAMES, strict=True)
]
"""On Ray all of the suite takes two minutes, and from the start of an agent on it is the path of the external one."""


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster, as a user has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with ray_cluster.running(8) as running:
            patch.setenv(RAY_CLUSTER, running.address)
            yield running


@pytest.fixture(params=IN_CI)
def world(request, tmp_path, monkeypatch):
    if request.param == RAY:  # first: what the cluster's fixture finds in the environment, it leaves there
        request.getfixturevalue("cluster")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with OPEN[request.param]() as launcher:
        world = World(launcher, tmp_path)
        yield world
        for handle in world.handles:
            handle.kill()


def test_every_known_launcher_is_tested_here():
    assert {name.partition(",")[0] for name in OPEN} == set(LAUNCHERS.names())


# -- start


def test_workers_run_as_told_and_their_handles_are_in_order(world):
    specs = [world.spec(n, ["say_config", "secret"], ["say", str(n)], ["sleep"]) for n in range(3)]
    handles = world.start(*specs)
    assert [handle.name for handle in handles] == ["trainer-0", "trainer-1", "trainer-2"]
    world.until_said(*((f"trainer-{n}", str(n)) for n in range(3)), ("trainer-2", '"s"'))
    assert [handle.poll() for handle in handles] == [None] * 3
    assert world.exits == []


def test_a_worker_runs_in_the_folder_of_its_spec(world):
    world.folder.joinpath("elsewhere").mkdir()
    spec = world.spec(0, ["write", "here", "x"], ["exit", 0])
    world.start(replace(spec, folder=world.folder / "elsewhere"))
    world.until_exits(1)
    assert (world.folder / "elsewhere" / "here").exists()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_all_start_or_none_does(world, place):
    """And of those that did, nothing is left and nothing is reported."""
    specs = [world.spec(n, *ORPHANING) for n in range(3)]
    specs[place] = replace(specs[place], command=("/no/such/program",))
    with pytest.raises(CannotStart) as failed:
        world.start(*specs)
    assert (failed.value.worker, failed.value.exit_code) == (f"trainer-{place}", 75)
    assert "No such file" in failed.value.reason
    noted = world.pids() if (world.folder / "pids").exists() else []
    assert [pid for pid in noted if runs(pid)] == []
    time.sleep(0.1)
    assert world.exits == [] and world.lines == []


@pytest.mark.parametrize("world", ["local", "local, not forked"], indirect=True)
def test_no_worker_starts_where_a_configuration_cannot_be_written(world):
    specs = [world.spec(n, *ORPHANING) for n in range(2)]
    with pytest.raises(Unwritable):
        world.start(specs[0], replace(specs[1], run_folder=world.folder / "not there"))
    noted = world.pids() if (world.folder / "pids").exists() else []
    assert [pid for pid in noted if runs(pid)] == []
    assert world.exits == []


def test_after_a_start_that_failed_another_one_succeeds(world):
    spec = world.spec(0, ["say", "up"], ["exit", 0])
    with pytest.raises(CannotStart):
        world.start(replace(spec, command=("/no/such/program",)))
    world.start(spec)
    world.until_exits(1)
    assert world.exits == [("trainer-0", 0)]


def test_an_older_generation_is_refused(world):
    world.start(world.spec(0, ["exit", 0]), generation=5)
    with pytest.raises(ValueError, match="generation 4 is older than 5"):
        world.start(world.spec(1, ["exit", 0]), generation=4)
    world.start(world.spec(2, ["exit", 0]), generation=5)
    world.until_exits(2)
    assert sorted(world.exits) == [("trainer-0", 0), ("trainer-2", 0)]


def test_a_reader_that_ended_is_started_again_while_the_trainers_run(world):
    readers = [world.spec(n, ["say", "up"], ["sleep"], role=WorkerRole.READER) for n in range(2)]
    _, reader, _ = world.start(world.spec(0, ["say", "up"], ["sleep"]), *readers)
    world.until_said(("trainer-0", "up"), ("reader-0", "up"), ("reader-1", "up"))
    assert reader.kill()
    until(lambda: world.launcher.has_place(readers[0]))
    again = replace(readers[0], config={**readers[0].config, "do": [["say", "again"], ["exit", 5]]})
    told = {"on_line": lambda name, text: world.lines.append((name, text)), "on_exit": world.note_exit}
    world.handles += (handle := world.launcher.start([again], 1, **told))
    world.until_exits(2)
    assert world.exits == [("reader-0", -signal.SIGKILL), ("reader-0", 5)]
    assert handle[0].kill() and handle[0].last_lines() == ["again"]


# -- the end


ENDS = [(["exit", 0], 0), (["exit", 75], 75), (["kill_self", 9], -9), (["kill_self", 11], -11)]


def test_the_exit_status_is_reported_once_and_polled(world):
    workers = (world.spec(n, ["note_pid"], ["spawn"], ["say", "alas"], act) for n, (act, _) in enumerate(ENDS))
    handles = world.start(*workers)
    world.until_exits(len(ENDS))
    assert [handle.poll() for handle in handles] == [code for _, code in ENDS]
    assert [pid for pid in world.pids() if runs(pid)] == [], "what the workers started ended with them"
    assert all(handle.kill() for handle in handles), "harmless after the end; its last lines are read then"
    assert [handle.last_lines() for handle in handles] == [["alas"]] * len(ENDS)
    assert sorted(world.exits) == [(f"trainer-{n}", code) for n, (_, code) in enumerate(ENDS)]


def test_only_the_last_lines_are_kept(world):
    says = [["say", str(n)] for n in range(TAIL_LINES + 5)]
    (handle,) = world.start(world.spec(0, *says, ["exit", 1]))
    world.until_exits(1)
    assert handle.kill()
    assert handle.last_lines() == [str(n) for n in range(5, TAIL_LINES + 5)]
    assert len(world.lines) == TAIL_LINES + 5


def test_terminate_asks_and_a_worker_may_end_its_own_way(world):
    polite, deaf = world.start(
        world.spec(0, ["say", "up"], ["sleep"]), world.spec(1, ["ignore_term"], ["say", "up"], ["sleep"])
    )
    world.until_said(("trainer-0", "up"), ("trainer-1", "up"))
    polite.terminate()
    deaf.terminate()
    world.until_exits(1)
    assert world.exits == [("trainer-0", -signal.SIGTERM)]
    assert deaf.poll() is None
    polite.terminate()


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_means_gone_with_all_that_the_worker_started(world, stopped):
    (handle,) = world.start(world.spec(0, ["ignore_term"], *ORPHANING))
    world.until_said(("trainer-0", "up"))
    pids = world.pids()
    assert len(pids) == 2 and all(map(runs, pids))
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    assert handle.kill()
    assert not any(map(runs, pids))
    assert handle.poll() == -signal.SIGKILL
    assert world.exits == [("trainer-0", -signal.SIGKILL)]
    assert handle.kill()
    assert len(world.exits) == 1


def test_a_kill_that_does_not_wait_ends_the_worker_all_the_same(world):
    handles = world.start(*(world.spec(n, *ORPHANING) for n in range(2)))
    world.until_said(("trainer-0", "up"), ("trainer-1", "up"))
    for handle in handles:
        handle.kill(within_s=0)
    world.until_exits(2)
    assert [handle.poll() for handle in handles] == [-signal.SIGKILL] * 2


def test_one_worker_is_killed_and_the_others_go_on(world):
    first, second = world.start(*(world.spec(n, *ORPHANING) for n in range(2)))
    world.until_said(("trainer-0", "up"), ("trainer-1", "up"))
    assert first.kill()
    assert (first.poll(), second.poll()) == (-signal.SIGKILL, None)


# -- the rendezvous


def test_an_address_is_known_once_the_worker_has_told_it(world):
    go = world.folder / "go"
    spec = world.spec(0, ["await_file", str(go)], ["address"], ["sleep"], role=WorkerRole.SHARD)
    world.start(spec)
    assert world.launcher.rendezvous.address(spec) is None
    go.touch()
    until(lambda: world.launcher.rendezvous.address(spec) == "127.0.0.1:1")


# -- the process that launches

LAUNCH = """
import json, sys, time
from pathlib import Path
from tests.contract.test_launchers import OPEN, World

with OPEN[sys.argv[1]]() as launcher:
    world = World(launcher, Path(sys.argv[2]))
    do = [["ignore_term"], ["note_pid"], ["spawn"], ["say", "up"], ["sleep"]]
    world.start(world.spec(0, *do), world.spec(1, *do))
    world.until_said(("trainer-0", "up"), ("trainer-1", "up"))
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("name", NAMES)
def test_workers_end_with_the_process_that_launched_them(request, tmp_path, monkeypatch, name):
    if name == RAY:
        request.getfixturevalue("cluster")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, name, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 4 and all(map(runs, pids))
    finally:
        process.kill()
        process.communicate()
    until(lambda: not any(map(runs, pids)))
