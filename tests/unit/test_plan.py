"""Cutting a stream into passes: pure, fair, complete."""

from hypothesis import given
from hypothesis import strategies as st

from dataset.source import Partition, Segment
from trainer.plan import Plan, backlog, cut, drained, share, split


def partition(number, end, begin=0, final=True):
    return Partition(f"t/{number}", number, begin, begin, end, final)


waiting = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@given(waiting, st.integers(1, 200))
def test_a_pass_takes_all_it_may_and_no_more_than_there_is(counts, max_events):
    taken = share(counts, max_events)
    assert sum(taken) == min(max_events, sum(counts))
    assert all(0 <= t <= c for t, c in zip(taken, counts, strict=True))


@given(waiting, st.integers(1, 200))
def test_partitions_with_backlog_left_got_equal_parts_and_the_remainder_went_to_the_lowest(counts, max_events):
    taken = share(counts, max_events)
    unfinished = [t for t, c in zip(taken, counts, strict=True) if t < c]
    if unfinished:
        assert unfinished == sorted(unfinished, reverse=True)
        assert max(unfinished) - min(unfinished) <= 1
        assert all(t <= min(unfinished) + 1 for t in taken)


def test_what_one_partition_lacks_is_shared_by_the_others():
    assert share([1, 100, 100], 10) == [1, 5, 4]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 4))
def test_passes_cover_every_position_once_whatever_the_ranks(ends, max_events, num_ranks):
    partitions = [partition(i, end) for i, end in enumerate(ends)]
    positions: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    number = 0
    while not drained(partitions, positions):
        number += 1
        plan = cut(number, partitions, positions, max_events, num_ranks, learn=True)
        assert len(plan.segments) == num_ranks
        for segment in (s for rank in plan.segments for s in rank):
            seen.setdefault(segment.partition, []).extend(range(segment.begin, segment.end))
        positions |= plan.positions()
    assert seen == {f"t/{i}": list(range(end)) for i, end in enumerate(ends) if end}


def test_a_partition_belongs_to_its_number_modulo_the_ranks_and_a_lone_one_is_split():
    plan = cut(1, [partition(i, 10) for i in range(4)], {}, 40, 3, learn=True)
    assert [[s.number for s in rank] for rank in plan.segments] == [[0, 3], [1], [2]]
    lone = cut(1, [partition(0, 10)], {}, 40, 3, learn=True)
    assert [[(s.begin, s.end) for s in rank] for rank in lone.segments] == [[(0, 4)], [(4, 7)], [(7, 10)]]


def test_a_plan_survives_being_told():
    plan = cut(3, [partition(i, 7) for i in range(3)], {"t/1": 5}, 9, 2, learn=False)
    assert Plan.of_message(plan.message()) == plan


def test_a_position_before_the_first_retained_one_is_kept_for_the_source_to_refuse():
    assert backlog([partition(0, 10, begin=5)], {"t/0": 2}) == [8]


def test_splitting_more_than_there_is_leaves_empty_parts():
    assert [s.end - s.begin for s in split(Segment("t/0", 0, 0, 2), 3)] == [1, 1, 0]
