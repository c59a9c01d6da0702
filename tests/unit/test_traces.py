"""Combinations of signs are searched whole, in pieces, as their plain definitions make them."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.features.feature_kernels import crossed_reference
from headrace.deadline import Deadline
from headrace.keys import key_of_reference
from headrace.service.tables import traces

PARTS = st.lists(st.lists(st.integers(0, (1 << 64) - 1), max_size=5), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(traces, "PIECE", 4)


def searched(parts, groups):
    search = traces._Search(None, SimpleNamespace(deadline=Deadline.after(60)), "a", traces.NO_KEYS)
    given = [(np.array(part, np.uint64), group) for part, group in zip(parts, groups, strict=True)]
    return [int(each) for piece in search._chained("pairs", given) for each in piece], search.notes


@given(PARTS)
def test_crosses_are_those_of_the_pipe(parts):
    found, notes = searched(parts, [traces.CROSS_GROUP] * len(parts))
    assert sorted(found) == sorted(crossed_reference(list(each)) for each in product(*parts)) and notes == []


@given(PARTS, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_keys_of_pairs_are_those_of_counters(parts, groups):
    def key_of(signs):
        key = 0
        for sign, group in zip(signs, groups, strict=False):
            key = key_of_reference(sign ^ key, group)
        return key

    assert sorted(searched(parts, groups[: len(parts)])[0]) == sorted(map(key_of, product(*parts)))


def test_a_cross_with_too_many_combinations_is_named_and_not_searched(monkeypatch):
    monkeypatch.setattr(traces, "MAX_COMBINATIONS", 5)
    found, [note] = searched([[1, 2], [3, 4, 5]], [0, 0])
    assert (
        found == []
        and note == "slot pairs: 6 combinations are too many to search; forget each by the values of all parts"
    )
