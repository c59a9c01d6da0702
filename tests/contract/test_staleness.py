"""What `train.staleness` promises: a pull for step t sees exactly the first max(0, t - k) steps of its pass.

The exchanges of each rank, on real shards, against a twin of dictionaries and loops that trains with the same delay.
Gradients are small integers that depend on the rows read, so equality is exact.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import Gradients
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.server.commands import DigestRows, Explain
from headrace.trainer.status.time_spent import StepClock
from headrace.trainer.train.exchanges import Exchanges
from tests.contract import shards_world as w

WIDTH = 2
TABLES = {
    "all": TableSection(dim=WIDTH, first_order=False, init_range=0.0, optimizer=Sgd(kind="sgd", lr=1.0)),
    "chosen": TableSection(
        dim=WIDTH,
        first_order=False,
        init_range=0.0,
        optimizer=Sgd(kind="sgd", lr=1.0),
        admission=(CountEntry(kind="count", n=3, exact=True),),
    ),
}
BOUND = 10
"""The tables keep weights within it."""
STEP_S = 20.0
PLACES = [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (3, 3)]
"""Shards, 0: embedded, and trainers."""


@dataclass
class Batch:
    """As much of a batch as exchanges use."""

    signs: list[int]
    prepared: object
    keys: dict


def gradient(rank: int, step: int, rows_UD: np.ndarray) -> np.ndarray:
    """Integers that depend on the rows that a step read."""
    return ((3 * rows_UD + 2 * step + rank) % 5 - 2).astype(np.float32)


def shows(rank: int, step: int, signs: list[int]) -> np.ndarray:
    return np.array([1 + (sign + step + rank) % 2 for sign in signs], np.float32)


def train(shards, rank: int, number: int, signs: list[list[int]], num_steps: int, staleness: int):
    """One pass of a rank; the rows that each of its steps read, and the digests of the close."""
    shards.open_pass(number, w.soon())
    exchanges = Exchanges(shards, staleness, STEP_S, StepClock(STEP_S))
    read = []
    try:
        at = exchanges.begin(batches(shards, signs), learn=True)
        for step in range(num_steps):
            gradients = None
            if at.batch is not None:
                read.append({name: rows_UD.copy() for name, rows_UD in at.rows.items()})
                show_U = shows(rank, step, at.batch.signs)
                gradients = {
                    name: Gradients(gradient(rank, step, rows_UD), show_U, np.zeros_like(show_U))
                    for name, rows_UD in at.rows.items()
                }
            following = exchanges.following()
            assert exchanges.following() is following
            at = exchanges.push(step, at.batch, gradients, 64)
            assert at.batch is following
        exchanges.finish()
    finally:
        exchanges.close()
    return read, shards.close_pass(0, w.soon())


def batches(shards, signs: list[list[int]]) -> Iterator[Batch]:
    for each in signs:
        keys = {name: w.keys(*each) for name in TABLES}
        yield Batch(each, shards.prepare(keys, learn=True), keys)


class PlainTwin:
    """The same by dictionaries: all states of the rows after each step, and counts of admission."""

    def __init__(self, staleness: int) -> None:
        self.staleness, self.weights, self.rows, self.shown, self.seen = staleness, [{}], [set()], {}, {}

    def train(self, signs_by_rank: list[list[list[int]]]) -> list[list[dict]]:
        read: list[list[dict]] = [[] for _ in signs_by_rank]
        for step in range(max(len(signs) for signs in signs_by_rank)):
            then = max(0, step - self.staleness)
            present, sums, records = self.rows[then], {}, {}
            for rank, signs in enumerate(signs_by_rank):
                if step >= len(signs):
                    continue
                read[rank].append({name: self.pull(name, signs[step], then) for name in TABLES})
                for name, rows_UD in read[rank][-1].items():
                    grads_UD, show_U = gradient(rank, step, rows_UD), shows(rank, step, signs[step])
                    for u, sign in enumerate(signs[step]):
                        key = name, sign
                        sums[key] = sums.get(key, 0) + grads_UD[u]
                        records[key] = records.get(key, 0) + show_U[u]
            self.apply(present, sums, records)
        return read

    def pull(self, name: str, signs: list[int], then: int) -> np.ndarray:
        weights = self.weights[then]
        return np.array([weights.get((name, sign), np.zeros(WIDTH)) for sign in signs], np.float32).reshape(-1, WIDTH)

    def apply(self, present: set, sums: dict, records: dict) -> None:
        """A key without a row at the pull does not learn: it is counted, or, if it has got one since, shown."""
        weights, rows = dict(self.weights[-1]), set(self.rows[-1])
        for key, sum_D in sums.items():
            if key[0] == "all" or key in present:
                rows.add(key)
                weights[key] = np.clip(weights.get(key, np.zeros(WIDTH)) - sum_D, -BOUND, BOUND)
                self.shown[key] = self.shown.get(key, 0) + records[key]
            elif key in rows:
                self.shown[key] += records[key]
            else:
                self.seen[key] = self.seen.get(key, 0) + records[key]
                if self.seen[key] >= 3:
                    rows.add(key)
                    self.shown[key] = records[key]
        self.weights.append(weights)
        self.rows.append(rows)


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-shards-{place[1]}-trainers")
def world(request):
    num_shards, num_ranks = request.param
    with w.job(num_shards, num_ranks, TABLES) as made:
        made.numbers = count(1)
        yield made


PASS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), max_size=6)


@given(data=st.data(), staleness=st.integers(0, 4))
@settings(max_examples=25, deadline=None)
def test_rows_and_statistics_are_those_of_a_twin_with_that_delay(world, data, staleness):
    number = next(world.numbers)
    drawn = [data.draw(PASS, f"batches of rank {rank}") for rank in range(len(world.ranks))]
    signs = [[[100 * number + sign for sign in step] for step in steps] for steps in drawn]  # no row of a pass before
    num_steps = max(len(each) for each in signs)
    results = world.each(lambda rank, shards: train(shards, rank, number, signs[rank], num_steps, staleness))
    if not num_steps:
        return
    twin = PlainTwin(staleness)
    for (read, _), wanted in zip(results, twin.train(signs), strict=True):
        assert len(read) == len(wanted)
        for found, expected in zip(read, wanted, strict=True):
            for name in TABLES:
                np.testing.assert_array_equal(found[name], expected[name])
    every = sorted({sign for steps in signs for step in steps for sign in step})
    rows = world.one.look({name: w.keys(*every) for name in TABLES}, w.soon())
    for name in TABLES:
        np.testing.assert_array_equal(rows[name], twin.pull(name, every, -1))
    for sign in every[:3]:
        told = world.one.call(Explain("chosen", int(w.keys(sign).keys_U[0]), 1), w.soon())
        assert told["row"] == (("chosen", sign) in twin.rows[-1])
        if told["row"]:
            assert told["show"] == twin.shown["chosen", sign]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_digests_do_not_depend_on_where_rows_are(staleness):
    signs = [[step, step + 1, 9, 20 + 3 * step] for step in range(7)]
    digests = set()
    for num_shards in (0, 1, 2, 3):
        with w.job(num_shards, 1, TABLES) as made:
            train(made.one, 0, 1, signs, len(signs), staleness)
            digests.add(tuple(sorted(made.one.call(DigestRows(), w.soon()).items())))
    assert len(digests) == 1


def test_every_staleness_gives_other_rows():
    """The law above would hold for any delay, if none had an effect."""
    signs, digests = [[1, 2, 3]] * 8, set()
    for staleness in range(4):
        with w.job(0, 1, TABLES) as made:
            train(made.one, 0, 1, signs, len(signs), staleness)
            digests.add(made.one.call(DigestRows(), w.soon())["all"])
    assert len(digests) == 4


# The order of calls, and how many steps are held


class SlowShards:
    """Shards that answer nothing but pulls until they may, and note each call with its thread."""

    def __init__(self) -> None:
        self.may_answer, self.calls = threading.Event(), []

    def note(self, *call) -> None:
        self.calls.append((*call, threading.current_thread() is threading.main_thread()))

    def pull(self, prepared, deadline):
        self.note("pull", prepared)
        return {"all": prepared}

    def exchange(self, step, batch, gradients, following, scale, deadline):
        self.note("exchange", step, batch, following)
        assert self.may_answer.wait(STEP_S)
        return None if following is None else {"all": following}


def numbered(num_batches: int, asked=lambda number: None) -> Iterator[Batch]:
    for number in range(num_batches):
        asked(number)
        yield Batch([], number, {})


def test_without_staleness_the_loop_makes_the_calls_itself_in_the_order_of_steps():
    shards = SlowShards()
    shards.may_answer.set()
    exchanges = Exchanges(shards, 0, STEP_S, StepClock(STEP_S))
    at = exchanges.begin(numbered(2), learn=True)
    for step in range(3):  # another rank has three batches
        at = exchanges.push(step, at.batch, None, 64)
    exchanges.finish()
    assert shards.calls == [
        ("pull", 0, True),
        ("exchange", 0, 0, 1, True),
        ("exchange", 1, 1, None, True),
        ("exchange", 2, None, None, True),
    ]


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_a_trainer_goes_on_while_a_push_is_not_answered_and_at_most_k_plus_1_steps_are_held(staleness):
    shards, answered = SlowShards(), []

    def asked(number: int) -> None:
        if number == 2 * staleness + 1:  # it goes with the push of step k, the last that may be held
            assert not shards.may_answer.is_set()
            answered.append(sum(call[0] == "exchange" for call in shards.calls))
            shards.may_answer.set()

    exchanges = Exchanges(shards, staleness, STEP_S, StepClock(STEP_S))
    at = exchanges.begin(numbered(20, asked), learn=True)
    for step in range(20):
        assert at.batch.prepared == step and at.rows == {"all": step}
        if step == staleness + 1:
            assert shards.may_answer.is_set(), "the rows of this step come with the push of step 0"
        at = exchanges.push(step, at.batch, None, 64)
    exchanges.finish()
    exchanges.close()
    assert len(answered) == 1 and answered[0] <= 1, "no second push travels before the first is answered"
    pushes = [call for call in shards.calls if call[0] == "exchange"]
    assert [call[1:4] for call in pushes] == [
        (step, step, step + 1 + staleness if step + 1 + staleness < 20 else None) for step in range(20)
    ]
    assert not any(call[-1] for call in shards.calls)


def test_a_failed_push_is_told_at_the_step_that_needs_its_rows():
    shards = SlowShards()
    shards.exchange = partial(fail, "the shard is gone")
    exchanges = Exchanges(shards, 2, STEP_S, StepClock(STEP_S))
    at = exchanges.begin(numbered(9), learn=True)
    with pytest.raises(OSError, match="the shard is gone"):
        for step in range(3):
            at = exchanges.push(step, at.batch, None, 64)
    assert at.batch.prepared == 2, "the rows of steps 0 to 2 were pulled before"
    exchanges.close()


def fail(why: str, *_arguments) -> None:
    raise OSError(why)


def test_a_pass_that_is_only_predicted_pulls_one_batch_at_a_time():
    shards = SlowShards()
    exchanges = Exchanges(shards, 3, STEP_S, StepClock(STEP_S))
    at = exchanges.begin(numbered(3), learn=False)
    for number in range(3):
        assert at.batch.prepared == number and at.rows == {"all": number}
        at = exchanges.follow()
    assert at.batch is None and [call[:2] for call in shards.calls] == [("pull", number) for number in range(3)]
    exchanges.close()
