"""When tables shrink: each day, if not too many rows go; small ones at the close, large ones once they are counted."""

import pytest

from dataset.config import SparseSlot
from dataset.schema import Schema
from millrace.errors import NotYet, SpecError
from pserver.client import TableStats
from pserver.config import SlotLife, TableSection
from pserver.operations import Shrink, Survey
from trainer.operations import Closing
from trainer.shrinking import SMALL_ROWS, Shrinking, TooMany

SCHEMA = Schema.of([SparseSlot(name="user"), SparseSlot(name="item"), SparseSlot(name="seen", share="item")])
DAILY = {"op": "shrink", "id": None, "table": "default", "delete_below": None, "delete_after_days": None}


class Shards:
    """Counts as it is told to; a survey in the background is there once `counted`."""

    def __init__(self):
        self.survey_is, self.counted, self.asked = Survey(100, {0: 5}, {1: 6}), True, []

    def survey(self, shrink, deadline):
        self.asked.append(shrink)
        return self.survey_is if self.counted or shrink.at_once else None


class World:
    def __init__(self, *, learn=True):
        self.tables = {"default": TableSection(delete_below=1.0, delete_after_days=9), "bare": TableSection()}
        self.shards, self.version, self.rows, self.sweeping = Shards(), 0, 100, False
        self.shrinking = Shrinking(lambda: self.tables, SCHEMA, self.shards, learn=learn)

    def close(self, day, *, ordered=(), replayed=False, ended=False):
        """A pass closes on this day; what is to be logged. In a replay `ordered` is what acts."""
        self.version += 1
        stats = {name: TableStats(self.rows, 0, 0, {}, sweeping=self.sweeping) for name in self.tables}
        close = Closing(
            version=self.version, day=day, ticks=0, event_time_s=None, pass_times_s=None, wall_s=0.0, stats=stats,
            positions={}, metrics={}, num_samples=1, ended=ended,
        )  # fmt: skip
        self.shrinking.saw(close)
        due = [] if replayed else self.shrinking.due(close, ordered)
        for body in (*ordered, *due):
            self.shrinking.acted(self.version, body, replayed)
        return due


@pytest.fixture
def world():
    return World()


def test_a_small_table_shrinks_at_the_close_in_which_a_day_begins(world):
    assert world.close(0) == []
    assert world.close(1) == [{**DAILY, "at_once": True}]
    assert world.shards.asked == [Shrink(table="default", at_once=True)]
    assert world.close(1) == [] and not world.shrinking.wants_pass(False)
    assert len(world.close(3)) == 1, "several days are one shrink"


