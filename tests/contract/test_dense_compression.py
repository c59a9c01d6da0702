"""Promises of compressions and hierarchical sums, on ranks that are threads: their oracles, restarts, other ranks."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense.dgc import largest, largest_reference, num_sent
from headrace.trainer.dense.gradient_sums import all_reduce_of
from headrace.trainer.dense.powersgd import matrices_of, orthonormal
from headrace.trainer.dense.strategy import Around
from headrace.trainer.dense_config import DenseSection, DgcSection
from headrace.trainer.dense_optimizers import DenseAdam, DenseSgd
from tests.fakes.thread_ranks import on_ranks

STEPS = 4
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
SGD, MOMENTUM = DenseSgd(kind="sgd", lr=0.1), DenseSgd(kind="sgd", lr=0.1, momentum=0.5)
DGC = {"compression": "dgc", "dgc": {"sparsity": 0.9}, "optimizer": MOMENTUM}
POWER = {"compression": "powersgd", "powersgd": {"rank": 2}, "optimizer": MOMENTUM}
EACH = pytest.mark.parametrize("more", [DGC, POWER], ids=["dgc", "powersgd"])


def made(ranks, seed=0, **more):
    """Two layers of (12, 8) and (8, 12) and their biases, and the strategy."""
    net, draw = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)), torch.Generator().manual_seed(5)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    return AllReduceDense(net, DenseSection(**more), ranks, around=Around(seed=seed)), net


def gradient(ranks, step, like, *, integers=False):
    """Of one rank; 0 where it has no batch."""
    draw = torch.Generator().manual_seed(10 * step + ranks.rank)
    if (step + ranks.rank) % 3 == 2:
        return torch.zeros_like(like)
    if integers:
        return torch.randint(-8, 9, like.shape, generator=draw).float()
    return torch.randn(like.shape, generator=draw)


def learn(part, ranks, steps=range(STEPS), **more):
    """The gradients given, and those applied, in all steps."""
    given, applied = torch.zeros_like(part.gradient), torch.zeros_like(part.gradient)
    for step in steps:
        part.clear()
        mine = gradient(ranks, step, part.gradient, **more)
        part.gradient.copy_(mine)
        assert part.finite()
        part.after_backward(step, 1.0)
        part.wait()
        part.step()
        given, applied = given + mine, applied + part.gradient
    part.flush()
    return given, applied


def weights(part):
    return torch.cat([value.reshape(-1) for name, value in part.tensors().items() if name.startswith("model.")]).clone()


def learnt(world, steps=range(STEPS), integers=False, **more):
    """The weights after some steps: the same on all ranks, and the collectives."""

    def act(ranks):
        part, _ = made(ranks, **more)
        learn(part, ranks, steps, integers=integers)
        return weights(part), part.digest()

    found, ranks = on_ranks(world, act)
    assert len({digest for _, digest in found}) == 1
    return found[0][0], ranks[0].made


# DGC


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-9, 9, width=32)), min_size=1), st.data())
def test_the_largest_numbers_are_those_of_the_plain_twin(values, data):
    k = data.draw(st.integers(1, len(values)))
    assert largest(torch.tensor(values), k).tolist() == largest_reference(values, k)


def test_the_share_that_is_sent_falls_in_five_stages():
    config = DgcSection(sparsity=1 - 2**-10, warmup_steps=50)
    sent = [num_sent(config, 1 << 20, step) for step in range(60)]
    assert sorted(set(sent), reverse=True) == [1 << 18, 1 << 16, 1 << 14, 1 << 12, 1 << 10]
    assert sent[9] == 1 << 18 and sent[10] == 1 << 16 and sent[39:41] == [1 << 12, 1 << 10]
    assert num_sent(DgcSection(sparsity=0), 77, 0) == 77 and num_sent(DgcSection(), 5, 0) == 1


def test_dense_steps_come_before_the_stages_that_are_given():
    config = DgcSection(sparsity=0.75, begin=3, warmup_steps=4, stages=(0.25, 0.5))
    assert [num_sent(config, 100, step) for step in range(9)] == [100, 100, 100, 75, 75, 50, 50, 25, 25]
    one = DgcSection(sparsity=0.5, begin=2)
    assert [num_sent(one, 100, step) for step in range(3)] == [100, 100, 50]
    assert not {"begin", "stages"} & DgcSection().model_dump().keys()


DECAYING = DenseSgd(kind="sgd", lr=0.1, momentum=0.5, weight_decay=0.5)


@WORLDS
@pytest.mark.parametrize(
    "optimizer",
    [SGD, MOMENTUM, DenseAdam(lr=0.1), DECAYING, DECAYING.model_copy(update={"no_decay": ("bias",)})],
    ids=["sgd", "momentum", "adam", "decay", "decay of some"],
)
def test_steps_before_dgc_begins_are_dense(world, optimizer):
    dense, _ = learnt(world, optimizer=optimizer)
    found, _ = learnt(world, optimizer=optimizer, compression="dgc", dgc={"sparsity": 0.9, "begin": STEPS})
    later, _ = learnt(world, optimizer=optimizer, compression="dgc", dgc={"sparsity": 0.9, "begin": STEPS - 1})
    assert torch.allclose(found, dense, rtol=0, atol=1e-6) and not torch.allclose(later, dense, rtol=0, atol=1e-3)


@WORLDS
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, DenseAdam(lr=0.1)], ids=["sgd", "momentum", "adam"])
def test_dgc_without_sparsity_is_dense(world, optimizer):
    dense, _ = learnt(world, optimizer=optimizer)
    found, _ = learnt(world, optimizer=optimizer, compression="dgc", dgc={"sparsity": 0})
    assert torch.allclose(found, dense, rtol=0, atol=1e-6)
    assert torch.equal(found, dense) or optimizer is MOMENTUM


def own_gradient(rank, step, num_floats):
    """That of one rank, in float64."""
    return gradient(SimpleNamespace(rank=rank), step, torch.zeros(num_floats)).numpy().astype(np.float64)


def dgc_reference(world, start, *, sparsity, momentum, clip_norm, lr, decay=0.0):
    """The plain twin: weights after STEPS, from the paper's algorithm in float64."""
    held = start.numpy().astype(np.float64)
    velocity, residual = (np.zeros((world, len(held))) for _ in range(2))
    k = max(1, round(len(held) * (1 - sparsity)))
    for step in range(STEPS):
        total = np.zeros(len(held))
        for rank in range(world):
            own = own_gradient(rank, step, len(held))
            own *= min(1.0, clip_norm / math.sqrt(world) / (np.linalg.norm(own) + 1e-6))
            own += decay / world * held
            velocity[rank] = momentum * velocity[rank] + own
            residual[rank] += velocity[rank]
            for index in largest_reference(residual[rank].tolist(), k):
                total[index] += residual[rank][index]
                residual[rank][index] = velocity[rank][index] = 0
        held -= lr * total
    return held


