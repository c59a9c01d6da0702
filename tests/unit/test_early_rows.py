"""Which rows are early: those of a rank's next batch that no rank has in its batch of the step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.config import DENSE_SLICES
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.shards import Keys
from headrace.pserver.server.early_rows import EarlyRows
from headrace.pserver.server.pushes import ResolvedBatch

ROWS = st.lists(st.integers(0, 12), max_size=8, unique=True)


def batch(rows, **more):
    found = {"default": np.array(rows, np.int32)} | {name: np.array(r, np.int32) for name, r in more.items()}
    return ResolvedBatch(True, found, {})


@given(st.lists(st.tuples(st.none() | ROWS, st.none() | ROWS), min_size=1, max_size=4), st.randoms())
def test_early_rows_are_those_that_no_batch_of_the_step_has(ranks, random):
    early, order = EarlyRows(len(ranks)), list(range(len(ranks)))
    random.shuffle(order)
    for place, rank in enumerate(order):
        assert not early.may_answer(0) and early.missing() == sorted(order[place:])
        learnt, wanted = (None if rows is None else batch(rows) for rows in ranks[rank])
        early.ask(0, rank, learnt, wanted, None if wanted is None else 7)
    assert early.may_answer(0) and early.missing() == []
    used = {row for learnt, _ in ranks for row in learnt or ()}
    for rank, (_, wanted) in enumerate(ranks):
        masks = early.of(rank, 7)
        assert (wanted is None) == (masks == {})
        if wanted is not None:
            assert masks["default"].tolist() == [row not in used for row in wanted]


def test_neither_slices_nor_rows_that_the_step_may_make_are_early():
    early, nothing = EarlyRows(1), Keys(np.array([5], np.uint64), np.zeros(1, np.uint16))
    wanted = ResolvedBatch(True, batch([1, 2], picky=[-1], **{DENSE_SLICES: [0, 1]}).rows, {"picky": nothing})
    early.ask(0, 0, batch([2]), wanted, 3)
    assert {name: mask.tolist() for name, mask in early.of(0, 3).items()} == {"default": [True, False]}
    assert early.of(0, 2) == {}, "of another batch nothing is known"


def test_a_repeat_changes_nothing_and_no_step_is_left_out():
    early = EarlyRows(2)
    early.ask(0, 0, batch([1]), batch([1, 2]), 5)
    early.ask(0, 0, None, None, None)
    with pytest.raises(InvalidShardCall, match="early rows of step 1, while ranks ask for those of step 0"):
        early.ask(1, 0, None, None, None)
    early.ask(0, 1, None, None, None)
    assert early.of(0, 5)["default"].tolist() == [False, True]
    early.ask(1, 1, None, None, None)
    assert early.may_answer(0) and not early.may_answer(1)
    with pytest.raises(InvalidShardCall, match="early rows of step 0, while ranks ask for those of step 1"):
        early.ask(0, 0, None, None, None)
