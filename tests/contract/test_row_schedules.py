"""Rates of rows follow a schedule: the same in each step on every shard, by samples and by versions."""

import math

import numpy as np
import pytest

from headrace.pserver.config import SlotLife, TableSection
from headrace.pserver.consistency.policy import MergeSection
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.protocol.table_operations import SetTables
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.server.commands import DigestRows, Operate
from tests.contract import shards_world as w
from tests.contract.test_shards import some_batches

STEP = 10
"""Samples of a step."""


def table(schedule, **settings):
    given = {"dim": 0, "optimizer": Sgd(kind="sgd", lr=0.5), "schedule": schedule, **settings}
    return {"default": TableSection(bounds={"low": -1e6, "high": 1e6}, **given)}


def learn(shards, number, *, steps=3, samples=0, sign=7, skipped=()):
    """A pass with a gradient of 1 for one key in each step that is not skipped. -> the weights after each step."""
    shards.open_pass(number, w.soon(), samples)
    weights = []
    for step in range(steps):
        prepared = shards.prepare({"default": w.keys(sign)}, learn=True)
        shards.pull(prepared, w.soon())
        one = np.ones(1, np.float32)
        push = None if step in skipped else {"default": Gradients(np.ones((1, 1), np.float32), one, one)}
        following = shards.prepare({"default": w.keys(sign)}, learn=True)
        rows = shards.exchange(step, prepared, push, following, StepScale(STEP), w.soon())
        weights.append(float(rows["default"][0, 0]))
    shards.close_pass(0, w.soon())
    return weights


def cosine(count):
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1, count / 60))) / 2