@WORLDS
@pytest.mark.parametrize(("sparsity", "decay"), [(0.5, 0.0), (0.95, 0.0), (0.95, 0.5)])
def test_dgc_learns_what_its_plain_twin_learns(world, sparsity, decay):
    """With half of the numbers several ranks sum the whole buffer; else they gather indices and numbers."""

    def act(ranks):
        dgc = {"compression": "dgc", "dgc": {"sparsity": sparsity}, "clip_norm": 8.0}
        part, _ = made(ranks, optimizer=MOMENTUM.model_copy(update={"weight_decay": decay}), **dgc)
        start = part._flat.weights.clone()
        learn(part, ranks)
        return start, part._flat.weights.clone()

    found, ranks = on_ranks(world, act)
    start, ended = found[0]
    assert any("all_gather" in call for call in ranks[0].made) == (sparsity == 0.95 or world == 1)
    expected = dgc_reference(world, start, sparsity=sparsity, momentum=0.5, clip_norm=8.0, lr=0.1, decay=decay)
    assert np.abs(ended.numpy() - expected).max() < 1e-5 < np.abs(start.numpy() - expected).max()


# PowerSGD


def test_only_matrices_that_get_smaller_are_compressed():
    net = nn.Sequential(nn.Linear(8, 12), nn.Linear(2, 12), nn.Conv1d(4, 16, 5))
    part = AllReduceDense(net, DenseSection(compression="powersgd"), SingleRank())
    found = matrices_of(part._flat.parameters, 2)
    assert [(each.name, each.rows, each.columns) for each in found] == [("0.weight", 12, 8), ("2.weight", 16, 20)]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_columns_are_orthonormal_and_span_the_matrix_whatever_its_rank(rank):
    draw = torch.Generator().manual_seed(2)
    matrix = torch.randn(9, rank, generator=draw) @ torch.randn(rank, 3, generator=draw) * 1e10
    found = orthonormal(matrix)
    assert torch.allclose(found.T @ found, torch.eye(3), atol=1e-5)
    assert torch.allclose(found @ (found.T @ matrix), matrix, rtol=1e-4, atol=1e5)


