"""Mixed precision: which operations compute in which type, and the scale of the loss."""

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from headrace.errors import SpecError
from headrace.trainer.config import TrainSection
from headrace.trainer.loss_scale import LossScaleSection
from headrace.trainer.train.mixed_precision import LossScale, Precision

CPU = torch.device("cpu")
NET = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def types(**train):
    """The types that the layers of a model compute in, and that of a product."""
    found = []
    with Precision(TrainSection(**train), CPU).forward():
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
        for layer in NET:
            x = layer(x)
            found.append(x.dtype)
        found.append(torch.matmul(x, x.t()).dtype)
    return found


LOW, HIGH = torch.bfloat16, torch.float32


def test_lists_change_the_types_of_operations():
    assert types() == [HIGH, HIGH, HIGH]
    assert types(amp="bfloat16") == [LOW, LOW, LOW]
    assert types(amp="bfloat16", amp_black=["linear"]) == [HIGH, HIGH, LOW]
    assert types(amp="bfloat16", amp_black=["layer_norm", "matmul"]) == [LOW, HIGH, HIGH]
    assert types(amp="bfloat16", amp_black=["linear"], amp_white=["layer_norm"]) == [HIGH, LOW, LOW]


def test_operations_in_float32_have_the_bits_of_float32():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with Precision(TrainSection(amp="bfloat16", amp_black=["linear", "softmax"]), CPU).forward():
        mixed = functional.softmax(NET[0](x), 1)
    assert torch.equal(mixed, functional.softmax(NET[0](x), 1))


def test_gradients_flow_through_both_types():
    x = torch.ones(2, 3, requires_grad=True)
    with Precision(TrainSection(amp="bfloat16", amp_white=["tanh"], amp_black=["linear"]), CPU).forward():
        out = torch.tanh(NET[0](x))
    assert out.dtype == LOW
    out.sum().backward()
    assert x.grad.dtype == HIGH and x.grad.any()


def test_an_operation_that_torch_does_not_have_is_named():
    with pytest.raises(SpecError, match='train.amp_black: torch has no operation "linaer"'):
        Precision(TrainSection(amp="bfloat16", amp_black=["linaer"]), CPU)


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"amp_white": ["linear"]}, "are for amp"),
        ({"amp": "bfloat16", "amp_white": ["linear"], "amp_black": ["linear"]}, "'linear' is in amp_white and in"),
        ({"loss_scale": {"growth": 1.0}}, "greater than 1"),
        ({"loss_scale": {"decrease": 1.0}}, "less than 1"),
        ({"loss_scale": {"dynamic": False, "growth_every": 5}}, "keeps the scale, and growth_every changes it"),
    ],
)
def test_settings_that_make_no_sense_are_refused(train, why):
    with pytest.raises(ValidationError, match=why):
        TrainSection.model_validate(train)


def test_a_loss_scale_halves_at_an_overflow_and_doubles_after_many_good_steps():
    scale = LossScale(on=True)
    start = scale.value
    scale.settle(finite=False)
    assert scale.value == start / 2
    for _ in range(LossScaleSection().growth_every):
        scale.settle(finite=True)
    assert scale.value == start
    for _ in range(100):
        scale.settle(finite=False)
    assert scale.value == 1
    off = LossScale(on=False)
    off.settle(finite=False)
    assert off.value == 1


def test_a_constant_loss_scale_stays_and_is_the_one_of_the_job_file_after_a_restart():
    constant = LossScaleSection(initial=1024.0, dynamic=False)
    scale = LossScale(True, constant)
    for finite in [*[False] * 20, *[True] * (constant.growth_every + 1)]:
        scale.settle(finite)
    assert scale.value == 1024 and not scale.adapts
    dynamic = LossScale(True)
    dynamic.load_state(scale.state())
    assert dynamic.value == 1024, "learning goes on from there"
    scale.load_state([65536.0, 3, 1])
    assert scale.value == 1024


@given(
    st.lists(st.booleans(), max_size=60),
    st.builds(
        LossScaleSection,
        initial=st.sampled_from([1.0, 64.0, 2.0**98]),
        growth=st.sampled_from([2.0, 4.0]),
        growth_every=st.integers(1, 5),
        decrease=st.sampled_from([0.5, 0.25]),
        decrease_every=st.integers(1, 3),
    ),
    st.integers(0, 60),
)
def test_a_loss_scale_is_that_of_torch_and_continues_from_a_commit(steps, section, restart):
    """torch's scaler decreases at every overflow; Paddle's after some in a row, which is the same for 1."""
    ours, value, good, bad = LossScale(True, section), section.initial, 0, 0
    for number, finite in enumerate(steps):
        if number == restart:
            state, ours = ours.state(), LossScale(True, section)
            ours.load_state(state)
        ours.settle(finite)
        good, bad = (good + 1, 0) if finite else (0, bad + 1)
        if bad == section.decrease_every:
            value, bad = max(1.0, value * section.decrease), 0
        if good == section.growth_every:
            value, good = min(2.0**100, value * section.growth), 0
        assert ours.value == value
    if section.decrease_every == 1 and 1 < value < 2.0**90 and section.initial < 2.0**90:
        theirs = torch.amp.GradScaler("cpu", section.initial, section.growth, section.decrease, section.growth_every)
        _ = theirs.scale(torch.ones(()))
        for finite in steps:
            theirs._found_inf_per_device = lambda _, f=finite: {CPU: torch.tensor(float(not f))}
            theirs._per_optimizer_states[0] = {"found_inf_per_device": {CPU: torch.tensor(float(not finite))}}
            theirs.update()
            theirs._per_optimizer_states.clear()
        assert min(value, 2.0**100) == theirs.get_scale() or min(steps_low(steps, section)) <= 1


def steps_low(steps, section):
    """The scale after each step without a lowest one: where it falls below 1, torch's goes on falling."""
    value, good, found = section.initial, 0, [section.initial]
    for finite in steps:
        good = good + 1 if finite else 0
        value = value if finite else value * section.decrease
        if good == section.growth_every:
            value, good = value * section.growth, 0
        found.append(value)
    return found


def test_a_commit_of_an_older_headrace_has_two_numbers():
    scale = LossScale(on=True)
    scale.load_state([1024.0, 7])
    assert scale.state() == [1024.0, 7, 0]
