"""The agreement of the ranks at a close."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.stream.source import Segment
from headrace.trainer.job_status import Status
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.closes import DayJumps, advanced, median_day, merge_tallies, merge_times, would_fill
from headrace.trainer.status.progress import PassReading, RankTally, TrainerProgress
from headrace.trainer.status.time_spent import LoopPart, TimeSpent


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 9), min_size=1))
def test_the_day_of_a_pass_is_the_lower_median_of_its_samples_days(days):
    written_out = sorted(day for day, count in days.items() for _ in range(count))
    assert median_day(days) == written_out[(len(written_out) - 1) // 2]


def test_days_are_counted_from_the_first_pass_and_never_go_back():
    plan = PassPlan(3, ((Segment("t/0", 0, 5, 9),),))
    assert advanced(plan, 0, None, 20_000, 7) == (0, 20_000)
    assert advanced(plan, 0, 20_000, 20_007, 7) == (7, 20_000)
    assert advanced(plan, 7, 20_000, 20_003, 7) == (7, 20_000), "late events"
    assert advanced(plan, 7, 20_000, None, 7) == (7, 20_000), "no event at all"
    assert advanced(plan, 0, None, None, 7) == (0, None)


def test_an_event_from_2099_stops_the_job_before_tables_age_by_it():
    plan = PassPlan(3, ((Segment("t/0", 0, 5, 9),), (Segment("t/1", 1, 0, 4),)))
    with pytest.raises(DayJumps) as caught:
        advanced(plan, 2, 20_000, 47_117, 7)
    said = str(caught.value)
    assert caught.value.exit_code == 1, "a restart would end alike"
    for words in (
        "pass 3", "of 2099-01-01", "27115 days after", "passes.max_day_jump is 7", "t/0 5-9, t/1 0-4", "headrace skip",
        "passes.max_day_jump=27115",
    ):  # fmt: skip
        assert words in said
    assert advanced(plan, 2, 20_000, 47_117, 27_115) == (27_117, 20_000)
    with pytest.raises(DayJumps, match="day 99999999 of the epoch"):
        advanced(plan, 2, 20_000, 99_999_999, 7)


def test_a_day_that_rows_cannot_store_stops_the_job():
    plan = PassPlan(3, ((Segment("t/0", 0, 5, 9),),))
    day, first = advanced(plan, 0, 20_000, 52_000, 32_000)
    assert advanced(plan, day, first, 52_767, 32_000) == (32_767, 20_000), "the last one"
    for found, days in ((52_768, 768), (84_000, 32_000)):
        with pytest.raises(DayJumps) as caught:
            advanced(plan, day, first, found, 32_000)
        said = str(caught.value)
        assert (
            f"{days} days after" in said
            and f"day {found - first:,} of the job, and rows store days up to 32,767" in said
        )
        assert "`headrace skip`" in said and "start a new job" in said and "max_day_jump" not in said


def test_event_times_of_ranks_become_one_range():
    assert merge_times([None, [3.0, 9.0], None, [1.0, 4.0]]) == (1.0, 9.0)
    assert merge_times([None, None]) is None


def test_without_event_time_there_is_no_day():
    assert median_day({}) is None


def test_tallies_of_ranks_become_one():
    one = {
        "num_events": 3,
        "num_samples": 9,
        "num_judged": 3,
        "num_clicks": 1,
        "rejected": {"not UTF-8": 1},
        "days": {7: 2},
    }
    two = {
        "num_events": 4,
        "num_samples": 0,
        "num_judged": 6,
        "num_clicks": 2,
        "rejected": {"not UTF-8": 2, "too long": 1},
        "days": {9: 5},
    }
    first = {"not UTF-8": "t/0 at 3"}, {"not UTF-8": "t/1 at 0", "too long": "t/1 at 2"}
    reading = merge_tallies(
        [RankTally(**one, first_of=first[0]), RankTally(**two, left_out={"before since": 4}, first_of=first[1])]
    )
    assert reading.first_of == {"not UTF-8": "t/0 at 3", "too long": "t/1 at 2"}
    assert reading.left_out == {"before since": 4}
    assert (reading.num_events, reading.num_samples, reading.num_judged, reading.day) == (7, 9, 9, 9)
    assert reading.rejected == {"not UTF-8": 3, "too long": 1} and reading.num_clicks == 3


def test_the_share_of_clicks_without_an_impression_is_that_of_recent_ones_and_is_in_commits():
    progress = TrainerProgress("job")
    plan, status = PassPlan(1, ()), lambda: progress.status().clicks_unmatched

    def closed(num_clicks, unmatched):
        left_out = {"click without an impression": unmatched}
        progress.closed(plan, PassReading(9, 9, 9, {}, None, left_out, num_clicks), Status())

    closed(900, 900)
    assert status() is None, "of so few nothing is said"
    closed(900, 0)
    assert status() == 0.5
    closed(98_200, 0)
    after = TrainerProgress("job")
    after.load_saved(progress.saved())
    assert status() == after.status().clicks_unmatched == 900 / 100_000
    closed(50_000, 20_000)
    assert status() == (900 + 20_000) // 2 / 75_000


def test_progress_tells_closed_passes_and_plans_apart():
    progress = TrainerProgress("job")
    plan = PassPlan(1, ((Segment("t/0", 0, 0, 5),), (Segment("t/0", 0, 5, 9),)))
    progress.planned(plan)
    progress.opened(plan, "training")
    assert progress.status().positions == {} and progress.planned_positions == {"t/0": 9}
    progress.closed(plan, PassReading(9, 20, 10, {"bad": 1}, None), Status(lag={"t/0": 3}))
    status = progress.status()
    assert status.version == 1 and status.events == 9 and status.samples == 20
    assert status.positions == {"t/0": 9} and status.lag == {"t/0": 3} and status.rejected == {"bad": 1}
    assert status.samples_per_s > 0


def test_progress_tells_which_share_of_the_recent_work_was_a_wait_for_samples():
    progress, clock = TrainerProgress("job"), [100.0]
    progress.spent = TimeSpent(lambda: clock[0])
    plan = PassPlan(1, ((Segment("t/0", 0, 0, 5),),))
    assert progress.status().pipe_wait is None, "no pass is closed"
    for part, seconds in ((LoopPart.PIPE, 6.0), (LoopPart.FORWARD, 9.0), (LoopPart.EVENTS, 70.0)):
        with progress.spent.part(part):
            clock[0] += seconds
    progress.closed(plan, PassReading(5, 5, 5, {}, None), Status())
    status = progress.status()
    assert status.pipe_wait == 0.4
    assert status.advice.startswith("60% of the work's time went to forward")


def test_progress_continues_from_a_commit():
    progress, again = TrainerProgress("job"), TrainerProgress("job")
    first, second = (PassPlan(n, ((Segment("t/0", 0, 9 * (n - 1), 9 * n),),)) for n in (1, 2))
    for plan in (first, second):  # the second is planned and not closed when the commit is made
        progress.planned(plan)
    progress.closed(first, PassReading(9, 20, 10, {"bad": 1}, None), Status())
    again.load_saved(progress.saved())
    assert (again.version, again.num_events, again.num_samples, again.rejected) == (1, 9, 20, {"bad": 1})
    assert again.last_planned == 1 and again.planned_positions == {"t/0": 9} and again.num_planned == 9


def test_a_commit_is_asked_for_before_a_pass_like_the_last_fills_the_memory():
    assert not would_fill(dirty=49, dirty_before=0, max_dirty=100) and would_fill(
        dirty=51, dirty_before=50, max_dirty=100
    )
    assert not would_fill(dirty=40, dirty_before=20, max_dirty=100) and would_fill(
        dirty=48, dirty_before=90, max_dirty=90
    )
    assert would_fill(dirty=34, dirty_before=0, max_dirty=67) and not would_fill(dirty=33, dirty_before=0, max_dirty=67)
