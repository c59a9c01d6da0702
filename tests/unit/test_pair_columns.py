"""The ids of slots with `pairs`: those of their plain twin, whatever the samples have; and what such slots may say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import validate
from headrace.dataset.features.feature_kernels import crossed_reference
from headrace.dataset.features.pair_columns import MAX_CROSSED, pair_column
from headrace.dataset.samples.batch import Ragged
from headrace.dataset.spec.config import SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.keys import sign_of_text
from headrace.lists import offsets_of

PAIRS = [("a", "b"), ("c", "a")]


def pair_column_reference(samples: list[dict[str, list[int]]], pairs: list[tuple[str, str]]) -> list[list[int]]:
    """The plain twin of `pair_column`."""
    return [
        [
            crossed_reference([sign_of_text(f"{one},{other}".encode()), first, second])
            for one, other in pairs
            for first in sample[one][:MAX_CROSSED]
            for second in sample[other][:MAX_CROSSED]
        ]
        for sample in samples
    ]


def ragged(lists: list[list[int]]) -> Ragged:
    values = np.array([each for ids in lists for each in ids], np.uint64)
    return Ragged(values, offsets_of(np.array([len(ids) for ids in lists], np.int64)))


SIGNS = st.integers(0, (1 << 64) - 1)
SINGLE = st.fixed_dictionaries({name: SIGNS.map(lambda sign: [sign]) for name in "abc"})
LISTS = st.fixed_dictionaries({name: st.lists(SIGNS, max_size=3) for name in "abc"})


@given(st.lists(SINGLE, min_size=1, max_size=5) | st.lists(LISTS, min_size=1, max_size=5), st.booleans())
def test_the_ids_are_those_of_the_twin(samples, long):
    if long:
        samples[0] = {**samples[0], "a": list(range(MAX_CROSSED + 3))}
    (slot,) = Schema.of([SparseSlot(name="x", pairs=PAIRS)]).crossed
    found = pair_column({name: ragged([sample[name] for sample in samples]) for name in "abc"}, slot)
    lists = [part.tolist() for part in np.split(found.values_N, found.offset_B1[1:-1])]
    assert lists == pair_column_reference(samples, PAIRS)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"pairs": [["a", "a"]]}, "with itself"),
        ({"pairs": [["a", "b"], ["b", "a"]]}, "one pair twice"),
        ({"pairs": PAIRS, "pooling": "none", "max_len": 2}, "do not go with"),
        ({"pairs": PAIRS, "values": "string"}, "need a name of their own"),
    ],
)
def test_what_pairs_refuse(keys, why):
    with pytest.raises(SpecError, match=why):
        validate(SparseSlot, {"name": "x", **keys})


def test_a_slot_without_pairs_is_written_as_before_there_were_any():
    assert "pairs" not in SparseSlot(name="x").model_dump()
