"""sync_bn equals one process: ranks that share a batch learn as one rank that has all of it, some without a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.dense.batch_norms import LayersDiffer, SyncBatchNorms
from tests.fakes.thread_ranks import on_ranks

TOLERANCE = 1e-6


def model(dims=1, seed=3, **more):
    """Two normalised layers; with `dims` = 2 on images of one channel."""
    made = torch.Generator().manual_seed(seed)
    if dims == 1:
        ends = nn.Linear(5, 4), nn.BatchNorm1d(4, **more)
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, **more), nn.Tanh(), *ends)
    else:
        net = nn.Sequential(nn.Conv2d(1, 5, 2), nn.BatchNorm2d(5, **more), nn.Tanh(), nn.Conv2d(5, 4, 2))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=made)
    return net


def samples(sizes, dims=1, step=0):
    made = torch.Generator().manual_seed(step)
    shape = (3,) if dims == 1 else (1, 4, 4)
    return [torch.randn(size, *shape, generator=made) for size in sizes]


def loss_of(net, batch, total):
    return (net(batch).flatten(1).square().mean(1) + net(batch).flatten(1).sum(1)).sum() / total


def learn(net, norms, batches, rank):
    """One step of SGD for each list of batches by rank; the gradients that this rank adds."""
    for step_batches in batches:
        mine, total = step_batches[rank], sum(len(each) for each in step_batches)
        norms.open_step(all_have=all(len(each) for each in step_batches))
        net.zero_grad()
        if len(mine):
            with norms.forward(len(mine)):
                loss = loss_of(net, mine, total)
            with norms.backward():
                loss.backward()
        else:
            norms.follow(backward=True)
        yield


def learnt(world, batches, dims=1, **more):
    """Parameters and buffers of each rank after all steps, as all-reduce would learn them."""
    nets = [model(dims, **more) for _ in range(world)]

    def act(ranks):
        net, norms = nets[ranks.rank], SyncBatchNorms(nets[ranks.rank], ranks)
        for _ in learn(net, norms, batches, ranks.rank):
            for parameter in net.parameters():
                grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                ranks.all_reduce(grad)
                parameter.data = parameter.data - 0.1 * grad
        return {name: value.clone() for name, value in net.state_dict().items()}

    return on_ranks(world, act)[0]


def learnt_by_torch(batches, dims=1, **more):
    net = model(dims, **more)
    for step_batches in batches:
        whole = torch.cat(step_batches)
        net.zero_grad()
        loss_of(net, whole, len(whole)).backward()
        for parameter in net.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
    return net.state_dict()


@pytest.mark.parametrize(
    ("dims", "more"),
    [(1, {}), (2, {}), (1, {"momentum": None}), (2, {"affine": False}), (1, {"track_running_stats": False})],
    ids=str,
)
@pytest.mark.parametrize("sizes", [[7], [5, 3], [0, 6, 2, 3]], ids=str)
def test_ranks_with_parts_of_a_batch_learn_as_torch_does_from_all_of_it(dims, sizes, more):
    batches = [samples(sizes, dims, step) for step in range(3)]
    expected = learnt_by_torch(batches, dims, **more)
    found = learnt(len(sizes), batches, dims, **more)
    for state in found:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(state[name].double(), value.double(), rtol=0, atol=TOLERANCE), name
    for state in found[1:]:
        assert all(torch.equal(state[name], value) for name, value in found[0].items()), "no broadcast is needed"


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(lambda sizes: sum(sizes) > 1), max_size=3))
def test_any_division_of_batches_gives_the_same_model(divisions):
    batches = [samples(sizes, step=step) for step, sizes in enumerate(divisions)]
    expected = learnt_by_torch(batches)
    for state in learnt(3, batches):
        for name, value in expected.items():
            assert torch.allclose(state[name].double(), value.double(), rtol=0, atol=1e-4), name


def test_one_value_in_all_ranks_is_normalised_by_the_running_statistics():
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    expected = net.eval()(samples([1])[0])
    net.train()

    def act(ranks):
        mine = SyncBatchNorms(net if ranks.rank == 0 else model(), ranks)
        mine.open_step(all_have=False)
        if ranks.rank:
            return mine.follow(backward=True)
        with mine.forward(1):
            out = net(samples([1])[0])
        with mine.backward():
            out.sum().backward()
        return out

    out, _ = on_ranks(2, act)[0]
    assert torch.allclose(out, expected) and net[0].weight.grad is not None
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_statistics_that_float32_does_not_hold_make_the_step_not_finite_on_every_rank():
    huge = [torch.full((2, 3), 3e38), samples([2])[0]]

    def act(ranks):
        net = nn.BatchNorm1d(3)
        norms = SyncBatchNorms(net, ranks)
        norms.open_step(all_have=True)
        with norms.forward(2):
            return net(huge[ranks.rank])

    for out in on_ranks(2, act)[0]:
        assert not out.isfinite().any()


def test_a_model_in_inference_mode_makes_no_collective():
    net = model().eval()

    def act(ranks):
        norms = SyncBatchNorms(net, ranks)
        with norms.forward(2):
            return net(samples([2])[0])

    results, ranks = on_ranks(1, act)
    assert torch.equal(results[0], net(samples([2])[0])) and ranks[0].made == []


def test_layers_in_another_order_on_another_rank_are_refused():
    class Turned(nn.Module):
        def __init__(self, turned):
            super().__init__()
            self.turned, self.layers = turned, nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])

        def forward(self, x):
            for layer in reversed(self.layers) if self.turned else self.layers:
                x = layer(x)
            return x

    def act(ranks):
        net = Turned(ranks.rank == 1)
        norms = SyncBatchNorms(net, ranks)
        norms.open_step(all_have=True)
        with norms.forward(2):
            return net(samples([2])[0])

    with pytest.raises(LayersDiffer, match="another order"):
        on_ranks(2, act)


def test_the_layers_are_torch_s_again_after_a_step():
    net = model()

    def act(ranks):
        for _ in learn(net, SyncBatchNorms(net, ranks), [samples([4])], 0):
            pass

    on_ranks(1, act)
    assert all("forward" not in vars(layer) for layer in net)
