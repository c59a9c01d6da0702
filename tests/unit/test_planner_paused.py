"""While a job is paused, no pass with events is planned, nor the end; a waiting operation still gets a close."""

import threading

from msgspec.structs import replace

from headrace.service.monitor.lines import progress_line
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import PAUSED, PassRules, Planner, StreamEnded
from headrace.trainer.status.progress import TrainerProgress
from tests.unit.test_planner import Stream


def planner_of(stream, paused, wants_pass=lambda: False, **passes):
    planner = Planner(stream, PassRules(PassesSection(**passes), 1))
    planner.held, planner.wants_pass = paused.is_set, wants_pass
    return planner


def until(condition):
    """Waits for the planner's thread, which polls every few hundredths of a second."""
    looked = threading.Event()
    for _ in range(200):
        if condition():
            return
        looked.wait(0.02)
    raise AssertionError("not within 4 s")


def test_paused_no_pass_is_planned_and_resumed_the_events_that_waited_are():
    paused = threading.Event()
    paused.set()
    planner = planner_of(Stream((25, False)), paused, max_events=10, cut="count")
    try:
        planner.request(1, {}, 0)
        until(lambda: planner.paused)
        assert planner.take(0.2) is None
        paused.clear()
        answer = planner.take(10.0)
        assert isinstance(answer, PassPlan) and answer.num_positions == 10 and not planner.paused
    finally:
        planner.close()


def test_paused_at_its_end_a_bounded_stream_is_not_drained_until_it_is_resumed():
    paused = threading.Event()
    paused.set()
    planner = planner_of(Stream((7, True), bounded=True), paused)
    try:
        planner.request(1, {"t/0": 7}, 7)
        until(lambda: planner.paused)
        assert planner.take(0.2) is None
        paused.clear()
        assert isinstance(planner.take(10.0), StreamEnded)
    finally:
        planner.close()


def test_paused_a_waiting_operation_gets_an_empty_pass():
    paused = threading.Event()
    paused.set()
    planner = planner_of(Stream((25, False)), paused, wants_pass=lambda: True, wait="1ms", max_events=10)
    try:
        planner.request(1, {}, 0)
        answer = planner.take(10.0)
        assert isinstance(answer, PassPlan) and answer.num_positions == 0
    finally:
        planner.close()


def test_the_state_says_paused_while_no_pass_is_known_and_only_then():
    progress = TrainerProgress("clicks")
    progress.idle(False)
    assert progress.status().state == "starting"
    progress.idle(True)
    assert progress.status().state == "paused"
    progress.idle(False)
    assert progress.status().state == "training"


def test_a_job_that_goes_on_and_finds_no_events_is_not_starting_and_tells_since_when():
    progress = TrainerProgress("clicks")
    progress.version = 7
    assert progress.status().idle_s is None
    progress.idle(False)
    status = progress.status()
    assert status.state == "training" and 0 <= status.idle_s < 60
    assert "no events" not in progress_line(status)
    assert "no events for 75 s" in progress_line(replace(status, idle_s=75.2))
    progress.opened(PassPlan(8, ((), ())), "training")
    assert progress.status().idle_s is None


def test_the_file_is_the_one_that_the_service_makes():
    from headrace.service.cluster import store

    assert store.PAUSED == PAUSED and store.PAUSED in store.MADE_BY_A_RUN
