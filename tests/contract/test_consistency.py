"""What every consistency policy keeps, and what `sync` promises beyond that.

The contract: each push counts once, in an order that does not depend on the order of arrival; a rank that pushed gets
its answer; no pass closes over a push that is not applied; ranks agree on a step although some have no batch.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.pserver.config import MergeSection, TableSection
from headrace.pserver.consistency.policy import FEATURES, StepFigures, policy_of
from headrace.pserver.consistency.policy import MODES as MODE_CLASSES
from headrace.pserver.errors import InvalidShardCall, StepTimedOut
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.server import data_server
from headrace.pserver.server.commands import CountRows, DigestRows, Explain, LeavePass
from tests.contract import shards_world as w
from tests.fakes.thread_ranks import on_ranks

MODES = {
    "sync": {"mode": "sync"},
    "async": {"mode": "async"},
    "geo": {"mode": "geo"},
    "half-async": {"mode": "async", "merge": MergeSection(pushes=2, wait=0.02)},
    "bounded": {"mode": "async", "max_ahead": 1},
}
EVERY = pytest.mark.parametrize("mode", sorted(MODES))
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


def policy(mode):
    return policy_of(**MODES[mode])


def job(mode, *places, **more):
    """A world whose shards are in this mode."""
    return w.job(
        *places, **{key: getattr(value, "model_dump", lambda v=value: v)() for key, value in MODES[mode].items()}
    )


class Pass:
    """The pushes of one pass on a shard, as the shard handles them, with ranks that run at their own speed."""

    def __init__(self, mode, num_ranks, steps):
        self.order = policy(mode).steps(1, num_ranks)
        self.steps, self.at = steps, [0] * num_ranks
        self.waits: dict[int, int] = {}  # the step of each rank that waits for its answer
        self.applied = []

    def push(self, rank):
        """One rank pushes its next step."""
        step = self.at[rank]
        assert self.order.push(step, rank)
        self.waits[rank] = step
        self.apply()

    def apply(self):
        if due := self.order.due():
            self.applied.append([tuple(key) for key in due])
            self.order.applied()
        for other, pushed in list(self.waits.items()):
            if self.order.may_answer(pushed, other):
                del self.waits[other]
                self.at[other] += 1

    def ready(self):
        """The ranks that may push. If none may, time passes until a push has waited long enough."""
        if not (found := self._idle()):
            self.order.wait_no_longer()
            self.apply()
            found = self._idle()
        return found

    def _idle(self):
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


@pytest.mark.parametrize("mode", sorted(name for name, each in MODES.items() if each["mode"] != "sync"))
@given(num_ranks=st.integers(1, 4), steps=st.integers(1, 6), seed=st.integers(0, 1 << 16))
@settings(max_examples=40, deadline=None)
def test_it_is_measured_how_many_steps_of_others_a_rank_did_not_see(mode, num_ranks, steps, seed):
    draw, one = random.Random(seed), Pass(mode, num_ranks, steps)
    missed: list[list[int]] = [[] for _ in range(num_ranks)]

    def others(rank, groups):
        return sum(key[1] != rank for group in groups for key in group)

    while ready := one.ready():
        rank = draw.choice(ready)
        reads = [  # by rank: groups that were applied when it read its rows, with its own last push
            max((i + 1 for i, group in enumerate(one.applied) if any(key[1] == r for key in group)), default=0)
            for r in range(num_ranks)
        ]
        missed[rank].append(others(rank, one.applied[reads[rank] :]))
        one.push(rank)
    for found, expected in zip(one.order.apart(), missed, strict=True):
        assert (found.mean, found.max) == (sum(expected) / steps, max(expected))
        assert found.max <= (num_ranks - 1) * steps and found.behind <= steps


def test_ranks_that_take_each_step_together_are_never_apart():
    assert run("sync", 3, 4, seed=1).order.apart() == ()


@EVERY
def test_a_policy_has_the_name_by_which_it_is_chosen(mode):
    assert policy(mode).name == MODES[mode]["mode"]
    assert {each["mode"] for each in MODES.values()} == {*MODE_CLASSES.names()}, "every policy is tested"


def test_a_mode_that_is_not_built_is_refused_with_those_that_are():
    with pytest.raises(SpecError, match="no mode 'gossip'; known: async, geo, sync"):
        policy_of("gossip")


# In the loop


def uneven(rank, step):
    """Rank 0 has one batch, rank 1 two, and so on: (weight, samples), or None."""
    return (0.1 + rank + step, 10 * rank + step + 1) if step <= rank else None


@EVERY
@WORLDS
def test_a_pass_ends_on_every_rank_although_some_run_out_of_batches(mode, world):
    kept = policy(mode)

    def act(ranks):
        told = []
        for step in range(world + 3):
            mine = uneven(ranks.rank, step)
            weight, num_samples = mine or (0.0, 0)
            news = {"plan": step} if ranks.rank == 0 and step == 0 else None
            figures, heard = kept.agree(ranks, StepFigures([weight], num_samples, int(mine is not None)), news)
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
    def bad(ranks, rank):
        return policy(mode).agree(ranks, StepFigures([1.0], 1, 1, int(ranks.rank == rank)), None)[0].num_bad

    found, _ = on_ranks(world, lambda ranks: bad(ranks, world - 1))
    assert found[world - 1] > 0 and (mode != "sync" or found == [1] * world)
    good, _ = on_ranks(world, lambda ranks: bad(ranks, None))
    assert good == [0] * world


@EVERY
def test_only_a_mode_that_repeats_its_weights_promises_digests_of_them(mode):
    kept = policy(mode)
    assert bool(kept.promised({"dense": "aa", "metrics": "bb"})) == kept.repeatable
    assert kept.promised({FEATURES: "cc"}) == {FEATURES: "cc"}, "histories depend on the log alone"


@EVERY
@WORLDS
def test_no_rank_leaves_a_pass_before_the_pushes_of_all_are_applied(mode, world):
    """The order is that of the shard; a rank settles after the answer to its last push."""
    one, turn = Pass(mode, world, 2), threading.Condition()

    def act(ranks):
        for _ in range(2):
            with turn:
                assert turn.wait_for(lambda: ranks.rank in one.ready(), timeout=20)
                one.push(ranks.rank)
                turn.notify_all()
        with turn:
            assert turn.wait_for(lambda: one.ready() is not None and ranks.rank not in one.waits, timeout=20)
            turn.notify_all()
        policy(mode).settle(ranks)
        return sum(len(group) for group in one.applied)

    assert on_ranks(world, act)[0] == [2 * world] * world


@EVERY
def test_a_close_promises_no_other_digests_than_those_that_were_made(mode):
    digests = {"dense": "aa", "pushes": "bb"}
    assert policy(mode).promised(digests).items() <= digests.items()


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
        shards.call(LeavePass(1), w.soon())
        met.wait(w.soon().left_s())
        return shards.close_pass(0, w.soon())

    met = threading.Barrier(len(world.ranks))
    closes = world.each(act)
    return closes, world.one.call(DigestRows(), w.soon())


def batches_of(rank, num_steps):
    return [w.keys(*range(10 * step, 10 * step + 6)) for step in range(num_steps) if step <= rank]


def counts(world, num_steps):
    """Shows and clicks of every key that was pushed, as the shards have them."""
    found = {}
    for step in range(num_steps):
        for key in batches_of(step, num_steps)[step].keys_U.tolist():
            told = world.one.call(Explain("default", key, 1), w.soon())
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
    with job(mode, 2, 3) as world:
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
        sums = (0.5 * ranks.rank, 1e16 * (-1) ** ranks.rank)
        mine = StepFigures([0.1 * (ranks.rank + 1), 1e16 * (-1) ** ranks.rank], ranks.rank, 1, sums=sums)
        return policy_of("sync").agree(ranks, mine, None)[0]

    found, _ = on_ranks(3, act)
    weights = [float((np.float64(0.1) * 1 + np.float64(0.1) * 2) + np.float64(0.1) * 3), 1e16 - 1e16 + 1e16]
    assert found == [StepFigures(weights, 3, 3, sums=(1.5, 1e16))] * 3


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
        mine = StepFigures([0.5 + ranks.rank], 7 * ranks.rank, 1, int(ranks.rank == 1))
        assert policy.agree(ranks, mine, {"plan": 1} if ranks.rank == 0 else None)[0] == mine
        assert ranks.made == []
        policy.settle(ranks)
        return ranks.made

    assert on_ranks(3, act)[0] == [["meet"]] * 3


@pytest.mark.parametrize("num_shards", [1, 2])
def test_async_with_one_trainer_equals_sync(num_shards):
    found = []
    for mode in ("sync", "async"):
        with w.job(num_shards, 1, mode=mode) as world:
            found.append(in_lockstep(world, samples=30)[0])
    assert found[0] == found[1]


# async with merge


@given(num_ranks=st.integers(1, 4), steps=st.integers(1, 5), merged=st.integers(1, 6), seed=st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None)
def test_half_async_applies_pushes_as_soon_as_there_are_enough_of_them(num_ranks, steps, merged, seed):
    one, draw, most = Pass("async", num_ranks, steps), random.Random(seed), min(merged, num_ranks)
    one.order = policy_of("async", merge=MergeSection(pushes=merged)).steps(1, num_ranks)
    while ready := one._idle():
        one.push(draw.choice(ready))
        assert len(one.waits) < most
    assert {len(group) for group in one.applied} <= {most}
    assert len(one.waits) < most, "ranks that wait for others which have run out of batches wait for time to pass"
    one.order.wait_no_longer()
    one.apply()
    assert not one.waits


def halved(push):
    return {name: replace(each, grads_UD=each.grads_UD / 2) for name, each in push.items()}


def in_lockstep(world, samples, share=lambda push: push):
    """A pass of three steps with a batch on every rank; the digest of all rows, and seconds of the slowest step."""

    def act(rank, shards):
        shards.open_pass(1, w.soon())
        keys = [w.keys(*range(10 * step, 10 * step + 6)) for step in range(3)]
        ready, longest_s = [shards.prepare({"default": each}, learn=True) for each in keys], 0.0
        shards.pull(ready[0], w.soon())
        for step in range(3):
            met.wait(w.soon().left_s())
            since_s = time.monotonic()
            push = share({"default": w.push_of(keys[step], 5, seed=100 * step + rank)})
            following = ready[step + 1] if step < 2 else None
            shards.exchange(step, ready[step], push, following, StepScale(samples), w.soon())
            longest_s = max(longest_s, time.monotonic() - since_s)
        shards.close_pass(0, w.soon())
        return longest_s

    met = threading.Barrier(len(world.ranks))
    longest_s = max(world.each(act))
    return world.one.call(DigestRows(), w.soon())["default"], longest_s


def test_half_async_with_every_trainer_in_time_is_sync_over_the_samples_of_all():
    """Each rank's gradients are means over its own samples: over those of both, half of that."""
    with w.job(2, 2, mode="sync") as world:
        wanted, _ = in_lockstep(world, 64, halved)
    with w.job(2, 2, mode="async", merge={"pushes": 2, "wait": 20.0}) as world:
        found, _ = in_lockstep(world, 32)
    assert found == wanted


