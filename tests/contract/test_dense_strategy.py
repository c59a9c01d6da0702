"""What every dense strategy keeps: the same parameters on all ranks, and the same collectives in the same order.

Three ranks, of which some have no batch in some steps; each rank is a thread.
"""

import pytest
import torch
from torch import nn

from millrace.errors import BadInput, SpecError
from tests.fakes.thread_ranks import on_ranks
from trainer.collectives.ranks import SingleRank
from trainer.config import DenseSgd, TrainSection
from trainer.dense.strategy import STRATEGIES, dense_strategy

EVERY = pytest.mark.parametrize("name", sorted(STRATEGIES))
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
STEPS = 5
TOLERANCE = 1e-6
"""Sums over ranks are rounded otherwise than sums over one batch."""


def model(seed=3):
    """The same on every rank; the weights are drawn without torch's generator, which all threads share."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    draw = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    return net


def section(name, **more):
    return TrainSection(dense=name, **({"dense_optimizer": DenseSgd(kind="sgd", lr=0.1, momentum=0.5)} | more))


def batch(rank, step):
    """(samples, 3) of a rank; None where it has run out: rank 0 after one step, rank 1 after three."""
    if step > 2 * rank:
        return None
    return torch.randn(2 + rank, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def train(ranks, strategy, net, steps=range(STEPS), batches=batch):
    """Steps as the loop makes them: each loss is divided by the samples of all ranks."""
    for step in steps:
        mine = batches(ranks.rank, step)
        num_samples = sum(len(each) for r in range(ranks.world) if (each := batches(r, step)) is not None)
        strategy.clear()
        if mine is not None:
            (net(mine).square().sum() / max(num_samples, 1)).backward()
        if mine is not None or strategy.communicates(step):
            strategy.after_backward(step, 1.0)
        assert strategy.finite()
        strategy.step()
    strategy.flush()


def trained(ranks, name, **more):
    net = model()
    strategy = dense_strategy(net, section(name, **more), ranks)
    train(ranks, strategy, net)
    return strategy, net


def weights(tensors):
    return {name: value.clone() for name, value in tensors.items() if name.startswith("model.")}


@EVERY
@WORLDS
def test_after_a_pass_all_ranks_hold_the_same_parameters_although_some_had_no_batch(name, world):
    digests, _ = on_ranks(world, lambda ranks: trained(ranks, name)[0].digest())
    assert len(set(digests)) == 1
    again, _ = on_ranks(world, lambda ranks: trained(ranks, name)[0].digest())
    assert again == digests, "the same at every run"


@EVERY
def test_every_rank_makes_the_same_collectives_in_the_same_order(name):
    def act(ranks):
        strategy, _ = trained(ranks, name)
        strategy.consolidate()
        return [strategy.communicates(step) for step in range(STEPS)]

    answers, ranks = on_ranks(3, act)
    made = [each.made for each in ranks]
    assert made[0] and made[0] == made[1] == made[2]
    assert answers[0] == answers[1] == answers[2]
    _, again = on_ranks(3, act)
    assert [each.made for each in again] == made, "fixed buckets in a fixed order"


@EVERY
def test_the_order_in_which_gradients_are_ready_changes_no_collective(name):
    class Turned(nn.Module):
        """Uses its two layers in one order or the other, so that their gradients are ready in another one, too."""

        def __init__(self, turned):
            super().__init__()
            self.first, self.second, self.turned = nn.Linear(3, 3), nn.Linear(3, 3), turned

        def forward(self, x):
            return self.first(self.second(x)) if self.turned else self.second(self.first(x))

    def act(ranks):
        net = Turned(ranks.rank == 1)
        for parameter in net.parameters():
            parameter.data.fill_(0.1)
        train(ranks, dense_strategy(net, section(name), ranks), net)

    _, ranks = on_ranks(3, act)
    assert ranks[0].made == ranks[1].made == ranks[2].made


@EVERY
def test_a_step_in_which_no_rank_has_a_batch_makes_the_same_collectives(name):
    nobody = lambda rank, step: None  # noqa: E731

    def act(ranks):
        net = model()
        strategy = dense_strategy(net, section(name), ranks)
        train(ranks, strategy, net, batches=nobody)
        return strategy.digest()

    digests, ranks = on_ranks(3, act)
    assert len(set(digests)) == 1 and ranks[0].made == ranks[1].made == ranks[2].made


@EVERY
def test_what_is_consolidated_continues_the_training_on_ranks_that_load_it(name):
    def act(ranks):
        strategy, net = trained(ranks, name)
        found = {key: value.clone() for key, value in strategy.consolidate().items()}
        train(ranks, strategy, net, range(STEPS, 2 * STEPS), lambda rank, step: batch(rank, step - STEPS))
        return found, strategy.digest()

    results, _ = on_ranks(3, act)
    saved, digest = results[0]

    def go_on(ranks):
        net = model(seed=4)
        strategy = dense_strategy(net, section(name), ranks)
        strategy.load({key: value.clone() for key, value in saved.items()})
        train(ranks, strategy, net, range(STEPS, 2 * STEPS), lambda rank, step: batch(rank, step - STEPS))
        return strategy.digest()

    assert on_ranks(3, go_on)[0] == [digest] * 3


@EVERY
def test_what_three_ranks_consolidated_is_loaded_by_one(name):
    results, _ = on_ranks(3, lambda ranks: dict(trained(ranks, name)[0].consolidate()))
    saved = {key: value.clone() for key, value in results[0].items()}
    net = model(seed=4)
    alone = dense_strategy(net, section(name), SingleRank())
    alone.load(saved)
    assert all(torch.equal(value, saved[key]) for key, value in weights(alone.tensors()).items())
    assert {f"model.{key}" for key in net.state_dict()} <= saved.keys()


@EVERY
def test_a_skipped_step_changes_nothing(name):
    net = model()
    strategy = dense_strategy(net, section(name), SingleRank())
    before = strategy.digest()
    strategy.clear()
    (net(torch.ones(2, 3)).sum() * float("nan")).backward()
    strategy.after_backward(0, 1.0)
    assert not strategy.finite()
    strategy.clear()
    strategy.flush()
    assert strategy.digest() == before


@EVERY
def test_the_scale_of_the_loss_is_taken_out(name):
    def learnt(scale):
        net = model()
        strategy = dense_strategy(net, section(name), SingleRank())
        strategy.clear()
        (net(torch.ones(2, 3)).square().sum() * scale).backward()
        strategy.after_backward(0, scale)
        strategy.step()
        strategy.flush()
        return strategy.digest()

    assert learnt(1.0) == learnt(1024.0)


@EVERY
def test_a_pass_leaves_nothing_for_the_next_one(name):
    net = model()
    strategy = dense_strategy(net, section(name, accumulate=4), SingleRank())
    train(SingleRank(), strategy, net, range(3), lambda rank, step: torch.ones(2, 3))
    digest = strategy.digest()
    strategy.flush()
    assert strategy.digest() == digest


@EVERY
def test_a_commit_of_another_model_is_refused(name):
    other = dense_strategy(nn.Linear(2, 2), section(name), SingleRank()).consolidate()
    with pytest.raises(BadInput, match="another model"):
        dense_strategy(model(), section(name), SingleRank()).load(dict(other))


@EVERY
def test_a_model_without_dense_parameters_is_no_error(name):
    def act(ranks):
        strategy = dense_strategy(nn.Identity(), section(name), ranks)
        train(ranks, strategy, nn.Identity(), batches=lambda rank, step: None)
        return dict(strategy.consolidate())

    assert on_ranks(2, act)[0][0] == {}


def test_a_strategy_that_is_not_built_is_refused_with_those_that_are():
    unknown = TrainSection().model_copy(update={"dense": "local_sgd"})
    with pytest.raises(
        SpecError, match=f'train.dense: there is no strategy "local_sgd"; known: {sorted(STRATEGIES)[0]}'
    ):
        dense_strategy(model(), unknown, SingleRank())


# all-reduce


@WORLDS
def test_all_reduced_ranks_learn_what_one_rank_learns_from_all_batches(world):
    found, _ = on_ranks(world, lambda ranks: weights(trained(ranks, "allreduce")[0].tensors()))
    net = model()
    alone = dense_strategy(net, section("allreduce"), SingleRank())

    def joined(rank, step):
        parts = [each for r in range(world) if (each := batch(r, step)) is not None]
        return torch.cat(parts) if parts else None

    train(SingleRank(), alone, net, batches=joined)
    for name, value in weights(alone.tensors()).items():
        assert torch.allclose(found[0][name], value, rtol=0, atol=TOLERANCE)
