"""Jobs whose workers somebody else starts: `headrace worker`, by hand and by torchrun."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.identity.join_token import JoinToken, read_token
from headrace.service.spec.launchers import EXTERNAL
from tests.fakes.agents import AgentProcess, children_of
from tests.integration.running_job import RunningJob
from tests.integration.test_run_processes import SPEC, lines

NUM_LINES, PASS = 12_000, 1_000
SMALL_STEPS = f"passes.max_events={PASS}", "train.batch_size=8"
"""So that the stream takes seconds, and a death comes in its middle."""
TWO_BY_TWO = "cluster.trainers=2", "cluster.shards=2", *SMALL_STEPS
OF_OTHERS = (*TWO_BY_TWO, f"cluster.launcher={EXTERNAL}", 'cluster.node_timeout="3s"', "commit.every_passes=1")


class World:
    """A job on the external launcher, and its agents."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agents, self.jobs = folder, [], []
        self.token = folder / "store" / "identity" / "join_token"
        self.address = ""
        (folder / "job.toml").write_text(SPEC)
        (folder / "lines.txt").write_text(lines(0, NUM_LINES))

    def run(self, *settings: str) -> RunningJob:
        self.jobs.append(RunningJob(self.folder / "job.toml", self.folder, *settings))
        return self.jobs[-1]

    def run_external(self, *settings: str) -> RunningJob:
        job = self.run(*OF_OTHERS, *settings)
        waits = job.until_said("waits for 4 of 4 workers: trainer-0, trainer-1, shard-0, shard-1; `headrace worker")
        self.address = re.search(r"--join (\S+)", waits)[1]
        return job

    def agent(self, *options: str, token: Path | None = None, **environment: str) -> AgentProcess:
        output = self.folder / f"agent-{len(self.agents)}"
        self.agents.append(AgentProcess(self.address, token or self.token, output, *options, **environment))
        return self.agents[-1]

    def end(self) -> None:
        for job in self.jobs:
            job.kill()
        for agent in self.agents:
            agent.kill()

    def ends(self) -> list[int]:
        return [agent.process.wait(40) for agent in self.agents]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def digest_of(job: RunningJob) -> str:
    code, said = job.end(120)
    assert code == 0, said
    assert job.report["events"] == NUM_LINES
    return job.report["digest"]


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.end()


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """Of the same job on the local launcher."""
    world = World(tmp_path_factory.mktemp("local"))
    try:
        return digest_of(world.run(*TWO_BY_TWO))
    finally:
        world.end()


def until(condition, what: str, within_s: float = 40):
    deadline = Deadline.after(within_s)
    while not (found := condition()):
        deadline.check(f"waiting until {what}")
        time.sleep(0.02)
    return found


# -- joining


@pytest.mark.slow
def test_workers_started_by_hand_give_the_digest_of_the_local_launcher(world, digest):
    job = world.run_external()
    for _ in range(4):
        world.agent()
    assert digest_of(job) == digest
    assert world.ends() == [0] * 4
    assert sum("trainer-0: done: version" in agent.said for agent in world.agents) == 1
    assert sum(": shard 1 of 2 serves" in agent.said for agent in world.agents) == 1


@pytest.mark.slow
def test_workers_that_join_over_ipv6_give_the_same_digest(world, digest):
    job = world.run_external('cluster.listen="[::1]:0"')
    assert world.address.startswith("[::1]:")
    for _ in range(4):
        world.agent()
    assert digest_of(job) == digest
    assert world.ends() == [0] * 4


@pytest.mark.slow
def test_workers_started_by_torchrun_give_the_same_digest(world, digest):
    job = world.run_external()
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=4", "--no-python"]
    worker = [sys.executable, "-m", "headrace.service", "worker", "--join", world.address, "--token-file", world.token]
    with (world.folder / "torchrun").open("w") as out:
        torchrun = subprocess.Popen(list(map(str, [*command, *worker])), stdout=out, stderr=out)
    try:
        assert digest_of(job) == digest
        assert torchrun.wait(40) == 0, (world.folder / "torchrun").read_text()
    finally:
        for pid in [torchrun.pid, *children_of(torchrun.pid)]:
            kill(pid)
        torchrun.wait()


