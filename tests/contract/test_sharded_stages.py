"""Stages 2 and 3 of the sharded strategy: the bits of stage 1 in less memory, whichever ranks have batches."""

import copy
from contextlib import contextmanager, nullcontext
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headrace.errors import SpecError
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.sharded_blocks import OtherOrder
from headrace.trainer.dense.strategy import Around, dense_strategy
from headrace.trainer.dense_config import DenseSection, RecomputeSection
from headrace.trainer.dense_optimizers import DenseAdagrad, DenseAdam, DenseAdamW, DenseLamb, DenseLars, DenseSgd
from headrace.trainer.features.default_rows import DefaultRows
from headrace.trainer.train.activations import saved_activations
from tests.fakes.thread_ranks import on_ranks

STAGES = pytest.mark.parametrize("stage", [2, 3])
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
OPTIMIZERS = {
    "sgd": DenseSgd(kind="sgd", lr=0.1, momentum=0.5, weight_decay=0.01),
    "adam": DenseAdam(lr=0.01, weight_decay=0.1),
    "adamw": DenseAdamW(kind="adamw", lr=0.01, no_decay=("bias",)),
    "adagrad": DenseAdagrad(kind="adagrad", lr=0.1, initial=0.1),
    "lamb": DenseLamb(kind="lamb", lr=0.01),
    "lars": DenseLars(kind="lars", lr=0.1),
}
STEPS = 4


class Twisted(nn.Module):
    """Its layers have several slices, and are called in another order than they are named: one twice, one in vain."""

    parameters_in_calls = True

    def __init__(self):
        super().__init__()
        self.last, self.inner = nn.Linear(96, 1), nn.Linear(96, 96)
        self.norm, self.first, self.unused = nn.BatchNorm1d(96), nn.Linear(3, 96, bias=False), nn.Linear(96, 2)
        draw = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw)

    def forward(self, x):
        hidden = torch.tanh(self.inner(torch.tanh(self.inner(self.norm(self.first(x))))))
        self.unused(hidden)
        return self.last(hidden)


class Straight(Twisted):
    """Calls each layer once: ranks that are threads share torch's copies of weights in bfloat16."""

    def forward(self, x):
        return self.last(torch.tanh(self.inner(self.norm(self.first(x)))))


def batch(rank, step, part=0):
    """(samples, 3) of a rank; None where it has run out: rank 0 after one step, rank 1 after three."""
    if step > 2 * rank:
        return None
    return torch.randn(2 + rank, 3, generator=torch.Generator().manual_seed(1000 * part + 100 * step + rank))


def section(stage, **more):
    given = {"strategy": "sharded", "optimizer": DenseAdam(lr=0.01)} | more
    return DenseSection(**given, **({} if stage == 1 else {"stage": stage, "bucket_bytes": 64}))


def train(ranks, strategy, net, steps=range(STEPS), batches=batch, around=nullcontext):
    """A pass as the loop makes it, with micro-batches where they are set."""
    for step in steps:
        strategy.clear()
        parts = range(strategy._config.accumulate)
        everyone = [batches(rank, step, part) for rank in range(ranks.world) for part in parts]
        num_samples = sum(len(each) for each in everyone if each is not None)
        for part in parts:
            if (mine := batches(ranks.rank, step, part)) is not None:
                with around():
                    output = net(mine)
                (output.float().square().sum() / num_samples).backward()
        strategy.note(0.0, 0.0)
        assert strategy.finite()
        strategy.after_backward(step, 1.0)
        strategy.wait()
        strategy.step()
    strategy.flush()
    strategy.buffers.broadcast()


def trained(dense, world, saved=None, more=None, make=Twisted, act=train, around=lambda net: nullcontext):
    """What rank 0 consolidates after a pass, and the digest."""

    def work(ranks):
        net = make()
        strategy = dense_strategy(net, dense, ranks, None if more is None else more().parameters)
        if saved is not None:
            strategy.load(saved)
        act(ranks, strategy, net, around=around(net))
        return {key: value.clone() for key, value in strategy.consolidate().items()}, strategy.digest()

    found, ranks = on_ranks(world, work)
    assert len({digest for _, digest in found}) == 1
    assert all(each.made == ranks[0].made for each in ranks), "the same collectives in the same order"
    return found[0]


