"""What every consistency policy keeps, and what `sync` promises beyond that.

The contract: each push counts once, in an order that does not depend on the order of arrival; a rank that pushed gets
its answer; no pass closes over a push that is not applied; ranks agree on a step although some have no batch.
"""

import random
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import SpecError
from pserver.consistency.modes import POLICIES, policy_of
from pserver.consistency.policy import StepFigures
from pserver.errors import InvalidShardCall
from pserver.protocol.shards import StepScale
from tests.contract import shards_world as w
from tests.fakes.thread_ranks import on_ranks

EVERY = pytest.mark.parametrize("mode", sorted(POLICIES))
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


class Pass:
    """The pushes of one pass on a shard, as the shard handles them, with ranks that run at their own speed."""

    def __init__(self, mode, num_ranks, steps):
        self.order = policy_of(mode).steps(1, num_ranks)
        self.steps, self.at = steps, [0] * num_ranks
        self.waits: dict[int, int] = {}  # the step of each rank that waits for its answer
        self.applied = []

    def push(self, rank):
        """One rank pushes its next step."""
        step = self.at[rank]
        assert self.order.push(step, rank)
        self.waits[rank] = step
        if due := self.order.due():
            self.applied.append([tuple(key) for key in due])
            self.order.applied()
        for other, pushed in list(self.waits.items()):
            if self.order.may_answer(pushed, other):
                del self.waits[other]
                self.at[other] += 1

    def ready(self):
        return [rank for rank, at in enumerate(self.at) if rank not in self.waits and at < self.steps]


def run(mode, num_ranks, steps, seed):
    """A whole pass whose ranks take turns as `seed` draws them."""
    draw, one = random.Random(seed), Pass(mode, num_ranks, steps)
    while ready := one.ready():
        one.push(draw.choice(ready))
    return one


@EVERY
@given(num_ranks=st.integers(1, 4), steps=st.integers(0, 6), seed=st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None)
def test_every_push_is_applied_once_and_every_rank_gets_its_answer(mode, num_ranks, steps, seed):
    one = run(mode, num_ranks, steps, seed)
    assert not one.waits and one.at == [steps] * num_ranks
    counts = Counter(key for group in one.applied for key in group)
    assert counts == Counter((step, rank) for step in range(steps) for rank in range(num_ranks))
    for rank in range(num_ranks):
        one.order.close(rank)


@EVERY
@given(num_ranks=st.integers(2, 4), steps=st.integers(1, 5), seed=st.integers(0, 1 << 16))
@settings(max_examples=40, deadline=None)
def test_the_pushes_that_are_applied_together_are_merged_in_order_of_step_and_rank(mode, num_ranks, steps, seed):
    for group in run(mode, num_ranks, steps, seed).applied:
        assert group == sorted(group)


@EVERY
@WORLDS
def test_a_push_that_is_repeated_after_it_was_applied_does_not_count_again(mode, world):
    one = run(mode, world, 2, seed=1)
    assert not any(one.order.push(1, rank) for rank in range(world))
    assert not one.order.due()


@EVERY
@WORLDS
def test_no_push_follows_the_close_of_its_rank(mode, world):
    one = run(mode, world, 1, seed=1)
    one.order.close(0)
    with pytest.raises(InvalidShardCall):
        one.order.push(1, 0)


@EVERY
def test_rows_are_as_the_last_close_left_them_until_a_step_is_applied(mode):
    one = Pass(mode, 2, 1)
    while not one.applied:
        assert one.order.num_applied == 0
        one.push(one.ready()[0])
    assert one.order.num_applied > 0


@EVERY
def test_a_policy_has_the_name_by_which_it_is_chosen(mode):
    assert policy_of(mode).name == mode


def test_a_mode_that_is_not_built_is_refused_with_those_that_are():
    with pytest.raises(SpecError, match=f'train.mode: there is no mode "gossip"; known: {", ".join(sorted(POLICIES))}'):
        policy_of("gossip")


# In the loop


def uneven(rank, step):
    """Rank 0 has one batch, rank 1 two, and so on: (weight, samples), or None."""
    return (0.1 + rank + step, 10 * rank + step + 1) if step <= rank else None