@WORLDS
def test_gradients_of_low_rank_and_small_parameters_lose_nothing(world):
    """Each rank has one sample a step, so the sum has at most `world` as its rank, of four."""

    def act(ranks, **more):
        part, net = made(ranks, optimizer=SGD, **more)
        for step in range(STEPS):
            x = torch.randn(1, 8, generator=torch.Generator().manual_seed(10 * step + ranks.rank))
            part.clear()
            (net(x).square().sum() * 0.003).backward()
            assert part.finite()
            part.after_backward(step, 1.0)
            part.wait()
            if step == 0:
                first = {name: each.grad.clone() for name, each in net.named_parameters()}
            part.step()
        return first, weights(part)

    power = {"compression": "powersgd", "powersgd": {"rank": 4}}
    dense, compressed = on_ranks(world, act)[0], on_ranks(world, lambda ranks: act(ranks, **power))[0]
    (plain, ended), (found, ended_too) = dense[0], compressed[0]
    assert torch.allclose(ended_too, ended, rtol=0, atol=1e-5) and not torch.equal(ended_too, ended)
    assert torch.equal(found["0.bias"], plain["0.bias"]) and torch.equal(found["1.bias"], plain["1.bias"])


def power_reference(world, part, *, rank, momentum, lr):
    """The plain twin: weights after STEPS, from the paper's algorithm in float64.

    `part`: a strategy that has not learnt yet.
    """
    held, matrices = part._flat.weights.numpy().astype(np.float64), matrices_of(part._flat.parameters, rank)
    right = {each.name: part.tensors()[f"powersgd.{each.name}"].numpy().astype(np.float64) for each in matrices}
    velocity, residual = np.zeros(len(held)), np.zeros((world, len(held)))
    for step in range(STEPS):
        own = np.stack([own_gradient(each, step, len(held)) for each in range(world)])
        total = own.sum(axis=0)
        for each in matrices:
            at = slice(each.begin, each.begin + each.rows * each.columns)
            error_fed = (own + residual)[:, at].reshape(world, each.rows, each.columns)
            left, _ = np.linalg.qr(sum(error_fed @ right[each.name]))
            projected = [whole.T @ left for whole in error_fed]
            lacking = [whole - left @ q.T for whole, q in zip(error_fed, projected, strict=True)]
            residual[:, at] = np.stack(lacking).reshape(world, -1)
            total[at] = (left @ sum(projected).T).reshape(-1)
            right[each.name], _ = np.linalg.qr(sum(projected))
        velocity = momentum * velocity + total
        held -= lr * velocity
    return held


@WORLDS
def test_powersgd_learns_what_its_plain_twin_learns(world):
    """Gradients have rank 8, and matrices of rank 2 travel: most is kept back, and comes later."""
    expected = power_reference(world, made(SingleRank(), **POWER)[0], rank=2, momentum=0.5, lr=0.1)

    def act(ranks):
        part, _ = made(ranks, **POWER)
        start = part._flat.weights.clone()
        learn(part, ranks)
        return start, part._flat.weights.clone()

    start, ended = on_ranks(world, act)[0][0]
    assert np.abs(ended.numpy() - expected).max() < 1e-4 < np.abs(start.numpy() - expected).max()


def test_the_first_matrices_follow_from_the_seed_and_the_parameter():
    one, again, other = (made(SingleRank(), seed, **POWER)[0].tensors() for seed in (1, 1, 2))
    names = ["powersgd.0.weight", "powersgd.1.weight"]
    assert [name for name in one if name.startswith("powersgd.")] == names
    for name in names:
        assert torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name])
    draw = made(SingleRank(), 1, **POWER)[0].tensors()
    assert not torch.equal(draw[names[0]][:4], draw[names[1]][:4])


