"""How far an event's time may move the clock of a join: as a twin that reads one event after another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.protocol.join_clock import MOVED, JoinClock, TimeSpans, clock_reference

AHEAD_S = 10.0
TIMES = st.lists(st.one_of(st.integers(0, 60), st.sampled_from([1e9, 2e9])).map(float), max_size=130)


def spans_of(parts):
    spans = [TimeSpans.of_times(np.array(part, np.float64), AHEAD_S) for part in parts]
    return TimeSpans.merged(spans, AHEAD_S)


@given(st.lists(st.lists(TIMES, min_size=1, max_size=3), max_size=5))
def test_the_clock_is_that_of_a_twin_and_the_bound_cuts_the_same_events(passes):
    """Each pass has the times of one, two or three ranks."""
    clock = law = JoinClock()
    for parts in passes:
        times = [at_s for part in parts for at_s in part]
        clock = clock.after(spans_of(parts), AHEAD_S)
        law, ahead = clock_reference(law, times, AHEAD_S)
        assert clock == law
        assert ahead == [clock.newest_s is not None and at_s > clock.newest_s + AHEAD_S for at_s in times]


def clock_after(*passes):
    clock = JoinClock()
    for times in passes:
        clock = clock.after(spans_of([times]), AHEAD_S)
    return clock


def test_a_wrong_event_moves_nothing_even_where_it_is_alone_in_its_pass():
    assert clock_after([0.0, 5.0, 2e9], [2e9], [7.0, 15.0], [2e9, 20.0]) == JoinClock(20.0)
    assert clock_after([0.0], *[[2e9], [1.0]] * 500) == JoinClock(1.0)


def test_the_clock_goes_along_events_without_a_gap_in_any_order_of_the_log():
    assert clock_after([0.0], [39.0, 10.0, 20.0, 50.0, 29.5]) == JoinClock(39.0)


def test_a_stream_that_really_moved_is_believed_in_one_large_pass_or_after_small_ones():
    later = [1000.0] * (MOVED - 1)
    assert clock_after([0.0], [*later, 1005.0]) == JoinClock(1005.0)
    assert clock_after([0.0], later) == JoinClock(0.0, MOVED - 1)
    assert clock_after([0.0], later, [1000.0]) == JoinClock(1000.0)
    assert clock_after([0.0], later, [3.0], [1000.0]) == JoinClock(3.0, MOVED - 1), "events near it vote against"


def test_a_clock_that_began_wrong_comes_back_and_a_source_that_lags_moves_nothing():
    assert clock_after([2e9], [5.0] * 60, [8.0] * 39) == JoinClock(2e9, 0, 99)
    assert clock_after([2e9], [5.0] * 60, [8.0] * 40) == JoinClock(8.0)
    assert clock_after([100.0], *[[5.0] * 60, [100.0]] * 4) == JoinClock(100.0)