def assert_same(found, expected, exact=True):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=0, atol=1e-6), key
        assert not exact or torch.equal(found[key], value), key


@cache
def of_stage_1(optimizer, group, world):
    return trained(section(1, optimizer=OPTIMIZERS[optimizer], group=group), world)[0]


@STAGES
@pytest.mark.parametrize(("world", "group"), [(1, None), (3, None), (2, 1), (4, 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_commit_is_that_of_stage_1(stage, world, group, optimizer):
    found, _ = trained(section(stage, optimizer=OPTIMIZERS[optimizer], group=group), world)
    by_norms = OPTIMIZERS[optimizer].by_norms and world > 1  # squares are summed over other slices
    assert_same(found, of_stage_1(optimizer, group, world), exact=not by_norms)


@STAGES
@WORLDS
@pytest.mark.parametrize("given", [{"clip_norm": 0.1}, {"accumulate": 3}], ids=["clip_norm", "accumulate"])
def test_norms_and_micro_batches_are_summed_in_another_order(stage, world, given):
    given = given | {"optimizer": DenseSgd(kind="sgd", lr=0.003, momentum=0.5)}
    found, _ = trained(section(stage, **given), world)
    assert_same(found, trained(section(1, **given), world)[0], exact=False)


@WORLDS
@pytest.mark.parametrize("given", [{}, {"clip_norm": 0.1}, {"accumulate": 3}, {"optimizer": OPTIMIZERS["lamb"]}])
def test_stage_3_is_stage_2_to_the_bit(world, given):
    found, digest = trained(section(3, **given), world)
    expected, digest_2 = trained(section(2, **given), world)
    assert_same(found, expected)
    assert digest == digest_2


@STAGES
@WORLDS
@pytest.mark.parametrize("amp", [False, True])
def test_blocks_that_are_recomputed_have_the_same_bits(stage, world, amp):
    def precision():
        return torch.autocast("cpu", torch.bfloat16, enabled=amp)

    def learnt(dense):
        def around(net):
            saved = saved_activations(net, dense, torch.device("cpu"), precision)

            @contextmanager
            def forward():
                with precision(), saved.forward():
                    yield

            return forward

        return trained(dense, world, make=Straight, around=around)[0]

    blocks = RecomputeSection(blocks=("inner", "norm", "last"))
    expected = learnt(section(1))
    assert_same(learnt(section(stage)), expected)
    assert_same(learnt(section(stage, recompute=blocks)), expected)


@STAGES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_commit_is_continued_by_any_number_of_ranks_and_by_other_strategies(stage, optimizer):
    given = {"optimizer": OPTIMIZERS[optimizer]}
    saved, digest = trained(section(stage, **given), 3)

    def loaded(ranks, strategy, net, around):
        strategy.flush()

    others = [(section(each, **given), world) for each in (1, 2, 3) for world in (1, 2, 4)]
    for dense, world in [*others, (DenseSection(**given), 2)]:
        again, found = trained(dense, world, saved, act=loaded)
        assert_same(again, saved)
        assert found == digest or dense.stage not in (2, 3), "a digest does not depend on the number of ranks"
    of_stage_1, _ = trained(section(1, **given), 3)
    assert_same(trained(section(stage, **given), 2, of_stage_1, act=loaded)[0], of_stage_1)


@STAGES
@WORLDS
def test_learnt_default_rows_learn_with_the_model(stage, world):
    class Rows(DefaultRows):
        def __init__(self):
            super().__init__({"a": 5, "b": 3}, torch.device("cpu"))

    def both(ranks, strategy, net, around):
        def batches(rank, step, part):
            mine = batch(rank, step, part)
            if mine is not None and rank == ranks.rank:
                for name, row in rows.items():
                    strategy._flat.parameters[name].grad.add_(row + step)
            return mine

        rows = {
            name: torch.arange(1.0, len(each) + 1)
            for name, each in strategy._flat.parameters.items()
            if "." in name and name.startswith("default_row")
        }
        train(ranks, strategy, net, batches=batches)

    found, _ = trained(section(stage), world, more=Rows, act=both)
    expected, _ = trained(section(1), world, more=Rows, act=both)
    assert_same(found, expected)
    assert found["model.default_row.a"].abs().sum() > 0


@STAGES
def test_modules_may_share_a_parameter(stage):
    class Tied(nn.Module):
        parameters_in_calls = True

        def __init__(self):
            super().__init__()
            self.one, self.middle, self.two = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            draw = torch.Generator().manual_seed(3)
            for parameter in self.parameters():
                parameter.data = torch.randn(parameter.shape, generator=draw)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.middle(self.one(x)))

    found, _ = trained(section(stage), 2, make=Tied)
    assert_same(found, trained(section(1), 2, make=Tied)[0])


@STAGES
def test_a_model_that_uses_weights_anywhere_learns_the_same(stage, caplog):
    class Free(Twisted):
        parameters_in_calls = False

        def forward(self, x):
            return nn.functional.linear(torch.tanh(self.first(x)), self.last.weight)

    found, _ = trained(section(stage), 3, make=Free)
    assert_same(found, trained(section(1), 3, make=Free)[0])
    assert ("parameters_in_calls" in caplog.text) == (stage == 3)


def test_a_model_that_calls_its_layers_in_changing_order_is_told_so():
    class Changing(Twisted):
        calls = 0

        def forward(self, x):
            self.calls += 1
            hidden = self.first(x)
            hidden = self.inner(hidden) if self.calls < 3 else self.inner(self.inner(self.norm(self.inner(hidden))))
            return self.last(hidden)

    everyone = lambda rank, step, part: batch(2, step, part)  # noqa: E731

    def act(ranks, strategy, net, around):
        train(ranks, strategy, net, batches=everyone)

    with pytest.raises(OtherOrder, match=r"the parameters inner\.weight, inner\.bias .*set dense\.stage = 2"):
        trained(section(3), 2, make=Changing, act=act)


@STAGES
def test_a_layer_that_is_differentiated_twice_is_told_the_stage_that_can(stage):
    class Again(nn.Module):
        parameters_in_calls = True

        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.first(x)
            for _ in range(2):
                hidden = checkpoint(self.inner, hidden, use_reentrant=True)
            return self.last(hidden)

    with pytest.raises(
        OtherOrder, match=rf"inner\.weight, .*stage {stage} cannot follow: set dense\.stage = {stage - 1}"
    ):
        trained(section(stage), 2, make=Again)


@STAGES
def test_a_step_that_is_skipped_changes_nothing(stage):
    def act(ranks):
        net = Twisted()
        strategy = dense_strategy(net, section(stage), ranks)
        train(ranks, strategy, net, steps=range(2))
        before = strategy.digest()
        strategy.clear()
        strategy.buffers.save()
        if ranks.rank:
            (net(torch.ones(2, 3)).sum() * float("nan")).backward()
        fits = strategy.finite()
        strategy.buffers.restore()
        strategy.clear()
        strategy.flush()
        return fits, strategy.digest() == before

    assert on_ranks(3, act)[0] == [(True, True), (False, True), (False, True)]


@STAGES
def test_batches_that_are_only_predicted_learn_nothing_and_need_no_other_rank(stage):
    """Rank 1 predicts before the first step and after it; rank 0 has nothing to predict."""

    def act(ranks):
        net, plain = Twisted().eval(), Twisted().eval()
        strategy = dense_strategy(net, section(stage, accumulate=2), ranks)
        found = []
        for _ in range(2):
            with strategy.predicting(), torch.no_grad():
                if ranks.rank:
                    found.append(torch.equal(net(torch.ones(2, 3)), plain(torch.ones(2, 3))))
            before = strategy.digest()
            train(ranks, strategy, net, steps=range(1), batches=lambda rank, step, part: None)
        return found, before == strategy.digest()

    assert [found for found, _ in on_ranks(2, act)[0]] == [[], [True, True]]


def test_between_steps_of_stage_3_a_rank_has_only_its_slices():
    """And a copy of the model, such as one that is traced, calls no other rank."""

    def act(ranks):
        net = Twisted()
        strategy = dense_strategy(net, section(3), ranks)
        train(ranks, strategy, net)
        made = len(ranks.made)
        assert torch.isnan(copy.deepcopy(net)(torch.ones(2, 3))).all()
        whole = {name: torch.zeros(value.shape) for name, value in Twisted().state_dict().items()}
        copied = copy.deepcopy(net)
        for name, value in copied.state_dict(keep_vars=True).items():
            value.detach().copy_(whole[name])
        copied(torch.ones(2, 3))
        held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in net.parameters()}
        return made == len(ranks.made), sum(held.values()), sorted(strategy.tensors())

    for same, num_bytes, names in on_ranks(2, act)[0]:
        assert same and num_bytes == 4, "one number that is none stands for all"
        assert "model.inner.weight" not in names and "model.norm.running_mean" in names


@STAGES
def test_rank_0_has_the_whole_model_to_publish_until_the_next_step(stage):
    def act(ranks):
        net = Twisted()
        strategy = dense_strategy(net, section(stage), ranks)
        train(ranks, strategy, net)
        before = strategy.published()
        assert (before is None) == strategy.gathers == (stage == 3)
        if strategy.gathers:
            strategy.gather()
        found = {name: value.clone() for name, value in strategy.published().items()}
        commit = strategy.consolidate()
        strategy.clear()
        assert (strategy.published() is None) == strategy.gathers
        return found, {name: value.clone() for name, value in commit.items()}

    found, commit = on_ranks(2, act)[0][0]
    model = {name for name in commit if name.startswith("model.")}
    assert_same({name: found[name] for name in model}, {name: commit[name] for name in model})


@STAGES
def test_alone_it_has_the_bits_of_all_reduce(stage):
    found, _ = trained(section(stage, clip_norm=0.05), 1)
    expected, _ = trained(DenseSection(optimizer=DenseAdam(lr=0.01), clip_norm=0.05), 1)
    assert_same(found, expected)


def test_a_forward_pass_that_measures_is_one_more_for_each_batch():
    def act(ranks):
        net = Twisted()
        strategy = dense_strategy(net, section(3), ranks, around=Around(forwards=2))

        class Both(nn.Module):
            def forward(self, x):
                with torch.no_grad():
                    net.eval()(x)
                return net.train()(x)

        train(ranks, strategy, Both())
        return strategy.digest()

    found, ranks = on_ranks(3, act)
    assert found == [trained(section(3), 3)[1]] * 3
    assert ranks[0].made == ranks[1].made == ranks[2].made


@pytest.mark.parametrize(
    ("given", "trouble"),
    [
        ({"stage": 2, "strategy": "all_reduce"}, 'stage is for strategy = "sharded"'),
        ({"stage": 2, "buffers": "sync_bn"}, 'buffers = "sync_bn" and stage = 2'),
        ({"stage": 3, "offload": "all"}, "offload and stage = 3"),
        ({"stage": 4}, "stage"),
        ({"bucket_bytes": 128}, "bucket_bytes"),
    ],
)
def test_what_does_not_work_together_is_refused(given, trouble):
    with pytest.raises(ValueError, match=trouble):
        DenseSection(**({"strategy": "sharded"} | given))


def test_many_classes_that_are_divided_are_refused():
    net = Twisted()
    net.class_rows = object()
    with pytest.raises(SpecError, match=r"dense\.stage: 2 does not work with many classes"):
        dense_strategy(net, section(2), SingleRank())
