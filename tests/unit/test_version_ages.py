"""The cost of a version's age: parts that a job and a frozen version share, in bands of ages."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.stream.source import Segment
from headrace.service.history.version_ages import AGES_S, aged_parts, costs_of, format_costs, spread
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log_file import LogRecord
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import PassClose

HOUR_S = 3600.0


def history(cuts, auc, first=1, shift=0):
    """A job that closed a pass at each of `cuts`; an event takes a minute, and `auc(time)` is that of a pass.

    `first`: the first pass in the log; `shift` is added to the numbers of passes.
    """
    found, begin = JobHistory(), 0
    for number, end in enumerate(cuts, 1 + shift):
        plan = PassPlan(number, ((Segment("a", 0, begin, end),),))
        close = PassClose(
            number=number, day=0, events=end - begin, samples=end - begin, rejected={}, digests={},
            event_time_s=60.0 * end, of_pass={"ctr": {"auc": auc(60.0 * end), "rmse": 0.1}},
        )  # fmt: skip
        if number >= first:
            found.plans[number] = LogRecord(2 * number, plan, None)
            found.closes[number] = LogRecord(2 * number + 1, close, None)
        begin = end
    return found


CUTS = range(30, 30 * 40 + 1, 30)


def test_a_version_that_ages_loses_more_with_each_hour():
    job = history(CUTS, lambda _: 0.8)
    frozen = history(CUTS, lambda time_s: 0.8 - (time_s - 7200) / 1e6, first=5)
    parts = aged_parts(4, 7200.0, {"a": 120}, job, frozen)
    assert len(parts) == 36 and parts[0].age_s == 900.0 and parts[-1].age_s == 35.5 * 1800
    costs = costs_of(parts)
    assert {cost.metric for cost in costs} == {"auc"}, "rmse is not of a click"
    assert [(cost.from_s / HOUR_S, cost.parts) for cost in costs][:3] == [(1 / 6, 1), (0.5, 1), (1.0, 2)]
    assert [cost.difference for cost in costs] == sorted((cost.difference for cost in costs), reverse=True)
    assert sum(cost.samples for cost in costs) == 36 * 30
    many, few = ([cost for cost in costs if (cost.parts >= 6) is enough] for enough in (True, False))
    assert many and all(cost.p < 0.05 and cost.error > 0 for cost in many)
    assert few and all(cost.p is None for cost in few)
    lines = list(format_costs([4], costs))
    assert lines[2].split()[:6] == ["ctr", "auc", "10", "min", "-", "30"] and "-0.0018" in lines[2]
    table = lines[1 : 2 + len(costs)]
    assert len({len(line) for line in table}) == 1, "columns are below their names"


def test_passes_that_were_cut_in_another_way_are_compared_where_both_closed():
    job, frozen = history(CUTS, lambda _: 0.8), history(range(60, 1201, 60), lambda _: 0.7, first=5, shift=2)
    parts = aged_parts(4, 7200.0, {"a": 120}, job, frozen)
    assert [part.job.events for part in parts] == [60] * 18
    assert all(part.job.figures["ctr", "auc"] == 0.8 for part in parts)


@given(st.lists(st.integers(0, 1000), unique=True).map(sorted), st.integers(1, 9))
def test_versions_are_spread_from_the_first_to_the_last(versions, most):
    found = spread(versions, most)
    assert found == sorted(set(found)) and set(found) <= set(versions) and len(found) == min(most, len(versions))
    assert not versions or found[0] == versions[0]
    assert most == 1 or not versions or found[-1] == versions[-1]


def test_bands_ascend_without_a_gap():
    assert list(AGES_S) == sorted(set(AGES_S)) and AGES_S[0] == 0


def test_a_version_that_is_as_good_costs_nothing():
    job = history(CUTS, lambda _: 0.8)
    costs = costs_of(aged_parts(4, 7200.0, {"a": 120}, job, job))
    assert {cost.difference for cost in costs} == {0.0} and {cost.p for cost in costs} == {1.0, None}
