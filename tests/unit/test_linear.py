"""The linear layer: whatever kernels its table names, it computes what torch's own does, and the same at every call."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from headrace.trainer.config import ModelSection
from headrace.trainer.models import linear as linear_module
from headrace.trainer.models.contract import Inputs, Shape, SlotShape
from headrace.trainer.models.layers import Mlp
from headrace.trainer.models.linear import (
    NO_TABLE,
    Kernel,
    Linear,
    ProductKernels,
    linear,
    onednn_works,
    sizes_of,
    table_message,
    table_of,
    use_table,
)
from headrace.trainer.models.registry import load_model
from headrace.trainer.train.tracing import FrozenModel
from tests.fakes.model_settings import MODEL_NAMES, fitting

KERNELS = st.builds(ProductKernels, *[st.sampled_from(Kernel)] * 3)
WIDTH = st.integers(1, 70)
ONEDNN = ProductKernels(*[Kernel.ONEDNN] * 3)

needs_onednn = pytest.mark.skipif(not onednn_works(), reason="this torch has no such operator")


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def elsewhere(tensor, floats):
    """Equal values, so many floats after an aligned address, in rows that do not follow each other."""
    rows, columns = tensor.shape
    found = torch.zeros(rows, columns + 16)[:, floats : floats + columns]
    return found.copy_(tensor)


def results(x, weight, bias, table, upstream):
    """Output and gradients."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in (x, weight, bias)]
    output = linear(*leaves, table)
    output.backward(upstream)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@needs_onednn
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 130), WIDTH, WIDTH, st.booleans(), KERNELS, st.integers(0, 15), st.integers(0, 99))
def test_it_agrees_with_float64_and_its_bits_depend_on_the_values_alone(b, i, o, biased, kernels, floats, seed):
    x, weight, upstream = drawn(seed, b, i), drawn(seed + 1, o, i), drawn(seed + 2, b, o)
    bias = drawn(seed + 3, o) if biased else None
    table = {(i, o): kernels}
    found = results(x, weight, bias, table, upstream)
    doubles = [None if each is None else each.double() for each in (x, weight, bias)]
    for one, other in zip(found, results(*doubles, NO_TABLE, upstream.double()), strict=True):
        assert one.shape == other.shape and torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)
    if kernels == ONEDNN:
        moved = results(elsewhere(x, floats), elsewhere(weight, floats), bias, table, elsewhere(upstream, floats))
        assert all(torch.equal(one, other) for one, other in zip(found, moved, strict=True))
    again = results(x, weight, bias, table, upstream)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 130), WIDTH, WIDTH, st.booleans(), st.integers(0, 99))
def test_without_a_table_it_is_torchs_own_to_the_bit(b, i, o, biased, seed):
    torch.manual_seed(seed)
    ours, theirs = Linear(i, o, biased), nn.Linear(i, o, biased)
    theirs.load_state_dict(ours.state_dict())
    for layer in (ours, theirs):
        layer(drawn(seed, b, i)).square().sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    torch.manual_seed(seed)
    nn.Linear(i, o, biased)
    assert torch.equal(torch.get_rng_state(), state_after(lambda: Linear(i, o, biased), seed))


def state_after(make, seed):
    torch.manual_seed(seed)
    make()
    return torch.get_rng_state()


@needs_onednn
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(1, 50), WIDTH, st.integers(0, 99))
def test_a_perceptron_over_parts_is_the_one_over_the_whole(widths, b, hidden, seed):
    model = Mlp(sum(widths), [hidden, 3], parts=widths)
    use_table(model, dict.fromkeys(sizes_of(model), ONEDNN))
    assert {(width, hidden) for width in widths} <= {*sizes_of(model)}
    parts = [drawn(seed + number, b, width).requires_grad_() for number, width in enumerate(widths)]
    output = model.over(parts)
    output.sum().backward()
    plain = copy.deepcopy(model).double()
    plain.zero_grad()
    wholes = [part.detach().double().requires_grad_() for part in parts]
    wanted = plain(torch.cat(wholes, 1))
    wanted.sum().backward()
    assert torch.allclose(output.double(), wanted, rtol=1e-4, atol=1e-4)
    pairs = [*zip(parts, wholes, strict=True), *zip(model.parameters(), plain.parameters(), strict=True)]
    assert all(torch.allclose(one.grad.double(), other.grad, rtol=1e-3, atol=1e-3) for one, other in pairs)


