"""Time of the loop by part: every second counts to one part, and the part that takes most of it gets advice."""

import pytest

from headrace.trainer.status.time_spent import (
    ADVICE,
    PARTS,
    LoopPart,
    StepClock,
    TimeSpent,
    WaitsFor,
    advice,
    pipe_wait,
)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_every_second_is_counted_to_the_current_part():
    clock = Clock()
    spent = TimeSpent(clock)
    clock.now_s += 1
    with spent.part(LoopPart.FORWARD):
        clock.now_s += 2
        with spent.part(LoopPart.LOADER):
            clock.now_s += 4
        clock.now_s += 8
    clock.now_s += 16
    with pytest.raises(ValueError), spent.part(LoopPart.CLOSE):
        clock.now_s += 32
        assert spent.seconds()["close"] == 32, "also while it goes on"
        raise ValueError
    told = {part: seconds for part, seconds in spent.seconds().items() if seconds}
    assert told == {"other": 17, "forward": 10, "loader": 4, "close": 32}
    assert set(spent.seconds()) == {part.value for part in LoopPart}


def test_waiting_for_the_pipe_does_not_count_to_the_loader():
    clock, starved_s = Clock(), [0.0]
    spent = TimeSpent(clock)

    def batches():
        for waited_s, of_it_starved_s in ((3, 2), (4, 0), (1, 9)):
            clock.now_s += waited_s
            starved_s[0] += of_it_starved_s
            yield waited_s

    for _ in spent.loaded(batches(), lambda: starved_s[0]):
        clock.now_s += 10
    told = {part: seconds for part, seconds in spent.seconds().items() if seconds}
    assert told == {"pipe": 3, "loader": 5, "other": 30}, "never more than was waited"


def test_what_a_step_waits_for_is_its_part_unless_another_one_is_within():
    clock = Clock()
    spent = TimeSpent(clock)
    step = StepClock(30.0, clock)
    step.goes_on = spent.goes_on
    step.begin(WaitsFor.TRAINERS)
    clock.now_s += 1
    step.at(WaitsFor.MODEL)
    clock.now_s += 2
    with spent.part(LoopPart.BACKWARD):
        clock.now_s += 4
    clock.now_s += 8
    step.at(WaitsFor.SHARDS)
    clock.now_s += 16
    step.end()
    clock.now_s += 32
    told = {part: seconds for part, seconds in spent.seconds().items() if seconds}
    assert told == {"exchange": 17, "forward": 10, "backward": 4, "other": 32}
    assert set(PARTS) == set(WaitsFor)


def test_the_part_that_takes_most_gets_one_sentence_of_advice():
    told = advice({"pipe": 60.0, "forward": 30.0, "close": 10.0, "other": 500.0, "events": 900.0})
    assert told.startswith("60% of the work's time went to pipe: raise pipe.processes")
    for part in ADVICE:
        assert advice({part.value: 20.0}).startswith(f"100% of the work's time went to {part.value}: ")


@pytest.mark.parametrize(
    "seconds",
    [
        {},
        {"pipe": 5.0},
        {"pipe": 40.0, "forward": 30.0, "close": 30.0},
        {"events": 5000.0},
        {"other": 5000.0, "pipe": 3.0},
    ],
)
def test_there_is_no_advice_if_no_part_takes_most_or_little_was_done(seconds):
    assert advice(seconds) == ""


def test_a_job_that_waits_for_its_pipe_is_told_so_even_if_that_is_not_the_most():
    seconds = {"pipe": 4.0, "forward": 4.0, "close": 4.0}
    told = advice(seconds, 0.345)
    assert told.startswith("in recent passes, training waited 34% of the time for samples from the source and the pipe")
    assert "raise pipe.processes" in told and "generate_columns" in told
    assert advice(seconds, 0.19) == advice(seconds, None) == advice({"forward": 5.0}, 0.9) == ""
    assert advice({"pipe": 60.0, "forward": 30.0}, 0.6).startswith("67% of the work's time went to pipe")


def test_the_wait_for_the_pipe_is_a_share_of_the_work_between_two_moments():
    before = {"pipe": 10.0, "forward": 100.0, "events": 50.0, "other": 9.0}
    assert pipe_wait(before, {"pipe": 11.0, "forward": 103.0, "events": 950.0, "other": 99.0}) == 0.25
    assert pipe_wait(before, before | {"events": 60.0}) is None, "there was no work"
    assert pipe_wait({}, {"pipe": 3.0}) == 1.0
