"""A tombstone stays until a commit has recorded the deletion."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.lifecycle.tombstones import START_KEYS, Tombstones


def added(gone, *keys, group=1):
    gone.add(np.array(keys, np.uint64), np.full(len(keys), group, np.uint16))


def has(gone, *keys):
    return gone.contains(np.array(keys, np.uint64)).tolist()


def taken(gone):
    keys_U, group_U = gone.take()
    assert len(keys_U) == len(group_U)
    return dict(zip(keys_U.tolist(), group_U.tolist(), strict=True))


def test_a_tombstone_stays_until_its_commit_is_settled():
    gone = Tombstones()
    assert len(gone) == 0 and has(gone, 1) == [False] and has(gone) == []
    added(gone, 1, 2, 1, group=7)
    added(gone, 2, 3, group=7)
    added(gone)
    assert len(gone) == 3 and has(gone, 3, 4, 1) == [True, False, True]
    assert taken(gone) == {1: 7, 2: 7, 3: 7}
    assert len(gone) == 0 and has(gone, 1, 2, 3, 4) == [True, True, True, False]
    gone.settle(True)
    assert has(gone, 1, 2, 3) == [False] * 3
    assert taken(gone) == {}


def test_keys_of_a_failed_commit_are_in_the_next_one():
    gone = Tombstones()
    added(gone, 1, 2)
    taken(gone)
    added(gone, 2, 3)
    gone.settle(False)
    assert len(gone) == 3 and has(gone, 1, 2, 3) == [True] * 3
    assert taken(gone) == {1: 1, 2: 1, 3: 1}


def test_a_key_deleted_again_while_in_flight_keeps_its_tombstone():
    gone = Tombstones()
    added(gone, 1, 2)
    taken(gone)
    added(gone, 1)
    gone.settle(True)
    assert has(gone, 1, 2) == [True, False]
    assert taken(gone) == {1: 1}


def test_taken_keys_do_not_change():
    gone = Tombstones()
    added(gone, *range(100))
    keys_U, group_U = gone.take()
    with pytest.raises(ValueError, match="read-only"):
        keys_U[0] = 1
    added(gone, *range(1000), group=2)
    gone.settle(False)
    assert keys_U.tolist() == list(range(100)) and set(group_U.tolist()) == {1}


def test_one_snapshot_at_a_time():
    gone = Tombstones()
    with pytest.raises(AssertionError):
        gone.settle(True)
    gone.take()
    with pytest.raises(AssertionError):
        gone.take()


def test_it_grows_to_any_number_of_keys():
    gone, keys_U = Tombstones(), np.random.default_rng(1).integers(0, 1 << 64, 50 * START_KEYS, dtype=np.uint64)
    for begin in range(0, len(keys_U), 130):
        part_U = keys_U[begin : begin + 130]
        gone.add(part_U, (part_U % np.uint64(5)).astype(np.uint16))
    assert len(gone) == len(keys_U) and gone.contains(keys_U).all() and not gone.contains(keys_U + np.uint64(1)).any()
    assert taken(gone) == {key: key % 5 for key in keys_U.tolist()}


KEYS = st.lists(st.integers(0, 9), max_size=6)
ACTS = st.one_of(
    st.tuples(st.just("add"), KEYS), st.tuples(st.just("take"), st.none()), st.tuples(st.just("settle"), st.booleans())
)


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACTS, max_size=20))
def test_any_sequence_of_calls_equals_two_sets(acts):
    gone, waiting, in_flight = Tombstones(), set(), None
    for act, value in acts:
        if act == "add":
            added(gone, *value)
            waiting |= set(value)
        elif act == "take" and in_flight is None:
            assert taken(gone).keys() == waiting
            waiting, in_flight = set(), waiting
        elif act == "settle" and in_flight is not None:
            gone.settle(value)
            waiting, in_flight = waiting | (set() if value else in_flight), None
        assert has(gone, *range(10)) == [key in waiting | (in_flight or set()) for key in range(10)]
        assert len(gone) == len(waiting)


def test_threads_may_add_while_others_read_and_commit():
    gone, wrong, committed = Tombstones(), [], set()
    all_U = np.arange(40_000, dtype=np.uint64)

    def sweep(part_U):
        for begin in range(0, len(part_U), 500):
            chunk_U = part_U[begin : begin + 500]
            gone.add(chunk_U, np.ones(len(chunk_U), np.uint16))

    threads = [threading.Thread(target=sweep, args=(all_U[half::2],)) for half in range(2)]
    for thread in threads:
        thread.start()
    for number in range(50):
        keys = taken(gone).keys()
        if keys and not gone.contains(np.array(list(keys), np.uint64)).all():
            wrong.append(number)
        gone.settle(number % 2 == 0)
        committed |= keys if number % 2 == 0 else set()
    for thread in threads:
        thread.join()
    assert not wrong and committed | taken(gone).keys() == set(all_U.tolist())


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "room", "take", "fail", "settle"]), st.integers(1, 5 * START_KEYS))))
def test_room_made_ahead_changes_nothing(acts):
    ahead, plain, in_flight = Tombstones(), Tombstones(), False
    for what, number in acts:
        if what == "add":
            for gone in (ahead, plain):
                added(gone, *range(number, 2 * number), group=number % 7)
        elif what == "room":
            ahead.make_room(number)
            assert ahead._waiting.room >= len(ahead) + number
        elif what == "take" and not in_flight:
            in_flight = True
            assert taken(ahead) == taken(plain)
        elif what in ("fail", "settle") and in_flight:
            in_flight = False
            for gone in (ahead, plain):
                gone.settle(what == "settle")
        assert len(ahead) == len(plain)
        assert has(ahead, *range(0, 900, 7)) == has(plain, *range(0, 900, 7))
