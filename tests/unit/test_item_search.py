"""Exact search equals its plain twin bit by bit: which items, in which order, with which scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.serving.item_search_kernels import LANES, rounded, search, search_reference


def found(vectors_IV, open_I, user_BV, most, after=None):
    num_users = len(user_BV)
    score_BK, at_BK = np.zeros((num_users, most), np.float32), np.zeros((num_users, most), np.int64)
    count_B = np.zeros(num_users, np.int64)
    after_B = np.full(num_users, np.inf, np.float32) if after is None else np.array([after[0]], np.float32)
    at_B = np.full(num_users, -1) if after is None else np.array([after[1]])
    search(vectors_IV, *rounded(vectors_IV), open_I, user_BV, after_B, at_B, score_BK, at_BK, count_B)
    return [(score_BK[b, :n].tolist(), at_BK[b, :n].tolist()) for b, n in enumerate(count_B)]


def wanted(*asked):
    with np.errstate(over="ignore", invalid="ignore"):
        return tuple(each.tolist() for each in search_reference(*asked))


VALUES = (
    lambda rng, shape: rng.integers(-2, 3, shape) / 3,  # many scores are equal
    lambda rng, shape: rng.normal(size=shape),
    lambda rng, shape: 1 + 1e-6 * rng.normal(size=shape),  # rounded, all are equal
    lambda rng, shape: rng.normal(size=shape) * 10.0 ** rng.integers(-44, 18, shape),  # rounded, most numbers are 0
    lambda rng, shape: rng.choice([-3e37, 1e37, 3e37], shape),  # some sums overflow, and are infinite or nan
    lambda rng, shape: rng.normal(size=shape) * 10.0 ** rng.integers(30, 37, shape),
)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_items=st.sampled_from([1, 2, 30, LANES - 1, LANES, LANES + 1, 9 * LANES + 7]),
    length=st.integers(1, 9),
    most=st.sampled_from([1, 2, 10, 50]),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    values=st.sampled_from(VALUES),
    size=st.sampled_from([1.0, 10.0, 1e36]),
)
def test_the_best_items_are_those_of_the_plain_twin(seed, num_items, length, most, share, values, size):
    rng = np.random.default_rng(seed)
    vectors_IV = values(rng, (num_items, length)).astype(np.float32)
    open_I, user_BV = rng.random(num_items) < share, (size * rng.normal(size=(3, length))).astype(np.float32)
    user_BV[1] = 0
    first = found(vectors_IV, open_I, user_BV, most)
    assert first == [wanted(vectors_IV, open_I, user_V, most) for user_V in user_BV]
    for user_V, (scores, places) in zip(user_BV, first, strict=True):
        if scores:
            next_page = found(vectors_IV, open_I, user_V[None], most, (scores[-1], places[-1]))
            assert next_page == [wanted(vectors_IV, open_I, user_V, most, scores[-1], places[-1])]


@pytest.mark.parametrize("most", [1, 7, 100])
def test_pages_one_after_another_are_all_items_each_once(most):
    rng = np.random.default_rng(1)
    vectors_IV = (rng.integers(-1, 2, (LANES + 100, 3)) / 3).astype(np.float32)
    user_BV, open_I = rng.normal(size=(1, 3)).astype(np.float32), np.ones(len(vectors_IV), np.bool_)
    seen, after = [], None
    while (page := found(vectors_IV, open_I, user_BV, most, after)[0])[1]:
        seen += page[1]
        after = page[0][-1], page[1][-1]
    assert seen == wanted(vectors_IV, open_I, user_BV[0], len(vectors_IV))[1]
