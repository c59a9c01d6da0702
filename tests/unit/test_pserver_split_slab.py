"""Rows whose vector joins later: kernels and their twins, the push at which it joins, the memory that is saved."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.config import SlotLife, TableSection
from headrace.pserver.protocol.shards import Gradients
from headrace.pserver.protocol.table_operations import ForgetRow, SetTables
from headrace.pserver.row_optimizers import Adagrad, Adam, Ftrl, Sgd
from headrace.pserver.rows import row_format, split_slab
from headrace.pserver.rows.kernels import EMPTY
from headrace.pserver.rows.row_settings import optimizer_of
from headrace.pserver.rows.table_rows import frozen
from headrace.pserver.tables.table import ShardTable

PLAIN = TableSection(dim=3, init_range=0.5, optimizer=Adagrad(per="element", lr=0.5))
LATER = PLAIN.model_copy(update={"extend_at": 1.0})
OPTIMIZERS = [Sgd(kind="sgd"), Adagrad(per="element"), Adagrad(), Adam(kind="adam"), Ftrl(kind="ftrl", l1=0.01)]
NAMES = ["sgd", "adagrad-element", "adagrad-row", "adam", "ftrl"]


def keys(count, seed=0):
    return np.unique(np.random.default_rng(seed).integers(1, 2**63, count).astype(np.uint64))


def reserve(table, keys_U, group=0):
    return frozen(table.rows.reserve(keys_U, np.full(len(keys_U), group, np.uint16)))


def push(table, rows_U, version, value=1.0, show=1.0, click=0.0):
    grads_UD = np.full((len(rows_U), table.rows.num_weights), value, np.float32)
    records = (grads_UD, *(np.full(len(rows_U), each, np.float32) for each in (show, click)))
    table.apply(rows_U, Gradients(*map(frozen, records)), 1, version)


def weights(table, keys_U):
    return table.gather_present(frozen(table.rows.find(keys_U)))


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- kernels ----------------------------------------------------------------------------------------------------------

NUMBERS = st.lists(st.one_of(st.just(EMPTY), st.integers(0, 4)), min_size=6, max_size=6)
ROWS = st.lists(st.integers(0, 5), unique=True, min_size=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@given(number_R=NUMBERS, rows=ROWS, seed=st.integers(0, 99), dim=st.integers(1, 5))
def test_a_row_is_put_together_and_taken_apart_as_its_twin_says(optimizer, number_R, rows, seed, dim):
    parts_W = optimizer_of(LATER.model_copy(update={"optimizer": optimizer, "dim": dim})).parts_W
    head_H, vector_X = (np.flatnonzero(parts_W == part) for part in (0, 1))
    heads, vectors = drawn(seed, 6, len(head_H)), drawn(seed + 1, 5, len(vector_X))
    vector_R, rows_U = np.array(number_R, np.int32), frozen(np.array(rows, np.int32))
    whole = [
        split_slab.take_reference(heads[r], None if number_R[r] == EMPTY else vectors[number_R[r]], parts_W)
        for r in rows
    ]
    out = np.full((len(rows), len(parts_W)), np.nan, np.float32)
    split_slab.take(heads, vector_R, vectors, head_H, vector_X, rows_U, 0, len(rows), out)
    assert out.tolist() == np.array(whole).tolist()
    read = np.full((len(rows), 1 + dim), np.nan, np.float32)
    split_slab.gather(heads, vector_R, vectors, rows_U, 0, len(rows), read)
    assert read.tolist() == out[:, : 1 + dim].tolist()
    others = np.zeros_like(heads), np.zeros_like(vectors)
    split_slab.put(others[0], vector_R, others[1], head_H, vector_X, rows_U, 0, len(rows), out)
    again = np.empty_like(out)
    split_slab.take(others[0], vector_R, others[1], head_H, vector_X, rows_U, 0, len(rows), again)
    assert again.tolist() == out.tolist() and not others[0][[r for r in range(6) if r not in rows]].any()


@given(number_R=NUMBERS, rows=ROWS, seed=st.integers(0, 99))
def test_vectors_join_where_the_score_is_high_enough(number_R, rows, seed):
    show_R, click_R = np.abs(drawn(seed, 6)), np.abs(drawn(seed + 1, 6))
    group_R = np.arange(6, dtype=np.uint16) % 2
    extend_G, out = np.array([0.5, -np.inf], np.float32), np.empty(len(rows), np.int32)
    coefficients = np.float32(0.1), np.float32(1)
    statistics = show_R, click_R, group_R
    count = split_slab.joining(
        np.array(number_R, np.int32), statistics, frozen(np.array(rows, np.int32)), extend_G, *coefficients, out
    )
    scores = list((show_R - click_R) * coefficients[0] + click_R * coefficients[1])
    without, extend = [number == EMPTY for number in number_R], [float(extend_G[group]) for group in group_R]
    assert out[:count].tolist() == split_slab.joining_reference(rows, without, scores, extend)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_parts_cover_every_float_of_a_row(optimizer):
    for dim in (1, 4):
        section = LATER.model_copy(update={"optimizer": optimizer, "dim": dim})
        whole = optimizer_of(section)
        assert len(whole.parts_W) == 1 + dim + len(whole.start_state)
        assert (whole.parts_W[: 1 + dim] == [0] + [1] * dim).all() and whole.parts_W[-1] == 2
        assert 2 not in optimizer_of(section.model_copy(update={"extend_at": None})).parts_W


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@given(
    pushes=st.lists(
        st.tuples(st.lists(st.integers(0, 29), unique=True, min_size=1), st.integers(0, 99)), min_size=1, max_size=6
    )
)
def test_rows_born_whole_in_a_split_table_have_the_bits_of_a_plain_one(optimizer, pushes):
    plain = PLAIN.model_copy(update={"optimizer": optimizer})
    split = plain.model_copy(update={"slots": {"other": SlotLife(extend_at=1.0)}})
    tables = [ShardTable("t", section, 1, groups={"other": 9}) for section in (plain, split)]
    for version, (chosen, seed) in enumerate(pushes, 1):
        keys_U, grads_UD = keys(30)[chosen], frozen(drawn(seed, len(chosen), 4))
        one_U = frozen(np.ones(len(chosen), np.float32))
        read = []
        for table in tables:
            rows_U = reserve(table, keys_U)
            read.append(table.gather(rows_U).tolist())
            table.apply(rows_U, Gradients(grads_UD, one_U, one_U), 1, version)
        assert read[0] == read[1]
    assert weights(tables[0], keys(30)).tolist() == weights(tables[1], keys(30)).tolist()
    taken = []
    for table in tables:
        table.close_pass(0)
        snapshot = table.snapshots.take()
        taken.append(dict(zip(snapshot.keys_U.tolist(), snapshot.words_UW.tolist(), strict=True)))
    one = int(np.float32(1).view(np.uint32))
    assert {key: [*words, one] for key, words in taken[0].items()} == taken[1]


def test_the_push_that_crosses_adds_the_initial_vector_and_its_gradient_is_dropped():
    table, whole, keys_U = ShardTable("t", LATER, 1), ShardTable("t", PLAIN, 1), keys(5)
    rows_U, born_UD = reserve(table, keys_U), whole.gather(reserve(whole, keys_U))
    assert not table.gather(rows_U).any()
    push(table, rows_U, 1, show=9.0)  # scores 0.9
    before = table.gather(rows_U)
    assert before[:, 0].all() and not before[:, 1:].any()
    push(table, frozen(rows_U[:3]), 1, click=1.0)
    crossed = table.gather(rows_U)
    assert (crossed[:3, 1:] == born_UD[:3, 1:]).all() and (crossed[:3, 0] < before[:3, 0]).all()
    assert (crossed[3:] == before[3:]).all()
    push(table, rows_U, 1)
    after = table.gather(rows_U)
    assert (after[:3] != crossed[:3]).all() and (after[:3, 1:] == crossed[:3, 1:] - 0.5).all()


def test_a_threshold_of_nothing_is_crossed_by_the_first_push():
    table, keys_U = ShardTable("t", PLAIN.model_copy(update={"extend_at": 0.0}), 1), keys(5)
    rows_U = reserve(table, keys_U)
    assert not table.gather(rows_U).any()
    push(table, rows_U, 1, show=0.0)
    assert table.gather(rows_U).all()


def test_a_vector_stays_when_the_score_decays_and_joins_where_the_threshold_is_lowered():
    table, keys_U = ShardTable("t", LATER, 1), keys(6)
    rows_U = reserve(table, keys_U)
    push(table, rows_U, 1, show=4.0)
    push(table, frozen(rows_U[:2]), 1, show=10.0)
    table.close_pass(60)
    push(table, rows_U, 2, show=0.0)
    assert table.gather(rows_U)[:, 1:].any(axis=1).tolist() == [True] * 2 + [False] * 4
    table.operate(SetTables(tables={"t": LATER.model_copy(update={"extend_at": 0.01}).model_dump(mode="json")}), 2)
    push(table, frozen(rows_U[2:]), 3)
    assert table.gather(rows_U)[:, 1:].any(axis=1).all()


def test_rows_of_a_commit_tell_whether_they_have_a_vector():
    table, keys_U = ShardTable("t", LATER, 1), keys(4)
    rows_U = reserve(table, keys_U)
    push(table, rows_U, 1)
    push(table, frozen(rows_U[:1]), 1, click=1.0)
    table.close_pass(0)
    taken = table.snapshots.take()
    floats_UW = taken.words_UW[:, row_format.HEAD :].view(np.float32)
    assert (
        row_format.FORMAT == 1
        and floats_UW.shape == (4, 4 + 4 + 1)
        and table.snapshots.num_words == row_format.HEAD + 9
    )
    with_vector = taken.keys_U == keys_U[0]
    assert (floats_UW[:, -1] == with_vector).all() and (floats_UW[:, 1:4].any(axis=1) == with_vector).all()
    assert not floats_UW[~with_vector, 5:8].any() and floats_UW[:, 0].all() and floats_UW[:, 4].all()


def test_numbers_of_vectors_are_used_again():
    table, keys_U = ShardTable("t", LATER, 1), keys(50)
    for version in range(1, 9):
        rows_U = reserve(table, keys_U)
        push(table, rows_U, version, click=1.0)
        table.rows.release(rows_U)
        table.close_pass(0)
        assert table.rows.floats.num_vectors == len(keys_U)
        for key in keys_U.tolist():
            table.operate(ForgetRow(table="t", group=0, key=key), version)
        assert table.rows.floats.num_vectors == table.deletions.num_rows == 0
    assert table.rows.floats.more_bytes == 50 * 4 * 6


def test_rows_without_vectors_take_less_than_half_of_the_memory():
    keys_U, num_bytes = keys(100_000), []
    for section, click in (
        (TableSection(), 0.0),
        (TableSection(extend_at=1.0), 0.0),
        (TableSection(extend_at=1.0), 1.0),
    ):
        table = ShardTable("t", section, 1)
        rows_U = reserve(table, keys_U)
        push(table, rows_U, 1, click=click)
        num_bytes.append(table.stats().num_bytes - table.rows.index_I.nbytes)
    plain, without, whole = num_bytes
    assert without < 0.4 * plain and whole < 1.05 * plain


def test_two_threads_give_the_bits_of_one():
    with ThreadPoolExecutor(1) as pool:
        tables = [ShardTable("t", LATER, 1), ShardTable("t", LATER, 1, pool)]
        keys_U = keys(20_000)
        for table in tables:
            rows_U = reserve(table, keys_U)
            push(table, rows_U, 1)
            push(table, frozen(rows_U[::2]), 1, click=1.0)
            push(table, rows_U, 1)
        assert tables[0].overview.digest() == tables[1].overview.digest() != 0


def test_vectors_that_move_in_one_thread_while_others_come_in_another_are_not_lost(monkeypatch):
    monkeypatch.setattr(split_slab, "START_VECTORS", 2)
    section = PLAIN.model_copy(update={"slots": {"other": SlotLife(extend_at=3.0, lr=0.25)}})
    tables = [ShardTable("t", section, 1, groups={"other": 1}) for _ in range(2)]

    def learn(table, version):
        rows_U = reserve(table, keys(60, version % 40), group=version % 2)
        push(table, rows_U, version, click=1.0)
        table.rows.release(rows_U)

    ahead = [keys(500, 1000 + seed) for seed in range(40)]
    loader = threading.Thread(target=lambda: [reserve(tables[0], keys_U) for keys_U in ahead])
    loader.start()
    for version in range(1, 120):
        learn(tables[0], version)
    loader.join()
    for version in range(1, 120):
        learn(tables[1], version)
    assert tables[0].overview.digest() == tables[1].overview.digest()
    born, alone = ShardTable("t", PLAIN, 1), ahead[7]
    assert tables[0].gather(reserve(tables[0], alone)).tolist() == born.gather(reserve(born, alone)).tolist()
