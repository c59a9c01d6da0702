"""Workers, agents and machines of an elastic job die at seeded moments, and come again; nobody does anything else.

Each event counts once, the number of trainers stays within its bounds, and the log gives the same bits again. Five
deaths in CI, ten of each seed in soak runs; for more of them:
`HEADRACE_SEEDS=2-30 pytest -m slow tests/faults/test_elastic_killed.py`.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import TypeVar

import pytest

from headrace.deadline import Deadline
from headrace.private_folder import private_folder
from headrace.trainer.journal.log import RecordKind, read
from tests.fakes.agents import AgentProcess
from tests.integration.running_job import assert_gone, runs
from tests.integration.test_elastic_jobs import NUM_LINES, World, assert_rerun, processes_in

FIVE = ("worker", "worker", "agent", "agent", "machine")
TEN = (*FIVE, "worker", "worker", "agent", "machine", "machine")
"""Deaths by their kinds."""
SETTINGS = ("passes.max_events=20",)
FIRST_COMMIT = 5
"""Deaths begin after this version: until its commit is there, the log may lose its first passes."""
FIRST, _, LAST = os.environ.get("HEADRACE_SEEDS", "2-4").partition("-")
WITHIN_S = 240.0
"""Longest time until the job goes on after a death."""
Found = TypeVar("Found")


class Campaign:
    """Deaths of one seed."""

    def __init__(self, world: World, most: int, seed: int) -> None:
        """`most`: trainers."""
        self.world, self.most, self.random = world, most, Random(seed)
        self.deaths: list[str] = []

    def run(self, kinds: Sequence[str]) -> None:
        self.world.agent("--role", "shard")
        for _ in range(self.most):
            self.world.agent("--role", "trainer")
        self._until_closes(FIRST_COMMIT)
        for kind in self.random.sample(kinds, len(kinds)):
            self._until_closes(self.random.randint(0, 2))
            time.sleep(self.random.random())
            assert self.world.running.process.poll() is None, f"the stream ended before: {self.deaths}"
            getattr(self, f"_{kind}")()
            self.deaths.append(kind)
        self._until_closes(1)

    def _worker(self) -> None:
        """Its agent runs one of the next generation."""
        with suppress(ProcessLookupError):
            os.kill(self.random.choice(self._until(self.world.workers, "a worker runs")), signal.SIGKILL)

    def _agent(self) -> None:
        """Its worker ends by itself. It is started again soon."""
        self.random.choice(self.world.agents).process.kill()
        time.sleep(2 * self.random.random())
        self._start_ended()

    def _machine(self) -> None:
        """Its agent is started again once the job has gone on without it."""
        agent = self.random.choice([each for each in self.world.agents if "trainer" in each.process.args])
        self.world.lose(agent)
        self._until_closes(1)
        self.world.agent("--role", "trainer")

    def _start_ended(self) -> None:
        """What whoever starts agents does: start those again that have ended."""
        for agent in [each for each in self.world.agents if each.process.poll() is not None]:
            self.world.agents.remove(agent)
            self.world.agent("--role", _role_of(agent))

    def _until_closes(self, more: int) -> None:
        """Wait until so many more passes have been closed for the first time."""
        number = self.world.history.closed + more
        self._until(lambda: self.world.history.closed >= number, f"version {number}")

    def _until(self, found: Callable[[], Found], what: str) -> Found:
        """Wait for something; whoever starts agents does so again meanwhile."""
        deadline = Deadline.after(WITHIN_S)
        while not (there := found()):
            assert self.world.running.process.poll() is None, f"the job ended before {what}, after {self.deaths}"
            deadline.check(f"waiting for {what}, after {self.deaths}")
            self._start_ended()
            time.sleep(0.1)
        return there


def _role_of(agent: AgentProcess) -> str:
    *_, role = agent.process.args
    return role


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_after_five_deaths_of_an_elastic_job_every_event_counts_once(tmp_path, monkeypatch):
    campaign(tmp_path, monkeypatch, FIVE, seed=1, most=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
def test_after_ten_deaths_of_each_seed_every_event_counts_once(tmp_path, monkeypatch, seed):
    campaign(tmp_path, monkeypatch, TEN, seed, most=3)


def campaign(folder, monkeypatch, kinds, seed, most):
    world = World(folder, *SETTINGS, most=most)
    try:
        Campaign(world, most, seed).run(kinds)
        world.slowly.unlink()
        code, output = world.running.end(300)
        assert code == 0 and "forked" not in output and "differ" not in output, output
        assert [agent.process.wait(60) for agent in world.agents] == [0] * len(world.agents)
        assert_each_event_once(world, most)
        assert_nothing_left(world, monkeypatch)
        assert_rerun(world, "0")
    finally:
        world.end()


def assert_each_event_once(world, most):
    """No version twice, none left out, but those that were planned for another number of trainers and withdrawn."""
    records, history = read(world.running.store / "log"), world.history
    versions = [record.body["number"] for record in records if record.kind is RecordKind.CLOSE]
    assert versions == sorted({*versions}) == sorted(history.closes)
    assert {*versions} | {*history.voids} == {*range(1, versions[-1] + 1)}
    closes, plans = ([found[number].content for number in versions] for found in (history.closes, history.plans))
    assert sum(close.events for close in closes) == world.running.report["events"] == 3 * NUM_LINES - 21
    segments = sorted((s.partition, s.begin, s.end) for plan in plans for rank in plan.segments for s in rank)
    assert all(begin == (end if name == other else 0) for (name, _, end), (other, begin, _) in pairwise(segments))
    widths = {len(plan.segments) for plan in plans}
    assert {most - 1, most} <= widths <= {*range(1, most + 1)}, widths


def assert_nothing_left(world, monkeypatch):
    """Neither processes nor folders; what killed agents left goes at the next start of one."""
    folder, store = world.job.parent, world.running.store
    assert_gone(world.running)
    assert not [pid for pid in processes_in(folder) if runs(pid)]
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    with private_folder("agent") as mine:
        assert [*(folder / "tmp").iterdir()] == [mine]
    assert not list(store.rglob("*.tmp")) and not list((store / "live").glob("*")) and not (store / "workers").exists()
