"""Exports are made one at a time, tried again after pauses that grow, and given up at last."""

import pytest

from headrace.trainer.config import ExportSection
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest
from headrace.trainer.exports.exporter_process import FIRST_PAUSE_S, LONGEST_PAUSE_S, ExportAttempts


class Exporter:
    """Answers when it is told to."""

    def __init__(self):
        self.begun, self.answer, self.closed = [], None, False

    def submit(self, request):
        assert self.answer is None
        self.begun.append((request.stream, request.version))

    def poll(self):
        answer, self.answer = self.answer, None
        return answer

    def close(self):
        self.closed = True


class World:
    def __init__(self):
        self.now_s, self.exporter = 100.0, Exporter()
        self.trouble = ""
        self.attempts = ExportAttempts(self.exporter, lambda: self.now_s, lambda: self.trouble)

    def add(self, stream="main", version=1, tries=3):
        self.attempts.add(
            ExportRequest(
                job="news",
                stream=stream,
                section=ExportSection(tries=tries),
                kind="base",
                timeline="t1",
                version=version,
                parent=None,
                commit="/c",
                address="/e",
                stage="/s",
                tables={},
                slots={},
            )  # fmt: skip
        )

    def tick(self, after_s=0.0, outcome=None, **more):
        self.now_s += after_s
        if outcome is not None:
            self.exporter.answer = ExportAnswer(name="n", outcome=outcome, **more)
        return [(request.stream, answer.outcome) for request, answer in self.attempts.tick()]


@pytest.fixture
def world():
    return World()


def test_one_is_made_after_the_other(world):
    world.add("a")
    world.add("b")
    assert world.tick() == [] and world.exporter.begun == [("a", 1)]
    assert world.tick() == [] and world.exporter.begun == [("a", 1)]
    assert world.tick(outcome="complete") == [("a", "complete")] and world.exporter.begun[-1] == ("b", 1)
    assert [request.stream for request in world.attempts] == ["b"]
    assert world.tick(outcome="complete") == [("b", "complete")] and list(world.attempts) == []
    world.attempts.close()
    assert world.exporter.closed


def test_none_begins_while_there_is_trouble_and_one_that_began_ends(world):
    world.add("a")
    world.add("b")
    world.tick()
    world.trouble = "the object store was not reached"
    assert world.tick(outcome="complete") == [("a", "complete")] and world.exporter.begun == [("a", 1)]
    world.trouble = ""
    world.tick()
    assert world.exporter.begun == [("a", 1), ("b", 1)]


def test_one_that_fails_is_tried_again_after_pauses_then_given_up(world):
    world.add(tries=3)
    world.tick()
    assert world.tick(outcome="failed", error="no room") == []
    since_s, why = world.attempts.failing["main"]
    assert (since_s, why) == (100.0, "no room")
    world.tick(FIRST_PAUSE_S - 0.1)
    assert len(world.exporter.begun) == 1
    world.tick(0.1)
    assert len(world.exporter.begun) == 2
    world.tick(outcome="failed", error="still none")
    assert world.attempts.failing["main"] == (100.0, "still none")
    world.tick(2 * FIRST_PAUSE_S)
    assert world.tick(outcome="failed") == [("main", "failed")]
    assert world.attempts.failing == {} and list(world.attempts) == []


def test_pauses_are_bounded(world):
    world.add(tries=100)
    for _ in range(50):
        world.tick(LONGEST_PAUSE_S)
        world.tick(outcome="failed")
    assert len(world.exporter.begun) == 50


def test_what_cannot_succeed_is_not_tried_again_and_others_go_on_meanwhile(world):
    world.add("a")
    world.add("b")
    world.tick()
    world.tick(outcome="failed")
    assert world.exporter.begun[-1] == ("b", 1), "while a waits"
    assert world.tick(outcome="failed", final=True) == [("b", "failed")]
    world.tick(FIRST_PAUSE_S)
    assert world.exporter.begun[-1] == ("a", 1)
    assert world.tick(outcome="complete") == [("a", "complete")] and world.attempts.failing == {}
