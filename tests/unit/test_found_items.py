"""Recall as the job learns is that of its plain twin, for any ranks, and its state comes back."""

import math
from collections import Counter
from statistics import median_low

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.metrics import found_items
from headrace.trainer.metrics.found_items import NO_TIME, Clicks, MostClicked, RetrievalMeter, SampledEvents
from headrace.trainer.metrics.meter import LocalReduce

AT = (1, 3)


class Joined:
    """Rank 0 of several: `gather` has what the other ranks said before."""

    def __init__(self, others):
        self.others = others

    def gather(self, columns):
        return [dict(columns), *self.others]


class Silent(LocalReduce):
    """Another rank: it keeps what it says."""

    def gather(self, columns):
        self.said = dict(columns)


class Index:
    """Items 0 to 5; those nearest to the user's number are the best."""

    def best(self, user_EV, most):
        return [np.array(sorted(range(6), key=lambda i: (abs(i - u), i))[:most], np.uint64) for u in user_EV[:, 0]]

    def has(self, sign_U):
        return sign_U < 6


def clicks(events):
    """`events`: by event its user, its items, and its time."""
    rows = [(at, user, item, time) for at, (user, items, time) in enumerate(events) for item in items]
    event, user, item, time = (list(each) for each in zip(*rows, strict=True)) if rows else ([], [], [], [])
    vectors = np.array(user, np.float32).reshape(-1, 1)
    return Clicks(np.array(event, np.int64), vectors, np.array(item, np.uint64), np.array(time, np.float64))


class Twin:
    """Recall by dictionaries."""

    def __init__(self):
        self.sums, self.count, self.clicked, self.newest = Counter(), 0, [], 0

    def learn(self, events):
        hour = Counter(i for i, _ in self.clicked if i < 6)
        popular = sorted(hour, key=lambda i: (-hour[i], i))
        for user, items, _ in events:
            mine = set(items)
            self.count += bool(mine)
            best = sorted(range(6), key=lambda i: (abs(i - user), i))
            for method, found in (("index", best), ("popular", popular)):
                for k in AT if mine else ():
                    hits = len(mine & {*found[:k]})
                    self.sums[f"{method}_recall@{k}"] += hits / len(mine)
                    self.sums[f"{method}_hit_rate@{k}"] += hits > 0
        clicked = [(item, time // 300) for _, items, time in events for item in items]
        if parts := [part for _, part in clicked if not math.isnan(part)]:
            self.newest = max(self.newest, median_low(parts))
        self.clicked += [(item, self.newest if math.isnan(part) else part) for item, part in clicked]
        self.clicked = [each for each in self.clicked if self.newest - 12 < each[1] <= self.newest + 1]


TIME = st.integers(0, 9000).map(float) | st.sampled_from([math.nan, 1e9])
EVENT = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 8), max_size=3), TIME)


@given(st.lists(st.lists(st.lists(EVENT, max_size=5), min_size=2, max_size=2), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_what_is_found_is_as_in_the_plain_twin_on_any_ranks(passes):
    meter, other = (RetrievalMeter(AT, 100, 3600.0, timed=True) for _ in range(2))
    twin, again = Twin(), RetrievalMeter(AT, 100, 3600.0, timed=True)
    meter.index = again.index = Index()
    for ours, theirs in passes:
        silent = Silent()
        meter.add(clicks(ours))
        again.add(clicks(ours))
        other.add(clicks(theirs))
        other.close_pass(silent)
        meter.close_pass(Joined([silent.said]))
        again.close_pass(Joined([silent.said]))
        restored = RetrievalMeter(AT, 100, 3600.0, timed=True)
        restored.load_state(again.state())
        restored.index, again = Index(), restored
        twin.learn([*ours, *theirs])
    life = meter.reports()["life"]
    assert life["looked_for"] == twin.count and again.reports()["life"] == life
    assert again.reports()["window"] == meter.reports()["window"]
    for name in (f"{m}_{what}@{k}" for m in ("index", "popular") for what in ("recall", "hit_rate") for k in AT):
        wanted = twin.sums[name] / twin.count if twin.count else math.nan
        assert life[name] == (pytest.approx(wanted, abs=1e-6) if twin.count else None)


def test_of_many_events_those_are_kept_that_are_spread_over_the_pass():
    sampled = SampledEvents(10)
    for begin in range(0, 100, 7):
        sampled.add(clicks([(at, [at % 6], 0.0) for at in range(begin, min(100, begin + 7))]))
    taken = sampled.take()
    assert taken["users"].tolist() == [0.0, 16.0, 32.0, 48.0, 64.0, 80.0, 96.0] and taken["lengths"].tolist() == [1] * 7
    assert not len(sampled.take()["users"])


def test_an_epoch_again_counts_nothing_and_no_index_measures_nothing():
    meter = RetrievalMeter(AT, 100, 3600.0, timed=False)
    meter.add(clicks([(1, [1], 0.0)]))
    meter.close_pass(LocalReduce())
    assert meter.reports()["life"]["looked_for"] == 0 and meter.reports()["life"]["index_recall"] is None
    meter.index = Index()
    meter.add(clicks([(1, [1], 0.0), (4, [1, 7], 0.0)]))
    meter.close_pass(LocalReduce(), again=True)
    assert meter.reports()["life"]["looked_for"] == 0
    last = meter.reports()["pass"]
    assert last["looked_for"] == 2 and last["popular_recall"] == 0.75 and last["not_in_index"] == pytest.approx(1 / 3)


def everything(sign_U):
    return np.ones(len(sign_U), np.bool_)


def added(clicked, part, sign, count):
    clicked.add(np.array(part, np.int64), np.array(sign, np.uint64), np.array(count, np.int64))
    return clicked.best(9, everything).tolist()


def test_clicks_of_old_parts_are_forgotten():
    clicked = MostClicked(2)
    assert added(clicked, [1, 1, 2], [5, 6, 6], [9, 1, 1]) == [5, 6]
    assert added(clicked, [3], [7], [1]) == [6, 7]
    assert added(clicked, [1, 3], [8, 7], [5, 1]) == [7, 6], "the newest part never goes back"


def test_clicks_with_a_wrong_time_drop_no_others():
    clicked, later = MostClicked(2), MostClicked(2)
    assert added(clicked, [7, 7, 8, 9, 1 << 40], [5, 6, 3, 2, 4], [3, 2, 1, 1, 1]) == [5, 6, 3]
    assert added(clicked, [8], [3], [9]) == [3, 5, 6]
    later.load(clicked.state())
    assert added(later, [9, NO_TIME], [2, 3], [1, 1]) == added(clicked, [9, NO_TIME], [2, 3], [1, 1]) == [3, 2]


def test_of_each_part_the_items_with_most_clicks_are_kept_of_equal_ones_the_lowest(monkeypatch):
    monkeypatch.setattr(found_items, "MAX_ITEMS", 2)
    clicked = MostClicked(2)
    assert added(clicked, [7, 7, 7, 7, 8, 8, 7], [2**64 - 1, 4, 9, 6, 6, 1, 4], [3, 1, 2, 3, 1, 1, 1]) == [
        6,
        2**64 - 1,
        1,
    ]
    state = clicked.state()
    assert state.arrays["part"].tolist() == [7, 7, 8, 8] and state.arrays["sign"].tolist() == [6, -1, 1, 6]
    assert state.arrays["count"].tolist() == [3, 3, 1, 1] and added(MostClicked(2), [], [], []) == []
