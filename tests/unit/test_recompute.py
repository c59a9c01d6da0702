"""Recompute and offload: gradients, buffers and random numbers have the bits of a model that keeps all activations."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.errors import SpecError
from headrace.trainer.config import TrainSection
from headrace.trainer.dense.batch_norms import OwnBatchNorms
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.models.layers import Mlp
from headrace.trainer.train.activations import (
    Offloaded,
    RecomputeDiffers,
    blocks_of,
    layers_of,
    parts_of,
    saved_activations,
)
from headrace.trainer.train.mixed_precision import Precision

CPU = torch.device("cpu")
WIDTH, B = 6, 5


class Residual(nn.Module):
    """A block with a keyword argument and several outputs."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(3 * WIDTH, momentum=None)
        self.outer, self.dropout = nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale):
        self.calls = self.calls + 1  # a model may replace a buffer
        inner = torch.tanh(self.norm(self.inner(x))) * self.calls
        return x + self.dropout(self.outer(inner)) * scale, inner.sum()


class Net(nn.Module):
    """A sequence of layers, a list of blocks of which one runs twice, and a head."""

    def __init__(self):
        super().__init__()
        layers = [
            each
            for _ in range(5)
            for each in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.3))
        ]
        self.tower = nn.Sequential(nn.Flatten(), *layers)
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x, sums = self.tower(x), 0.0
        for block in (*self.blocks, self.blocks[0]):
            x, total = block(x, scale=0.5)
            sums = sums + total
        return self.head(torch.softmax(x, 1)).squeeze(1) + sums


def learnt(section, x, train=None, num_steps=2):
    """Gradients, buffers and the next random number after some steps, as the stepper makes them."""
    torch.manual_seed(3)
    model, precision = Net(), Precision(train or TrainSection(), CPU)
    norms, saved = OwnBatchNorms(model), saved_activations(model, section, CPU, precision.forward)
    x = x.clone().requires_grad_()
    for _ in range(num_steps):
        with precision.forward(), norms.forward(len(x)), saved.forward():
            loss = model(x).float().square().sum()
        torch.rand(7)  # what is drawn meanwhile
        loss.backward()
    own = {name: each.grad for name, each in model.named_parameters()} | dict(model.named_buffers())
    assert all(vars(module).get("forward") is None for module in model.modules())
    return own | {"x": x.grad, "random": torch.rand(3)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


names = st.lists(st.sampled_from(["tower", "blocks.0", "blocks.1", "head"]), unique=True, min_size=1)
chosen = st.one_of(st.just("all"), names, st.just(["blocks", "tower"]))
types = st.sampled_from([{}, {"amp": "bfloat16"}, {"amp": "bfloat16", "amp_black": ["linear"], "amp_white": ["tanh"]}])


@settings(max_examples=10, deadline=None)
@given(chosen, st.none() | st.integers(1, 7), types, st.integers(1, B))
def test_a_model_that_is_recomputed_learns_the_same_bits(blocks, segments, types, num_samples):
    section = DenseSection(recompute={"blocks": blocks, "segments": segments})
    x, train = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(1)), TrainSection(**types)
    wanted = learnt(DenseSection(), x, train)
    assert wanted["blocks.0.calls"] == 4 and wanted["blocks.0.norm.num_batches_tracked"] == (
        4 if num_samples > 1 else 0
    )
    assert_same(learnt(section, x, train), wanted)


class Storages(TorchDispatchMode):
    """Keeps a weak reference to the memory of each result of an operation."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self):
        """Bytes that are still there."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def kept_bytes(section):
    """Bytes that wait for the backward pass of a tower, without its parameters and its input."""
    tower = nn.Sequential(*(each for _ in range(9) for each in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5))))
    saved = saved_activations(nn.ModuleList([tower]), section, CPU, Precision(TrainSection(), CPU).forward)
    x = torch.randn(256, 64, requires_grad=True)
    with Storages() as storages, saved.forward():
        result = tower(x)
    found = storages.alive() - result.nbytes
    result.sum().backward()
    return found


def test_less_than_half_the_bytes_wait_for_the_backward_pass():
    all_bytes = kept_bytes(DenseSection())
    assert kept_bytes(DenseSection(recompute={"blocks": ["0"]})) < 0.25 * all_bytes
    assert kept_bytes(DenseSection(recompute={"blocks": ["0"], "segments": 9})) < 0.5 * all_bytes


class Wrong(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, x):
        self.calls += 1
        match self.what:
            case "input":
                return x.mul_(2).exp()
            case "shape":
                return (x[: self.calls].exp()).sum() * x
            case "fewer":
                return x.exp() if self.calls == 1 else x + 1
            case _:
                result = x.exp()
                result.add_(1)
                return result


