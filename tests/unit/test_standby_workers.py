"""The workers of a resize, as the launcher holds them beside those that train."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from headrace.errors import Unavailable
from headrace.lifecycle import ExitCode
from headrace.service.cluster.resizing import StandbyWorkers, Successor
from headrace.service.cluster.supervision import Exited, RunOutcome, Tick
from headrace.trainer.rank0.resize_messages import PrepareWorkers, WorkersFailed, WorkersMoved

ASKED = PrepareWorkers("a", shards=3, trainers=2)
DRAINED = RunOutcome(ExitCode.DRAINED, "the stream is drained")
DIED = RunOutcome(ExitCode.BUG, "shard-0 ended first: killed by SIGKILL", "shard-0")
TICK = Tick()
MOVED = WorkersMoved("a", 7, rounds=1, took_s=0.1, state="moving")


class RankZero:
    def __init__(self, message=None):
        self.message, self.heard = message, []

    def send(self, message):
        self.heard.append(message)


@dataclass
class Workers:
    """Stands for a Generation."""

    number: int
    rank0: RankZero
    outcome: RunOutcome | None = None
    stop_asked: bool = False
    events: list = field(default_factory=list)

    @property
    def plan(self):
        return SimpleNamespace(generation=self.number)

    def step(self, event):
        self.events.append(event)
        if isinstance(event, Exited):
            self.outcome = DIED


class World:
    """Plans and begins generations that stand by, beside generation 4."""

    def __init__(self, asked=None):
        self.present = Workers(4, RankZero(asked))
        self.begun, self.ended, self.said = [], [], []
        self.claimed = self.decided = self.handed = self.broken = False
        self.standby = StandbyWorkers(self.present, self, self.begin, lambda worker, text: self.said.append(text))

    def beside(self, last, resize, trainers, shards):
        assert (resize, trainers, shards) == ("a", 2, 3)
        return SimpleNamespace(generation=last + 1)

    def begin(self, plan):
        if self.broken:
            raise Unavailable("no room")
        self.begun.append(Workers(plan.generation, RankZero()))
        held = ExitStack()
        held.callback(lambda: self.ended.append(plan.generation))
        return Successor(self.begun[-1], None, held)

    def has_claimed(self, plan):
        return self.claimed

    def is_decided(self):
        return self.decided

    def is_handed_over(self):
        return self.handed

    def step(self, event=TICK):
        self.standby.step(event, 4)


def standing():
    world = World(ASKED)
    world.step()
    assert [each.number for each in world.begun] == [5]
    return world


def test_nobody_stands_by_before_rank_0_asks_for_it():
    world = World()
    world.step()
    assert not world.begun and world.standby.number is None
    assert world.standby.successor_of(DRAINED, stop_asked=False) is None


def test_they_begin_once_and_rank_0_hears_how_far_they_are():
    world = standing()
    world.step()
    assert world.standby.number == 5 and not world.present.rank0.heard
    world.begun[0].rank0.message = MOVED
    world.step()
    world.step()
    assert world.present.rank0.heard == [MOVED], "told once"
    assert len(world.begun) == 1 and world.said == ["resize to 2 trainers and 3 shards: generation 5 stands by"]


def test_their_death_ends_the_request_and_nothing_else():
    world = standing()
    world.step(Exited("shard-0", -9))
    assert world.ended == [5] and world.standby.number is None
    assert world.present.rank0.heard == [WorkersFailed("a", DIED.reason)]
    world.step()
    assert len(world.begun) == 1, "not tried again: the one who asked may ask again"
    assert world.standby.successor_of(DRAINED, stop_asked=False) is None


def test_workers_that_cannot_be_started_end_the_request():
    world = World(ASKED)
    world.broken = True
    world.step()
    assert world.present.rank0.heard == [WorkersFailed("a", "no room")]
    assert world.said == ["the resize is given up: no room"]


def test_once_they_have_the_job_they_follow_however_those_before_them_end():
    world = standing()
    world.claimed = True
    world.step()
    assert world.standby.has_claimed
    successor = world.standby.successor_of(DIED, stop_asked=True)
    assert successor.generation is world.begun[0] and not world.ended
    with world.standby:
        pass
    assert not world.ended, "it is the caller's now"


@pytest.mark.parametrize(
    ("outcome", "stop_asked", "decided", "follow"),
    [
        (DRAINED, False, True, True),
        (DRAINED, False, False, False),  # the stream has ended
        (DRAINED, True, True, False),
        (DIED, False, True, False),  # there may be passes to train again, by as many trainers as before
    ],
)
def test_before_that_they_follow_those_that_ended_for_them(outcome, stop_asked, decided, follow):
    world = standing()
    world.decided = decided
    with world.standby:
        assert (world.standby.successor_of(outcome, stop_asked=stop_asked) is not None) == follow
    assert world.ended == ([] if follow else [5])


@pytest.mark.parametrize("handed", [True, False])
def test_at_a_stop_they_follow_where_they_alone_can_commit_the_last_version(handed):
    world = standing()
    world.decided, world.handed = True, handed
    with world.standby:
        assert (world.standby.successor_of(DRAINED, stop_asked=True) is not None) == handed
        assert world.standby.successor_of(DIED, stop_asked=True) is None


def test_a_job_that_was_asked_to_stop_prepares_nothing():
    world = World(ASKED)
    world.present.stop_asked = True
    world.step()
    assert not world.begun
