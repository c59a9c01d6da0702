"""The learning rate is a pure function of what was learnt: it continues to the bit, and may be set while a job runs."""

import pytest
import torch
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.train.learning_rate import LearningRate

COSINE = {"kind": "warmup_cosine", "warmup": 100, "total": 1000}
BY_VERSION = {"kind": "exponential", "factor": 0.5, "every": 2, "counts": "versions"}
SCHEDULES = [
    {"kind": "constant"},
    {"kind": "warmup_linear", "warmup": 100, "total": 400, "final": 0.1},
    COSINE,
    {"kind": "exponential", "factor": 0.7, "every": 100},
    {"kind": "piecewise", "at": [200, 320], "shares": [1.0, 0.5, 0.25]},
    {"kind": "inverse_sqrt", "warmup": 100},
    BY_VERSION,
]
"""Each kind; its rate changes both before and after the commit, which is at sample 280 of 480 and version 7 of 12."""
OPTIMIZERS = [{"kind": kind} for kind in ("sgd", "adam", "adamw", "lamb", "lars", "adagrad")]


class Recorder:
    """The part of a strategy that a rate needs."""

    def __init__(self):
        self.rates = []

    def set_lr(self, lr):
        self.rates.append(lr)


def rate(schedule=None, lr=0.5, **more):
    dense = Recorder()
    section = {"optimizer": {"kind": "sgd", "lr": lr}} | ({} if schedule is None else {"schedule": schedule})
    return LearningRate(dense, DenseSection.model_validate(section | more)), dense


def test_a_constant_rate_sets_nothing_and_leaves_digests_alone():
    plain, dense = rate()
    plain.open_pass(1)
    plain.step(64)
    assert dense.rates == [] and plain.digest("abc") == "abc" and plain.value == 0.5


def test_a_schedule_counts_the_samples_before_a_step():
    counted, dense = rate(COSINE)
    counted.open_pass(1)
    for _ in range(3):
        counted.step(50)
    assert dense.rates[:2] == [0.0, 0.25] and dense.rates[2] == 0.5
    assert counted.value < 0.5


def test_a_schedule_counts_the_versions_before_a_pass():
    counted, dense = rate(BY_VERSION)
    for version in range(1, 6):
        counted.open_pass(version)
        counted.step(9)
    assert dense.rates == [0.5, 0.5, 0.25, 0.25, 0.125]


@pytest.mark.parametrize(("strategy", "share"), [("all_reduce", 1.0), ("shards", 0.5)])
def test_on_shards_the_shown_rate_counts_samples_of_predicted_passes_as_shards_do(strategy, share):
    counted, _ = rate({"kind": "piecewise", "at": [400], "shares": [1.0, 0.5]}, strategy=strategy)
    counted.open_pass(1)
    counted.step(100)
    counted.open_pass(2, 100)  # its 300 samples are predicted
    counted.open_pass(3, 400)
    counted.step(50)
    assert counted.value == 0.5 * share


def test_the_count_of_a_commit_continues_the_rates_to_the_bit():
    whole, every = rate(COSINE)
    for _ in range(20):
        whole.step(37)
    first, begun = rate(COSINE)
    for _ in range(9):
        first.step(37)
    second, ended = rate(COSINE)
    second.load_state(first.state())
    for _ in range(11):
        second.step(37)
    assert begun.rates + ended.rates == every.rates
    assert second.digest("abc") == whole.digest("abc") != first.digest("abc") != "abc"


def test_rate_and_schedule_are_set_while_samples_are_counted():
    counted, dense = rate()
    counted.step(500)
    counted.set(0.25, None)
    counted.set(None, {"kind": "piecewise", "at": [400, 600], "shares": [1.0, 0.5, 0.25]})
    counted.step(100)
    counted.step(100)
    assert dense.rates == [0.25, 0.125, 0.125, 0.0625]
    counted.set(None, {"kind": "constant"})
    assert dense.rates[-1] == 0.25 == counted.value


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each["kind"] + "_by_" + each.get("counts", "samples"))
@pytest.mark.parametrize(
    "optimizer", [*OPTIMIZERS, {"kind": "sgd", "momentum": 0.9}], ids=lambda each: "_".join(map(str, each.values()))
)
def test_a_scheduled_optimizer_continues_from_a_commit_to_the_bit(optimizer, schedule):
    section = DenseSection.model_validate({"optimizer": {"lr": 0.1} | optimizer, "schedule": schedule})

    def trainer():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        part = AllReduceDense(net, section, SingleRank())
        return net, part, LearningRate(part, section)

    def learn(net, part, counted, steps):
        rates = []
        for step in steps:
            counted.open_pass(step + 1)
            rates.append(counted.value)
            counted.step(40)
            part.clear()
            net(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            part.after_backward(step, 1.0)
            part.wait()
            part.step()
        return rates

    whole, first, second = trainer(), trainer(), trainer()
    rates = learn(*whole, range(12))
    assert rates[:7] == learn(*first, range(7))
    second[1].load({name: value.clone() for name, value in first[1].consolidate().items()})
    second[2].load_state(first[2].state())
    assert rates[7:] == learn(*second, range(7, 12))
    assert second[1].digest() == whole[1].digest() != first[1].digest()
    changes = [len(set(some)) > 1 for some in (rates[:7], rates[7:])]
    assert changes == [schedule["kind"] != "constant"] * 2, "the schedule is at work before the commit and after it"
