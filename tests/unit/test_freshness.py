"""Delays of events until they are learnt and served: summaries that are nearly exact."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.simulated import SimulatedSource
from headrace.trainer.status.freshness import (
    BOUNDS_S,
    MAX_GROUPS,
    MAX_KEPT,
    DelayHistogram,
    EventTimes,
    EventTimesCollector,
    Freshness,
    is_replay,
)


def noted(*batches):
    note = EventTimesCollector()
    for batch in batches:
        note.add(np.array(batch, float))
    return note.take()


@given(st.lists(st.lists(st.integers(0, 10_000), max_size=80), max_size=20))
def test_every_sample_is_counted_and_none_appears_younger(batches):
    told, times_s = noted(*batches), sorted(time_s for batch in batches for time_s in batch)
    assert len(told.count_G) <= MAX_GROUPS and told.count_G.sum() == len(times_s)
    for oldest_s, group_s in zip(
        told.oldest_s_G, np.split(times_s, np.cumsum(told.count_G)[:-1]), strict=bool(times_s)
    ):
        assert oldest_s == min(group_s)


def test_one_event_of_another_age_is_one_event():
    told = noted([*np.linspace(1e9, 1e9 + 1, 1999), 0.0])
    assert told.count_G[told.oldest_s_G == 0].sum() <= 2000 / MAX_GROUPS and told.oldest_s_G[1] >= 1e9


def test_very_many_samples_are_represented_by_some():
    times_s, note = np.arange(10.0 * MAX_KEPT), EventTimesCollector()
    for batch in np.array_split(times_s, 999):
        note.add(batch)
    told = note.take()
    assert told.count_G.sum() == len(times_s)
    at = np.cumsum(told.count_G) - told.count_G  # where a group begins among all, sorted
    assert np.abs(told.oldest_s_G - at).max() <= len(times_s) / MAX_GROUPS
    assert note.take().count_G.sum() == 0


def test_times_of_ranks_and_passes_are_joined_and_survive_a_message():
    parts = [noted(np.arange(300.0)), noted([]), noted([1000.5])]
    joined = EventTimes.joined([EventTimes.of_message(part.message()) for part in parts])
    assert joined.count_G.sum() == 301 and joined.oldest_s_G[-1] == 1000.5 and len(joined.count_G) <= MAX_GROUPS


def test_a_histogram_counts_up_to_its_bounds_inclusive():
    delays = DelayHistogram()
    delays.add(EventTimes(np.array([0.0, 9.5, 9.9, 20.0]), np.array([1, 2, 3, 4])), 10.0)
    upto = dict(delays.totals().buckets)
    assert (upto["0.1"], upto["0.4"], upto["0.5"], upto["10"], upto["+Inf"]) == (7, 7, 9, 10, 10)
    assert len(upto) == len(BOUNDS_S) + 1 and np.isclose(delays.totals().sum_s, 10 + 2 * 0.5 + 3 * 0.1)


def test_a_pass_learnt_again_after_a_restart_is_not_counted_again():
    freshness, message = Freshness(), noted([1.0, 2.0]).message()
    for version, is_new in ((4, False), (5, True)):
        freshness.read(version, [message, message], counts=is_new)
        told = freshness.closed(3.0)
        assert told == freshness.closed(9.0)  # a pass of no events follows
    assert dict(told.buckets)["+Inf"] == 4
    assert freshness.of(5) == noted([1.0, 1.0, 2.0, 2.0]).message() and freshness.of(4) is None


def test_the_age_of_events_of_a_replay_is_not_reported():
    freshness = Freshness(live_from_s=100.0)
    freshness.read(1, [noted([1.0, 99.0]).message()], counts=True)
    assert freshness.closed(101.0) is None and freshness.age_s(99.0, 101.0) is None
    freshness.read(2, [noted([98.0, 100.5]).message()], counts=True)
    assert dict(freshness.closed(101.0).buckets)["+Inf"] == 2 and freshness.age_s(100.5, 101.0) == 0.5
    assert freshness.of(1) is None and freshness.of(2) is not None, "replicas hear of event times all the same"
    assert Freshness().age_s(1.0, 101.0) == 100.0, "a stream without an end that is behind is told"


def test_a_stream_that_ends_and_one_of_made_up_times_are_replays():
    simulated = SimulatedSource(kind="simulated", rate=10.0)
    following = FilesSource(kind="files", paths=["a"], follow=True)
    assert is_replay([simulated], bounded=False) and is_replay([following], bounded=True)
    assert not is_replay([simulated, following], bounded=False)


def test_a_pass_without_event_times_has_no_delay():
    freshness = Freshness()
    freshness.read(1, [noted([]).message()], counts=True)
    assert freshness.closed(1.0) is None