SCHEDULES = {
    "warm-up": ({"kind": "warmup_linear", "warmup": 40, "total": 10_000, "final": 1.0}, lambda n: min(1, n / 40)),
    "step": ({"kind": "piecewise", "at": [20, 40], "shares": [1.0, 0.1, 0.01]}, lambda n: 10.0 ** -min(2, n // 20)),
    "exponential": ({"kind": "exponential", "factor": 0.5, "every": 20}, lambda n: 2.0 ** -(n // 20)),
    "cosine": ({"kind": "warmup_cosine", "total": 60, "final": 0.1}, cosine),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shards", [0, 2])
def test_a_step_learns_at_the_rate_of_the_samples_before_it(name, shards):
    schedule, share = SCHEDULES[name]
    with w.job(shards, tables=table(schedule)) as world:
        found = learn(world.one, 1) + learn(world.one, 2, samples=3 * STEP)
    rates = [0.5 * share(STEP * step) for step in range(6)]
    assert found == pytest.approx(-np.cumsum(rates), abs=1e-6)


@pytest.mark.parametrize("shards", [0, 2])
def test_a_pass_learns_at_the_rate_of_the_versions_before_it(shards):
    schedule = {"kind": "exponential", "factor": 0.5, "every": 1, "counts": "versions"}
    with w.job(shards, tables=table(schedule)) as world:
        found = [learn(world.one, number, samples=99)[-1] for number in (1, 2, 4)]
    assert found == [-1.5, -2.25, -2.25 - 3 * 0.0625]


@pytest.mark.parametrize("shards", [0, 2])
def test_a_skipped_step_counts(shards):
    with w.job(shards, tables=table({"kind": "piecewise", "at": [20], "shares": [1.0, 0.1]})) as world:
        assert learn(world.one, 1, skipped=[0]) == pytest.approx([0, -0.5, -0.55])


class PlainFtrl:
    """McMahan et al. 2013 for one weight, in float64: each step is proximal to all weights before, by 1 / rate."""

    def __init__(self, beta, l1, l2):
        self.beta, self.l1, self.l2 = beta, l1, l2
        self.z = self.n = self.w = self.strength = 0.0

    def step(self, gradient, rate):
        if not rate:
            return
        self.n += gradient**2
        strength = (self.beta + math.sqrt(self.n)) / rate
        self.z += gradient - (strength - self.strength) * self.w
        self.strength = strength
        shrunk = math.copysign(max(0.0, abs(self.z) - self.l1), self.z)
        self.w = -shrunk / (strength + self.l2)


@pytest.mark.parametrize("name", [*SCHEDULES, "from 0", "as it is"])
def test_ftrl_goes_on_from_its_weights_at_any_rate(name):
    more = {
        "from 0": ({"kind": "inverse_sqrt", "warmup": 40}, lambda n: n / 40 if n < 40 else (40 / n) ** 0.5),
        "as it is": ({"kind": "constant"}, lambda n: 1.0),
    }
    schedule, share = (SCHEDULES | more)[name]
    optimizer = {"kind": "ftrl", "lr": 0.5, "beta": 1.0, "l1": 0.125, "l2": 0.25}
    with w.job(0, tables=table(schedule, optimizer=optimizer)) as world:
        found = learn(world.one, 1) + learn(world.one, 2, samples=3 * STEP)
    plain, expected = PlainFtrl(1.0, 0.125, 0.25), []
    for step in range(6):
        plain.step(1.0, 0.5 * share(STEP * step))
        expected.append(plain.w)
    assert found == pytest.approx(expected, abs=1e-6)


def test_slots_with_a_rate_of_their_own_have_the_share_too():
    tables = table({"kind": "piecewise", "at": [10], "shares": [1.0, 0.5]}, slots={"mine": SlotLife(lr=2.0)})
    with w.job(0, tables=tables, groups={"mine": 1}) as world:
        assert learn(world.one, 1) == [-2.0, -3.0, -4.0]


@pytest.mark.parametrize("shards", [0, 2])
def test_a_schedule_set_while_the_job_runs_counts_from_the_next_pass_on(shards):
    with w.job(shards, tables=table(None)) as world:
        assert learn(world.one, 1) == [-0.5, -1.0, -1.5]
        (later,) = table({"kind": "piecewise", "at": [40], "shares": [1.0, 0.5]}).values()
        world.one.call(Operate(1, [SetTables(tables={"default": later.model_dump(mode="json")})]), w.soon())
        assert learn(world.one, 2, samples=30) == [-2.0, -2.25, -2.5]
        (none,) = table(None).values()
        world.one.call(Operate(2, [SetTables(tables={"default": none.model_dump(mode="json")})]), w.soon())
        assert learn(world.one, 3, samples=60)[0] == -3.0


@pytest.mark.parametrize("counts", ["samples", "versions"])
def test_three_ranks_end_with_the_same_bits_on_any_number_of_shards(counts):
    schedule = {"kind": "warmup_cosine", "warmup": 3, "total": 400, "counts": counts}
    tables = {
        name: each.model_copy(update={"schedule": table(schedule)["default"].schedule})
        for name, each in w.TABLES.items()
    }
    digests = []
    for num_shards in (1, 2, 3):
        with w.job(num_shards, num_ranks=3, tables=tables) as world:
            for number in (1, 2):
                batches = [some_batches(0, 4), some_batches(1, 2), []]  # one rank runs out, one never had any
                world.each(lambda rank, shards, b=batches, n=number: w.train(shards, n, b[rank], seed=rank, steps=4))
            digests.append(world.one.call(DigestRows(), w.soon()))
    assert digests[0] == digests[1] == digests[2] and all(digests[0].values())
    with w.job(2, num_ranks=3) as world:
        world.each(lambda rank, shards, b=batches: w.train(shards, 1, b[rank], seed=rank, steps=4))
        assert world.one.call(DigestRows(), w.soon()) != digests[0]


def test_without_waiting_a_shard_counts_the_samples_of_all_ranks():
    tables = table({"kind": "piecewise", "at": [3 * STEP], "shares": [1.0, 0.0]})
    with w.job(2, num_ranks=2, tables=tables, mode="async", merge=MergeSection()) as world:
        for shards in world.ranks:
            shards.open_pass(1, w.soon())
        moved = []
        for step, rank in ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1)):
            shards = world.ranks[rank]
            prepared = shards.prepare({"default": w.keys(7)}, learn=True)
            before = shards.pull(prepared, w.soon())["default"][0, 0]
            one = np.ones(1, np.float32)
            push = {"default": Gradients(np.ones((1, 1), np.float32), one, one)}
            following = shards.prepare({"default": w.keys(7)}, learn=True)
            after = shards.exchange(step, prepared, push, following, StepScale(STEP), w.soon())["default"][0, 0]
            moved.append(float(before - after))
    assert moved == [0.5, 0.5, 0.5, 0.0, 0.0]
