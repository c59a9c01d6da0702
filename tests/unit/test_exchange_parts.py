"""How an exchange is split: each row is in one message, and the order is that of the priority."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.config import DENSE_SLICES
from headrace.pserver.protocol.parts import WHOLE, Part, Split

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=4)


def test_without_a_split_one_message_has_all_rows():
    assert WHOLE.of("default") == WHOLE.of(DENSE_SLICES) == slice(None)


@given(COUNTS, st.integers(1, 50), st.booleans())
def test_every_slice_and_all_other_rows_are_in_one_message(counts, slices_each, rows_first):
    messages = list(Split(counts, slices_each, rows_first))
    for shard, count in enumerate(counts):
        mine = [part for other, part in messages if other == shard]
        chosen = [list(range(count))[places] for part in mine if (places := part.of(DENSE_SLICES)) is not None]
        assert sorted(sum(chosen, [])) == list(range(count)) and all(len(each) <= slices_each for each in chosen)
        assert [part.of("default") for part in mine if part.of("default") is not None] == [slice(None)]
        assert sorted(part.number for part in mine) == list(range(len(mine))), "each has an order of its own"


def test_the_rows_and_the_first_layers_travel_first():
    parts = [(shard, part.number, part.begin, part.end) for shard, part in Split([3, 2], 2, rows_first=True)]
    assert parts == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 2), (1, 1, 0, 2), (0, 2, 2, 3)]


def test_first_in_first_out_is_the_order_of_the_backward_pass():
    parts = [(shard, part.number) for shard, part in Split([3, 2], 2, rows_first=False)]
    assert parts == [(0, 2), (1, 1), (0, 1), (0, 0), (1, 0)]


def test_a_part_of_slices_has_no_other_rows():
    assert Part(True, 2, 2, 3).of("default") is None and Part(True).of(DENSE_SLICES) is None
