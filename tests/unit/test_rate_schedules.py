"""Schedules of learning rates are those of torch, as pure functions of a count."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch.optim import lr_scheduler

from headrace.pserver.rate_schedules import Schedule, half_cosine, power

SCHEDULE = TypeAdapter(Schedule)


def schedule(kind, **settings):
    return SCHEDULE.validate_python({"kind": kind, **settings})


def lambdas(function):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, function)


def sequence(*parts, at):
    def build(optimizer):
        return lr_scheduler.SequentialLR(optimizer, [part(optimizer) for part in parts], [at])

    return build


def rise(steps):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / steps)


THEIRS = {
    "constant": (schedule("constant"), lambdas(lambda step: 1.0)),
    "linear": (
        schedule("warmup_linear", total=40, final=0.25),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.25, 40),
    ),
    "warmup_linear": (
        schedule("warmup_linear", warmup=10, total=40),
        sequence(rise(10), lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 30), at=10),
    ),
    "cosine": (
        schedule("warmup_cosine", total=50, final=0.1),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 50, eta_min=0.05),
    ),
    "warmup_cosine": (
        schedule("warmup_cosine", warmup=10, total=50),
        lambdas(lambda step: step / 10 if step < 10 else (1 + math.cos(math.pi * (step - 10) / 40)) / 2),
    ),
    "exponential": (
        schedule("exponential", factor=0.9, every=1),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    ),
    "step": (schedule("exponential", factor=0.5, every=7), lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5)),
    "piecewise": (
        schedule("piecewise", at=[5, 20], shares=[1.0, 0.1, 0.01]),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 20], 0.1),
    ),
    "inverse_sqrt": (
        schedule("inverse_sqrt", warmup=16),
        lambdas(lambda step: 4 * min((step or 1e-30) ** -0.5, step * 16**-1.5)),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.filterwarnings("ignore")  # torch warns of schedulers without steps of the optimizer
def test_a_schedule_is_that_of_torch_within_a_millionth(name):
    ours, build = THEIRS[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = build(optimizer)
    for count in range(51):
        assert 0.5 * ours.share(count) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6), count
        theirs.step()


@given(st.integers(0, 1 << 40))
def test_every_share_is_a_finite_number_that_is_not_negative(count):
    for ours, _ in THEIRS.values():
        assert 0 <= ours.share(count) <= 1
        assert ours.share(count) == ours.share(count)


def test_a_schedule_stays_at_its_final_share():
    assert schedule("warmup_cosine", total=50, final=0.1).share(1 << 40) == 0.1
    assert schedule("warmup_linear", total=50).share(50) == schedule("warmup_linear", total=50).share(99) == 0


@given(st.floats(0, 1))
def test_half_a_cosine_is_exact_to_rounding(x):
    assert half_cosine(x) == pytest.approx((1 + math.cos(math.pi * x)) / 2, abs=1e-15)


def test_half_a_cosine_falls_from_1_to_0():
    values = [half_cosine(k / 64) for k in range(65)]
    assert values[0] == 1 and values[32] == 0.5 and values[64] == 0
    assert all(later < before for before, later in pairwise(values))


@given(st.floats(0.001, 1), st.integers(0, 10_000))
def test_powers_are_exact_to_rounding(base, exponent):
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-11, abs=1e-300)


MISTAKES = {
    "total = 5 is not above warmup = 5": ("warmup_linear", {"warmup": 5, "total": 5}),
    "is not ascending": ("piecewise", {"at": [5, 5], "shares": [1, 1, 1]}),
    "there are 1 shares; 1 counts need 2": ("piecewise", {"at": [5], "shares": [1]}),
    "less than or equal to 1": ("exponential", {"factor": 1.5, "every": 2}),
    "Extra inputs": ("constant", {"counts": "samples"}),
    "found using 'kind'": ("polynomial", {}),
}


@pytest.mark.parametrize("why", MISTAKES)
def test_a_schedule_that_makes_no_sense_is_refused(why):
    kind, settings = MISTAKES[why]
    with pytest.raises(ValidationError, match=why):
        schedule(kind, **settings)
