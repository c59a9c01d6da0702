"""Daily shrinks: steady ageing always acts; small tables at the close, large ones once they are counted."""

import json

import pytest
from msgspec.structs import replace

from headrace.codec import plain
from headrace.dataset.spec.config import SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.errors import NotYet, SpecError
from headrace.pserver.config import SlotLife, TableSection
from headrace.pserver.protocol.table_operations import ShrinkRows, ShrinkSurvey
from headrace.pserver.protocol.table_stats import TableStats
from headrace.trainer.journal.records import DayTickOperation, HoldOperation, SetOperation, ShrinkOperation
from headrace.trainer.rank0.operations import ClosingPass
from headrace.trainer.rank0.shrink_guard import rule_of
from headrace.trainer.rank0.shrinks import SMALL_ROWS, Shrinks, ShrinkTooLarge

SCHEMA = Schema.of([SparseSlot(name="user"), SparseSlot(name="item"), SparseSlot(name="seen", share="item")])
RULED = TableSection(delete_below=1.0, delete_after_days=9)
DAILY = ShrinkOperation(
    id=None, table="default", delete_below=None, delete_after_days=None, at_once=True, rule=rule_of(RULED)
)
ALLOWED = {"op": "shrink", "id": "x", "table": "default", "allow": True}


class Shards:
    """Has a scripted count; a survey in the background is ready once `counted`."""

    def __init__(self):
        self.survey_is, self.counted, self.asked = ShrinkSurvey(100, {0: 5}, {1: 6}), True, []

    def call(self, command, deadline):
        self.asked.append(command.shrink)
        return self.survey_is if self.counted or command.shrink.at_once else None


class World:
    def __init__(self, *, learn=True, imported=False):
        """`imported`: the tables have rows before the first close."""
        self.tables, self.imported = {"default": RULED, "bare": TableSection()}, imported
        self.shards, self.version, self.rows, self.sweeping = Shards(), 0, 100, False
        self.shrinking = Shrinks(lambda: self.tables, SCHEMA, self.shards, learn=learn)

    def close(self, day, *, ordered=(), replayed=False, ended=False, days=None, signals=()):
        """A pass closes on this day; returns the due operations. In a replay `ordered` has those that act.

        `days`: those that its samples are of; unless given, all up to this one.
        """
        self.version += 1
        new = self.rows if self.version == 1 and not self.imported else 0
        stats = {name: TableStats(self.rows, 0, new, {}, sweeping=self.sweeping) for name in self.tables}
        close = ClosingPass(
            version=self.version, day=day, event_time_s=None, pass_times_s=None, wall_s=0.0, stats=stats,
            positions={}, metrics={}, num_samples=1, ended=ended, days=range(day + 1) if days is None else days,
            signals=signals,
        )  # fmt: skip
        self.shrinking.saw(close)
        due = [] if replayed else self.shrinking.due(close, ordered)
        for each in (*ordered, *due):
            self.shrinking.acted(self.version, each, replayed)
        return due


@pytest.fixture
def world():
    return World()


def test_a_small_table_shrinks_at_the_close_in_which_a_day_begins(world):
    assert world.close(0) == []
    assert world.close(1) == [DAILY]
    assert world.shards.asked == [ShrinkRows(table="default", at_once=True)]
    assert world.close(1) == [] and not world.shrinking.wants_pass(False)
    assert len(world.close(3)) == 1, "several days are one shrink"