# both


@WORLDS
@EACH
def test_what_was_applied_and_what_is_kept_back_is_all_that_was_given(world, more):
    def act(ranks):
        part, _ = made(ranks, **more | {"optimizer": SGD})
        return *learn(part, ranks), part._sums.residual.clone()

    found, _ = on_ranks(world, act)
    given, left = (sum(each[at] for each in found) for at in (0, 2))
    assert torch.allclose(found[0][1] + left, given, rtol=0, atol=1e-4)
    assert float(left.abs().max()) > 0.1


@WORLDS
@EACH
def test_a_commit_continues_to_the_bit_and_a_skipped_step_leaves_nothing(world, more):
    def act(ranks):
        part, _ = made(ranks, **more)
        learn(part, ranks, range(2))
        commit = {name: value.clone() for name, value in part.consolidate().items()}
        commit, before = load(save(ranks._meet("commit", commit)[0])), part.digest()
        learn(part, ranks, range(2, STEPS))
        again, _ = made(ranks, seed=9, **more)
        again.load(commit)
        restored = again.digest()
        again.clear()
        again.gradient.fill_(1.0)
        assert again.finite()  # and another rank was not
        again.clear()
        again.gradient.fill_(float("inf"))
        assert not again.finite()
        learn(again, ranks, range(2, STEPS))
        return part.digest(), again.digest(), before, restored

    found, _ = on_ranks(world, act)
    assert len({each for each in found}) == 1
    assert found[0][0] == found[0][1] != found[0][2] == found[0][3]


@EACH
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1)])
def test_on_another_number_of_ranks_what_was_kept_back_is_divided(old, new, more):
    names = ["residual", "velocity"] if "dgc" in more else ["residual"]

    def saved(ranks):
        part, _ = made(ranks, **more)
        learn(part, ranks)
        return {name: value.clone() for name, value in part.consolidate().items()}

    commit = on_ranks(old, saved)[0][0]

    def loaded(ranks):
        part, _ = made(ranks, **more)
        part.load(commit)
        digest = part.digest()
        part.flush()
        assert part.digest() == digest
        return {name: value.clone() for name, value in part.consolidate().items()}

    found = on_ranks(new, loaded)[0][0]
    assert len({name for name in found if name.startswith("residual.")}) == new
    for name in names:
        before, after = (
            torch.stack([all_[f"{name}.{rank}"] for rank in range(num)]) for all_, num in ((commit, old), (found, new))
        )
        assert torch.allclose(after.sum(0), before.sum(0), rtol=0, atol=1e-5) and before.abs().max() > 0.1
        assert torch.equal(after[0], after[-1])


# hierarchy


@pytest.mark.parametrize(("world", "group"), [(4, 2), (4, 4), (3, 2), (4, 3), (1, 2)])
@pytest.mark.parametrize("more", [{}, {"overlap": True, "bucket_bytes": 64 * 3}], ids=["after", "beside"])
def test_sums_in_two_levels_are_those_of_all_ranks(world, group, more):
    given, hierarchy = {"optimizer": MOMENTUM}, {"hierarchy": {"group": group}, **more}
    expected, _ = learnt(world, **given)
    found, made_calls = learnt(world, **given, **hierarchy)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    assert any("reduce_scatter" in call for call in made_calls) == (world == 4)
    whole, parts = (learnt(world, integers=True, optimizer=SGD, **each)[0] for each in ({}, hierarchy))
    assert torch.equal(whole, parts), "integers"


@pytest.mark.parametrize("num_floats", [1, 5, 7, 12])
def test_a_sum_in_two_levels_has_any_length(num_floats):
    config = DenseSection(hierarchy={"group": 2})

    def act(ranks):
        flat = torch.arange(num_floats) + 10.0 * ranks.rank
        all_reduce_of(ranks, config)(flat)()
        return flat.tolist()

    assert on_ranks(4, act)[0] == [[4.0 * at + 60 for at in range(num_floats)]] * 4
