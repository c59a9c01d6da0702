"""Slices: the choice of values with their own metrics does not depend on the ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.exact_auc import exact_auc
from headrace.trainer.config import MetricsSection, TaskSection
from headrace.trainer.metrics.meter import LocalReduce, Meter
from headrace.trainer.metrics.samples import ObservedBatch
from headrace.trainer.metrics.slices import Candidates, SliceRows, choose, max_candidates
from headrace.trainer.metrics.totals import COUNT

TASKS = (("ctr", True),)


def columns(size, seed=0):
    rng = np.random.default_rng(seed)
    prediction = {"ctr": rng.random(size, dtype=np.float32)}
    label = {"ctr": (rng.random(size) < 0.5).astype(np.float32)}
    return prediction, label, {"ctr": np.ones(size, np.float32)}


def metered(passes, max_values=2):
    meter = Meter(
        MetricsSection(slices=("device",), max_slice_values=max_values),
        [TaskSection(name="ctr", label="click")],
        timed=False,
    )
    for number, values in enumerate(passes):
        meter.add(ObservedBatch(0, *columns(len(values), number), slices={"device": values}))
        meter.close_pass(LocalReduce())
    return meter


def test_the_most_frequent_values_of_the_first_pass_are_kept_and_the_rest_is_other():
    first, second = np.array([5, 5, 5, 6, 7, 7], np.uint64), np.array([6] * 9 + [5, 8], np.uint64)
    report = metered([first, second]).report()
    slices = report["life"]["ctr"]["slices"]["device"]
    assert {name: row["count"] for name, row in slices.items()} == {"other": 11, "5": 4, "7": 2}
    assert {name: row["count"] for name, row in report["pass"]["ctr"]["slices"]["device"].items()} == {
        "other": 10,
        "5": 1,
        "7": 0,
    }


def test_later_passes_fill_the_free_places():
    meter = metered([np.array([5], np.uint64), np.array([6, 9, 9], np.uint64)])
    slices = meter.report()["life"]["ctr"]["slices"]["device"]
    assert {name: row["count"] for name, row in slices.items()} == {"other": 1, "5": 1, "9": 2}


def test_a_value_is_measured_as_if_it_were_alone():
    values = np.array([1, 2] * 100, np.uint64)
    found = metered([values]).report()["pass"]["ctr"]["slices"]["device"]["1"]
    prediction, label, weight = (column["ctr"][values == 1] for column in columns(200))
    assert abs(found["auc"] - exact_auc(prediction, label, weight)) <= found["auc_error"] + 1e-12
    assert found["mean_prediction"] == pytest.approx(prediction.mean(), rel=1e-6)
    assert "gauc" not in found


def test_text_values_have_their_text_as_name_and_a_value_other_is_distinguished():
    values = np.array(["phone", "other", "phone", "tv"], object)
    slices = metered([values], max_values=3).report()["pass"]["ctr"]["slices"]["device"]
    assert {name: row["count"] for name, row in slices.items()} == {"other": 0, "phone": 2, "'other'": 1, "tv": 1}


def test_ties_go_to_the_lower_id():
    heard = [Candidates({9: 1, 3: 1}, {}), Candidates({4: 1, 9: 1}, {})]
    assert choose([], heard, 2) == [9, 3]
    assert choose([7], heard, 2) == [7, 9]
    assert choose([7, 8], heard, 2) == [7, 8]


def close(ranks):
    known = choose([], [rank.candidates() for rank in ranks], 2)
    return known, sum(rank.take(known)["ctr"] for rank in ranks)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(1, 3), st.integers(1, 9), st.randoms())
def test_more_values_than_candidates_change_nothing_between_ranks(values, world, size, random):
    """30 values, 8 candidates: a value that one rank drops would be dropped by all ranks together."""
    assert max_candidates(2) == 8
    values = np.array(values, np.uint64)
    prediction, label, weight = columns(len(values))
    alone, ranks = SliceRows(TASKS, 2), [SliceRows(TASKS, 2) for _ in range(world)]
    alone.add(values, prediction, label, weight)
    order = list(range(len(values)))
    random.shuffle(order)
    for number, begin in enumerate(range(0, len(order), size)):
        at = np.array(order[begin : begin + size])
        part = ({"ctr": column["ctr"][at]} for column in (prediction, label, weight))
        ranks[number % world].add(values[at], *part)
    (known, rows), (known_too, rows_too) = close([alone]), close(ranks)
    assert known == known_too
    rows_too[:] = _carried(rows_too)
    assert (_carried(rows) == rows_too).all()
    assert rows[:, COUNT].sum() == len(values)
    for row, value in enumerate(known, 1):
        assert rows[row, COUNT] == (values == value).sum()


def _carried(rows):
    from headrace.trainer.metrics.totals import carry

    carry(rows)
    return rows


def test_a_slot_of_many_values_stays_bounded():
    rows = SliceRows(TASKS, 4)
    for seed in range(20):
        values = np.random.default_rng(seed).integers(0, 1 << 62, 500).astype(np.uint64)
        rows.add(values, *columns(500))
    assert len(rows.candidates().count) == max_candidates(4)
    assert rows.take([])["ctr"].shape[0] == 5
