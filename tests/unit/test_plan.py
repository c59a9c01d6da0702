"""Cutting a stream into passes: pure, fair, complete."""

import json

from hypothesis import given
from hypothesis import strategies as st

from dataset.source import Partition
from trainer.partitions import Skip
from trainer.plan import Gap, Plan, backlog, cut, drained, gaps, share


def partition(number, end, begin=0, final=True, start=None):
    return Partition(f"t/{number}", number, begin if start is None else start, begin, end, final, f"id-{number}")


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


skipped = st.lists(st.builds(Skip, st.sampled_from(["t/0", "t/1"]), st.integers(0, 60), st.integers(0, 70)), max_size=4)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 4), skipped)
def test_passes_cover_every_position_once_whatever_the_ranks_but_those_skipped(ends, max_events, num_ranks, skips):
    partitions = [partition(i, end) for i, end in enumerate(ends)]
    positions: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    number = 0
    while not drained(partitions, positions, skips):
        number += 1
        waiting = sum(backlog(partitions, positions, skips))
        plan = cut(number, partitions, positions, max_events, num_ranks, learn=True, skips=skips)
        assert len(plan.segments) == num_ranks
        assert plan.num_positions == min(max_events, waiting)
        for segment in (s for rank in plan.segments for s in rank):
            seen.setdefault(segment.partition, []).extend(range(segment.begin, segment.end))
        positions |= plan.positions()
    wanted = {f"t/{i}": [n for n in range(end) if not gone(f"t/{i}", n, skips)] for i, end in enumerate(ends)}
    assert seen == {name: numbers for name, numbers in wanted.items() if numbers}


def gone(name, position, skips):
    return any(skip.partition == name and skip.begin <= position < skip.end for skip in skips)


def test_a_segment_stops_where_a_skip_begins_and_the_next_goes_on_behind_it():
    plan = cut(1, [partition(0, 100), partition(1, 100)], {"t/0": 5}, 40, 1, True, [Skip("t/0", 10, 60)])
    assert [(s.partition, s.begin, s.end) for s in plan.segments[0]] == [
        ("t/0", 5, 10),
        ("t/0", 60, 75),
        ("t/1", 0, 20),
    ]


def test_every_segment_carries_the_identity_of_its_partition():
    plan = cut(1, [partition(0, 10), partition(1, 10)], {}, 20, 2, learn=True)
    assert [[s.identity for s in rank] for rank in plan.segments] == [["id-0"], ["id-1"]]
    assert '"identity": "id-0"' in json.dumps(plan.message())


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


def test_a_lone_partition_with_less_than_a_position_a_rank_leaves_ranks_without():
    plan = cut(1, [partition(0, 2)], {}, 40, 3, learn=True)
    assert [[(s.begin, s.end) for s in rank] for rank in plan.segments] == [[(0, 1)], [(1, 2)], []]


def test_a_gap_is_where_the_job_stands_before_what_is_kept_even_if_it_never_read_there():
    there = [partition(0, 80, begin=50, start=0), partition(1, 80, begin=50, start=60)]
    assert gaps(there, {}, to_latest=False) == [Gap("t/0", 0, 50)]
    assert gaps(there, {"t/0": 50, "t/1": 49}, to_latest=True) == [Gap("t/1", 49, 80)]
