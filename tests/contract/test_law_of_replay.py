"""For any base and the deltas after it, in order: replay(base, deltas) == the base of that version, bit for bit."""

import logging
import os
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.deadline import Deadline
from tests.contract.replay_law import Law
from tests.contract.replay_world import NUM_SIGNS, SLOTS, STREAMS, Death, Pass, World

EXAMPLES = int(os.environ.get("HEADRACE_REPLAY_EXAMPLES", "40"))
"""Histories in make test; `make soak` draws SOAK times as many, and longer ones."""
SOAK = 40
SHRINK_S = 100.0
"""How long a smaller history is looked for."""

SIGNS = st.lists(st.integers(0, NUM_SIGNS - 1), unique=True, max_size=6).map(tuple)
TABLE = st.sampled_from(list(SLOTS))
DAYS = st.sampled_from([0, 0, 0, 1, 2])
OPERATION = st.one_of(
    st.tuples(
        st.just("shrink"), TABLE, st.sampled_from([None, 0.2, 0.6]), st.sampled_from([None, 0, 2]), st.booleans()
    ),
    st.tuples(st.sampled_from(["forget", "forget", "clear"]), TABLE, st.integers(0, NUM_SIGNS - 1)),
    st.tuples(st.just("tick"), st.integers(0, 2)),
    st.tuples(st.just("set"), TABLE, st.sampled_from([0.5, 0.97]), st.sampled_from([0.5, 0.125])),
)
PLACES = ["trained", "logged", "acted", "written", "committed", "exporting", "exported", "end"]
DEATH = st.builds(Death, at=st.sampled_from(PLACES), shards=st.integers(0, 3), older=st.booleans())
DELTAS = tuple((stream, "delta") for stream in STREAMS)
WISHES = st.sampled_from([DELTAS, DELTAS, DELTAS, DELTAS, (), (), (("main", "base"), ("picky", "base")), DELTAS[:1]])
PASS = st.builds(
    Pass,
    learns=SIGNS,
    clicks=st.sampled_from([0, 0, 1]),
    days=DAYS,
    sweeps=st.sampled_from([0, 2, 40]),
    operations=st.one_of(st.just(()), st.lists(OPERATION, max_size=2).map(tuple)),
    wishes=WISHES,
    commit=st.sampled_from(["", "", "", "made", "late", "fails"]),
    export=st.sampled_from(["complete", "complete", "complete", "complete", "fails", "killed", "late"]),
    loses=st.sampled_from(["", "", "", "", "", "", "", "", "", "main", "picky"]),
    death=st.one_of(st.none(), st.none(), st.none(), st.none(), DEATH),
)
SETTING = st.fixed_dictionaries(
    {
        "streams": st.lists(st.sampled_from(list(STREAMS)), unique=True, min_size=1, max_size=2),
        "shards": st.sampled_from([0, 0, 0, 1, 2, 3]),
        "memory": st.booleans(),
        "max_increments": st.sampled_from([64, 2]),
    }
)