def test_half_async_does_not_wait_longer_than_it_may_for_a_trainer_that_is_late():
    with w.job(1, 2, mode="async", merge={"pushes": 2, "wait": 0.05}) as world:
        shards, keys = world.one, w.keys(1, 2, 3)
        for each in world.ranks:
            each.open_pass(1, w.soon())
        batch, push = shards.prepare({"default": keys}, learn=True), w.push_of(keys, 5, seed=1)
        shards.pull(batch, w.soon())
        since_s = time.monotonic()
        shards.exchange(0, batch, {"default": push}, None, StepScale(32), w.soon())
        assert time.monotonic() - since_s >= 0.05
        told = shards.call(Explain("default", int(keys.keys_U[0]), 1), w.soon())
        assert told["row"] and told["show"] == push.show_U[0]


def test_pushes_of_unequal_batches_count_by_their_samples():
    tables = {"default": TableSection(dim=2, first_order=False, init_range=0.0, optimizer=Sgd(kind="sgd", lr=1.0))}
    with w.job(1, 2, tables, mode="async", merge={"pushes": 2, "wait": 20.0}) as world:

        def act(rank, shards):
            shards.open_pass(1, w.soon())
            batch = shards.prepare({"default": w.keys(7)}, learn=True)
            shards.pull(batch, w.soon())
            gradient = np.full((1, 2), [8.0, 4.0][rank], np.float32)
            count = np.ones(1, np.float32)
            push = {"default": Gradients(gradient, count, count)}
            shards.exchange(0, batch, push, None, StepScale([1, 3][rank]), w.soon())

        world.each(act)
        rows_UD = world.one.look({"default": w.keys(7)}, w.soon())["default"]
        np.testing.assert_array_equal(rows_UD, [[-5.0, -5.0]])  # (8 * 1 + 4 * 3) / 4


