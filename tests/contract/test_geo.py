"""The promises of mode "geo": each trainer learns k batches on a copy, and rows move by the mean of the differences.

The exchanges of each rank, on real shards. Gradients are small integers, so equality is exact where sums are.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from threading import Semaphore

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import Bounds, TableSection
from headrace.pserver.errors import StepTimedOut
from headrace.pserver.protocol.shards import ABSENT_BITS, Gradients, Keys
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.server.commands import DigestRows, Explain
from headrace.trainer.status.time_spent import StepClock
from headrace.trainer.train.exchanges import CopiedTable, Exchanges, GeoExchanges, RowCopy
from tests.contract import shards_world as w

WIDTH = 2
PLAIN = {"dim": WIDTH, "first_order": False, "init_range": 0.0, "optimizer": Sgd(kind="sgd", lr=0.5)}
TABLES = {
    "all": TableSection(**PLAIN),
    "chosen": TableSection(**PLAIN, admission=(CountEntry(kind="count", n=3, exact=True),)),
}
NEARBY = {"bounds": Bounds(low=-3.0, high=3.0)}
STEP_S = 20.0
PLACES = [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 4)]
"""Shards, 0: embedded, and trainers; a mean of so many is exact in float32."""


@dataclass
class Table:
    name: str


@dataclass
class Lookup:
    table: Table
    keys: Keys


class Batch:
    """As much of a batch as exchanges use."""

    def __init__(self, signs: list[int], prepared: object = None) -> None:
        self.signs, self.prepared = signs, prepared
        self.lookups = [Lookup(Table(name), w.keys(*signs)) for name in TABLES]


def rows_settings():
    return {name: RowSettings.of(section, {}) for name, section in TABLES.items()}


def geo(shards, k_steps: int, num_ranks: int, staleness: int = 0) -> GeoExchanges:
    last = STEP_S, StepClock(STEP_S)
    return GeoExchanges(shards, k_steps, num_ranks, {}, rows_settings, *last, staleness=staleness)


def train(shards, exchanges, rank: int, number: int, batches: Iterator[Batch], gradient):
    """One pass of a rank, and the rows of table "all" that each of its steps read."""
    shards.open_pass(number, w.soon())
    read, step = [], 0
    at = exchanges.begin(batches, learn=True)
    while at.batch is not None:
        read.append({name: rows_UD.copy() for name, rows_UD in at.rows.items()})
        show_U = shows(rank, step, at.batch.signs)
        grads = {name: Gradients(gradient(rank, step, at.rows[name]), show_U, show_U / 2) for name in TABLES}
        following = exchanges.following()
        assert exchanges.following() is following
        at = exchanges.push(step, at.batch, grads, 64)
        assert at.batch is following
        step += 1
    exchanges.finish()
    exchanges.close()
    return read


def shows(rank: int, step: int, signs: list[int]) -> np.ndarray:
    return np.array([1 + (sign + step + rank) % 2 for sign in signs], np.float32)


def of_rows(rank: int, step: int, rows_UD: np.ndarray) -> np.ndarray:
    """Gradients that depend on the rows that a step read."""
    return ((np.floor(3 * rows_UD) + 2 * step + rank) % 5 - 2).astype(np.float32)


def of_steps(rank: int, step: int, rows_UD: np.ndarray) -> np.ndarray:
    """Gradients that do not, so that the order in which trainers push makes no difference."""
    return np.full_like(rows_UD, (3 * step + rank) % 5 - 2)


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-shards-{place[1]}-trainers")
def world(request):
    num_shards, num_ranks = request.param
    more = {"mode": "geo"} if num_shards else {}
    with w.job(num_shards, num_ranks, TABLES, **more) as made:
        made.numbers = count(1)
        yield made


PASS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), max_size=7)


def own(number: int, drawn: list[list[int]]) -> list[list[int]]:
    """Signs that no other pass has."""
    return [[100 * number + sign for sign in step] for step in drawn]


@given(data=st.data(), k_steps=st.integers(1, 4), staleness=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_rows_move_by_the_mean_of_the_differences_and_statistics_add_up(world, data, k_steps, staleness):
    number, num_ranks = next(world.numbers), len(world.ranks)
    signs = [own(number, data.draw(PASS, f"batches of rank {rank}")) for rank in range(num_ranks)]

    def act(rank, shards):
        exchanges = geo(shards, k_steps, num_ranks, staleness)
        return train(shards, exchanges, rank, number, iter(map(Batch, signs[rank])), of_steps)

    world.each(act)
    world.each(lambda _rank, shards: shards.close_pass(0, w.soon()))
    moved, shown = Counter(), Counter()
    for rank, batches in enumerate(signs):
        for step, batch in enumerate(batches):
            for sign, show in zip(batch, shows(rank, step, batch), strict=True):
                moved[sign] -= 0.5 * ((3 * step + rank) % 5 - 2) / num_ranks
                shown[sign] += show
    every = sorted(shown)
    if not every:
        return
    rows_UD = world.one.look({"all": w.keys(*every)}, w.soon())["all"]
    np.testing.assert_array_equal(rows_UD, np.array([[moved[sign]] * WIDTH for sign in every], np.float32))
    for sign in every[:4]:
        told = world.one.call(Explain("all", int(w.keys(sign).keys_U[0]), 1), w.soon())
        assert (told["show"], told["click"]) == (shown[sign], shown[sign] / 2)
        told = world.one.call(Explain("chosen", int(w.keys(sign).keys_U[0]), 1), w.soon())
        assert told["row"] == (shown[sign] >= 3), "admission counts every show"


class PlainTwin:
    """One trainer by dictionaries: the rows of the shards, and the copy, which is dropped after k steps."""

    def __init__(self, k_steps: int) -> None:
        self.k_steps, self.rows = k_steps, {}

    def train(self, signs: list[list[int]]) -> list[np.ndarray]:
        read, copy, sums = [], {}, Counter()
        for step, batch in enumerate(signs):
            if step % self.k_steps == 0:
                self.exchange(sums)
                copy, sums = dict(self.rows), Counter()
            rows = np.array([copy.get(sign, 0.0) for sign in batch], np.float32)
            read.append(rows)
            for sign, gradient in zip(batch, of_rows(0, step, rows).tolist(), strict=True):
                copy[sign] = copy.get(sign, 0.0) - 0.5 * gradient
                sums[sign] += gradient
        self.exchange(sums)
        return read

    def exchange(self, sums: Counter) -> None:
        for sign, total in sums.items():
            self.rows[sign] = self.rows.get(sign, 0.0) - 0.5 * total


@given(data=st.data(), k_steps=st.integers(1, 4), staleness=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_trainer_alone_reads_what_a_twin_with_a_copy_of_k_steps_reads(num_shards, data, k_steps, staleness):
    signs = data.draw(PASS)
    with w.job(num_shards, 1, TABLES, **({"mode": "geo"} if num_shards else {})) as made:
        read = train(made.one, geo(made.one, k_steps, 1, staleness), 0, 1, iter(map(Batch, signs)), of_rows)
        made.one.close_pass(0, w.soon())
    for found, wanted in zip(read, PlainTwin(k_steps).train(signs), strict=True):
        np.testing.assert_array_equal(found["all"], wanted[:, None].repeat(WIDTH, 1))


@pytest.mark.parametrize("num_shards", [0, 1, 2])
def test_one_trainer_has_the_bits_of_sync_with_k_of_one_and_those_of_its_k_with_an_exchange_beside_training(num_shards):
    rng = np.random.default_rng(4)
    signs = [sorted(set(rng.integers(0, 40, 12).tolist())) for _ in range(11)]
    noise = rng.normal(size=(11, 40, WIDTH)).astype(np.float32)

    def gradient(_rank, step, rows_UD):
        return 0.3 * rows_UD + noise[step, : len(rows_UD)]

    def digest(k_steps: int | None, staleness: int = 0):
        with w.job(num_shards, 1, TABLES, **({"mode": "geo" if k_steps else "sync"} if num_shards else {})) as made:
            shards = made.one
            if k_steps is None:
                exchanges, batches = Exchanges(shards, 0, STEP_S, StepClock(STEP_S)), prepared(shards, signs)
            else:
                exchanges, batches = geo(shards, k_steps, 1, staleness), iter(map(Batch, signs))
            read = train(shards, exchanges, 0, 1, batches, gradient)
            shards.close_pass(0, w.soon())
            return shards.call(DigestRows(), w.soon()), [rows["all"].tobytes() for rows in read]

    def of_admitted(found):
        """Without table "chosen", whose rows a later copy still reads as they were before a key was admitted."""
        return found[0]["all"], found[1]

    assert digest(None) == digest(1)
    assert of_admitted(digest(1)) == of_admitted(digest(1, 1))
    for k_steps in (3, 4):
        assert of_admitted(digest(k_steps)) == of_admitted(digest(k_steps, 1)) != of_admitted(digest(1))


class Held:
    """Shards whose exchanges wait for a word, and may fail."""

    def __init__(self, shards, fails_at: int | None = None) -> None:
        self._shards, self.fails_at = shards, fails_at
        self.go, self.begun, self.running, self.most = Semaphore(0), [], 0, 0

    def __getattr__(self, name):
        return getattr(self._shards, name)

    def exchange(self, number, *more):
        self.begun.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.go.acquire(timeout=STEP_S)
        if number == self.fails_at:
            raise StepTimedOut(f"exchange {number} was not answered")
        found = self._shards.exchange(number, *more)
        self.running -= 1
        return found


def steps(exchanges, at, count):
    """Make steps without gradients."""
    for step in range(count):
        exchanges.following()
        at = exchanges.push(step, at.batch, None, 64)
    return at


def test_the_batches_of_a_copy_are_learnt_while_the_exchange_of_the_one_before_waits():
    with w.job(1, 1, TABLES, mode="geo") as made:
        made.one.open_pass(1, w.soon())
        held = Held(made.one)
        exchanges = geo(held, 3, 1, 1)
        at = exchanges.begin(iter([Batch([n, n + 1]) for n in range(12)]), learn=True)
        at = steps(exchanges, at, 5)  # the exchange of the first three is on its way all the time
        held.go.release()
        at = steps(exchanges, at, 3)  # the sixth waits for it
        held.go.release(4)
        at = steps(exchanges, at, 4)
        assert at.batch is None
        exchanges.finish()
        exchanges.close()
        assert held.begun == [0, 1, 2, 3] and held.running == 0, "a pass ends with every push applied"
        assert held.most == 1, "one exchange at a time"
        made.one.close_pass(0, w.soon())


@pytest.mark.parametrize("fails_at", [0, 2])
def test_an_exchange_that_fails_beside_training_ends_it_with_its_message(fails_at):
    with w.job(1, 1, TABLES, mode="geo") as made:
        made.one.open_pass(1, w.soon())
        held = Held(made.one, fails_at)
        held.go.release(9)
        exchanges = geo(held, 2, 1, 1)
        at = exchanges.begin(iter([Batch([n]) for n in range(6)]), learn=True)
        with pytest.raises(StepTimedOut, match=f"exchange {fails_at} was not answered"):
            steps(exchanges, at, 6)
            exchanges.finish()
        exchanges.close()


def clipped(tables, most):
    return {name: section.model_copy(update={"clip_norm": most}) for name, section in tables.items()}


@pytest.mark.parametrize("num_shards", [0, 2])
def test_rows_are_clipped_in_the_copy_by_batch_and_not_again_on_the_shards(num_shards):
    """With one batch an exchange these are the bits of sync; with three the sum may be three times as long."""
    tables, signs, found = clipped(TABLES, 0.5), [[1, 2]] * 3, {}

    def gradient(_rank, step, rows_UD):
        return np.full_like(rows_UD, 0.7 + step) + rows_UD

    for mode, k_steps in (("sync", 1), ("geo", 1), ("geo", 3)):
        with w.job(num_shards, 1, tables, mode=mode) as made:
            shards, exchanges, batches = made.one, Exchanges(made.one, 0, STEP_S, StepClock(STEP_S)), None
            if mode == "sync":
                batches = prepared(shards, signs)
            else:
                settings_now = {name: RowSettings.of(section, {}) for name, section in tables.items()}
                exchanges = GeoExchanges(
                    shards, k_steps, 1, {}, lambda now=settings_now: now, STEP_S, StepClock(STEP_S)
                )
            train(shards, exchanges, 0, 1, batches or iter(map(Batch, signs)), gradient)
            found[mode, k_steps] = shards.look({"all": w.keys(1, 2)}, w.soon())["all"]
    assert (found["sync", 1] == found["geo", 1]).all()
    np.testing.assert_allclose(np.linalg.norm(found["geo", 3], axis=1), 3 * 0.5 * 0.5, rtol=1e-5)


def prepared(shards, signs):
    for each in signs:
        yield Batch(each, shards.prepare({name: w.keys(*each) for name in TABLES}, learn=True))


def test_bytes_and_messages_are_as_many_as_there_are_exchanges():
    """Every batch has the same keys, and there is an exchange after each k of 24 batches."""
    sent = {}
    for k_steps in (1, 2, 4, 8):
        with w.job(1, 1, TABLES, mode="geo") as made:
            shards = made.one
            before = total(shards.links())
            train(shards, geo(shards, k_steps, 1), 0, 1, (Batch(list(range(3000))) for _ in range(24)), of_steps)
            sent[k_steps] = total(shards.links()) - before
    for k_steps in (2, 4, 8):
        assert sent[k_steps] * k_steps == pytest.approx(sent[1], rel=0.1)


def total(links) -> int:
    return sum(value for link in links.values() for name, value in link.items() if name.endswith("_bytes"))


def test_a_step_that_is_skipped_learns_nothing_and_a_copy_that_skips_all_pushes_nothing():
    copy = RowCopy([Batch([1, 2]), Batch([2, 3])], {}, rows_settings())
    copy.take({name: np.zeros((3, WIDTH), np.float32) for name in TABLES})
    copy.learn(None, 64)
    assert not copy.done and copy.learnt(1) is None and copy.num_samples == 0
    grads = {name: Gradients(np.ones((2, WIDTH), np.float32), *np.ones((2, 2), np.float32)) for name in TABLES}
    copy.learn(grads, 64)
    assert copy.done and copy.learnt(1)["all"].show_U.sum() == 2 and copy.num_samples == 64


def test_a_copy_keeps_to_the_bounds_of_its_table_and_does_not_move_a_learnt_default_row():
    section = TableSection(**PLAIN, **NEARBY)
    table = CopiedTable([w.keys(1, 2)], RowSettings.of(section, {}))
    rows = np.zeros((2, WIDTH), np.float32)
    rows[1] = ABSENT_BITS.view(np.float32)
    table.take(rows)
    ones = np.ones(2, np.float32)
    table.learn(0, Gradients(np.full((2, WIDTH), 16.0, np.float32), ones, ones))
    place = table.place_U[0]
    found = table.read(0)[np.argsort(place)]
    np.testing.assert_array_equal(found[0], [-3.0, -3.0])
    assert (found[1].view(np.uint32) == ABSENT_BITS).all()
    np.testing.assert_array_equal(table.learnt(2).grads_UD, np.full((2, WIDTH), 8.0))


def test_a_copy_learns_at_the_rate_of_the_samples_and_versions_before_it():
    schedule = {"kind": "piecewise", "at": [100], "shares": [1.0, 0.25]}
    section = TableSection(**PLAIN, schedule=schedule)
    moved = []
    for learnt in ((99, 7), (100, 7)):
        table = CopiedTable([w.keys(1)], RowSettings.of(section, {}))
        table.take(np.zeros((1, WIDTH), np.float32))
        table.learn_after(*learnt)
        table.learn(0, Gradients(np.ones((1, WIDTH), np.float32), *np.ones((2, 1), np.float32)))
        moved.append(table.read(0))
        np.testing.assert_array_equal(table.learnt(1).grads_UD, 1)
    np.testing.assert_array_equal(moved[0] * 0.25, moved[1])
    assert moved[0].all()


def test_a_pass_that_is_only_predicted_pulls_one_batch_at_a_time():
    with w.job(1, 1, TABLES, mode="geo") as made:
        shards, signs = made.one, [[1, 2], [3]]
        shards.open_pass(1, w.soon())
        exchanges = geo(shards, 4, 1)
        batches = (Predicted(each) for each in signs)
        at, seen = exchanges.begin(batches, learn=False), []
        while at.batch is not None:
            seen.append((at.batch.signs, {name: rows_UD.shape for name, rows_UD in at.rows.items()}))
            at = exchanges.follow()
    assert seen == [([1, 2], dict.fromkeys(TABLES, (2, WIDTH))), ([3], dict.fromkeys(TABLES, (1, WIDTH)))]


@dataclass(frozen=True)
class Predicted:
    """A batch that may be copied with its keys announced, as the trainer's are."""

    signs: list[int]
    prepared: object = None

    @property
    def lookups(self):
        return Batch(self.signs).lookups
