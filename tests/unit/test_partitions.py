"""The facts about a partition never change, whatever the source has later."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain, typed
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Partition
from headrace.trainer.journal.partitions import (
    KnownPartition,
    SkippedRange,
    after_skips,
    open_ranges,
    present_partitions,
    with_new_partitions,
)


def seen(name, end=10, *, start=0, begin=0, number=0, final=False, identity="one"):
    return Partition(name, number, start, begin, end, final, identity)


def met(*partitions, bounded=False):
    return with_new_partitions({}, partitions, bounded)[0]


def test_the_first_poll_fixes_numbers_starts_ends_and_identities():
    known, new = with_new_partitions(
        {}, [seen("b", 10, start=3, final=True), seen("a", 20, identity="two", final=True)], True
    )
    assert (
        new
        == list(known.values())
        == [KnownPartition("b", 0, 3, 10, "one", "", ()), KnownPartition("a", 1, 0, 20, "two", "", ())]
    )
    assert typed(KnownPartition, plain(new[0]), "it") == new[0]


def test_a_restart_has_the_same_partitions_whatever_the_source_has_then():
    first = [seen("b", 10, start=10), seen("a", 20, start=20)]
    known = met(*first)
    later = [seen("a", 30, start=30), seen("b", 15, start=15)]
    assert with_new_partitions(known, later, False) == (known, [])
    assert present_partitions(known, later, {"b": 12}, []) == [
        seen("b", 15, start=10, number=0),
        seen("a", 30, start=20, number=1),
    ]


def test_a_bounded_stream_ends_where_it_ended_at_first_sight_and_takes_no_new_ones():
    known = met(seen("a", 10, final=True), bounded=True)
    later = [seen("0", 5, final=True), seen("a", 25, final=True)]
    assert with_new_partitions(known, later, True) == (known, [])
    assert present_partitions(known, later, {}, []) == [seen("a", 10, final=True)]


def test_a_bounded_stream_that_has_not_all_arrived_has_no_end_yet():
    known = met(seen("a", 10, final=False), bounded=True)
    assert known["a"].end is None
    assert present_partitions(known, [seen("a", 15, final=True)], {}, []) == [seen("a", 15, final=True)]


def test_a_later_partition_comes_last_and_starts_at_its_beginning():
    known, new = with_new_partitions(
        met(seen("b"), seen("c")), [seen("a", 90, start=90, begin=7), seen("b"), seen("c")], False
    )
    assert new == [KnownPartition("a", 2, 7, None, "one", "", ())]
    assert [known[name].number for name in "abc"] == [2, 0, 1]


def test_a_replaced_partition_always_fails_even_if_it_is_longer():
    for bounded in (False, True):
        known = met(seen("t/0", 10, final=bounded), bounded=bounded)
        with pytest.raises(SourceGap, match=r"t/0 is not what it was .*identity one then, two now.*--fresh"):
            present_partitions(known, [seen("t/0", 99, identity="two")], {"t/0": 3}, [])


def test_an_unknown_identity_is_not_compared():
    known = met(seen("t/0", identity=""))
    assert present_partitions(known, [seen("t/0", identity="two")], {}, [])[0].identity == ""
    known = met(seen("t/0"))
    assert present_partitions(known, [seen("t/0", identity="")], {}, [])[0].identity == "one"


def test_a_partition_that_ends_before_the_jobs_position_always_fails():
    with pytest.raises(SourceGap, match=r"t/0 ends at position 10, but it once reached 11.*truncated.*headrace rewind"):
        present_partitions(met(seen("t/0")), [seen("t/0", 10)], {"t/0": 11}, [])
    assert present_partitions(met(seen("t/0")), [seen("t/0", 10)], {"t/0": 10}, [])


def test_a_truncated_bounded_partition_fails_before_its_end_is_read():
    known = met(seen("a", 10, final=True), bounded=True)
    with pytest.raises(SourceGap, match="a ends at position 8, but it once reached 10"):
        present_partitions(known, [seen("a", 8, final=True)], {"a": 2}, [])


def test_a_bounded_partition_may_change_after_it_was_read():
    known = met(seen("a", final=True), seen("b", final=True), bounded=True)
    for later in ([], [seen("a", 3, identity="two", final=True)]):
        first, second = present_partitions(known, [*later, seen("b", final=True)], {"a": 10}, [])
        assert (first.end, first.final, first.number, second.number) == (10, True, 0, 1)
    with pytest.raises(SourceGap, match="a is gone, and its positions 9 to 10 are not read yet.*headrace skip"):
        present_partitions(known, [seen("b", final=True)], {"a": 9}, [])
    assert present_partitions(known, [seen("b", final=True)], {"a": 4}, [SkippedRange("a", 4, 10)])[0].end == 10


def test_an_unbounded_partition_that_is_gone_ends_at_the_jobs_position():
    known = met(seen("a", start=2), seen("b"))
    gone, there = present_partitions(known, [seen("b")], {"a": 7}, [])
    assert (gone.name, gone.end, gone.final) == ("a", 7, True)
    assert not there.final
    assert present_partitions(known, [seen("b")], {}, [])[0].end == 2


names = st.lists(st.sampled_from("abcdef"), unique=True)


@given(st.lists(names, max_size=5), st.integers(0, 5))
def test_numbers_are_dense_stable_and_do_not_depend_on_where_a_restart_falls(looks, restart):
    known = {}
    for number, look in enumerate(looks):
        if number == restart:
            known = {name: typed(KnownPartition, plain(each), "it") for name, each in known.items()}
        before = dict(known)
        known, new = with_new_partitions(known, [seen(name) for name in look], False)
        assert all(known[name] == each for name, each in before.items())
        assert sorted(each.number for each in known.values()) == list(range(len(known)))
        assert [each.name for each in new] == [name for name in look if name not in before]


ranges = st.lists(st.builds(SkippedRange, st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 30)), max_size=5)


@given(st.integers(0, 30), st.integers(0, 30), ranges)
def test_open_ranges_are_without_skipped_positions(begin, end, skips):
    found = open_ranges("a", begin, end, skips)
    left = [n for first, last in found for n in range(first, last)]
    skipped = {n for skip in skips if skip.partition == "a" for n in range(skip.begin, skip.end)}
    assert left == [n for n in range(begin, end) if n not in skipped]
    assert all(first < last for first, last in found)
    assert after_skips("a", begin, skips) == next(n for n in range(begin, 99) if n not in skipped)


def test_a_partition_keeps_facts_of_the_source():
    now = seen("a", 30, begin=4, final=True)
    assert present_partitions(met(seen("a")), [now], {"a": 9}, []) == [replace(now, start=0)]