@needs_onednn
def test_gradients_that_nobody_needs_are_not_computed(monkeypatch):
    computed = []
    for name in ("input_gradient", "weight_gradient"):
        original = getattr(linear_module, name)
        monkeypatch.setattr(
            linear_module, name, lambda *given, name=name, do=original: computed.append(name) or do(*given)
        )
    x, weight = drawn(1, 4, 3), drawn(2, 5, 3)
    linear(x, weight.requires_grad_(), None, {(3, 5): ONEDNN}).sum().backward()
    assert computed == ["weight_gradient"] and weight.grad.shape == (5, 3) and x.grad is None


@needs_onednn
@pytest.mark.parametrize("how", ["autocast", "float64", "traced"])
def test_where_the_choice_does_not_apply_the_layer_is_torchs_own(how):
    layer = Linear(3, 5)
    use_table(layer, {(3, 5): ONEDNN})
    x = drawn(1, 4, 3)
    if how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
    elif how == "float64":
        assert torch.equal(layer.double()(x.double()), functional.linear(x.double(), layer.weight, layer.bias))
    else:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.onnx.export traces so, too
            traced = torch.jit.trace(layer, (x,))
        assert "mkldnn" not in str(traced.inlined_graph) and "aten::linear" in str(traced.inlined_graph)


@needs_onednn
def test_sequences_go_through_as_in_torch():
    layer, x = Linear(3, 5), drawn(1, 2, 7, 3)
    wanted = layer(x)
    use_table(layer, {(3, 5): ONEDNN})
    assert layer(x).shape == (2, 7, 5) and torch.allclose(layer(x), wanted, atol=1e-6)


SHAPE = Shape(
    (SlotShape("a", 4, True), SlotShape("b", 4, True)), (SlotShape("s", 4, True, 5),), (("d", 3),), ("ctr", "price")
)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_product_with_weights_of_our_models_follows_the_table(name, monkeypatch):
    """No layer multiplies past the table, and every size that is used is declared, so that it is measured."""
    model = load_model(ModelSection(name=name, settings=fitting(name, SHAPE)), SHAPE, Path("."))
    used, original = set(), functional.linear

    def noted(x, weight, bias=None):
        used.add((weight.shape[1], weight.shape[0]))
        return original(x, weight, bias)

    monkeypatch.setattr(functional, "linear", noted)
    model(inputs_of(SHAPE, 3))
    assert used == {*sizes_of(model)}
    assert not any(type(module) is nn.Linear for module in model.modules())


@needs_onednn
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_our_models_predict_and_learn_alike_with_both_kernels(name):
    torch.manual_seed(3)
    model = load_model(ModelSection(name=name, settings=fitting(name, SHAPE)), SHAPE, Path("."))
    other = copy.deepcopy(model)
    use_table(other, dict.fromkeys(sizes_of(other), ONEDNN))
    for each in (model, other):
        sum(output.square().sum() for output in each(inputs_of(SHAPE, 9)).values()).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-3, atol=1e-4)
    frozen = FrozenModel(other, ()).model
    assert all(module.kernels == NO_TABLE for module in frozen.modules() if isinstance(module, Linear))


def inputs_of(shape, num_samples):
    from headrace.trainer.train.tracing import _examples, _inputs

    named = _examples(shape, num_samples)
    return _inputs(shape, named, next(iter(named.values())))


def test_a_table_goes_through_json():
    table = {(3, 5): ProductKernels(forward=Kernel.ONEDNN), (13, 1): ProductKernels()}
    message = table_message(table)
    assert message["3x5"] == {"forward": "onednn", "input_gradient": "mkl", "weight_gradient": "mkl"}
    assert table_of(message) == table and isinstance(inputs_of(SHAPE, 1), Inputs)


@pytest.mark.parametrize("how", ["absent", "wrong", "changing"])
def test_an_operator_that_is_absent_or_wrong_is_not_used(monkeypatch, caplog, how):
    calls = []

    def operator(x, weight, bias, *_):
        calls.append(x)
        if how == "absent":
            raise AttributeError("no such operator")
        error = 1.0 if how == "wrong" else 1e-6 * (len(calls) % 2)
        return functional.linear(x, weight, bias) + error

    monkeypatch.setattr(linear_module, "_operator", lambda: operator)
    onednn_works.cache_clear()
    try:
        assert not onednn_works()
        layer = Linear(3, 5)
        use_table(layer, {(3, 5): ONEDNN})
        assert layer.kernels == NO_TABLE and "MKL takes its place" in caplog.text
        assert np.isfinite(layer(drawn(1, 2, 3)).detach().numpy()).all()
    finally:
        onednn_works.cache_clear()