def run(passes, **setting):
    """A history; what its exports showed."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        law = Law(Path(folder) / "law")
        with World(Path(folder) / "store", law=law, **setting) as world:
            for one in passes:
                world.run(one)
    return law.seen


def check(setting, passes):
    """Run a history. Where it breaks, a smaller one that breaks is told."""
    logging.disable(logging.CRITICAL)
    try:
        run(passes, **setting)
    except Exception as error:
        patience = Deadline.after(SHRINK_S)
        small = smallest(passes, lambda fewer: not patience.passed() and _breaks(setting, fewer))
        told = "\n".join(f"    {one!r}," for one in small)
        raise AssertionError(f"run([\n{told}\n], **{setting!r}) breaks: {error!r}") from error
    finally:
        logging.disable(logging.NOTSET)


def _breaks(setting, passes):
    try:
        run(passes, **setting)
    except Exception:  # noqa: BLE001  # whatever it is
        return True
    return False


def smallest(passes, breaks):
    """A history with nothing in it that could be left out alone: passes, then what is in them, breaking all the same.

    Hypothesis would find smaller ones, in ten minutes.
    """
    kept, place = list(passes), 0
    while place < len(kept):
        simpler = [[], *([replace(kept[place], **{each.name: each.default})] for each in fields(Pass) if
                         getattr(kept[place], each.name) != each.default),
                   *([replace(kept[place], **{name: tuple(part for part in value if part is not one)})]
                     for name in ("learns", "operations", "wishes")
                     for value in [getattr(kept[place], name)] for one in value)]  # fmt: skip
        found = next((less for less in simpler if breaks([*kept[:place], *less, *kept[place + 1 :]])), None)
        if found is None:
            place += 1
        else:
            kept[place : place + 1] = found
    return kept


@pytest.mark.long
@pytest.mark.timeout(400)
@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])
@given(SETTING, st.lists(PASS, min_size=1, max_size=12))
def test_any_history_obeys_the_law(setting, passes):
    check(setting, passes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=SOAK * EXAMPLES, derandomize=False, phases=[Phase.explicit, Phase.generate])
@given(SETTING, st.lists(PASS, min_size=1, max_size=30))
def test_any_long_history_obeys_the_law(setting, passes):
    check(setting, passes)


ALONE = {"shards": 0, "memory": False, "max_increments": 64}
PICKY = ("picky", "delta")


def test_a_plain_history_shows_all_there_is():
    every = [("main", "delta"), PICKY]
    passes = [
        Pass(learns=(0, 1, 2, 3), wishes=every),
        Pass(learns=(2, 3, 4), days=1, wishes=every),
        Pass(learns=(5,), operations=(("forget", "plain", 0), ("forget", "choosy", 2)), wishes=every),
        Pass(learns=(5, 6), clicks=1, operations=(("shrink", "plain", 0.6, None, True),), wishes=every, commit="made"),
    ]
    seen = run(passes, streams=["main", "picky"], **ALONE)
    assert (seen["base"], seen["delta"], seen["longest chain"]) == (2, 6, 4), seen
    assert seen["tombstones"] and seen["delta_threshold"] and seen["base_threshold"], seen


def test_a_row_that_went_and_came_back_too_low_for_a_delta_is_not_served_as_it_was():
    passes = [
        Pass(learns=(0, 2, 4), clicks=1, wishes=[PICKY]),
        Pass(learns=(4,), operations=(("forget", "plain", 0),)),
        Pass(learns=(0,), wishes=[PICKY]),
    ]
    assert run(passes, streams=["picky"], **ALONE)["tombstones"] == 1


def test_a_delta_waits_for_what_goes_in_the_background_from_its_very_close():
    shrink = ("shrink", "plain", 0.6, None, False)
    passes = [
        Pass(learns=(0, 1, 2), wishes=[("main", "base")]),
        Pass(learns=(3,), operations=(shrink,), wishes=[("main", "delta")]),
        Pass(learns=(4,)),
        Pass(sweeps=40),
        Pass(),
    ]
    seen = run(passes, streams=["main"], **ALONE)
    assert (seen["base"], seen["delta"]) == (1, 1) and seen["tombstones"], seen


def test_a_delta_whose_parent_somebody_removes_before_it_is_made_becomes_a_base():
    passes = [
        Pass(learns=(0,), wishes=[PICKY]),
        Pass(learns=(1,), wishes=[("main", "delta"), PICKY], export="late"),
        Pass(loses="picky"),
        Pass(learns=(2,)),
    ]
    seen = run(passes, streams=["main", "picky"], **ALONE)
    assert (seen["base"], seen["delta"]) == (3, 0), seen


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("memory", [False, True])
def test_what_went_in_a_commit_that_failed_is_in_the_next_delta(shards, memory):
    passes = [
        Pass(learns=(0, 1, 2), wishes=[("main", "delta")]),
        Pass(learns=(3,), operations=(("forget", "plain", 0), ("forget", "plain", 1)), commit="fails"),
        Pass(learns=(1,), death=Death(at="logged")),
        Pass(learns=(4,), operations=(("forget", "plain", 2),), wishes=[("main", "delta")], commit="fails"),
        Pass(learns=(5,), wishes=[("main", "delta")]),
    ]
    seen = run(passes, streams=["main"], **(ALONE | {"shards": shards, "memory": memory}))
    assert seen["delta"] == 1 and seen["tombstones"] == 2, seen
    survived = [passes[0], passes[1], Pass(learns=(1,), wishes=[("main", "delta")])]
    seen = run(survived, streams=["main"], **(ALONE | {"shards": shards, "memory": memory}))
    assert seen["delta"] == 1 and seen["tombstones"] == 1, seen
