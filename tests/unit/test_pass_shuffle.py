"""Shuffled passes: one permutation for any number of trainers, against a plain sort; and what is refused."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.loader.pass_shuffle import PassShuffle, RankShare, joined, shuffled_places
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.stream.source import Segment
from headrace.keys import key_of_reference
from headrace.seeds import derive
from headrace.trainer.journal.pass_plan import divide, part_sizes

SEGMENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=4)


def segments_of(drawn):
    return [Segment(f"p/{number}", number, begin, begin + size) for number, (begin, size) in enumerate(drawn)]


def order_reference(segments, seed, pass_number):
    """Partition and position of each event, in shuffled order."""
    of_pass = derive(seed, "shuffle", pass_number)
    all_ = [(each.partition, position) for each in segments for position in range(each.begin, each.end)]
    return sorted(all_, key=lambda each: key_of_reference((derive(of_pass, each[0]) + each[1]) % (1 << 64), 0))


def samples_of(segment, positions):
    """Two samples for each event, whose signs tell them apart."""
    event_B = np.repeat(np.array(positions, np.int64), 2)
    sign_B = np.arange(len(event_B), dtype=np.uint64) % np.uint64(2) + (1000 * segment.number + 2 * event_B).astype(
        np.uint64
    )
    column = Ragged(sign_B, np.arange(len(event_B) + 1))
    return Samples({"s": column}, {}, {}, event_B, np.full(len(event_B), np.nan))


def read(share, pass_number, segments):
    """Signs of one trainer's samples in order."""
    shuffle = PassShuffle(share, pass_number, segments)
    placed = []
    for segment in shuffle.segments:
        own_N = shuffle.own(segment)
        positions = np.arange(segment.begin, segment.end)
        placed.append(shuffle.placed(segment, samples_of(segment, positions if own_N is None else positions[own_N])))
    return [sign for block in shuffle.in_order(placed) for sign in block.sparse["s"].values_N.tolist()]


@settings(deadline=None)
@given(SEGMENTS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 9))
def test_the_trainers_together_have_one_order_whatever_their_number(drawn, world, seed, pass_number):
    segments = segments_of(drawn)
    total = sum(each.end - each.begin for each in segments)
    ranks = divide(segments, part_sizes(total, world))  # as a plan divides them
    flat = [each for rank in ranks for each in rank]
    parts = [read(RankShare(seed, rank, world), pass_number, flat) for rank in range(world)]
    expected = [
        1000 * int(name.removeprefix("p/")) + 2 * position + which
        for name, position in order_reference(segments, seed, pass_number)
        for which in (0, 1)
    ]
    assert [sign for part in parts for sign in part] == expected
    assert [len(part) // 2 for part in parts] == [
        total * (rank + 1) // world - total * rank // world for rank in range(world)
    ]


def test_each_pass_has_an_order_of_its_own_which_is_the_same_again():
    segments = [Segment("p/0", 0, 0, 50)]
    once, again, other, seeded = (
        shuffled_places(segments, derive(seed, "shuffle", number))[0].tolist()
        for seed, number in ((1, 1), (1, 1), (1, 2), (2, 1))
    )
    assert once == again and sorted(once) == list(range(50))
    assert once != other and once != seeded and once != sorted(once)


def test_parts_of_ranks_are_one_segment_again():
    parts = [Segment("b", 1, 4, 9), Segment("a", 0, 5, 7), Segment("a", 0, 0, 5), Segment("b", 1, 10, 12)]
    assert joined(parts) == [Segment("a", 0, 0, 7), Segment("b", 1, 4, 9), Segment("b", 1, 10, 12)]


def test_a_pass_without_events_has_no_samples():
    assert read(RankShare(1, 0, 2), 1, []) == []