@EVERY
@WORLDS
def test_a_pass_ends_on_every_rank_although_some_run_out_of_batches(mode, world):
    policy = policy_of(mode)

    def act(ranks):
        told = []
        for step in range(world + 3):
            mine = uneven(ranks.rank, step)
            weight, num_samples = mine or (0.0, 0)
            news = {"plan": step} if ranks.rank == 0 and step == 0 else None
            figures, heard = policy.agree(ranks, StepFigures([weight], num_samples, int(mine is not None)), news)
            told.append((figures, heard))
            if not figures.num_batches:
                return told
        raise AssertionError("the pass has no end")

    told, ranks = on_ranks(world, act)
    assert all(each[-1][0] == StepFigures([0.0], 0, 0) for each in told)
    for rank in range(world):
        own = [figures for figures, _ in told[rank]][: rank + 1]
        assert all(figures.weights[0] >= uneven(rank, step)[0] for step, figures in enumerate(own))
    assert len({tuple(each.made) for each in ranks}) == 1, "ranks without a batch make the same collectives"
    assert told[0][0][1] == {"plan": 0} and all(heard is None for _, heard in told[0][1:])


@EVERY
@WORLDS
def test_a_rank_does_not_push_what_is_not_finite(mode, world):
    bad, _ = on_ranks(world, lambda ranks: policy_of(mode).num_bad(ranks, ranks.rank != world - 1))
    assert bad[world - 1] > 0
    good, _ = on_ranks(world, lambda ranks: policy_of(mode).num_bad(ranks, True))
    assert good == [0] * world


@EVERY
def test_only_a_mode_that_repeats_its_weights_promises_digests_of_them(mode):
    policy = policy_of(mode)
    assert bool(policy.promised({"dense": "aa", "metrics": "bb"})) == policy.repeatable


@EVERY
@WORLDS
def test_no_rank_leaves_a_pass_before_the_pushes_of_all_are_applied(mode, world):
    """The order is that of the shard; a rank settles after the answer to its last push."""
    one, late = Pass(mode, world, 2), threading.Lock()

    def act(ranks):
        for _ in range(2):
            while True:
                with late:
                    if ranks.rank in one.ready():
                        one.push(ranks.rank)
                        break
        while True:
            with late:
                if ranks.rank not in one.waits:
                    break
        policy_of(mode).settle(ranks)
        return sum(len(group) for group in one.applied)

    assert on_ranks(world, act)[0] == [2 * world] * world


@EVERY
def test_a_close_promises_no_other_digests_than_those_that_were_made(mode):
    digests = {"dense": "aa", "pushes": "bb"}
    assert policy_of(mode).promised(digests).items() <= digests.items()


# On shards: three trainers, of which two run out of batches


def train(world, num_steps):
    """A pass in which rank r has batches for steps 0 to r alone; the digest of all rows."""

    def act(rank, shards):
        shards.open_pass(1, w.soon())
        batches = batches_of(rank, num_steps)
        ready = [shards.prepare({"default": keys}, learn=True) for keys in batches]
        if ready:
            shards.pull(ready[0], w.soon())
        for step in range(num_steps):
            mine = step < len(ready)
            push = {"default": w.push_of(batches[step], 5, seed=100 * step + rank)} if mine else None
            following = ready[step + 1] if step + 1 < len(ready) else None
            shards.exchange(step, ready[step] if mine else None, push, following, StepScale(30), w.soon())
        met.wait(w.soon().left_s())
        return shards.close_pass(0, w.soon())

    met = threading.Barrier(len(world.ranks))
    closes = world.each(act)
    return closes, world.one.digest(w.soon())


def batches_of(rank, num_steps):
    return [w.keys(*range(10 * step, 10 * step + 6)) for step in range(num_steps) if step <= rank]


def counts(world, num_steps):
    """Shows and clicks of every key that was pushed, as the shards have them."""
    found = {}
    for step in range(num_steps):
        for key in batches_of(step, num_steps)[step].keys_U.tolist():
            told = world.one.explain("default", key, 1, w.soon())
            found[key] = told["row"] and (told["show"], told["click"])
    return found


