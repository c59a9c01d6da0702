"""A stalled step is reported, with what it waits for, until it ends."""

import threading
import time

import pytest

from headrace.rpc.role import serve_role
from headrace.service.cluster.rank0_connection import RankZeroConnection
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.service.monitor.lines import status_changes
from headrace.trainer.job_status import StallStatus, Status, read
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.status.time_spent import StepClock, WaitsFor

WORDS = {
    "pipe": ({}, "no samples come from the source or the pipe command"),
    "trainers": ({}, "another trainer does not answer: one is stopped, or waits for its samples or for a shard"),
    "shards": ({"shards": [1, 3]}, "no answer from shard-1, shard-3: stopped, or waiting for another trainer"),
    "close": ({"shards": []}, "its close takes so long: a worker is stopped, or busy"),
    "model": ({}, "the model's own arithmetic takes so long"),
    "worker": ({"worker": "trainer-0"}, "trainer-0 does not answer: it is stopped, or busy"),
}


class Clock:
    def __init__(self):
        self.now_s = 100.0
        self.step = StepClock(30.0, lambda: self.now_s)


def test_a_step_is_stalled_from_its_time_limit_until_it_ends():
    clock = Clock()
    assert clock.step.stalled() is None
    clock.step.begin(WaitsFor.TRAINERS)
    clock.now_s += 20
    clock.step.at(WaitsFor.SHARDS)
    clock.now_s += 10
    assert clock.step.stalled() is None
    clock.now_s += 1
    clock.step.unanswered = lambda: [1]
    assert clock.step.stalled() == StallStatus(waits_for="shards", for_s=31.0, max_s=30.0, shards=[1])
    clock.step.begin(WaitsFor.TRAINERS)
    assert clock.step.stalled() is None


def test_a_wait_within_the_computation_counts_as_a_wait():
    clock, parts = Clock(), []
    clock.step.goes_on = parts.append
    with clock.step.awaiting(WaitsFor.SHARDS):
        assert parts == [], "there is no step"
    clock.step.begin(WaitsFor.MODEL)
    with clock.step.awaiting(WaitsFor.SHARDS):
        clock.now_s += 31
        assert clock.step.stalled().waits_for == "shards"
    assert parts == [WaitsFor.MODEL, WaitsFor.SHARDS, WaitsFor.MODEL]


def test_an_idle_trainer_is_not_stalled():
    clock = Clock()
    clock.step.begin(WaitsFor.PIPE)
    clock.step.end()
    clock.step.at(WaitsFor.PIPE)
    clock.now_s += 1000
    assert clock.step.stalled() is None


def test_the_status_of_a_trainer_has_a_stalled_step():
    progress = TrainerProgress("job", max_step_s=0.0)
    assert progress.status().stalled is None
    progress.step.begin(WaitsFor.PIPE)
    time.sleep(0.001)
    assert progress.status().stalled.waits_for == "pipe"


@pytest.mark.parametrize("waits_for", [*WaitsFor, "worker"])
def test_the_alarm_names_what_is_waited_for(waits_for):
    told, words = WORDS[waits_for]
    status = read(Status, {"pass": 7, "stalled": {"waits_for": str(waits_for), "for_s": 41.5, "max_s": 30.0, **told}})
    assert alarms(status) == {Alarm.STALLED: f"pass 7 stands still, for more than 30 s: {words}"}
    assert not Alarm.STALLED.grave


def test_the_alarm_is_logged_once_and_again_when_it_is_over():
    still = {"pass": 7, "stalled": {"waits_for": "pipe", "for_s": 31.0, "max_s": 30.0}}
    later = {"pass": 7, "stalled": {"waits_for": "pipe", "for_s": 61.0, "max_s": 30.0}}
    first = [line for line in status_changes(read(Status, still), read(Status, {"pass": 7})) if "ALARM" in line]
    assert first == ["ALARM pass 7 stands still, for more than 30 s: " + WORDS["pipe"][1]]
    assert list(status_changes(read(Status, later), read(Status, still))) == []
    assert next(status_changes(read(Status, {"pass": 7, "stalled": None}), read(Status, later))).startswith(
        "alarm over: pass 7 stands still"
    )


def test_a_log_that_cannot_be_written_is_the_alarm_and_not_the_waiting_close():
    told = {"trouble": "no room", "stalled": {"waits_for": "close", "for_s": 31.0, "max_s": 30.0}}
    assert alarms(read(Status, told)) == {Alarm.LOG: "no room"}


def test_a_rank_0_that_does_not_answer_is_stalled_until_it_does(tmp_path):
    asleep = threading.Event()

    def status():
        while asleep.is_set():
            time.sleep(0.01)
        return {"pass": 3, "state": "training"}

    with serve_role(status, lambda: None, "s", tmp_path / "socket") as server:
        line = RankZeroConnection(Status(), lambda: server.address, "s", 0.01, worker="trainer-0", max_silent_s=0.3)
        line.start()
        try:
            until(lambda: line.status == Status(pass_number=3, state="training"))
            asleep.set()
            until(lambda: line.status.stalled is not None)
            assert alarms(line.status) == {
                Alarm.STALLED: "pass 3 stands still, for more than 0.3 s: "
                "trainer-0 does not answer: it is stopped, or busy"
            }
            asleep.clear()
            until(lambda: line.status.stalled is None)
        finally:
            asleep.clear()
            line.close()
        time.sleep(0.4)
        assert line.status.stalled is None, "nobody is asked any more"


def until(holds):
    end_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)
