"""The cut of a stream into passes: pure, fair, complete."""

import json

from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain, typed
from headrace.dataset.stream.source import Partition
from headrace.trainer.journal.partitions import SkippedRange
from headrace.trainer.journal.pass_plan import (
    PassPlan,
    RetentionGap,
    backlog,
    cut,
    gaps,
    is_drained,
    num_positions,
    proportional_shares,
    streams,
)


def plan_of(number, partitions, positions, max_events, num_ranks, learn=True, *more, **named):
    return PassPlan(number, cut(partitions, positions, max_events, num_ranks, *more, **named), learn)


def partition(number, end, begin=0, final=True, start=None, **order):
    return Partition(
        f"t/{number}", number, begin if start is None else start, begin, end, final, f"id-{number}", **order
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 200))
def test_a_pass_takes_of_each_stream_in_proportion_to_its_backlog(counts, max_events):
    taken = proportional_shares(counts, max_events)
    total = sum(counts)
    assert sum(taken) == min(max_events, total)
    assert all(0 <= t <= c for t, c in zip(taken, counts, strict=True))
    assert all(abs(t - min(max_events, total) * c / max(1, total)) < 1 for t, c in zip(taken, counts, strict=True))


skipped = st.lists(
    st.builds(SkippedRange, st.sampled_from(["t/0", "t/1"]), st.integers(0, 60), st.integers(0, 70)), max_size=4
)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", "x", "y"]), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 3),
    skipped,
)
def test_passes_cover_every_position_once_in_order_and_ranks_have_equal_parts(files, max_events, num_ranks, skips):
    partitions = [partition(i, end, stream=s, period=(str(day),)) for i, (end, s, day) in enumerate(files)]
    positions: dict[str, int] = {}
    seen: dict[str, list[tuple[str, int]]] = {p.stream_name: [] for p in partitions}
    number = 0
    while not is_drained(partitions, positions, skips):
        number += 1
        waiting = sum(backlog(partitions, positions, skips))
        plan = plan_of(number, partitions, positions, max_events, num_ranks, learn=True, skips=skips)
        sizes = [num_positions(rank) for rank in plan.segments]
        assert len(sizes) == num_ranks and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        assert plan.num_positions == min(max_events, waiting) > 0
        for s in (s for rank in plan.segments for s in rank):
            seen[partitions[s.number].stream_name] += [(s.partition, at) for at in range(s.begin, s.end)]
        positions |= plan.positions()
    for stream in streams(partitions):
        whole = [(p.name, n) for p in stream for n in range(p.end) if not gone(p.name, n, skips)]
        assert seen[stream[0].stream_name] == whole


def gone(name, position, skips):
    return any(skip.partition == name and skip.begin <= position < skip.end for skip in skips)


def test_a_segment_stops_at_a_skip_and_the_next_begins_after_it():
    plan = plan_of(1, [partition(0, 100), partition(1, 100)], {"t/0": 5}, 40, 1, True, [SkippedRange("t/0", 10, 60)])
    assert [(s.partition, s.begin, s.end) for s in plan.segments[0]] == [
        ("t/0", 5, 10),
        ("t/0", 60, 67),
        ("t/1", 0, 28),
    ]  # in proportion to 45 and 100


def test_every_segment_carries_the_identity_of_its_partition():
    plan = plan_of(1, [partition(0, 10), partition(1, 10)], {}, 20, 2, learn=True)
    assert [[s.identity for s in rank] for rank in plan.segments] == [["id-0"], ["id-1"]]
    assert '"identity": "id-0"' in json.dumps(plain(plan))


def test_a_pass_is_split_into_equal_contiguous_parts_whatever_the_partitions():
    plan = plan_of(1, [partition(i, size) for i, size in enumerate([1, 10, 1])], {}, 40, 3, learn=True)
    assert [[(s.number, s.begin, s.end) for s in rank] for rank in plan.segments] == [
        [(0, 0, 1), (1, 0, 3)],
        [(1, 3, 7)],
        [(1, 7, 10), (2, 0, 1)],
    ]


def hours(*names, stream="files"):
    return [partition(i, 10, stream=stream, period=tuple(name.split("/"))) for i, name in enumerate(names)]


def test_files_of_a_stream_are_read_one_after_another_by_their_times_as_numbers():
    plan = plan_of(1, hours("2/10", "2/9", "1/11"), {}, 25, 1, learn=True)
    assert [(s.number, s.begin, s.end) for s in plan.segments[0]] == [(2, 0, 10), (1, 0, 10), (0, 0, 5)]


def test_a_file_that_comes_before_the_present_one_is_read_next():
    plan = plan_of(2, hours("2/1", "2/2", "1/1"), {"t/0": 10, "t/1": 4}, 12, 1, learn=True)
    assert [(s.number, s.begin, s.end) for s in plan.segments[0]] == [(2, 0, 10), (1, 4, 6)]


def test_a_cap_limits_a_partition():
    plan = plan_of(1, [partition(0, 10), partition(1, 10)], {"t/1": 2}, 40, 1, learn=True, caps={"t/0": 4, "t/1": 0})
    assert [(s.number, s.begin, s.end) for s in plan.segments[0]] == [(0, 0, 4)]


def test_a_plan_survives_its_message():
    plan = plan_of(3, [partition(i, 7) for i in range(3)], {"t/1": 5}, 9, 2, learn=False)
    assert typed(PassPlan, plain(plan), "it") == plan


def test_a_position_before_the_first_retained_one_is_left_for_the_source_to_refuse():
    assert backlog([partition(0, 10, begin=5)], {"t/0": 2}) == [8]


def test_a_lone_partition_with_less_than_a_position_a_rank_leaves_ranks_without():
    plan = plan_of(1, [partition(0, 2)], {}, 40, 3, learn=True)
    assert [[(s.begin, s.end) for s in rank] for rank in plan.segments] == [[(0, 1)], [(1, 2)], []]


def test_a_gap_is_a_position_before_the_first_retained_one_even_if_never_read():
    there = [partition(0, 80, begin=50, start=0), partition(1, 80, begin=50, start=60)]
    assert gaps(there, {}, to_latest=False) == [RetentionGap("t/0", 0, 50)]
    assert gaps(there, {"t/0": 50, "t/1": 49}, to_latest=True) == [RetentionGap("t/1", 49, 80)]


three_shares = st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3).map(
    lambda found: [x / sum(found) for x in found]
)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=3), three_shares)
def test_ranks_have_parts_in_proportion_to_their_shares(ends, shares):
    plan = plan_of(1, [partition(i, end) for i, end in enumerate(ends)], {}, 400, 3, learn=True, shares=shares)
    sizes = [num_positions(rank) for rank in plan.segments]
    assert plan.num_positions == sum(sizes) == min(sum(ends), 400)
    assert all(abs(size - plan.num_positions * share) <= 1 for size, share in zip(sizes, shares, strict=True))
    taken = [position for rank in plan.segments for s in rank for position in range(s.begin, s.end)]
    equal = plan_of(1, [partition(i, end) for i, end in enumerate(ends)], {}, 400, 3, learn=True)
    assert taken == [position for rank in equal.segments for s in rank for position in range(s.begin, s.end)]
