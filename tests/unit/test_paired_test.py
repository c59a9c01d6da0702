"""`headrace compare`: what two jobs predicted of the same events, with a test that knows chance from a difference."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.stream.source import Segment
from headrace.errors import SpecError
from headrace.service.history import paired_test
from headrace.service.history.paired_test import compare_jobs, format_comparison, paired
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log_file import LogRecord
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import PassClose

SMALL = st.floats(-1, 1).map(lambda x: round(x, 3))


def history(cuts, figure):
    """A job that closed a pass at each of `cuts`; `figure(begin, end)` is the AUC of the events between."""
    found, begin = JobHistory(), 0
    for number, end in enumerate(cuts, 1):
        plan = PassPlan(number, ((Segment("a", 0, begin, end),),))
        close = PassClose(
            number=number, day=0, events=end - begin, samples=end - begin, rejected={}, digests={},
            of_pass={"ctr": {"auc": figure(begin, end)}},
        )  # fmt: skip
        found.plans[number] = LogRecord(2 * number, plan, None)
        found.closes[number] = LogRecord(2 * number + 1, close, None)
        begin = end
    return found


@pytest.fixture
def logs(monkeypatch):
    made = {}
    monkeypatch.setattr(paired_test, "read_history", lambda folder: made[folder])
    return made


@given(st.lists(st.tuples(SMALL, st.integers(1, 50)), min_size=2, max_size=9))
def test_p_is_the_share_of_all_signs_that_give_such_a_mean(parts):
    difference_N, weight_N = (np.array(each, np.float64) for each in zip(*parts, strict=True))
    share_N = weight_N / weight_N.sum()
    mean, error, p = paired(difference_N, weight_N)
    every = [abs(float(np.dot(signs, share_N * difference_N))) for signs in product((-1, 1), repeat=len(parts))]
    exact = np.mean([each >= abs(mean) * (1 - 1e-12) for each in every])
    assert mean == pytest.approx(float(np.average(difference_N, weights=weight_N))) and error >= 0
    assert p == pytest.approx(exact, abs=0.03) and (mean, error, p) == paired(difference_N, weight_N)


def test_jobs_that_cut_the_stream_differently_are_compared_where_both_closed(logs):
    logs["a"] = history(range(10, 241, 10), lambda begin, end: 0.7 + begin / 10000)
    logs["b"] = history(range(20, 241, 20), lambda begin, end: 0.71 + begin / 10000)
    found = compare_jobs("a", "b")
    assert (found.parts, found.events, found.only_first, found.only_second) == (12, 240, 12, 0)
    (auc,) = found.results
    assert auc.difference == pytest.approx(0.0095) and auc.p < 0.001 and auc.error == pytest.approx(0, abs=1e-12)
    assert "+0.00950" in "\n".join(format_comparison(found))
    assert compare_jobs("a", "b", after=6).events == 120


def test_equal_jobs_do_not_differ(logs):
    logs["a"] = logs["b"] = history(range(10, 101, 10), lambda begin, end: begin / 100)
    (auc,) = compare_jobs("a", "b").results
    assert (auc.difference, auc.p) == (0.0, 1.0)


def test_jobs_without_a_common_stream_are_refused(logs):
    logs["a"], logs["b"] = (history(range(at, 101, 10), lambda begin, end: 0.5) for at in (10, 11))
    with pytest.raises(SpecError, match="0 parts of the stream in common"):
        compare_jobs("a", "b")
