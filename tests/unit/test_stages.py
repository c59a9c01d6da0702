"""Dividing a tower into stages, and passing batches through it, on one rank."""

from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from headrace.errors import SpecError
from headrace.service.spec.job import load_job
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.collectives.stage_steps import micro_batch_size
from headrace.trainer.dense.pipeline import PipelineDense, Stage, divided
from headrace.trainer.dense_config import DenseSection, PipelineSection, RecomputeSection
from headrace.trainer.models.contract import DeepTower
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.requests import resize_requested
from headrace.trainer.spec.changes import SHARDS, TRAINERS
from headrace.trainer.train.pipeline_step import entered, stage_activations, stage_plan, summed_loss
from tests.faults.test_joins_killed import SPEC as LATE
from tests.integration.stream_job import write_job

WIDTHS = (5, 7, 6, 4)


class InBlocks(nn.Module):
    """A tower of linear layers, drawn without torch's own generator."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in zip(WIDTHS, WIDTHS[1:], strict=False))
        self.top, self.bias = nn.Linear(WIDTHS[-1], 2), nn.Parameter(torch.zeros(2))
        draw = torch.Generator().manual_seed(3)
        for each in self.parameters():
            each.data = 0.3 * torch.randn(each.shape, generator=draw)

    def tower(self):
        return DeepTower(lambda x: (x, self.bias.expand(len(x), 2)), WIDTHS[0], list(self.layers), self.top)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.top(x) + self.bias


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 5), st.integers(0, 50))
def test_the_most_costly_stage_costs_least(costs, num_stages, last):
    found = divided(costs, num_stages, last)
    assert [at for stage in found for at in stage] == list(range(len(costs))) and len(found) == num_stages
    assert all(stage.start <= stage.stop <= len(costs) for stage in found)

    def most(bounds):
        return max(sum(costs[a:b]) + last * (b == len(costs)) for a, b in zip(bounds, bounds[1:], strict=False))

    if len(costs) > num_stages:
        every = ((0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), num_stages - 1))
        assert most((0, *(stage.stop for stage in found))) == min(map(most, every))
        assert all(found), "no stage is empty"


@given(st.integers(1, 100_000), st.integers(1, 256))
def test_micro_batches_have_few_sizes_and_little_padding(num_samples, number):
    size = micro_batch_size(num_samples, number)
    least = -(-num_samples // number)
    assert least <= size <= least * 9 / 8
    assert size & ((1 << max(0, size.bit_length() - 4)) - 1) == 0, "four binary digits"


@pytest.mark.parametrize("number", [1, 4, 7])
@pytest.mark.parametrize("num_samples", [1, 8, 13])
def test_micro_batches_add_up_to_the_batch(number, num_samples):
    draw = torch.Generator().manual_seed(number)
    label, weight = torch.rand(num_samples, 2, generator=draw), torch.rand(num_samples, 2, generator=draw) / num_samples
    x = torch.randn(num_samples, WIDTHS[0], generator=draw)
    whole, divided_net = InBlocks(), InBlocks()
    dense = PipelineDense(divided_net, DenseSection(strategy="pipeline"), SingleRank())
    steps = SingleRank().stages(stage_plan(dense.stage, PipelineSection(micro_batches=number), ("bce", "mse")), 1)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    logits = steps.lead(*divided_net.tower().enter(mine), torch.cat([label, weight], 1))
    wanted = whole(theirs)
    bce = functional.binary_cross_entropy_with_logits(wanted[:, 0], label[:, 0], weight[:, 0], reduction="sum")
    (bce + ((wanted[:, 1] - label[:, 1]) ** 2 * weight[:, 1]).sum()).backward()
    found = {name: divided_net.get_parameter(name).grad for name, _ in whole.named_parameters()}
    plain = {name: each.grad for name, each in whole.named_parameters()}
    for name, grad in (found | {"logits": logits, "input": mine.grad}).items():
        assert (grad - (plain | {"logits": wanted, "input": theirs.grad})[name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("section", "calls"),
    [
        (RecomputeSection(), {"layers.0": 4, "layers.1": 4, "layers.2": 4, "top": 4}),
        (RecomputeSection(blocks=("layers.1",)), {"layers.0": 2, "layers.1": 4, "layers.2": 2, "top": 2}),
    ],
)
def test_the_named_blocks_of_a_stage_are_computed_twice_in_each_micro_batch(section, calls):
    net, found = InBlocks(), dict.fromkeys(calls, 0)
    config = DenseSection(strategy="pipeline", pipeline=PipelineSection(micro_batches=2), recompute=section)
    stage = PipelineDense(net, config, SingleRank()).stage
    saved = stage_activations(net, stage, config, nullcontext)
    stage.surroundings = entered(nullcontext, saved.forward)

    def count(module, *_):
        name = next(name for name, each in net.named_modules() if each is module)
        found[name] += 1

    for name in calls:
        net.get_submodule(name).register_forward_hook(count)
    steps = SingleRank().stages(stage_plan(stage, config.pipeline, ("bce", "mse")), 1)
    x = torch.randn(4, WIDTHS[0])
    steps.lead(x, torch.zeros(4, 2), torch.ones(4, 4))
    assert found == calls


def test_padding_has_no_loss():
    assert summed_loss(("bce", "mse"), torch.randn(3, 2), torch.zeros(3, 4)) == 0


def test_stages_meet_at_the_same_widths_and_share_no_parameter():
    net = InBlocks()
    for number in range(1, 6):
        stages = [Stage(net.tower(), at, number) for at in range(number)]
        assert [each.width_in for each in stages] == [WIDTHS[0], *(each.width_out for each in stages[:-1])]
        owned = [id(parameter) for stage in stages for parameter in stage.parameters()]
        assert len(owned) == len(set(owned)) == 2 * len(WIDTHS)
        given = x = torch.randn(4, WIDTHS[0])
        beside = net.bias.expand(4, 2)
        for stage in stages[:-1]:
            x, beside = stage(x, beside)
        torch.testing.assert_close(stages[-1](x, beside), net(given))


class Other(InBlocks):
    """Has what stages do not compute."""

    def losses(self, outputs, inputs):
        return {}


def with_buffer():
    net = InBlocks()
    net.register_buffer("count", torch.zeros(1))
    return net


@pytest.mark.parametrize(
    ("net", "why"), [(nn.Linear(2, 2), "no `tower`"), (Other(), "has `losses`"), (with_buffer(), "such as count")]
)
def test_other_models_are_refused(net, why):
    with pytest.raises(SpecError, match=why):
        PipelineDense(net, DenseSection(strategy="pipeline"), SingleRank())


REFUSED = {
    "compression": {"compression": "bf16"},
    "hierarchy": {"hierarchy": {"group": 2}},
    "overlap": {"overlap": True},
    "sync_bn": {"buffers": "sync_bn"},
    "bucket_bytes": {"bucket_bytes": "64KiB"},
    "k_steps": {"k_steps": 2},
    "slice_floats": {"slice_floats": 4096},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_other_strategies_are_refused(name):
    with pytest.raises(ValueError, match=name):
        DenseSection(strategy="pipeline", **REFUSED[name])


def test_its_settings_are_for_it_alone():
    with pytest.raises(ValueError, match='pipeline is for strategy = "pipeline"'):
        DenseSection(pipeline={"micro_batches": 2})


def test_late_labels_are_refused(tmp_path):
    """Trainers that only have a stage got samples, whose steps no other trainer took part in."""
    (tmp_path / "job.toml").write_text(LATE)
    load_job(tmp_path / "job.toml")
    with pytest.raises(SpecError, match="join: does not work with dense.strategy"):
        load_job(tmp_path / "job.toml", ["dense.strategy=pipeline"])


def test_a_resize_to_a_part_of_a_pipeline_is_refused(tmp_path):
    given = ["dense={strategy='pipeline',pipeline={stages=2}}", "cluster={trainers=4,shards=1}"]
    job = JobInForce(load_job(write_job(tmp_path, num_lines=1), given).spec, {SHARDS: 1, TRAINERS: 4})
    with pytest.raises(SpecError, match="stages: 2 trainers share a model, and 3 is no multiple of that"):
        resize_requested({"id": "a", "trainers": 3}, job)
    assert resize_requested({"id": "a", "trainers": 6}, job).keys == {SHARDS: 1, TRAINERS: 6}