@pytest.mark.parametrize(
    ("what", "told"),
    [("input", "one of its inputs"), ("result", "its gradient needs"), ("shape", "second time"), ("fewer", "second")],
)
def test_a_block_that_is_not_computed_the_same_way_twice_is_an_error(what, told):
    model = nn.ModuleDict({"part": Wrong(what)})
    saved = saved_activations(
        model, DenseSection(recompute={"blocks": ["part"]}), CPU, Precision(TrainSection(), CPU).forward
    )
    with pytest.raises(RecomputeDiffers, match=rf'"part".*{told}'), saved.forward():
        model["part"](torch.randn(3, 2, requires_grad=True) * 2).sum().backward()


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {"recompute": {"blocks": ["towr"]}},
            'dense.recompute.blocks: the model has no block "towr"; known: tower, to',
        ),
        ({"recompute": {"blocks": [""]}}, "dense.recompute.blocks: the model has no block"),
        ({"recompute": {"blocks": ["tower", "tower.1"]}}, '"tower.1" and "tower" have modules in common'),
        ({"recompute": {}, "buffers": "sync_bn"}, '"tower" has BatchNorm, and with dense.buffers = "sync_bn"'),
        ({"offload": ["nothing"]}, 'dense.offload: the model has no block "nothing"'),
    ],
)
def test_a_block_that_is_not_there_or_cannot_be_recomputed_is_named(section, told):
    with pytest.raises(SpecError, match=told):
        saved_activations(Net(), DenseSection(**section), CPU, Precision(TrainSection(), CPU).forward)


def test_a_block_without_batch_norm_is_recomputed_with_sync_bn():
    section = DenseSection(recompute={"blocks": ["head"]}, buffers="sync_bn")
    saved_activations(Net(), section, CPU, Precision(TrainSection(), CPU).forward)


def test_a_prediction_keeps_the_model_as_it_is():
    model = Net().eval()
    saved = saved_activations(model, DenseSection(recompute={}), CPU, Precision(TrainSection(), CPU).forward)
    with torch.no_grad(), saved.forward():
        assert all("forward" not in vars(each) for each in model.modules())
    copy.deepcopy(model)


def test_a_block_that_is_never_called_is_told(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    section = DenseSection(recompute={"blocks": ["0", "1"]})
    saved = saved_activations(model, section, CPU, Precision(TrainSection(), CPU).forward)
    with caplog.at_level(logging.WARNING), saved.forward():
        model[0](torch.zeros(1, 2))
    assert [each.getMessage() for each in caplog.records] == [
        "the model does not call these blocks, so all their activations are kept: 1"
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.none() | st.integers(1, 15))
def test_parts_of_a_sequence_begin_with_layers_that_have_parameters(has_parameters, num_parts):
    layers = [nn.Linear(1, 1) if has else nn.ReLU() for has in has_parameters]
    parts = parts_of(layers, num_parts)
    assert [each for part in parts for each in part] == layers and all(parts)
    assert all(isinstance(part[0], nn.Linear) for part in parts[1:])
    most = sum(has_parameters)
    root = next(n for n in range(13) if n * n >= most)
    assert len(parts) == max(1, min(most, num_parts or root))
    if most and len(parts) > 1:
        sizes = [sum(isinstance(each, nn.Linear) for each in part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_lists_of_modules_stand_for_each_of_them():
    model = nn.ModuleDict({"towers": nn.ModuleList([nn.Linear(1, 1), nn.ModuleList([nn.ReLU()])]), "relu": nn.ReLU()})
    assert list(blocks_of(model, ["towers"], "key")) == ["towers.0", "towers.1.0"]
    assert list(blocks_of(model, "all", "key")) == ["towers.0", "towers.1.0"]
    assert layers_of(model["towers"][0]) is None


def test_a_sequence_has_the_layers_of_sequences_in_it():
    first, second, third = nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)
    assert layers_of(nn.Sequential(nn.Sequential(first, second), nn.Sequential(), third))[::3] == [first, third]
    assert layers_of(Mlp(1, [2, 3]))[2].in_features == 2


def test_offloaded_activations_give_the_same_bits_and_parameters_stay():
    x = torch.randn(B, WIDTH, requires_grad=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model(x).sum().backward()
    wanted, x.grad = x.grad, None
    offload = Offloaded(model.parameters())
    offload.call(model, x).sum().backward()
    assert torch.equal(x.grad, wanted)
    assert offload.num_bytes == 3 * 4 * B * WIDTH  # two inputs of layers, and the result of tanh


def test_offload_on_a_cpu_says_that_it_has_no_effect(caplog):
    x = torch.randn(3, WIDTH)
    with caplog.at_level(logging.WARNING):
        assert_same(learnt(DenseSection(offload="all"), x), learnt(DenseSection(), x))
    assert "dense.offload has no effect" in caplog.text
