"""Jobs that began before streams were in order: each pass takes an equal share of every partition."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.stream.source import Partition
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import encode
from headrace.trainer.rank0.equal_shares import cut_equally, equal_counts
from headrace.trainer.rank0.planner import MemoryPlanJournal, PassRules, Planner, StreamEnded
from headrace.trainer.rank0.recovery import after

GOLDEN = Path(__file__).parents[1] / "golden" / "equal-shares" / "log"
"""Four partitions in passes of 20 for three ranks, as the program wrote them before."""


waiting = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@given(waiting, st.integers(1, 200))
def test_a_pass_takes_all_it_may_and_no_more_than_there_is(counts, max_events):
    taken = equal_counts(counts, max_events)
    assert sum(taken) == min(max_events, sum(counts))
    assert all(0 <= t <= c for t, c in zip(taken, counts, strict=True))


@given(waiting, st.integers(1, 200))
def test_partitions_with_backlog_left_got_equal_parts_and_the_remainder_went_to_the_lowest(counts, max_events):
    taken = equal_counts(counts, max_events)
    unfinished = [t for t, c in zip(taken, counts, strict=True) if t < c]
    if unfinished:
        assert unfinished == sorted(unfinished, reverse=True)
        assert max(unfinished) - min(unfinished) <= 1
        assert all(t <= min(unfinished) + 1 for t in taken)


def test_the_others_share_what_a_short_partition_leaves():
    assert equal_counts([1, 100, 100], 10) == [1, 5, 4]


def test_a_partition_belongs_to_its_number_modulo_the_ranks_and_a_lone_one_is_split():
    four = [Partition(f"t/{i}", i, 0, 0, 10, True) for i in range(4)]
    plan = PassPlan(1, cut_equally(four, {}, 40, 3))
    assert [[s.number for s in rank] for rank in plan.segments] == [[0, 3], [1], [2]]
    lone = PassPlan(1, cut_equally(four[:1], {}, 40, 3))
    assert [[(s.begin, s.end) for s in rank] for rank in lone.segments] == [[(0, 4)], [(4, 7)], [(7, 10)]]


def test_a_job_with_an_old_log_continues_with_the_same_passes():
    history = JobHistory.of(read(GOLDEN))
    began = after(history, None, {})
    logged = history.operations[1].content
    assert plain(list(began.known.values())) == encode(logged)["partitions"]  # as it was written
    positions = {}
    for logged in began.replay:  # a restart behind each pass
        journal = MemoryPlanJournal()
        source = MemorySource([[b"e"] * n for n in (57, 3, 20, 41)])
        planner = Planner(source, PassRules(PassesSection(max_events=20), 3), journal=journal, known=began.known)
        planner.request(logged.plan.number, positions, 0)
        assert planner.take(10.0) == logged.plan
        planner.close()
        positions |= logged.plan.positions()


def test_new_partitions_of_such_a_job_are_read_in_equal_shares_too():
    known = after(JobHistory.of(read(GOLDEN)), None, {}).known
    journal = MemoryPlanJournal()
    source = MemorySource([[b"e"] * n for n in (57, 3, 20, 41, 8)])
    planner = Planner(source, PassRules(PassesSection(max_events=20), 3), journal=journal, known=known)
    planner.request(8, {name: each.end for name, each in known.items()}, 0)
    plan = planner.take(10.0)
    assert [[(s.number, s.begin, s.end) for s in rank] for rank in plan.segments] == [[], [(4, 0, 8)], []]
    (operation,) = journal.operations
    assert [*encode(operation)["partitions"][0]] == ["name", "number", "start", "end", "identity"]
    planner.request(9, {**{name: each.end for name, each in known.items()}, "memory/4": 8}, 0)
    assert isinstance(planner.take(10.0), StreamEnded)
    planner.close()