# async with max_ahead


@given(
    parts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    most=st.integers(1, 3),
    merged=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=100, deadline=None)
def test_no_rank_is_further_ahead_of_the_slowest_one_than_it_may_be(parts, most, merged, seed):
    """Ranks have unequal parts of a pass, and say when they leave it."""
    one, draw, left = Pass("async", len(parts), 0), random.Random(seed), set()
    one.order = policy_of("async", merge=MergeSection(pushes=merged), max_ahead=most).steps(1, len(parts))
    while len(left) < len(parts):
        for rank, steps in enumerate(parts):
            if rank not in left and one.at[rank] == steps:
                one.order.leave(rank)
                left.add(rank)
        one.apply()
        able = [rank for rank, steps in enumerate(parts) if rank not in one.waits and one.at[rank] < steps]
        if able:
            one.push(draw.choice(able))
        else:
            one.order.wait_no_longer()
            one.apply()
        slowest = min((one.at[rank] for rank in range(len(parts)) if rank not in left), default=None)
        assert slowest is None or all(
            one.at[rank] - slowest <= most + 1 for rank in range(len(parts)) if rank not in left
        )
    assert one.at == parts and not one.waits, "nobody waits for ever"
    assert all(rank.behind <= most for rank in one.order.apart())


def two_ahead(num_ranks):
    """Ranks 0 and 2 have pushed two steps, merged, and wait for the others."""
    order = policy_of("async", merge=MergeSection(pushes=2), max_ahead=1).steps(1, num_ranks)
    for step in (0, 1):
        for rank in (0, 2):
            order.push(step, rank)
        order.applied()
    return order


