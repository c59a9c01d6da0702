"""Guards of slots: figures, drift and bounds as pure functions, and the decider that keeps the reference."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.slot_counters import NUM_BUCKETS, SlotCounters, SlotSum
from headrace.dataset.spec.config import MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.pserver.protocol.table_stats import TableStats
from headrace.trainer.exports.gates import GateFacts, check_gates
from headrace.trainer.guard_config import GatesSection, GuardBounds, GuardsSection
from headrace.trainer.rank0.operations import ClosingPass
from headrace.trainer.rank0.slot_guards import (
    SlotCounts,
    SlotGuards,
    SlotOutside,
    drift,
    figures_of,
    outside,
    slots_of,
    summed,
)
from tests.fakes.ragged import ragged
from tests.unit.test_spec import message

SCHEMA = Schema.of([SparseSlot(name="user"), SparseSlot(name="item"), MetaSlot(name="label", kind="meta")])
ROWS = st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=8)
COUNTS = st.builds(
    SlotCounts,
    st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50),
    st.tuples(*[st.integers(0, 30)] * NUM_BUCKETS),
)  # fmt: skip


def counters(user, item=None):
    """Of samples with these signs."""
    item = [[1]] * len(user) if item is None else item
    num = len(user)
    found = SlotCounters(SCHEMA)
    meta = {"label": np.zeros(num, np.float32)}
    samples = Samples({"user": ragged(user), "item": ragged(item)}, {}, meta, np.arange(num), np.full(num, np.nan))
    found.observe(samples)
    return found


def drift_reference(now, reference):
    """Plain twin, in the words of the definition."""
    total = 0.0
    for a, b in zip((*now.buckets, now.empty), (*reference.buckets, reference.empty), strict=True):
        p = (a + 0.5) / (sum(now.buckets) + now.empty + 0.5 * (NUM_BUCKETS + 1))
        q = (b + 0.5) / (sum(reference.buckets) + reference.empty + 0.5 * (NUM_BUCKETS + 1))
        total += (p - q) * math.log(p / q)
    return total


@given(COUNTS, COUNTS)
def test_drift_equals_its_twin_and_is_0_only_between_equal_shares(one, other):
    assert drift(one, other) == pytest.approx(drift_reference(one, other), abs=1e-12)
    assert drift(one, other) == pytest.approx(drift(other, one), abs=1e-12) and drift(one, other) >= -1e-12
    assert drift(one, one) == 0


@given(ROWS, ROWS)
def test_figures_do_not_depend_on_the_number_of_ranks(one, two):
    together = counters([*one, *two])
    apart = counters(one)
    apart.merge(counters(two))
    assert slots_of(apart) == slots_of(together)
    assert summed([{"user": slots_of(counters(rows))["user"].counts} for rows in (one, two)]) == {
        "user": slots_of(together)["user"].counts
    }


@given(st.lists(COUNTS, max_size=3))
def test_counts_come_back_from_a_commit(parts):
    blocks = [{"user": each} for each in parts]
    plain = json.loads(json.dumps([{name: counts.plain() for name, counts in block.items()} for block in blocks]))
    assert [{name: SlotCounts.of_plain(numbers) for name, numbers in block.items()} for block in plain] == blocks


def test_the_figures_of_a_slot():
    found = counters([[1, 2], [], [3], [3]])
    found.add("user", SlotSum.PADDING, 4)
    figures = figures_of(slots_of(found)["user"], 2, None)
    assert figures == {
        "coverage": 0.75, "null_rate": 0.5, "mean_count": 1.0, "distinct": 3, "new_rows": 0.5, "drift": None,
    }  # fmt: skip


FIGURES = {"coverage": 0.5, "null_rate": 0.2, "mean_count": 2.0, "distinct": 3, "new_rows": 0.25, "drift": 0.3}


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"min_coverage": 0.5, "max_null": 0.2, "min_count": 2, "max_count": 2, "max_drift": 0.3}, []),
        ({"min_distinct": 3, "max_new_rows": 0.25}, []),
        ({"min_coverage": 0.6}, ["coverage is below 0.6"]),
        ({"max_null": 0.1}, ["the share of dropped values is above 0.1"]),
        ({"min_count": 3}, ["the mean number of values is below 3"]),
        ({"max_count": 1}, ["the mean number of values is above 1"]),
        ({"min_distinct": 4}, ["distinct values are fewer than 4"]),
        ({"max_new_rows": 0.2, "max_drift": 0.2}, ["the share of new rows is above 0.2", "drift is above 0.2"]),
    ],
)
def test_each_bound_compares_its_figure(bounds, words):
    assert list(outside(GuardBounds(**bounds), FIGURES)) == words
    assert list(outside(GuardBounds(**bounds), dict.fromkeys(FIGURES))) == []


class Job:
    """A job with guards, one close after another."""

    def __init__(self, state=None, **section):
        self.guards = SlotGuards(GuardsSection(min_samples=4, **section), SCHEMA)
        self.guards.load_state(json.loads(json.dumps(state or {})))
        self.version, self.left = 0, TableStats(90, 0, 0, {0: 90})

    def close(self, user, item=None, live=True):
        self.version += 1
        close = ClosingPass(
            version=self.version, day=0, event_time_s=None, pass_times_s=None, wall_s=0.0, positions={},
            stats={"default": self.left}, metrics={}, num_samples=len(user), ended=False,
            slots=counters(user, item),
        )  # fmt: skip
        self.guards.saw(close)
        if live:
            self.guards.due(close, ())
        return plain(self.guards.status().outside)


GOOD, ELSEWHERE, EMPTY = [[n % 7] for n in range(70)], [[100 + n % 7] for n in range(70)], [[] for _ in range(70)]


def test_a_slot_that_moves_is_told_until_the_change_is_the_reference():
    job = Job(window=2, all=GuardBounds(max_drift=0.25))
    assert [job.close(GOOD) for _ in range(4)] == [{}] * 4
    assert job.close(ELSEWHERE) == {"user": {"why": "drift is above 0.25", "action": "alarm", "since": 5}}
    assert job.close(ELSEWHERE)["user"]["since"] == 5
    assert [job.close(ELSEWHERE) for _ in range(3)][-1] == {}
    assert job.guards.held == ()


def test_an_own_bound_replaces_that_of_all_and_holds_exports():
    job = Job(all=GuardBounds(min_coverage=0.5), slots={"user": GuardBounds(min_coverage=0.0, action="hold")})
    assert job.close(EMPTY) == {}
    job = Job(all=GuardBounds(min_coverage=0.5, action="hold"), slots={"item": GuardBounds(action="alarm")})
    job.close(EMPTY, EMPTY)
    assert job.guards.held == ("slot user: coverage is below 0.5",)
    failed = check_gates(GatesSection(), GateFacts(guards=job.guards.held))["guards"]
    assert not failed.passed and failed.why == "guards: slot user: coverage is below 0.5"
    assert "guards" not in check_gates(GatesSection(guards=False), GateFacts(guards=job.guards.held))
    job.close(GOOD, GOOD)
    assert job.guards.held == ()


def test_stop_ends_the_job_before_the_close_is_logged_and_never_in_a_replay():
    section = {"all": GuardBounds(min_coverage=0.5, action="stop")}
    Job(**section).close(EMPTY, live=False)
    with pytest.raises(SlotOutside, match=r"pass 1 .* slot user: coverage is below 0.5; its action"):
        Job(**section).close(EMPTY)


def test_a_small_pass_is_not_judged_and_not_in_the_reference():
    job = Job(all=GuardBounds(min_coverage=0.5))
    assert job.close([[]] * 3) == {} and job.guards.state()["blocks"] == []


@given(st.lists(ROWS, min_size=2, max_size=12), st.data())
def test_a_restart_goes_on_as_if_it_had_not_been(passes, data):
    section = {"window": 4, "all": GuardBounds(max_drift=0.1, min_coverage=0.5)}
    whole, at = Job(**section), data.draw(st.integers(0, len(passes)))
    for rows in passes[:at]:
        whole.close(rows)
    again = Job(state=whole.guards.state(), **section)
    again.version = whole.version
    for rows in passes[at:]:
        assert again.close(rows) == whole.close(rows)
    assert again.guards.state() == whole.guards.state()


def test_the_reference_stays_bounded():
    job = Job(window=20)
    for _ in range(60):
        job.close(GOOD)
    kept = sum(block["user"][0] for block in job.guards.state()["blocks"]) / len(GOOD)
    assert 20 <= kept <= 24 and len(job.guards.state()["blocks"]) <= 9


@pytest.mark.parametrize("sweeping", [False, True])
def test_new_rows_hold_the_same_whatever_is_removed_meanwhile(sweeping):
    """Rows that a shrink deleted are removed in the background: how many are left at a close is a matter of time."""
    job = Job(all=GuardBounds(max_new_rows=0.05, action="hold"))
    for made, left in ((7, 90), (0, 40), (7, 20)):
        job.left = TableStats(left, 0, made, {0: left}, sweeping=sweeping, new_by_group={0: made})
        told = job.close(GOOD)
        assert job.guards.status().slots["user"]["new_rows"] == made / len(GOOD)
        assert bool(told) == bool(made) == bool(job.guards.held)


def test_bounds_of_a_slot_that_is_not_sparse_are_refused():
    assert message("guards.slots.usr.min_coverage=0.5").startswith("guards.slots.usr: there is no slot 'usr'")
    assert message("guards.slots.click.min_coverage=0.5").startswith("guards.slots.click: slot 'click' is meta")
    assert message("guards.all={min_count=3,max_count=2}").startswith("guards.all: ")
