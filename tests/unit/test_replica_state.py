"""What a replica holds: one version at a time, exactly, whatever is applied, refused, gone back to."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.keys import key_of_reference
from headrace.pserver.rows.kernels import EMPTY, enter
from headrace.trainer.replica.replica_state import ReplicaState, RollbackInForce, UpdateRefused, VersionNotKept
from headrace.trainer.replica.replica_table import ReplicaTable
from headrace.trainer.replica.serving_model import golden_inputs
from headrace.trainer.replica.updates import ReplicaRows, TableUpdate
from headrace.trainer.serving import pooling_kernels
from headrace.trainer.serving.pooling_kernels import MEAN, SEQUENCE, SQRTN, SUM
from tests.fakes.served import Job, model_json


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def state_of(max_versions=10, max_bytes=1 << 30):
    return ReplicaState(max_versions, max_bytes)


def answers(state, job):
    model = state.model()
    kept, found = state.predict(model, golden_inputs(model, job.samples))
    return kept.version.number, found["ctr"]


@pytest.mark.parametrize("default_row", [(), (0.5, -1.0, 2.0, 0.0, 1.0)], ids=["zeros", "learnt"])
def test_each_version_answers_as_its_golden_predictions(job, default_row):
    """Keys without a row read the default row that model.json tells of."""
    state, job.model = state_of(), model_json(default_row)
    for version in range(1, 12):
        update = job.update(version, whole=version in (1, 7), forget=5 if version > 1 else 0)
        state.apply(replace(update, golden=job.golden()))
        number, found = answers(state, job)
        assert number == version and np.abs(found - job.predictions()).max() < 1e-5
        assert state.num_rows() == {"default": len(job.rows)}


def test_any_kept_version_answers_again_as_it_did(job):
    state, were = state_of(), {}
    for version in range(1, 9):
        state.apply(job.update(version, whole=version in (1, 5), forget=4 if version > 1 else 0))
        were[version] = answers(state, job)[1]
    for version in (3, 8, 1, 6, 5, 4, 2, 7, 8):
        assert state.go_to(version).version.number == version
        number, found = answers(state, job)
        assert number == version and np.array_equal(found, were[version])
    state.go_to(2)
    state.go_to_newest()
    state.apply(job.update(9, forget=3))
    assert np.abs(answers(state, job)[1] - job.predictions()).max() < 1e-5


def test_a_version_that_two_timelines_have_is_gone_back_to_on_either(job):
    state, were = state_of(), {}
    for version, timeline in ((24, "t1"), (25, "t1"), (25, "t2")):
        state.apply(job.update(version, timeline=timeline, whole=version == 24 or timeline == "t2"))
        were[version, timeline] = answers(state, job)[1]
    assert [state.name_of(each) for each in state.versions()] == ["24@t1", "25@t1", "25"]
    for version, named, timeline in ((25, "t1", "t1"), (25, "t2", "t2"), (24, None, "t1"), (25, None, "t2")):
        assert state.go_to(version, named).version.timeline == timeline
        assert np.array_equal(answers(state, job)[1], were[version, timeline])
    with pytest.raises(VersionNotKept, match="version 24 of timeline t2 is not kept; .* 24@t1, 25@t1, 25$"):
        state.go_to(24, "t2")


def test_nothing_newer_is_served_while_an_older_version_was_chosen(job):
    state = state_of()
    state.apply(job.update(1, whole=True))
    state.apply(job.update(2))
    state.go_to(1)
    update = job.update(3)
    with pytest.raises(RollbackInForce):
        state.apply(update)
    assert answers(state, job)[0] == 1
    state.go_to_newest()
    state.apply(update)
    assert answers(state, job)[0] == 3 and np.abs(answers(state, job)[1] - job.predictions()).max() < 1e-5


def test_what_is_kept_is_bounded_in_number_and_memory(job):
    state = state_of(max_versions=3)
    for version in range(1, 40):
        state.apply(job.update(version, whole=version == 1, forget=3 if version > 1 else 0))
    assert [each.version.number for each in state.versions()] == [36, 37, 38, 39]
    table = state.served.epoch.tables["default"]
    assert table._used < 50 + 5 * 25  # rows of versions let go are used again
    with pytest.raises(VersionNotKept, match=r"version 35 is not kept; .* 36, 37, 38, 39"):
        state.go_to(35)
    none = state_of(max_bytes=0)
    for version in range(1, 4):
        none.apply(Job(job.folder, seed=version).update(version, whole=True))
    assert [each.version.number for each in none.versions()] == [3]


def without_numbers(update):
    (chunk,) = update.tables["default"].rows
    chunk = replace(chunk, rows_UD=np.full(chunk.rows_UD.shape, np.nan, np.float32))
    return replace(update, tables={"default": TableUpdate([chunk], np.empty(0, np.uint64))})


REFUSED = {
    "older": lambda update, job: replace(update, version=2),
    "another-job": lambda update, job: replace(update, job="other"),
    "no-base": lambda update, job: replace(update, timeline="t2"),
    "golden": lambda update, job: replace(update, golden=golden_of_another(job)),
    "broken": lambda update, job: without_numbers(update),
}


def golden_of_another(job):
    other = Job(job.folder, seed=9)
    other.learn()
    return other.golden()


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_leaves_no_trace(job, reason):
    state = state_of()
    state.apply(job.update(1, whole=True))
    state.apply(job.update(2, forget=2))
    was, rows, predicted = answers(state, job)[1], state.num_rows(), job.predictions()
    memory = dict(job.rows), dict(job.dense)
    with pytest.raises(UpdateRefused) as refused:
        state.apply(REFUSED[reason](job.update(3, forget=5), job))
    assert refused.value.reason == reason
    assert np.array_equal(answers(state, job)[1], was) and state.num_rows() == rows
    assert np.abs(was - predicted).max() < 1e-5
    assert [each.version.number for each in state.versions()] == [1, 2]
    job.rows, job.dense = memory
    state.apply(job.update(3, forget=5))
    assert np.abs(answers(state, job)[1] - job.predictions()).max() < 1e-5


def test_a_tensor_of_another_shape_is_refused_by_name(job):
    state = state_of()
    update = job.update(1, whole=True)
    with pytest.raises(UpdateRefused, match=r"tensor 'w' is float32\[4\]; .* float32\[5\]"):
        state.apply(replace(update, dense=update.dense | {"w": np.zeros(4, np.float32)}))
    with pytest.raises(UpdateRefused, match="is a difference, and there is no version"):
        state.apply(job.update(2))


def test_a_default_row_that_is_learnt_changes_with_the_version(job):
    state = state_of()
    state.apply(job.update(1, whole=True))
    before = state.model()
    job.model = model_json((1.0, 0.0, -1.0, 2.0, 0.5))
    state.apply(replace(job.update(2), model=job.model, golden=job.golden()))
    assert state.model().graph is before.graph and state.model() is not before
    assert state.predict(before, before.empty()) is None  # who asks for the model of before asks anew
    assert np.abs(answers(state, job)[1] - job.predictions()).max() < 1e-5
    state.go_to(1)
    assert state.model() is before


def test_another_timeline_may_begin_with_an_older_number(job):
    state = state_of()
    state.apply(job.update(7, whole=True))
    state.apply(job.update(5, whole=True, timeline="t2"))
    assert str(state.served.version) == "t2-5"


def test_a_key_that_comes_twice_in_a_whole_update_counts_as_it_comes_last():
    table, keys_U = ReplicaTable(1), np.array([5, 6, 7], np.uint64)
    chunks = [ReplicaRows(keys_U, np.zeros(3, np.uint16), np.full((3, 1), value, np.float32)) for value in (1, 2)]
    table.load(chunks)
    assert table.num_rows == 3
    for side in (0, 1):
        view = table.view(side)
        assert sorted(view.rows_RW[view.index_I[view.index_I != EMPTY], 0].tolist()) == [2, 2, 2]


@pytest.mark.long
def test_a_request_sees_one_version_never_two(job):
    """Every version has one value in all rows: a mixture would not be a multiple of it."""
    state = state_of(max_versions=2)
    keys_U = np.array([key_of_reference(sign, 0) for sign in range(30)], np.uint64)

    def version(number, whole=False):
        chunk = ReplicaRows(keys_U, np.zeros(30, np.uint16), np.full((30, 5), number, np.float32))
        update = job.update(number, whole=whole)
        return replace(update, tables={"default": TableUpdate([chunk], np.empty(0, np.uint64))})

    state.apply(version(1, whole=True))
    model, wrong, seen, done = state.model(), [], set(), threading.Event()
    inputs = golden_inputs(model, job.samples)

    def ask():
        while not done.is_set():
            with state._reading() as view:
                feeds = model.feeds(view.tables, inputs)
                number = view.kept.version.number
            seen.add(number)
            if (feeds["a"] % number).any():
                wrong.append(number)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2, 400):
        state.apply(version(number, whole=number % 50 == 0))
        if number % 7 == 0:
            state.go_to(number - 1)
            state.go_to_newest()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and len(seen) > 20


SIGN = st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1.0, 2.0]))
SIGNS = st.lists(st.lists(SIGN, max_size=5), min_size=1, max_size=4)
POOLINGS, PADDINGS = st.sampled_from([SUM, MEAN, SQRTN, SEQUENCE]), st.sampled_from([None, 0, 3])


@given(SIGNS, POOLINGS, st.integers(0, 3), st.booleans(), PADDINGS, st.sets(st.integers(0, 6)))
def test_pooling_is_as_its_twin(signs, pooling, max_len, tail, padding, present):
    max_len = max(1, max_len) if pooling == SEQUENCE else max_len
    default_W = np.array([7, -7], np.float32)
    rows = {key_of_reference(sign, 4): np.array([sign, 10 + sign], np.float32) for sign in present}
    index_I, keys_R = np.full(1 << 10, EMPTY, np.int32), np.array([*rows, 0], np.uint64)
    enter(index_I, keys_R, np.arange(len(rows), dtype=np.int32))
    rows_RW = np.array([*rows.values(), [0, 0]], np.float32)
    flat = [each for sample in signs for each in sample]
    offset_SB1 = np.cumsum([0] + [len(sample) for sample in signs])[None].astype(np.int64)
    size = max_len * 2 if pooling == SEQUENCE else 2
    out, mask = np.zeros(len(signs) * size, np.float32), np.zeros(len(signs) * max(max_len, 1), np.bool_)
    slot_S7 = np.array([[4, pooling, max_len, tail, padding is not None, 0, 0]], np.int64)
    pooling_kernels.pool(
        index_I, keys_R, rows_RW, default_W, np.array([sign for sign, _ in flat], np.uint64),
        np.array([weight for _, weight in flat], np.float32), offset_SB1, slot_S7,
        np.array([padding or 0], np.uint64), out, mask,
    )  # fmt: skip
    as_float = [[(sign, np.float32(weight)) for sign, weight in sample] for sample in signs]
    slot = {"group": 4, "pooling": pooling, "max_len": max_len, "tail": tail}
    wanted, marks = pooling_kernels.pool_reference(rows, default_W, as_float, slot, padding)
    assert np.array_equal(out, wanted.reshape(-1))
    if pooling == SEQUENCE:
        assert mask.reshape(len(signs), max_len).tolist() == marks


@given(st.lists(st.tuples(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40))), max_size=6))
def test_a_table_is_a_dictionary_at_every_step_and_back(steps):
    table, state, taken, were = ReplicaTable(1), {}, [], []
    for number, (changed, gone) in enumerate(steps):
        were.append(dict(state))
        gone = gone - changed
        keys = [key_of_reference(sign, 0) for sign in sorted(changed)]
        chunk = ReplicaRows(
            np.array(keys, np.uint64), np.zeros(len(keys), np.uint16), np.full((len(keys), 1), number, np.float32)
        )
        gone_U = np.array([key_of_reference(sign, 0) for sign in sorted(gone)], np.uint64)
        step = table.stage([chunk], gone_U, 0)
        for side in (0, 1):
            table.turn(step, side)
        table.count(step)
        taken.append(step)
        state = {
            **{key: value for key, value in state.items() if key not in gone_U.tolist()},
            **dict.fromkeys(keys, number),
        }
        assert as_dictionary(table) == state and table.num_rows == len(state)
    for step, was in zip(reversed(taken), reversed(were), strict=True):
        for side in (0, 1):
            table.turn(step, side, back=True)
        table.count(step, back=True)
        assert as_dictionary(table) == was and table.num_rows == len(was)


def as_dictionary(table):
    found = []
    for side in (0, 1):
        view = table.view(side)
        rows = view.index_I[view.index_I != EMPTY]
        found.append(dict(zip(view.keys_R[rows].tolist(), view.rows_RW[rows, 0].tolist(), strict=True)))
    assert found[0] == found[1]
    return found[0]


@given(st.sets(st.integers(0, 30), min_size=1), st.data())
def test_replacing_is_as_its_twin(signs, data):
    keys = [key_of_reference(sign, 0) for sign in sorted(signs)]
    chosen = data.draw(st.lists(st.sampled_from(range(len(keys))), unique=True))
    keys_R = np.array(keys + [keys[at] for at in chosen], np.uint64)
    index_I = np.full(1 << 10, EMPTY, np.int32)
    enter(index_I, keys_R, np.arange(len(keys), dtype=np.int32))
    row_of = {key: row for row, key in enumerate(keys)}
    new = np.arange(len(keys), len(keys_R), dtype=np.int32)
    pooling_kernels.replace(index_I, keys_R, np.array(chosen, np.int32), new)
    pooling_kernels.replace_reference(row_of, [keys[at] for at in chosen], new.tolist())
    rows = index_I[index_I != EMPTY]
    assert dict(zip(keys_R[rows].tolist(), rows.tolist(), strict=True)) == row_of