def test_a_rank_that_is_ahead_reads_no_rows_without_a_step_of_the_slowest_one_that_waits_to_be_merged():
    order = two_ahead(4)
    order.push(0, 3)
    order.wait_no_longer()
    order.applied()
    order.push(0, 1)
    assert not order.due() and not order.may_answer(1, 0) and order.missing() == [1]
    order.push(1, 3)
    assert order.due() == [(0, 1), (1, 3)]
    order.applied()
    assert order.may_answer(1, 0) and order.may_answer(0, 1)


@pytest.mark.parametrize("left", [(), (0,), (0, 2)])
def test_a_push_is_not_kept_for_those_of_ranks_that_wait_for_it_or_have_left(left):
    order = two_ahead(3)
    for rank in left:
        order.leave(rank)
    assert not order.due()
    order.push(0, 1)
    assert order.due() == [(0, 1)]


def test_a_trainer_that_is_too_far_ahead_waits_as_long_as_it_may_and_names_the_slowest(monkeypatch):
    with w.job(1, 3, mode="async", max_ahead=1) as world:
        keys, ready = w.keys(1, 2, 3), {}
        for rank, shards in enumerate(world.ranks):
            shards.open_pass(1, w.soon())
            ready[rank] = [shards.prepare({"default": keys}, learn=True) for _ in range(4)]
            shards.pull(ready[rank][0], w.soon())

        def step(rank, number, deadline):
            push = {"default": w.push_of(keys, 5, seed=rank)}
            batch, following = ready[rank][number : number + 2]
            world.ranks[rank].exchange(number, batch, push, following, StepScale(8), deadline)

        step(2, 0, w.soon())
        step(0, 0, w.soon())
        late = pytest.raises(
            StepTimedOut, match="in step 1 of pass 1 for rank 1: is that trainer alive, or much slower"
        )
        with monkeypatch.context() as patch, late:
            patch.setattr(data_server, "waiting_s", lambda left_s: left_s / 100)  # long before the caller gives up
            step(0, 1, w.soon())
        world.ranks[1].call(LeavePass(1), w.soon())  # it has no batches
        step(0, 1, w.soon())  # applied already: the answer to the repeated call
        step(2, 1, w.soon())
        step(2, 2, w.soon())
        for shards in world.ranks:
            shards.call(LeavePass(1), w.soon())
        world.each(lambda _, shards: shards.close_pass(0, w.soon()))
        (figures,) = world.one.call(CountRows(), w.soon()).figures
        assert max(each["behind"] for each in figures.apart) <= 1
        shown = world.one.call(Explain("default", int(keys.keys_U[0]), 1), w.soon())["show"]
        assert shown == sum(n * w.push_of(keys, 5, seed=rank).show_U[0] for rank, n in ((0, 2), (2, 3)))