@pytest.mark.long
def test_agents_with_ranks_get_their_workers_and_a_second_one_of_a_rank_is_refused(world):
    job = world.run_external()
    last = world.agent(RANK="3", WORLD_SIZE="4")
    job.until_said("waits for 3 of 4 workers: trainer-0, trainer-1, shard-0")
    again = world.agent(RANK="3", WORLD_SIZE="4")
    assert again.process.wait(20) == 75
    assert "RANK 3 of generation 1 is shard-1, which an agent of this machine runs already" in again.said
    other = world.agent(RANK="1", WORLD_SIZE="2")
    assert other.process.wait(20) == 2
    assert "RANK 1 of WORLD_SIZE 2, and the job has 4 workers (2 trainers, 2 shards); start 4 of them" in other.said
    world.agent("--role", "trainer", RANK="1", WORLD_SIZE="2")
    job.until_said("waits for 2 of 4 workers: trainer-0, shard-0")
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 0 and "stopped before training began" in said
    assert last.process.wait(20) == 0


@pytest.mark.long
def test_a_stale_token_and_a_token_that_others_may_read_are_refused(world):
    world.run_external()
    stale, shown = world.folder / "stale", world.folder / "shown"
    stale.touch(0o600)
    stale.write_text(str(JoinToken(read_token(world.token).fingerprint, "0" * 64)))
    refused = world.agent(token=stale)
    assert refused.process.wait(20) == 1
    assert f"refused the join token in {stale}" in refused.said and "copy the present one from the head" in refused.said
    stale.write_text(str(JoinToken("0" * 64, "0" * 64)))
    strange = world.agent(token=stale)
    assert strange.process.wait(20) == 1
    assert "the token is of another job, or the authority was replaced" in strange.said
    shown.write_text(world.token.read_text())
    shown.chmod(0o644)
    open_to_all = world.agent(token=shown)
    assert open_to_all.process.wait(20) == 2
    assert "others may read the join token (mode 644); `chmod 600` it" in open_to_all.said
    assert world.token.stat().st_mode & 0o777 == 0o600


# -- deaths


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "agent", "agent that is frozen"])
def test_a_death_is_followed_by_another_generation_with_the_same_bits(world, digest, victim):
    job = world.run_external()
    for _ in range(4):
        world.agent()
    job.until_events(PASS, 90)
    agent = world.agents[1]
    children = agent.children()
    match victim:
        case "worker":
            kill(children[0])
            job.until_said("ended first: killed by SIGKILL; restarting, 1 of 5")
        case "agent":
            kill(agent.process.pid)
            until(lambda: not any(map(alive, children)), "the worker of a killed agent is gone")
            job.until_said("; restarting, 1 of 5")
            job.until_said("waits for 1 of 4 workers")
            world.agent()
        case "agent that is frozen":
            for pid in [agent.process.pid, *children]:
                kill(pid, signal.SIGSTOP)
            job.until_said("; restarting, 1 of 5")
            job.until_said("waits for 1 of 4 workers")
            for pid in [agent.process.pid, *children]:
                kill(pid, signal.SIGCONT)
            until(lambda: "was given up" in agent.said, "the frozen agent hears that it was given up")
            assert not any(map(alive, children))
    assert digest_of(job) == digest
    assert world.ends() == [-signal.SIGKILL if victim == "agent" and each is agent else 0 for each in world.agents]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_agents_of_a_head_that_is_lost_end_by_themselves_within_the_timeout(world):
    job = world.run_external()
    for _ in range(4):
        world.agent("--wait", "5s")
    job.until_events(PASS, 90)
    children = [pid for agent in world.agents for pid in agent.children()]
    os.kill(job.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    assert world.ends() == [75] * 4
    assert time.monotonic() - begin < 5 + 10
    assert not any(map(alive, children))
    assert re.search(r"not reachable for [34] s; \S+ was ended, and this agent joins again", world.agents[0].said)
