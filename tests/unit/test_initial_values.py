"""Initial values of rows are stated functions of seed, table and key, the same on every machine."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.keys import GOLDEN, MASK, mix_reference
from headrace.pserver.config import Initial, SlotLife, TableSection
from headrace.pserver.row_optimizers import Ftrl
from headrace.pserver.rows.initial_values import (
    DRAWS,
    NORMAL,
    UNIFORM,
    initial_vector_reference,
    initialise,
    normal_quantile,
    spread_of,
    table_seed_of,
)
from headrace.pserver.rows.row_settings import RowSettings

KEYS = st.one_of(st.integers(0, MASK), st.integers(0, 40).map(lambda n: MASK - n))
GOLDEN_VECTORS = {
    Initial.UNIFORM: ["0x1.29a1600000000p-1", "-0x1.ca84e80000000p-1", "-0x1.d15cf00000000p-2"],
    Initial.NORMAL: ["0x1.9e0d440000000p-1", "-0x1.9fa6320000000p+0", "-0x1.357a940000000p-1"],
    Initial.ZEROS: ["0x0.0p+0"] * 3,
}


def drawn(keys, init, dim, spread=1.0, seed=3):
    slab = np.full((len(keys), dim), np.nan, np.float32)
    spreads, draws = np.full(1, spread, np.float32), np.full(1, DRAWS[init], np.int8)
    groups, start = np.zeros(len(keys), np.uint16), np.zeros(dim, np.float32)
    initialise(slab, np.array(keys, np.uint64), groups, 0, len(keys), 0, dim, start, spreads, draws, np.uint64(seed))
    return slab


@given(
    st.lists(KEYS, min_size=1, max_size=9),
    st.integers(0, 1),
    st.integers(0, 20),
    st.integers(0, MASK),
    st.sampled_from(Initial),
)
def test_initial_values_are_the_stated_function_of_key_element_and_seed(batch, first_order, dim, seed, init):
    keys, weights, draw = np.array(batch, np.uint64), first_order + dim, DRAWS[init]
    start = np.concatenate([np.zeros(weights, np.float32), np.array([5, 6], np.float32)])
    slab = np.full((len(batch), weights + 2), np.nan, np.float32)
    groups, spreads, draws = np.zeros(len(batch), np.uint16), np.full(1, 0.01, np.float32), np.full(1, draw, np.int8)
    initialise(slab, keys, groups, 0, len(batch), first_order, weights, start, spreads, draws, np.uint64(seed))
    for key, row in zip(batch, slab, strict=True):
        assert row[:first_order].tolist() == [0] * first_order
        expected = initial_vector_reference(key, dim, 0.01, seed, draw)
        assert row[first_order:weights].view(np.uint32).tolist() == expected.view(np.uint32).tolist()
        assert row[weights:].tolist() == [5, 6]


@pytest.mark.parametrize("init", GOLDEN_VECTORS)
def test_initial_values_never_change(init):
    """Golden: a stored model's unseen keys must read the same in every later version."""
    vector = initial_vector_reference(mix_reference(GOLDEN), 3, 1.0, 42, DRAWS[init])
    assert [float(x).hex() for x in vector] == GOLDEN_VECTORS[init]
    assert drawn([mix_reference(GOLDEN)], init, 3, seed=42)[0].tolist() == vector.tolist()


@pytest.mark.parametrize(("init", "variance"), [(Initial.UNIFORM, 1 / 3), (Initial.NORMAL, 1.0)])
def test_initial_values_spread_evenly(init, variance):
    slab = drawn(np.random.default_rng(1).integers(0, 2**63, 4000), init, 8)
    assert abs(slab.mean()) < 0.01 * math.sqrt(3 * variance) and abs(slab.var() / variance - 1) < 0.03
    assert abs(np.corrcoef(slab.T) - np.eye(8)).max() < 0.07


def test_normal_values_have_the_quantiles_of_the_normal_distribution():
    slab = np.sort(drawn(np.random.default_rng(1).integers(0, 2**63, 4000), Initial.NORMAL, 8).ravel())
    shares = (np.arange(len(slab)) + 0.5) / len(slab)
    theirs = np.array([NormalDist().cdf(value) for value in slab.tolist()])
    assert abs(theirs - shares).max() < 1.63 / math.sqrt(len(slab)), "Kolmogorov's test at 1 %"


@given(st.integers(0, (1 << 24) - 1))
def test_the_normal_quantile_is_within_a_millionth(k):
    p = (k + 0.5) / 2**24
    assert normal_quantile(p) == normal_quantile.py_func(p) == -normal_quantile(1 - p)
    assert normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-6, abs=1e-12)


def test_xavier_is_uniform_in_the_bound_of_its_source():
    """As torch.nn.init.xavier_uniform_ of a (dim, 1) matrix: one key in, `dim` elements out."""
    section = TableSection(dim=5, init="xavier", init_range=7.0)
    assert DRAWS[section.init] == UNIFORM and spread_of(section) == 1.0
    assert DRAWS[Initial.NORMAL] == NORMAL and spread_of(TableSection(dim=5, init="normal", init_range=7.0)) == 7.0


def test_a_slot_has_an_initialiser_of_its_own():
    section = TableSection(
        dim=4,
        init="normal",
        init_range=0.5,
        slots={"zero": SlotLife(init="zeros"), "wide": SlotLife(init="uniform", init_range=2.0)},
    )
    settings, seed = RowSettings.of(section, {"other": 0, "zero": 1, "wide": 2}), table_seed_of("t", 1)
    keys = np.arange(3, dtype=np.uint64)
    slab = np.empty((3, len(settings.start_W)), np.float32)
    settings.initialise(slab, keys, np.arange(3, dtype=np.uint16), 0, 3, seed)
    seed = int(seed)
    assert slab[0, 1:5].tolist() == initial_vector_reference(0, 4, 0.5, seed, NORMAL).tolist()
    assert slab[1, 1:5].tolist() == [0] * 4
    assert slab[2, 1:5].tolist() == initial_vector_reference(2, 4, 2.0, seed).tolist()


def test_ftrl_begins_at_the_drawn_vector():
    section = TableSection(dim=4, init="normal", init_range=0.5, optimizer=Ftrl(kind="ftrl", l1=0.1, l2=0.2))
    settings, seed = RowSettings.of(section, {}), table_seed_of("t", 1)
    slab = np.empty((1, len(settings.start_W)), np.float32)
    settings.initialise(slab, np.array([9], np.uint64), np.zeros(1, np.uint16), 0, 1, seed)
    assert slab[0, 1:5].tolist() == initial_vector_reference(9, 4, 0.5, int(seed), NORMAL).tolist()
    assert (slab[0, 6:10] != 0).all(), "z holds it"
