"""The law of local SGD: k = 1 with sgd is all-reduce, however uneven batches are; and when ranks average."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.local_sgd import SCHEDULE, AveragingSchedule, next_interval
from headrace.trainer.dense_config import MAX_ADAPTIVE
from headrace.trainer.dense_optimizers import DenseAdagrad, DenseAdam, DenseSgd
from tests.contract.test_dense_strategy import STEPS, assert_close, batch, job, model, train, trained, weights

SGD, MOMENTUM = DenseSgd(kind="sgd", lr=0.1), DenseSgd(kind="sgd", lr=0.1, momentum=0.5)
NAME = "local_sgd"


def learnt(name, world, steps=range(STEPS), **more):
    """The weights of rank 0 after a pass, and all ranks."""
    with job(name, world, **more) as at:
        found, ranks = at.on_ranks(lambda ranks: weights(trained(at, ranks, steps)[0].tensors()))
    return found[0], ranks


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_with_k_1_it_is_all_reduce_although_batches_are_uneven(world, optimizer):
    steps = range(2 * world - 1)  # in each of them some rank has a batch
    found, _ = learnt(NAME, world, steps, optimizer=optimizer, k_steps=1)
    assert_close(found, learnt("all_reduce", world, steps, optimizer=optimizer)[0])


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, DenseAdam(lr=0.1), DenseAdagrad(kind="adagrad", lr=0.1)])
def test_before_its_beginning_it_is_all_reduce_to_the_bit(optimizer):
    found, _ = learnt(NAME, 3, optimizer=optimizer, k_steps=2, begin=STEPS)
    expected, _ = learnt("all_reduce", 3, optimizer=optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("optimizer", [SGD, DenseAdam(lr=0.1)], ids=["sgd", "adam"])
def test_one_rank_learns_as_by_all_reduce_to_the_bit(optimizer):
    found = {}
    for name, more in ((NAME, {"k_steps": 3}), ("all_reduce", {})):
        with job(name, optimizer=optimizer, **more) as at:
            net = model()
            strategy = at.strategy(SingleRank(), net)
            train(at, SingleRank(), strategy, net, batches=lambda rank, step: batch(2, step))
            found[name] = weights(strategy.tensors())
    assert all(torch.equal(value, found["all_reduce"][key]) for key, value in found[NAME].items())


def test_ranks_meet_only_to_average():
    counts = {}
    for k_steps in (1, 2, 4, 100):
        _, ranks = learnt(NAME, 3, k_steps=k_steps)
        counts[k_steps] = sum(each.startswith("all_reduce") for each in ranks[0].made)
    assert counts == {1: STEPS, 2: 3, 4: 2, 100: 1}, "the end of a pass averages, too"


def test_between_averages_ranks_differ_and_an_average_is_weighted_by_samples():
    apart, together = {}, {}
    with job(NAME, 2, optimizer=SGD, k_steps=100) as at:

        def act(ranks):
            net = model()
            strategy = at.strategy(ranks, net)
            before = weights(strategy.tensors())
            flush, strategy.flush = strategy.flush, lambda: None
            train(at, ranks, strategy, net, range(1))
            apart[ranks.rank] = weights(strategy.tensors())
            flush()
            together[ranks.rank] = weights(strategy.tensors())
            return before

        before = at.on_ranks(act)[0][0]
    samples = [len(batch(rank, 0)) for rank in range(2)]
    assert samples == [2, 3]
    for name, value in before.items():
        assert not torch.equal(apart[0][name], apart[1][name])
        assert torch.equal(together[0][name], together[1][name])
        moved = sum((apart[rank][name] - value) * samples[rank] / 5 for rank in range(2))
        assert torch.allclose(together[0][name], value + moved, rtol=0, atol=1e-6)


def test_the_state_of_the_optimizer_is_averaged_and_its_steps_are_those_of_the_job():
    with job(NAME, 3, k_steps=2) as at:
        found, _ = at.on_ranks(lambda ranks: dict(trained(at, ranks)[0].tensors()))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        first, *others = (each[f"optimizer.{name}"] for each in found)
        assert all(torch.equal(first, other) for other in others)
    assert float(found[0]["optimizer.step"]) == STEPS


def test_it_counts_its_steps_over_a_restart():
    with job(NAME, k_steps=2, begin=STEPS + 2) as at:
        strategy, _ = trained(at, SingleRank())
        saved = {name: value.clone() for name, value in strategy.consolidate().items()}
    assert saved[SCHEDULE].tolist()[:2] == [STEPS, 2]
    with job(NAME, 2, k_steps=2, begin=STEPS + 2) as at:

        def act(ranks):
            strategy = at.strategy(ranks, model())
            strategy.load(saved)
            answers = []
            for step in range(6):
                answers.append(strategy.communicates(step))
                strategy.clear()
                strategy.note(0.5, 0.5)
                strategy.after_backward(step, 1.0)
                strategy.wait()
                strategy.step()
            return answers

        found, _ = at.on_ranks(act)
    assert found == [[True, True, False, True, False, True]] * 2


@given(st.integers(1, MAX_ADAPTIVE), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_an_interval_follows_the_formula_within_its_bounds(k_steps, loss, lr):
    found = next_interval(k_steps, loss, lr)
    assert found == min(16, max(1, math.ceil(k_steps * math.sqrt(loss / lr))))
    assert next_interval(k_steps, 2 * loss, lr) >= found >= next_interval(k_steps, loss, 2 * lr)


@pytest.mark.parametrize("loss", [0.0, -1.0, math.nan, math.inf])
def test_a_loss_without_a_root_leaves_the_first_interval(loss):
    assert next_interval(5, loss, 1.0) == 5


def test_intervals_shrink_as_the_loss_falls():
    schedule = AveragingSchedule(8, 0, adaptive=True)
    found = []
    for loss in (4.0, 4.0, 1.0, 0.25, 0.001):
        while not schedule.due:
            schedule.learnt()
        schedule.learnt()
        found.append(schedule.since)
        schedule.averaged(loss, 0.1)
    assert found == [8, 8, 8, 4, 2]


@given(st.integers(1, 20), st.integers(0, 30), st.lists(st.integers(1, 30), max_size=5))
def test_steps_before_the_beginning_are_not_local_and_none_is_later_than_k(k_steps, begin, passes):
    schedule, done = AveragingSchedule(k_steps, begin, adaptive=False), 0
    for num_steps in passes:
        for _ in range(num_steps):
            assert schedule.local == (done >= begin)
            due = schedule.local and schedule.due
            schedule.learnt()
            done += 1
            assert schedule.since <= k_steps
            if due:
                assert schedule.since == k_steps
                schedule.averaged(1.0, 0.1)
        if schedule.since:
            schedule.averaged(1.0, 0.1)
        again = AveragingSchedule(k_steps, begin, adaptive=False)
        again.load_state(schedule.state())
        schedule = again
