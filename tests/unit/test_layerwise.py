"""LARS and LAMB on the flat buffer are those of their papers on each parameter, written here again without torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense.flat_parameters import FlatOptimizer
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseLamb, DenseLars, Segments

LAMB = DenseLamb(kind="lamb", lr=0.1, beta1=0.8, beta2=0.95, weight_decay=0.1)
LARS = DenseLars(kind="lars", lr=2.0, momentum=0.5, weight_decay=0.1, trust=0.05)
BOTH = {"lamb": LAMB, "lars": LARS}


def norm(values):
    return float(np.sqrt((values**2).sum()))


class PlainLamb:
    """You et al. 2020, algorithm 2, for one parameter, float64."""

    def __init__(self, weights):
        self.w, self.m, self.v, self.t = weights.astype(np.float64), 0.0, 0.0, 0

    def step(self, g):
        self.t += 1
        self.m = LAMB.beta1 * self.m + (1 - LAMB.beta1) * g
        self.v = LAMB.beta2 * self.v + (1 - LAMB.beta2) * g**2
        r = (self.m / (1 - LAMB.beta1**self.t)) / (np.sqrt(self.v / (1 - LAMB.beta2**self.t)) + LAMB.epsilon)
        update = r + LAMB.weight_decay * self.w
        trust = norm(self.w) / norm(update) if norm(self.w) and norm(update) else 1.0
        self.w = self.w - LAMB.lr * trust * update


class PlainLars:
    """You, Gitman, Ginsburg 2017, algorithm 1, for one parameter, float64."""

    def __init__(self, weights):
        self.w, self.v = weights.astype(np.float64), 0.0

    def step(self, g):
        known = norm(self.w) and norm(g)
        local = LARS.trust * norm(self.w) / (norm(g) + LARS.weight_decay * norm(self.w)) if known else 1.0
        self.v = LARS.momentum * self.v + LARS.lr * local * (g + LARS.weight_decay * self.w)
        self.w = self.w - self.v


PLAIN = {"lamb": PlainLamb, "lars": PlainLars}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("kind", BOTH)
@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    zeros=st.sets(st.integers(0, 3)),
)
def test_each_parameter_learns_as_in_the_paper(kind, dtype, bound, lengths, seed, zeros):
    """Parameters of zeros, and gradients of zeros, have no norm to scale by. What is left in float32 is rounding: the
    same code in float64 meets the plain twin to 1e-12."""
    random, segments, total = np.random.default_rng(seed), [], 0
    for length in lengths:
        segments.append((total, total + length))
        total += -(-length // 16) * 16
    flat = torch.zeros(total, dtype=dtype)
    for number, (begin, end) in enumerate(segments):
        flat[begin:end] = torch.from_numpy(random.normal(size=end - begin) * (number not in zeros)).to(dtype)
    plain = [PLAIN[kind](flat[begin:end].numpy()) for begin, end in segments]
    optimizer = FlatOptimizer(flat, BOTH[kind], segments)
    for step in range(4):
        gradient = torch.zeros(total, dtype=dtype)
        for begin, end in segments:
            gradient[begin:end] = torch.from_numpy(random.normal(size=end - begin) * (step != 2)).to(dtype)
        optimizer.step(gradient)
        for (begin, end), theirs in zip(segments, plain, strict=True):
            theirs.step(gradient[begin:end].numpy().astype(np.float64))
    assert optimizer.state.keys() == BOTH[kind].state
    for (begin, end), theirs in zip(segments, plain, strict=True):
        assert np.allclose(flat[begin:end].numpy(), theirs.w, rtol=bound, atol=bound / 10)
    used = torch.zeros(total, dtype=torch.bool)
    for begin, end in segments:
        used[begin:end] = True
    assert not flat[~used].any(), "padding stays 0"


@pytest.mark.parametrize("kind", BOTH)
def test_the_parameters_of_a_model_are_scaled_one_by_one(kind):
    def learnt(scale):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        before = [parameter.detach().clone() for parameter in net.parameters()]
        part = AllReduceDense(net, DenseSection(optimizer=BOTH[kind]), SingleRank())
        part.clear()
        (net(torch.ones(2, 3)).square().sum() * scale).backward()
        part.step()
        return [norm((a - b).detach().numpy()) / norm(b.numpy()) for a, b in zip(net.parameters(), before, strict=True)]

    if kind == "lamb":
        assert learnt(1.0) == pytest.approx([LAMB.lr] * 4, rel=1e-4), "a step is a share of the weights' norm"
    assert learnt(1.0) == pytest.approx(learnt(100.0), rel=0.2), "whatever the size of the gradient"


@pytest.mark.parametrize("kind", BOTH)
def test_an_excluded_parameter_learns_as_one_without_weight_decay(kind):
    start = torch.randn(32, generator=torch.Generator().manual_seed(1))
    places, names = [(0, 16), (16, 32)], ["deep.weight", "deep.bias"]

    def learnt(**settings):
        flat = start.clone()
        optimizer = FlatOptimizer(flat, BOTH[kind].model_copy(update=settings), Segments(places, names))
        for step in range(3):
            optimizer.step(torch.randn(32, generator=torch.Generator().manual_seed(10 + step)))
        return flat

    found, with_decay, without = learnt(no_decay=("bias",)), learnt(), learnt(weight_decay=0.0)
    assert torch.equal(found[:16], with_decay[:16]) and torch.equal(found[16:], without[16:])
    assert not torch.equal(with_decay, without)


def test_epsilon_of_lars_is_added_to_the_norms():
    flat = torch.tensor([3.0, 4.0])
    optimizer = FlatOptimizer(flat, LARS.model_copy(update={"epsilon": 4.5, "weight_decay": 0.1}), [(0, 2)])
    optimizer.step(torch.tensor([0.0, 5.0]))
    local = 0.05 * 5 / (5 + 0.1 * 5 + 4.5)
    expected = [3 - 2 * local * 0.3, 4 - 2 * local * 5.4]
    assert flat.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", BOTH)
def test_slices_without_whole_parameters_are_refused(kind):
    with pytest.raises(AssertionError, match="whole parameters"):
        FlatOptimizer(torch.ones(16), BOTH[kind])