def test_a_large_table_shrinks_at_the_first_close_after_it_is_counted(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    assert world.close(1) == [] == world.close(1) and world.shrinking.wants_pass(False)
    assert world.shrinking.status()["counting"] == ["default"]
    world.shards.counted = True
    assert world.close(1) == [{**DAILY, "at_once": False}]
    assert not world.shrinking.wants_pass(False)


def test_while_nothing_is_learnt_no_table_shrinks_and_what_was_to_waits(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(1)
    frozen = World(learn=False)
    frozen.shrinking.load_state(world.shrinking.state())
    assert frozen.close(1) == [] == frozen.close(1) and not frozen.shrinking.wants_pass(False)
    with pytest.raises(SpecError, match="train.learn: is false"):
        frozen.shrinking.asked({"op": "shrink", "id": "s", "table": "default", "allow": True})
    again = World()
    again.shrinking.load_state(frozen.shrinking.state())
    assert again.shrinking.wants_pass(False) and again.close(1) == [{**DAILY, "at_once": True}]


def test_at_the_end_of_a_stream_nothing_is_waited_for(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(1)
    assert world.shrinking.wants_pass(True)
    assert world.close(1, ended=True) == [{**DAILY, "at_once": True}]


def test_rows_that_the_shrink_before_took_are_not_counted_once_more(world):
    world.rows, world.sweeping = SMALL_ROWS, True
    assert world.close(1) == [] and world.shards.asked == [] and world.shrinking.wants_pass(False)
    world.sweeping = False
    assert world.close(1) == [{**DAILY, "at_once": False}]


def test_where_no_row_would_go_nothing_is_logged(world):
    world.shards.survey_is = Survey(100, {}, {})
    assert world.close(1) == [] and not world.shrinking.wants_pass(False)


def test_too_many_rows_wait_for_an_operator_and_are_counted_again_the_next_day(world):
    world.shards.survey_is = Survey(100, {0: 21}, {})
    assert world.close(1) == [] and not world.shrinking.wants_pass(False)
    held = world.shrinking.status()["held"]["default"]
    assert (held["fraction"], held["going"], held["rows"], held["since"]) == (0.21, 21, 100, 1)
    assert "millrace shrink" in held["command"] and "--allow" in held["command"]
    assert world.close(1) == []
    world.shards.survey_is = Survey(100, {0: 20}, {})
    assert len(world.close(2)) == 1 and world.shrinking.status()["held"] == {}


def test_what_an_operator_lets_go_no_longer_waits(world):
    world.shards.survey_is = Survey(100, {0: 90}, {})
    world.close(1)
    body = world.shrinking.asked({"op": "shrink", "id": "x", "table": "default", "allow": True})
    assert body == {**DAILY, "id": "x", "at_once": True}
    assert world.close(1, ordered=[body]) == [] and world.shrinking.status()["held"] == {}


def test_a_shrink_logged_before_a_crash_is_not_logged_twice(world):
    assert world.close(1, ordered=[{**DAILY, "at_once": True}]) == []
    assert world.close(1) == []


def test_a_replay_leaves_wanted_what_was_not_logged_by_its_end(world):
    world.close(1, replayed=True)
    assert len(world.close(1)) == 1
    world.close(2, replayed=True, ordered=[{**DAILY, "at_once": True}])
    assert world.close(2) == []


def test_a_day_that_an_operation_begins_is_a_day(world):
    world.close(0, ordered=[{"op": "day_tick", "id": "x", "to": 1}])
    assert world.shrinking.wants_pass(False) and len(world.close(1)) == 1


def test_tables_without_a_rule_or_that_shrink_when_asked_do_not_shrink_daily(world):
    world.tables = {
        "bare": TableSection(),
        "asked": TableSection(delete_below=1.0, shrink="asked"),
        "by_slot": TableSection(slots={"user": SlotLife(delete_after_days=0)}),
    }
    assert [body["table"] for body in world.close(1)] == ["by_slot"]


def test_a_commit_holds_what_is_wanted_and_what_waits(world):
    world.shards.survey_is = Survey(100, {0: 90}, {})
    world.close(1)
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(2)
    again = World()
    again.shrinking.load_state(world.shrinking.state())
    assert again.shrinking.state() == world.shrinking.state() and again.shrinking.wants_pass(False)
    assert World().shrinking.load_state({}) is None


# -- asked for


def test_a_shrink_with_a_rule_of_its_own_leaves_the_daily_one_to_come(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(1)
    own = {"op": "shrink", "id": "x", "table": "default", "delete_below": 3, "allow": True}
    body = world.shrinking.asked(own)
    assert body == {**DAILY, "id": "x", "delete_below": 3.0, "at_once": False}
    world.close(1, ordered=[body])
    assert world.shrinking.wants_pass(False)


def test_asking_for_too_many_rows_is_refused_with_what_to_do(world):
    world.shards.survey_is = Survey(1000, {0: 300}, {})
    with pytest.raises(TooMany, match=r"300 of 1,000 rows, 30\.0% and more than max_shrink_fraction = 0\.2.*--allow"):
        world.shrinking.asked({"op": "shrink", "id": "x", "table": "default"})


def test_asking_while_rows_are_counted_must_be_repeated(world):
    world.shards.counted = False
    with pytest.raises(NotYet, match="being counted"):
        world.shrinking.asked({"op": "shrink", "id": "x", "table": "default"})


def test_a_dry_run_tells_by_slot_what_would_go_and_why(world):
    told = world.shrinking.dry_run({"table": "default"})
    assert told == {
        "table": "default", "rows": 100, "going": 11, "fraction": 0.11, "max_fraction": 0.2,
        "below": {"user": 5}, "unseen": {"item": 6},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"table": "defualt"}, "there is no table 'defualt'; did you mean 'default'?"),
        ({"table": "bare"}, "table 'bare' has no rule by which rows go"),
        ({"table": "bare", "delete_below": -1}, "delete_below is -1: a score is finite, and 0 or more"),
        ({"table": "bare", "delete_below": float("nan")}, "delete_below is nan"),
        ({"table": "bare", "delete_below": float("inf")}, "delete_below is inf: a score is finite, and 0 or more"),
        ({"table": "bare", "delete_below": 10**400}, "delete_below is 1"),
        (
            {"table": "bare", "delete_below": 1e39},
            "delete_below is 1e+39: a score is finite, and 0 or more; at most 3.4",
        ),
        ({"table": "bare", "delete_after_days": 1.5}, "delete_after_days is 1.5: days are from 0 to 1,000,000"),
        (
            {"table": "bare", "delete_after_days": 1_000_001},
            "delete_after_days is 1000001: days are from 0 to 1,000,000",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_told(world, wrong, why):
    with pytest.raises(SpecError) as caught:
        world.shrinking.asked({"op": "shrink", "id": "x", "allow": True, **wrong})
    assert str(caught.value).startswith(why)


def test_other_wishes_are_not_its_own(world):
    assert world.shrinking.asked({"op": "forget"}) is None
