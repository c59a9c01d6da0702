"""The sharded optimizer: the weights of all-reduce, a part of its memory, and its commits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.block_layout import HASHED_FLOATS
from headrace.trainer.dense_config import group_size
from headrace.trainer.dense_optimizers import DenseAdagrad, DenseAdam, DenseSgd
from tests.contract.test_dense_strategy import STEPS, assert_close, job, model, train, trained, weights

OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [
        DenseSgd(kind="sgd", lr=0.1),
        DenseSgd(kind="sgd", lr=0.1, momentum=0.5),
        DenseAdam(lr=0.01, weight_decay=0.1),
        DenseAdagrad(kind="adagrad", lr=0.1, initial=0.1),
    ],
    ids=["sgd", "momentum", "adam", "adagrad"],
)
NAME = "sharded"


def consolidated(name, world, **more):
    """What rank 0 consolidates after a pass, and the digest."""
    with job(name, world, **more) as at:

        def act(ranks):
            strategy, _ = trained(at, ranks)
            return {key: value.clone() for key, value in strategy.consolidate().items()}, strategy.digest()

        found, _ = at.on_ranks(act)
    assert len({digest for _, digest in found}) == 1
    return found[0]


@pytest.mark.parametrize(("world", "group"), [(1, None), (2, None), (3, None), (3, 1), (4, 2)])
@OPTIMIZERS
def test_a_commit_is_that_of_all_reduce(world, group, optimizer):
    found, _ = consolidated(NAME, world, optimizer=optimizer, group=group)
    expected, _ = consolidated("all_reduce", world, optimizer=optimizer)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=0, atol=1e-6), key
        if group is None:  # these ranks are added one after another
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_gradient_is_clipped_to_the_norm_of_all_slices(world):
    found, _ = consolidated(NAME, world, clip_norm=0.1)
    assert_close(
        weights(found), weights(consolidated("all_reduce", world, optimizer=DenseAdam(lr=0.1), clip_norm=0.1)[0])
    )


@OPTIMIZERS
def test_its_commit_is_continued_by_any_number_of_ranks_and_by_all_reduce(optimizer):
    saved, digest = consolidated(NAME, 3, optimizer=optimizer)
    for name, world in (("all_reduce", 1), (NAME, 1), (NAME, 2), (NAME, 4)):
        with job(name, world, optimizer=optimizer) as at:

            def act(ranks):
                strategy = at.strategy(ranks, model(seed=4))  # noqa: B023
                strategy.load(saved)
                return strategy.digest(), {key: value.clone() for key, value in strategy.consolidate().items()}

            (first, again), *others = at.on_ranks(act)[0]
        assert again.keys() == saved.keys() and all(torch.equal(value, saved[key]) for key, value in again.items())
        assert all(other == first for other, _ in others)
        assert name != NAME or first == digest, "a digest does not depend on the number of ranks"


def test_it_continues_a_commit_of_all_reduce():
    saved, _ = consolidated("all_reduce", 2, optimizer=DenseAdam(lr=0.1))
    with job(NAME, 3) as at:

        def act(ranks):
            strategy = at.strategy(ranks, model(seed=4))
            strategy.load(saved)
            return {key: value.clone() for key, value in strategy.consolidate().items()}

        found, *_ = at.on_ranks(act)[0]
    assert all(torch.equal(value, saved[key]) for key, value in found.items())


@pytest.mark.parametrize(("world", "group", "part"), [(1, None, 1), (2, None, 2), (4, None, 4), (4, 2, 2)])
def test_a_rank_has_its_part_of_the_optimizers_memory(world, group, part):
    floats = 8 * HASHED_FLOATS

    def memory(name, **more):
        with job(name, world, optimizer=DenseAdam(lr=0.1), **more) as at:

            def act(ranks):
                net = nn.Linear(HASHED_FLOATS, 8, bias=False)
                net.weight.data.fill_(0.1)
                strategy = at.strategy(ranks, net)
                train(at, ranks, strategy, net, batches=lambda rank, step: torch.ones(1, HASHED_FLOATS))
                found = strategy.tensors()
                return sum(found[f"optimizer.{key}"].nbytes for key in ("exp_avg", "exp_avg_sq"))

            return at.on_ranks(act)[0]

    assert memory("all_reduce") == [2 * 4 * floats] * world
    assert memory(NAME, group=group) == [2 * 4 * floats // part] * world


def test_a_slice_that_differs_from_that_of_another_group_shows_in_the_digests():
    with job(NAME, 4, group=2) as at:

        def act(ranks):
            strategy, _ = trained(at, ranks)
            if ranks.rank == 2:
                strategy.tensors()["optimizer.exp_avg"][0] += 1
            strategy.flush()
            return strategy.digest()

        first, second, third, fourth = at.on_ranks(act)[0]
    assert first == second != third == fourth


def test_a_digest_before_the_first_step_is_that_after_an_empty_pass():
    for optimizer in (DenseAdam(), DenseAdagrad(kind="adagrad", initial=0.5)):
        with job(NAME, 2, optimizer=optimizer) as at:

            def act(ranks):
                strategy = at.strategy(ranks, model())  # noqa: B023
                before = strategy.digest()
                strategy.flush()
                return before == strategy.digest()

            assert at.on_ranks(act)[0] == [True, True]


@given(st.integers(1, 64), st.none() | st.integers(1, 80))
def test_groups_have_one_size_and_at_most_what_is_wanted(world, wanted):
    size = group_size(world, wanted)
    assert world % size == 0 and size <= (wanted or world)
    assert not any(world % other == 0 for other in range(size + 1, min(wanted or world, world) + 1))


def test_alone_it_has_the_bits_of_all_reduce():
    with job(NAME, clip_norm=0.05) as at:
        found = weights(trained(at, SingleRank(), range(STEPS))[0].tensors())
    with job("all_reduce", optimizer=DenseAdam(lr=0.1), clip_norm=0.05) as at:
        expected = weights(trained(at, SingleRank(), range(STEPS))[0].tensors())
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
