"""The clock that chooses rows to evict, and their removal from the index, equal their plain twins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.keys import MASK
from headrace.pserver.rows import eviction, kernels
from headrace.pserver.rows.eviction import FREE, MAX_USES
from headrace.pserver.rows.table_rows import frozen

# Keys that share their top bits, so that runs of slots are long and go around the end of the index.
KEYS = st.one_of(
    st.integers(0, MASK),
    st.sampled_from([n << 60 for n in range(16)]),
    st.integers(0, 40).map(lambda n: MASK - n),
    st.integers(0, 40),
)


@given(st.lists(KEYS, unique=True, min_size=1, max_size=38), st.data())
def test_rows_that_left_are_not_found_and_all_others_are(keys, data):
    keys_R, index_I = np.array(keys, np.uint64), np.full(64, kernels.EMPTY, np.int32)
    changed = data.draw(st.lists(st.integers(0, 2), min_size=len(keys), max_size=len(keys)))
    changed_R, pins_R = np.array(changed, np.uint32), np.zeros(len(keys), np.uint16)
    kernels.rebuild_index(index_I, keys_R, len(keys))
    row_of = {key: row for row, key in enumerate(keys)}
    for _ in range(3):
        rows = data.draw(st.lists(st.sampled_from(sorted(row_of.values())), unique=True)) if row_of else []
        present = eviction.leave(index_I, keys_R, changed_R, pins_R, np.array(rows, np.int32))
        assert present == eviction.leave_reference(row_of, changed, rows)
        found_U = np.empty(len(keys), np.int32)
        kernels.find(index_I, keys_R, frozen(np.array(keys, np.uint64)), found_U)
        assert found_U.tolist() == [row_of.get(key, kernels.EMPTY) for key in keys]
        assert (pins_R[rows] == FREE).all() and not changed_R[rows].any()
        back = data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []
        kernels.enter(index_I, keys_R, np.array(back, np.int32))
        row_of |= {keys[row]: row for row in back}
        changed_R[back] = np.array(changed)[back]
    assert (index_I != kernels.EMPTY).sum() == len(row_of)


@given(st.data(), st.integers(1, 20))
def test_the_hand_passes_rows_as_its_twin(data, num_rows):
    def drawn(values):
        return data.draw(st.lists(st.sampled_from(values), min_size=num_rows, max_size=num_rows))

    uses, marks, changed = drawn([0, 0, 1, 3]), drawn([0, 0, 1]), drawn([0, 5, 6])
    pins = drawn([0, 0, 0, 2, int(FREE)])
    stays = [bool(pins[row] or marks[row] or changed[row] == 6) for row in range(num_rows)]
    max_looks, max_rows = data.draw(st.integers(0, num_rows)), data.draw(st.integers(0, num_rows))
    hand, rows_U, uses_R = data.draw(st.integers(0, num_rows)), np.empty(max_rows, np.int32), np.array(uses, np.uint8)
    arrays = uses_R, np.array(pins, np.uint16), np.array(marks, np.uint8), np.array(changed, np.uint32)
    mine = eviction.sweep(hand, num_rows, max_looks, *arrays, np.uint32(6), rows_U)
    after, looks, chosen = eviction.sweep_reference(hand, max_looks, max_rows, uses, stays)
    assert (mine[1], rows_U[: mine[2]].tolist(), uses_R.tolist()) == (looks, chosen, uses)
    assert mine[0] % num_rows == after % num_rows


@given(st.lists(st.lists(st.sampled_from([kernels.EMPTY, 0, 1, 2, 3]), unique=True), max_size=6))
def test_pins_and_uses_count_batches(batches):
    pins_R, uses_R = np.zeros(4, np.uint16), np.zeros(4, np.uint8)
    batches_U = [frozen(np.array(batch, np.int32)) for batch in batches]
    for rows_U in batches_U:
        assert eviction.pin(rows_U, pins_R, uses_R)
    counted = [sum(row in batch for batch in batches) for row in range(4)]
    assert pins_R.tolist() == counted and uses_R.tolist() == [min(count, MAX_USES) for count in counted]
    assert all(eviction.unpin(rows_U, pins_R) for rows_U in batches_U) and not pins_R.any()
    assert uses_R.tolist() == [min(count, MAX_USES) for count in counted]
    assert not eviction.unpin(frozen(np.array([2], np.int32)), pins_R)
    pins_R[2] = FREE - 1
    assert not eviction.pin(frozen(np.array([2], np.int32)), pins_R, uses_R)
