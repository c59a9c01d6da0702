"""Where the time of the loop goes: every second is some part's, and one that takes most gets advice."""

import pytest

from trainer.time_spent import ADVICE, Part, TimeSpent, advice


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_every_second_is_counted_to_the_part_that_is_going_on():
    clock = Clock()
    spent = TimeSpent(clock)
    clock.now_s += 1
    with spent.part(Part.FORWARD):
        clock.now_s += 2
        with spent.part(Part.LOADER):
            clock.now_s += 4
        clock.now_s += 8
    clock.now_s += 16
    with pytest.raises(ValueError), spent.part(Part.CLOSE):
        clock.now_s += 32
        assert spent.seconds()["close"] == 32, "also while it goes on"
        raise ValueError
    told = {part: seconds for part, seconds in spent.seconds().items() if seconds}
    assert told == {"other": 17, "forward": 10, "loader": 4, "close": 32}
    assert set(spent.seconds()) == {part.value for part in Part}


def test_what_was_waited_for_the_pipe_is_taken_from_the_loader():
    clock = Clock()
    spent = TimeSpent(clock)
    with spent.part(Part.LOADER):
        clock.now_s += 3
    spent.move(Part.LOADER, Part.PIPE, 2)
    assert (spent.seconds()["loader"], spent.seconds()["pipe"]) == (1, 2)
    spent.move(Part.LOADER, Part.PIPE, 9)
    assert (spent.seconds()["loader"], spent.seconds()["pipe"]) == (0, 3)


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
def test_where_no_part_takes_most_or_little_was_done_nothing_is_said(seconds):
    assert advice(seconds) == ""