def pushed(num_ranks, num_steps):
    """The same, summed here."""
    found = Counter(), Counter()
    for rank in range(num_ranks):
        for step, keys in enumerate(batches_of(rank, num_steps)):
            push = w.push_of(keys, 5, seed=100 * step + rank)
            for of_kind, values in zip(found, (push.show_U, push.click_U), strict=True):
                for key, value in zip(keys.keys_U.tolist(), values.tolist(), strict=True):
                    of_kind[key] += value
    return {key: (found[0][key], found[1][key]) for key in found[0]}


@EVERY
def test_ranks_without_batches_take_part_in_every_step_on_the_shards(mode):
    with w.job(2, 3, mode=mode) as world:
        closes, digest = train(world, 3)
        found = counts(world, 3)
    assert closes[0] == closes[1] == closes[2] and digest["default"]
    assert found == pushed(3, 3), "every push counts once"


# sync


@given(num_ranks=st.integers(1, 4), steps=st.integers(1, 5), seed=st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None)
def test_sync_applies_whole_steps_in_their_order_with_ranks_in_theirs(num_ranks, steps, seed):
    applied = run("sync", num_ranks, steps, seed).applied
    assert applied == [[(step, rank) for rank in range(num_ranks)] for step in range(steps)]


def test_sync_names_the_ranks_that_are_missing_and_lets_nobody_close_before_they_are_there():
    one = Pass("sync", 3, 1)
    one.push(1)
    assert one.order.missing() == [0, 2] and one.ready() == [0, 2]
    with pytest.raises(InvalidShardCall, match="pass 1 cannot close: step 0 lacks rank 0, 2"):
        one.order.close(0)


def test_sync_sums_over_ranks_in_their_order():
    def act(ranks):
        mine = StepFigures([0.1 * (ranks.rank + 1), 1e16 * (-1) ** ranks.rank], ranks.rank, 1)
        return policy_of("sync").agree(ranks, mine, None)[0]

    found, _ = on_ranks(3, act)
    weights = [float((np.float64(0.1) * 1 + np.float64(0.1) * 2) + np.float64(0.1) * 3), 1e16 - 1e16 + 1e16]
    assert found == [StepFigures(weights, 3, 3)] * 3


def test_sync_gives_the_same_rows_at_every_run():
    digests = []
    for _ in range(2):
        with w.job(2, 3, mode="sync") as world:
            digests.append(train(world, 3))
    assert digests[0] == digests[1]


def test_sync_promises_all_digests():
    assert policy_of("sync").promised({"dense": "aa", "pushes": "bb"}) == {"dense": "aa", "pushes": "bb"}


# async


@given(num_ranks=st.integers(1, 4), steps=st.integers(1, 5), seed=st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None)
def test_async_applies_each_push_when_it_comes_and_answers_its_rank_at_once(num_ranks, steps, seed):
    one, draw, wanted = Pass("async", num_ranks, steps), random.Random(seed), []
    while ready := one.ready():
        rank = draw.choice(ready)
        wanted.append([(one.at[rank], rank)])
        one.push(rank)
        assert not one.waits and one.order.missing() == ()
    assert one.applied == wanted


def test_async_lets_a_rank_end_a_pass_before_another_has_begun_it():
    one = Pass("async", 2, 3)
    for _ in range(3):
        one.push(1)
    one.order.close(1)
    one.push(0)
    assert one.at == [1, 3]
    with pytest.raises(InvalidShardCall, match="push of step 2 of pass 1: the next step of rank 0 is 1"):
        one.order.push(2, 0)


def test_async_makes_no_collective_in_a_step_and_one_at_the_end_of_a_pass():
    def act(ranks):
        policy = policy_of("async")
        mine = StepFigures([0.5 + ranks.rank], 7 * ranks.rank, 1)
        assert policy.agree(ranks, mine, {"plan": 1} if ranks.rank == 0 else None)[0] == mine
        assert policy.num_bad(ranks, ranks.rank != 1) == int(ranks.rank == 1)
        assert ranks.made == []
        policy.settle(ranks)
        return ranks.made

    assert on_ranks(3, act)[0] == [["meet"]] * 3


@pytest.mark.parametrize("num_shards", [1, 2])
def test_async_with_one_trainer_equals_sync(num_shards):
    found = []
    for mode in ("sync", "async"):
        with w.job(num_shards, 1, mode=mode) as world:
            found.append(train(world, 1))
    assert found[0] == found[1]
