"""Where the slices of the dense parameters are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.protocol.placement import Placement
from headrace.pserver.protocol.shards import Keys
from headrace.trainer.dense.shard_slices import keys_of


@given(num_slices=st.integers(1, 30_000), num_shards=st.integers(1, 16))
def test_all_shards_have_about_as_many_slices(num_slices, num_shards):
    keys_U = keys_of(num_slices)
    assert len(np.unique(keys_U)) == num_slices
    parts = Placement.even(num_shards).route(Keys(keys_U, np.zeros(num_slices, np.uint16)))
    counts = [len(part.keys.keys_U) for part in parts]
    assert max(counts) - min(counts) <= 4 + num_slices // 100


def test_their_keys_never_change():
    """Commits have rows by these keys."""
    assert keys_of(3).tolist() == [0, 2531, 5062]