def test_a_large_table_shrinks_at_the_first_close_after_it_is_counted(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    assert world.close(1) == [] == world.close(1) and world.shrinking.wants_pass(False)
    assert world.shrinking.status().counting == ["default"]
    world.shards.counted = True
    assert world.close(1) == [replace(DAILY, at_once=False)]
    assert not world.shrinking.wants_pass(False)


def test_without_learning_no_table_shrinks_and_due_shrinks_wait(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(1)
    frozen = World(learn=False)
    frozen.shrinking.load_state(world.shrinking.state())
    assert frozen.close(1) == [] == frozen.close(1) and not frozen.shrinking.wants_pass(False)
    with pytest.raises(SpecError, match="train.learn: is false"):
        frozen.shrinking.asked({"op": "shrink", "id": "s", "table": "default", "allow": True})
    again = World()
    again.shrinking.load_state(frozen.shrinking.state())
    assert again.shrinking.wants_pass(False) and again.close(1) == [DAILY]


def test_at_the_end_of_a_stream_nothing_is_waited_for(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(1)
    assert world.shrinking.wants_pass(True)
    assert world.close(1, ended=True) == [DAILY]


def test_rows_of_the_shrink_before_are_not_counted_again(world):
    world.rows, world.sweeping = SMALL_ROWS, True
    assert world.close(1) == [] and world.shards.asked == [] and world.shrinking.wants_pass(False)
    world.sweeping = False
    assert world.close(1) == [replace(DAILY, at_once=False)]


def test_a_shrink_without_rows_is_not_logged(world):
    world.shards.survey_is = ShrinkSurvey(100, {}, {})
    assert world.close(1) == [] and not world.shrinking.wants_pass(False)


# -- holds


def held(world):
    found = world.shrinking.status().held.get("default")
    return None if found is None else plain(found)


def test_steady_ageing_is_never_held_however_many_rows_go(world):
    for day in range(1, 6):
        world.shards.survey_is = ShrinkSurvey(100, {0: 30 * (day % 3)}, {1: 31})
        assert world.close(day) == [DAILY] and held(world) is None


def test_a_shrink_by_a_changed_rule_waits_and_is_counted_again_each_day(world):
    world.close(1)
    world.tables["default"] = TableSection(delete_below=1.0, delete_after_days=3)
    world.shards.survey_is = ShrinkSurvey(100, {0: 21}, {})
    [hold] = world.close(2)
    why = "the table has not been shrunk by this rule before"
    assert hold == HoldOperation(table="default", rows=100, going=21, fraction=0.21, why=why)
    assert held(world)["since"] == 2 and held(world)["why"] == why and not world.shrinking.wants_pass(False)
    assert held(world)["command"] == "headrace shrink JOB.TOML --table default --allow"
    assert world.close(2) == []
    world.shards.survey_is = ShrinkSurvey(100, {0: 40}, {})
    [again] = world.close(3)
    assert again.op == "hold" and held(world)["going"] == 40 and held(world)["since"] == 2
    world.shards.survey_is = ShrinkSurvey(100, {0: 20}, {})
    assert [body.op for body in world.close(4)] == ["shrink"] and held(world) is None
    world.shards.survey_is = ShrinkSurvey(100, {0: 50}, {})
    assert [body.op for body in world.close(5)] == ["shrink"], "by now it is the table's rule"


def test_a_changed_rule_that_takes_nothing_is_the_rule_from_then_on(world):
    world.close(1)
    world.tables["default"] = TableSection(delete_after_days=30)
    world.shards.survey_is = ShrinkSurvey(100, {}, {})
    assert [body.op for body in world.close(2)] == ["shrink"] and world.close(3) == []
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    assert [body.op for body in world.close(4)] == ["shrink"]


def test_a_restored_rule_is_the_old_rule(world):
    world.close(1)
    world.tables["default"] = TableSection(delete_after_days=1)
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    assert world.close(2)[0].op == "hold"
    world.tables["default"] = RULED
    assert world.close(3)[0].op == "shrink" and held(world) is None


def test_a_table_without_a_rule_any_more_holds_nothing(world):
    world.close(1)
    world.tables["default"] = TableSection(delete_after_days=1)
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    assert world.close(2)[0].op == "hold"
    world.tables["default"] = TableSection()
    assert world.close(3) == [] and held(world) is None


def test_imported_rows_wait_for_permission():
    world = World(imported=True)
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    assert world.close(1)[0].op == "hold"
    allowed = world.shrinking.asked(ALLOWED)
    assert world.close(1, ordered=[allowed]) == [] and held(world) is None
    assert world.close(2)[0].op == "shrink"


def test_rows_are_counted_after_a_set_under_its_values(world):
    setting = SetOperation(id="s", keys={"tables.default.delete_after_days": 1})
    assert world.close(1, ordered=[setting]) == [] and world.shards.asked == [] and world.shrinking.wants_pass(True)
    world.tables["default"] = TableSection(delete_after_days=1)
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    assert world.close(1)[0].op == "hold"


def test_a_day_that_jumped_waits_until_the_next_one(world):
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    world.close(1)
    [hold] = world.close(5, days=[5])
    assert hold.why == "the day jumped from 1 to 5, and 3 days between had no samples"
    assert world.close(6, days=[6])[0].op == "shrink" and held(world) is None


def test_days_that_a_pass_has_samples_of_are_no_jump(world):
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    world.close(1)
    assert world.close(4, days=[2, 3, 4])[0].op == "shrink"


def test_days_that_an_earlier_pass_had_samples_of_are_no_jump(world):
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    world.close(1, days=[1, 2])
    again = World()
    again.shrinking.load_state(json.loads(json.dumps(world.shrinking.state())))
    for each in (world, again):  # the days ahead are in the commit
        each.shards.survey_is, each.version = world.shards.survey_is, 2
        assert each.close(3, days=[3, 4])[0].op == "shrink"


def test_a_stream_with_as_many_days_missing_each_time_is_steady(world):
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    ops = [body.op for day in (3, 6, 9, 12) for body in world.close(day, days=[day])]
    assert ops == ["hold", "shrink", "shrink", "shrink"]


ALL = ("click.default", "slot.item", "slot.seen", "slot.user")
USER, ITEM = (SCHEMA.by_name[name].group for name in ("user", "item"))


def test_rows_of_a_slot_whose_values_stopped_wait_until_they_come_again(world):
    world.close(1, signals=ALL)
    rest = [name for name in ALL if name != "slot.user"]
    world.shards.survey_is = ShrinkSurvey(100, {}, {USER: 60})
    assert world.close(2, signals=rest)[0].op == "shrink", "it came on the day that ended"
    [hold] = world.close(3, signals=rest)
    assert hold.why == "statistics broke: slot user had no value since day 1"
    assert world.close(4, signals=ALL)[0].op == "shrink"


def test_a_slot_without_values_that_has_few_rows_holds_nothing(world):
    rest = [name for name in ALL if name != "slot.user"]
    world.close(1, signals=ALL)
    world.shards.survey_is = ShrinkSurvey(100, {}, {USER: 20, ITEM: 40})
    assert [world.close(day, signals=rest)[0].op for day in (2, 3, 4)] == ["shrink"] * 3


def test_slots_that_share_rows_are_broken_where_all_are(world):
    world.close(1, signals=ALL)
    world.shards.survey_is = ShrinkSurvey(100, {}, {ITEM: 60})
    one, both = ("slot.user", "slot.item", "click.default"), ("slot.user", "click.default")
    assert [world.close(day, signals=one)[0].op for day in (2, 3)] == ["shrink"] * 2
    assert [world.close(day, signals=both)[0].op for day in (4, 5)] == ["shrink", "hold"]


def test_rows_that_go_for_their_score_wait_while_no_clicks_come(world):
    world.close(1, signals=ALL)
    rest = [name for name in ALL if name != "click.default"]
    world.shards.survey_is = ShrinkSurvey(100, {}, {ITEM: 60})
    assert [world.close(day, signals=rest)[0].op for day in (2, 3)] == ["shrink"] * 2, "not for their score"
    world.shards.survey_is = ShrinkSurvey(100, {ITEM: 30}, {ITEM: 30})
    assert world.close(4, signals=rest)[0].why == "statistics broke: table default had no click since day 1"


def test_a_broken_signal_that_an_operator_accepts_is_no_longer_watched(world):
    rest = [name for name in ALL if name != "slot.user"]
    world.close(1, signals=ALL)
    world.close(2, signals=rest)
    world.shards.survey_is = ShrinkSurvey(100, {}, {USER: 60})
    assert world.close(3, signals=rest)[0].op == "hold"
    world.close(3, signals=rest, ordered=[world.shrinking.asked(ALLOWED)])
    assert held(world) is None and world.close(4, signals=rest)[0].op == "shrink"
    world.close(5, signals=ALL)
    assert [world.close(day, signals=rest)[0].op for day in (6, 7)] == ["shrink", "hold"], "it came again, and went"


def test_a_shrink_that_an_operator_allows_no_longer_waits():
    world = World(imported=True)
    world.shards.survey_is = ShrinkSurvey(100, {0: 90}, {})
    world.close(1)
    body = world.shrinking.asked(ALLOWED)
    assert body == replace(DAILY, id="x")
    assert world.close(1, ordered=[body]) == [] and held(world) is None


def test_a_replay_comes_to_the_same_state_as_the_run_that_logged(world):
    """With a day that jumped, a changed rule, a slot that stopped; with holds and shrinks in the log."""
    rest, again = [name for name in ALL if name != "slot.user"], World()
    passes = [(0, [0], ALL), (1, [1], ALL), (5, [5], ALL), (6, [6], rest), (7, [7], rest), (8, [8], rest)]
    for number, (day, days, signals) in enumerate(passes):
        for each in (world, again):
            each.shards.survey_is = ShrinkSurvey(100, {}, {USER: 30 + number})
            if number == 4:
                each.tables["default"] = TableSection(delete_after_days=2)
        logged = world.close(day, days=days, signals=signals)
        again.close(day, days=days, signals=signals, ordered=logged, replayed=True)
        assert again.shrinking.state() == world.shrinking.state(), day
    assert held(world) is not None


def test_the_state_of_an_older_release_is_loaded(world):
    old = {"day": 3, "wanted": {}, "held": {"default": {"rows": 9, "going": 5, "fraction": 0.5, "since": 2}}}
    world = World(imported=True)
    world.shrinking.load_state(old)
    world.shards.survey_is = ShrinkSurvey(100, {}, {0: 60})
    assert world.close(4)[0].op == "hold" and held(world)["since"] == 2


def test_a_shrink_logged_before_a_crash_is_not_logged_twice(world):
    assert world.close(1, ordered=[DAILY]) == []
    assert world.close(1) == []


def test_a_shrink_that_was_not_logged_is_still_due_after_a_replay(world):
    world.close(1, replayed=True)
    assert len(world.close(1)) == 1
    world.close(2, replayed=True, ordered=[DAILY])
    assert world.close(2) == []


def test_a_day_that_an_operation_begins_is_a_day(world):
    world.close(0, ordered=[DayTickOperation(id="x", to=1)])
    assert world.shrinking.wants_pass(False) and len(world.close(1)) == 1


def test_tables_without_a_rule_or_that_shrink_when_asked_do_not_shrink_daily(world):
    world.tables = {
        "bare": TableSection(),
        "asked": TableSection(delete_below=1.0, shrink="asked"),
        "by_slot": TableSection(slots={"user": SlotLife(delete_after_days=0)}),
    }
    assert [body.table for body in world.close(1)] == ["by_slot"]


def test_a_commit_has_due_and_held_shrinks():
    world = World(imported=True)
    world.shards.survey_is = ShrinkSurvey(100, {0: 90}, {})
    world.close(1, signals=ALL)
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(2)
    again = World()
    again.shrinking.load_state(json.loads(json.dumps(world.shrinking.state())))
    assert again.shrinking.state() == world.shrinking.state() and again.shrinking.wants_pass(False)
    assert World().shrinking.load_state({}) is None


# -- requests


def test_a_shrink_with_a_rule_of_its_own_leaves_the_daily_one_to_come(world):
    world.rows, world.shards.counted = SMALL_ROWS, False
    world.close(1)
    own = {"op": "shrink", "id": "x", "table": "default", "delete_below": 3, "allow": True}
    body = world.shrinking.asked(own)
    assert body == replace(DAILY, id="x", delete_below=3.0, at_once=False, rule=None)
    world.close(1, ordered=[body])
    assert world.shrinking.wants_pass(False)


def test_asking_for_too_many_rows_is_refused_with_what_to_do(world):
    world.shards.survey_is = ShrinkSurvey(1000, {0: 300}, {})
    with pytest.raises(
        ShrinkTooLarge, match=r"300 of 1,000 rows, 30\.0% and more than max_shrink_fraction = 0\.2.*--allow"
    ):
        world.shrinking.asked({"op": "shrink", "id": "x", "table": "default"})


def test_asking_while_rows_are_counted_must_be_repeated(world):
    world.shards.counted = False
    with pytest.raises(NotYet, match="being counted"):
        world.shrinking.asked({"op": "shrink", "id": "x", "table": "default"})


def test_a_dry_run_counts_rows_by_slot_and_reason(world):
    told = world.shrinking.dry_run({"table": "default"})
    assert told == {
        "table": "default", "rows": 100, "going": 11, "fraction": 0.11, "max_fraction": 0.2,
        "below": {"user": 5}, "unseen": {"item": 6},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"table": "defualt"}, "there is no table 'defualt'; did you mean 'default'?"),
        ({"table": "bare"}, "table 'bare' has no rule to remove rows"),
        ({"table": "bare", "delete_below": -1}, "delete_below is -1: a score is a finite number from 0"),
        ({"table": "bare", "delete_below": float("nan")}, "delete_below is nan"),
        ({"table": "bare", "delete_below": float("inf")}, "delete_below is inf: a score is a finite number from 0"),
        ({"table": "bare", "delete_below": 10**400}, "delete_below is 1"),
        (
            {"table": "bare", "delete_below": 1e39},
            "delete_below is 1e+39: a score is a finite number from 0 to 3.4",
        ),
        ({"table": "bare", "delete_after_days": 1.5}, "delete_after_days is 1.5: days are from 0 to 1,000,000"),
        (
            {"table": "bare", "delete_after_days": 1_000_001},
            "delete_after_days is 1000001: days are from 0 to 1,000,000",
        ),
    ],
)
def test_an_invalid_request_is_refused(world, wrong, why):
    with pytest.raises(SpecError) as caught:
        world.shrinking.asked({"op": "shrink", "id": "x", "allow": True, **wrong})
    assert str(caught.value).startswith(why)


def test_other_requests_are_not_its_own(world):
    assert world.shrinking.asked({"op": "forget"}) is None
