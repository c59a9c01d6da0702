"""The shares of trainers in a pass, by their speed: equal at first, bounded, and steady."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.rank0.rank_speeds import MOST, RankSpeeds


def test_shares_are_equal_until_the_speed_of_every_trainer_is_known():
    speeds = RankSpeeds(2)
    speeds.trained([100, 0], [1.0, 0.1])
    assert speeds.shares == ()
    speeds.trained([100, 50], [1.0, 1.0])
    assert speeds.shares == pytest.approx((2 / 3, 1 / 3))


def test_trainers_that_keep_their_speed_end_together():
    speeds, per_s = RankSpeeds(3), (1000.0, 500.0, 100.0)
    counts = [400, 400, 400]
    for _ in range(3):
        speeds.trained(counts, [count / speed for count, speed in zip(counts, per_s, strict=True)])
        counts = [round(1200 * share) for share in speeds.shares]
    took_s = [count / speed for count, speed in zip(counts, per_s, strict=True)]
    assert max(took_s) == pytest.approx(min(took_s), rel=0.02)


def test_a_trainer_that_was_slow_once_keeps_a_quarter_of_its_speed():
    speeds = RankSpeeds(2)
    speeds.trained([100, 100], [1.0, 1.0])
    speeds.trained([100, 100], [1.0, 1e9])
    assert speeds.shares == pytest.approx((4 / 5, 1 / 5))


@given(st.lists(st.tuples(st.integers(0, 10_000), st.just(0.0) | st.floats(1e-9, 1e6)), min_size=1, max_size=6))
def test_shares_are_positive_and_bounded_whatever_is_measured(found):
    speeds = RankSpeeds(len(found))
    speeds.trained([count for count, _ in found], [seconds for _, seconds in found])
    if speeds.shares:
        assert sum(speeds.shares) == pytest.approx(1.0)
        assert max(speeds.shares) <= MOST * min(speeds.shares) * (1 + 1e-9)
    else:
        assert any(not count or not seconds for count, seconds in found)
