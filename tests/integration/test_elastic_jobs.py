"""A job with an elastic number of trainers: a machine is lost, another one joins, and nobody does anything about it."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.rpc.job_client import JobClient
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.journal.records import ResizeOperation
from headrace.trainer.spec.changes import TRAINERS
from headrace.warm_forkserver import VARIABLE
from tests.fakes.agents import AgentProcess
from tests.fakes.warm import warm_environment
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

NUM_LINES = 600
SETTINGS = ("passes.max_events=50", "train.threads=1", "train.batch_size=8", 'train.matmul="mkl"', "commit.keep=1000")
ELASTIC = (
    *("cluster.shards=1", "cluster.launcher=external"),
    *('cluster.node_timeout="5s"', 'cluster.elastic_wait="1s"', "cluster.max_restarts=100", "commit.every_passes=4"),
)


class World:
    """An elastic job, and its agents. Its pipe takes its time as long as a file "slowly" is there."""

    def __init__(self, folder: Path, *settings: str, most: int = 3) -> None:
        (folder / "pipe.sh").write_text("if [ -e slowly ]; then sleep 1; fi; exec cat\n")
        (folder / "tmp").mkdir()
        self.job = write_job(folder, num_lines=NUM_LINES, spec=changed(SPEC, {"pipe.command": ["sh", "pipe.sh"]}))
        self.slowly, self.agents, self._num_agents = folder / "slowly", [], 0
        self.slowly.touch()
        self.settings = (*SETTINGS, *settings)
        trainers = f"cluster.trainers={{min=1, max={most}}}"
        self.running = RunningJob(self.job, folder / "store", *self.settings, trainers, *ELASTIC)
        self.address = re.search(r"--join (\S+)", self.running.until_said("`headrace worker"))[1]

    def agent(self, *options: str) -> AgentProcess:
        token = self.running.store / "identity" / "join_token"
        output = self.job.parent / f"agent-{self._num_agents}"
        environment = {VARIABLE: warm_environment()[VARIABLE], "TMPDIR": str(self.job.parent / "tmp")}
        self._num_agents += 1
        self.agents.append(AgentProcess(self.address, token, output, *options, **environment))
        return self.agents[-1]

    def lose(self, agent: AgentProcess) -> None:
        """Its machine is gone: its worker ends with it."""
        agent.kill()
        self.agents.remove(agent)

    def until_trains(self, trainers: int, within_s: float = 240) -> float:
        """Wait until so many have closed a pass that none before them had; the seconds."""
        begun_s, deadline, version = time.monotonic(), Deadline.after(within_s), None
        while True:
            deadline.check(f"waiting until {trainers} trainers train, {''.join(self.running.said)}")
            try:
                status = JobClient(self.running.store).status(Deadline.after(5))
            except HeadraceError:
                continue
            if status["workers"].get("trainers") == trainers and status["state"] == "training":
                version = status["version"] if version is None else version
                if status["version"] > version:
                    return time.monotonic() - begun_s
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Process numbers of what the agents run."""
        return sorted(processes_in(self.job.parent / "tmp"))

    def widths(self) -> list[int]:
        """Numbers of trainers of the passes, where they change."""
        plans = sorted(self.history.plans.items())
        widths = [len(plan.content.segments) for number, plan in plans if number in self.history.closes]
        return [width for at, width in enumerate(widths) if at == 0 or widths[at - 1] != width]

    @property
    def history(self) -> JobHistory:
        return JobHistory.of(read(self.running.store / "log"))

    def end(self) -> None:
        self.running.kill()
        print(self.running.end()[1])  # shown if the test fails
        for agent in self.agents:
            agent.kill()


def processes_in(folder: Path) -> list[int]:
    """Numbers of the processes that are named by a path below `folder`, or run there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (process / "cmdline").read_bytes() or (process / "cwd").resolve() == folder:
                found.append(int(process.name))
    return found


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.end()


def assert_nothing_lost(world: World) -> None:
    """The job ends; each event counts once, no replay differed, and the log gives the same bits again."""
    world.slowly.unlink()
    code, output = world.running.end(300)
    assert code == 0, output
    assert "forked" not in output, output
    history, report = world.history, world.running.report
    assert report["events"] == 3 * NUM_LINES - 21
    in_log = sum(close.content.events for close in history.closes.values())
    whole = min(history.plans) == 1  # else files of the log before the oldest commit are gone
    assert in_log == report["events"] if whole else in_log < report["events"]
    begin = "0" if whole else Commits(world.running.store).names()[0]
    assert_rerun(world, begin)


def assert_rerun(world: World, begin: str) -> None:
    """From `begin` on the log gives the same bits again."""
    again = headrace(
        world.job, *world.settings, store=str(world.running.store), command="rerun", options=("--from", begin),
        timeout_s=600,
    )  # fmt: skip
    assert again.code == 0, again.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_machine_makes_the_job_go_on_with_fewer_and_a_new_one_with_more(world):
    world.agent("--role", "shard")
    trainers = [world.agent("--role", "trainer") for _ in range(3)]
    world.until_trains(3)
    world.lose(trainers[1])
    lost_s = world.until_trains(2)
    world.agent("--role", "trainer")
    joined_s = world.until_trains(3)
    print(f"fewer after {lost_s:.1f} s, more after {joined_s:.1f} s")
    assert_nothing_lost(world)
    assert world.widths()[-2:] == [2, 3]
    resizes = [each.content for each in world.history.operations if isinstance(each.content, ResizeOperation)]
    assert [each.keys[TRAINERS] for each in resizes][-2:] == [2, 3]
    said = "".join(world.running.said)
    assert "goes on with 2 trainers in place of 3: nothing was heard of the others for 5 s" in said
    assert "goes on with 3 trainers in place of 2: 1 worker has joined" in said
