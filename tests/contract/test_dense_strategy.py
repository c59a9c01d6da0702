"""What every dense strategy keeps: the same parameters on all ranks, and the same collectives in the same order.

Three ranks, of which some have no batch in some steps; each rank is a thread. Slices are on two real shards.
"""

import copy
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from headrace.errors import BadInput, SpecError
from headrace.pserver.config import SLICE_FLOATS
from headrace.pserver.protocol.shards import Shards, StepScale
from headrace.pserver.server.commands import RestoreCommit
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.strategy import Around, Awaiting, dense_strategy
from headrace.trainer.dense_config import DENSE_STRATEGIES, DenseSection
from headrace.trainer.dense_optimizers import DenseAdagrad, DenseAdam, DenseLamb, DenseLars, DenseSgd
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.train.learning_rate import LearningRate
from tests.contract import shards_world as w
from tests.fakes.thread_ranks import on_ranks

OF_SUMS = {
    "dgc": {"compression": "dgc", "dgc": {"sparsity": 0.8, "warmup_steps": 3}},
    "powersgd": {"compression": "powersgd", "powersgd": {"rank": 1}},
    "hierarchy": {"hierarchy": {"group": 3}},
}
"""Settings of "all_reduce" that sum in another way."""
STAGES = {f"stage{stage}": {"strategy": "sharded", "stage": stage, "bucket_bytes": 64} for stage in (2, 3)}
"""Of "sharded". Each layer is a block."""
EVERY = pytest.mark.parametrize("name", [*sorted({*DENSE_STRATEGIES.names()} - {"pipeline"}), *OF_SUMS, *STAGES])
"""All but "pipeline", in which other ranks have no batches: test_pipeline_on_gloo."""
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
STEPS = 5
TOLERANCE = 1e-6
"""Sums over ranks are rounded otherwise than sums over one batch."""


def model(seed=3):
    """The same on every rank; the weights are drawn without torch's generator, which all threads share."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net.parameters_in_calls = True
    draw = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    return net


MOMENTUM = DenseSgd(kind="sgd", lr=0.1, momentum=0.5)
OPTIMIZER = {"all_reduce": MOMENTUM, "dgc": MOMENTUM}
SETTINGS = {"local_sgd": {"k_steps": 2}} | OF_SUMS | STAGES


def section(name, **more):
    strategy = {"strategy": "all_reduce" if name in OF_SUMS else name}
    given = strategy | {"optimizer": OPTIMIZER.get(name, DenseAdam(lr=0.1))} | SETTINGS.get(name, {})
    return DenseSection(**(given | more))


@dataclass
class Job:
    """The ranks of a job with one strategy, and the shards that hold what it keeps there."""

    section: DenseSection
    shards: Sequence[Shards]
    awaiting: Awaiting = nullcontext

    def strategy(self, ranks, net):
        return dense_strategy(net, self.section, ranks, around=Around(self.shards[ranks.rank], 20.0, self.awaiting))

    def on_ranks(self, act):
        return on_ranks(len(self.shards), act)


@contextmanager
def job(name, world=1, live=None, restored=(None, (), 0), **more):
    mode, dense = more.pop("mode", "sync"), section(name, **more)
    tables = tables_on_shards({}, dense)
    with w.job(2 if tables else 1, world, tables, live, mode=mode) as made:
        folder, parts, version = restored
        if folder is not None:
            made.one.call(RestoreCommit(folder, parts, version), w.soon())
        yield Job(dense, made.ranks)


def batch(rank, step):
    """(samples, 3) of a rank; None where it has run out: rank 0 after one step, rank 1 after three."""
    if step > 2 * rank:
        return None
    return torch.randn(2 + rank, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def train(job, ranks, strategy, net, steps=range(STEPS), batches=batch, number=1):
    """A pass as the loop makes it: each loss is divided by the samples of all ranks."""
    shards, rate = job.shards[ranks.rank], LearningRate(strategy, job.section)
    shards.open_pass(number, w.soon())
    rate.open_pass(number)
    mine = {step: found for step in steps if (found := batches(ranks.rank, step)) is not None}
    prepared = {step: shards.prepare(strategy.slices, learn=True) for step in mine}
    rows = shards.pull(prepared[steps[0]], w.soon()) if prepared else {}
    for number_of_step, step in enumerate(steps):
        num_samples = sum(len(each) for r in range(ranks.world) if (each := batches(r, step)) is not None)
        rate.step(num_samples)
        strategy.take(rows)
        strategy.clear()
        share = loss = 0.0
        if step in mine:
            mean = net(mine[step]).square().sum() / max(num_samples, 1)
            mean.backward()
            share, loss = len(mine[step]) / num_samples, mean.item()
        strategy.note(share, loss)
        assert strategy.finite()
        if strategy.communicates(step) or step in mine:
            strategy.after_backward(step, 1.0)
            strategy.wait()
        strategy.step()
        push, following = strategy.push() if step in mine else None, prepared.get(step + 1)
        scale = StepScale(num_samples)
        rows = shards.exchange(number_of_step, prepared.get(step), push, following, scale, w.soon()) or {}
    strategy.flush()
    shards.close_pass(0, w.soon())


def wide(*, in_calls=True):
    """A model of seven slices: five of the first layer, and two with the last one. See trainer.models.contract."""
    draw, net = torch.Generator().manual_seed(5), nn.Sequential(nn.Linear(3, 1280), nn.Tanh(), nn.Linear(1280, 1))
    net.parameters_in_calls = in_calls
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    return net


def messages(shards):
    """Number of messages sent to all shards."""
    return sum(link["sent_messages"] for link in shards.links().values())


def trained(job, ranks, steps=range(STEPS), net=None):
    net = net or model()
    strategy = job.strategy(ranks, net)
    train(job, ranks, strategy, net, steps)
    return strategy, net


def weights(tensors):
    return {name: value.clone() for name, value in tensors.items() if name.startswith("model.")}


@EVERY
@WORLDS
def test_after_a_pass_all_ranks_hold_the_same_parameters_although_some_had_no_batch(name, world):
    found = []
    for _ in range(2):
        with job(name, world) as at:
            digests, _ = at.on_ranks(lambda ranks: trained(at, ranks)[0].digest())
        assert len(set(digests)) == 1
        found.append(digests)
    assert found[0] == found[1], "the same at every run"


@EVERY
def test_every_rank_makes_the_same_collectives_in_the_same_order(name):
    found = []
    for _ in range(2):
        with job(name, 3) as at:

            def act(ranks):
                net, answers = model(), []
                strategy = at.strategy(ranks, net)
                ask, strategy.communicates = (
                    strategy.communicates,
                    lambda step: answers.append(ask(step)) or answers[-1],
                )
                train(at, ranks, strategy, net)
                strategy.consolidate()
                return answers

            answers, ranks = at.on_ranks(act)
        made = [each.made for each in ranks]
        assert made[0] == made[1] == made[2] and bool(made[0]) == any(answers[0])
        assert answers[0] == answers[1] == answers[2]
        found.append(made)
    assert found[0] == found[1], "fixed buckets in a fixed order"


@EVERY
def test_the_order_in_which_gradients_are_ready_changes_no_collective(name):
    class Turned(nn.Module):
        """Uses its two layers in one order or the other, so that their gradients are ready in another one, too."""

        def __init__(self, turned):
            super().__init__()
            self.first, self.second, self.turned = nn.Linear(3, 3), nn.Linear(3, 3), turned

        def forward(self, x):
            return self.first(self.second(x)) if self.turned else self.second(self.first(x))

    with job(name, 3) as at:

        def act(ranks):
            net = Turned(ranks.rank == 1)
            for parameter in net.parameters():
                parameter.data.fill_(0.1)
            train(at, ranks, at.strategy(ranks, net), net)

        _, ranks = at.on_ranks(act)
    assert ranks[0].made == ranks[1].made == ranks[2].made


@EVERY
def test_a_step_in_which_no_rank_has_a_batch_makes_the_same_collectives(name):
    nobody = lambda rank, step: None  # noqa: E731

    with job(name, 3) as at:

        def act(ranks):
            net = model()
            strategy = at.strategy(ranks, net)
            train(at, ranks, strategy, net, batches=nobody)
            return strategy.digest()

        digests, ranks = at.on_ranks(act)
    assert len(set(digests)) == 1 and ranks[0].made == ranks[1].made == ranks[2].made


LATER = range(STEPS, 2 * STEPS)


def later(rank, step):
    return batch(rank, step - STEPS)


@EVERY
def test_what_is_consolidated_continues_the_training_on_ranks_that_load_it(name, tmp_path):
    parts = []

    with job(name, 3, tmp_path / "first", (tmp_path, (), 0)) as at:

        def act(ranks):
            strategy, net = trained(at, ranks)
            found = {key: value.clone() for key, value in strategy.consolidate().items()}
            if ranks.rank == 0:
                parts.extend(w.commit(at.shards[0], tmp_path / "commit", 1))
            ranks.broadcast({})  # rank 0 has committed
            train(at, ranks, strategy, net, LATER, later, 2)
            return found, strategy.digest()

        results, _ = at.on_ranks(act)
    saved, digest = results[0]

    with job(name, 3, tmp_path / "second", (tmp_path / "commit", parts, 1)) as at:

        def go_on(ranks):
            net = model(seed=4)
            strategy = at.strategy(ranks, net)
            strategy.load({key: value.clone() for key, value in saved.items()})
            train(at, ranks, strategy, net, LATER, later, 2)
            return strategy.digest()

        assert at.on_ranks(go_on)[0] == [digest] * 3


@EVERY
def test_what_three_ranks_consolidated_is_loaded_by_one(name):
    with job(name, 3) as at:
        results, _ = at.on_ranks(lambda ranks: dict(trained(at, ranks)[0].consolidate()))
    saved = {key: value.clone() for key, value in results[0].items()}
    net = model(seed=4)
    with job(name) as at:
        alone = at.strategy(SingleRank(), net)
        alone.load(saved)
    assert all(torch.equal(value, saved[key]) for key, value in weights(alone.tensors()).items())
    assert {f"model.{key}" for key in net.state_dict()} <= saved.keys()


@EVERY
def test_a_skipped_step_changes_nothing(name):
    net = model()
    with job(name) as at:
        strategy = at.strategy(SingleRank(), net)
        before = strategy.digest()
        strategy.clear()
        (net(torch.ones(2, 3)).sum() * float("nan")).backward()
        assert not strategy.finite()
        strategy.clear()
        strategy.flush()
    assert strategy.digest() == before


@EVERY
def test_the_scale_of_the_loss_is_taken_out(name):
    def learnt(scale):
        net = model()
        with job(name) as at:
            strategy = at.strategy(SingleRank(), net)
            strategy.clear()
            (net(torch.ones(2, 3)).square().sum() * scale).backward()
            strategy.note(1.0, 0.5)
            strategy.after_backward(0, scale)
            strategy.wait()
            pushed = {key: push.grads_UD.copy() for key, push in strategy.push().items()}
            strategy.step()
            strategy.flush()
        return strategy.digest(), {key: grads_UD.tobytes() for key, grads_UD in pushed.items()}

    assert learnt(1.0) == learnt(1024.0)


@EVERY
def test_a_pass_leaves_nothing_for_the_next_one(name):
    net = model()
    with job(name) as at:
        strategy = at.strategy(SingleRank(), net)
        train(at, SingleRank(), strategy, net, range(3), lambda rank, step: torch.ones(2, 3))
        digest = strategy.digest()
        strategy.flush()
    assert strategy.digest() == digest


@EVERY
def test_a_commit_of_another_model_is_refused(name):
    with job(name) as at:
        other = at.strategy(SingleRank(), nn.Linear(2, 2)).consolidate()
        with pytest.raises(BadInput, match="another model"):
            at.strategy(SingleRank(), model()).load(dict(other))


@EVERY
def test_a_model_without_dense_parameters_is_no_error(name):
    with job(name, 2) as at:

        def act(ranks):
            strategy = at.strategy(ranks, nn.Identity())
            train(at, ranks, strategy, nn.Identity(), batches=lambda rank, step: None)
            return dict(strategy.consolidate())

        assert at.on_ranks(act)[0][0] == {}


def test_a_strategy_that_is_not_built_is_refused_with_those_that_are():
    unknown = DenseSection().model_copy(update={"strategy": "other"})
    with pytest.raises(SpecError, match="no dense strategy 'other'; known: all_reduce"):
        dense_strategy(model(), unknown, SingleRank())


def joined(world):
    """The batches of all ranks, as one rank has them."""

    def batches(_rank, step):
        parts = [each for r in range(world) if (each := batch(r, step)) is not None]
        return torch.cat(parts) if parts else None

    return batches


# all-reduce


@WORLDS
def test_all_reduced_ranks_learn_what_one_rank_learns_from_all_batches(world):
    with job("all_reduce", world) as at:
        found, _ = at.on_ranks(lambda ranks: weights(trained(at, ranks)[0].tensors()))
    assert_close(found[0], learnt_by_one("all_reduce", world))


# shards

FALLING = {"kind": "exponential", "factor": 0.5, "every": 3}


@WORLDS
@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": DenseSgd(kind="sgd", lr=0.1)},
        {"optimizer": DenseAdam(lr=0.01)},
        {"optimizer": DenseAdagrad(kind="adagrad", lr=0.1, initial=0.1)},
        {"optimizer": DenseSgd(kind="sgd", lr=0.1, momentum=0.9)},
        {"optimizer": DenseSgd(kind="sgd", lr=0.1), "clip_norm": 0.05},
        {"optimizer": DenseAdam(lr=0.01), "schedule": FALLING},
    ],
    ids=["sgd", "adam", "adagrad", "momentum", "clipped", "scheduled"],
)
def test_slices_on_shards_learn_what_all_reduce_learns(world, more):
    steps = range(2 * world - 1)  # in each of them some rank has a batch
    found = {}
    for name in ("shards", "all_reduce"):
        with job(name, world, **more) as at:
            results, _ = at.on_ranks(lambda ranks: weights(trained(at, ranks, steps)[0].tensors()))  # noqa: B023
        found[name] = results[0]
    assert_close(found["shards"], found["all_reduce"])


def test_of_trainers_that_do_not_wait_for_each_other_each_clips_its_own_gradient():
    section = DenseSection(strategy="shards", optimizer=DenseSgd(kind="sgd", lr=1.0), clip_norm=0.5)
    with w.job(1, 2, tables_on_shards({}, section), mode="async") as made:

        def act(ranks):
            net = model()
            around = Around(made.ranks[ranks.rank], 20.0, in_step=False)
            strategy = dense_strategy(net, section, ranks, around=around)
            strategy.clear()
            net(batch(2, ranks.rank)).square().sum().backward()
            assert not strategy.communicates(0)
            strategy.after_backward(0, 1.0)
            (push,) = strategy.push().values()
            return float(np.linalg.norm(push.grads_UD))

        found, ranks = on_ranks(2, act)
    assert found == [pytest.approx(0.5, rel=1e-4)] * 2 and ranks[0].made == []


@pytest.mark.parametrize(("mode", "world"), [("sync", 1), ("sync", 2), ("sync", 3), ("async", 1)])
@pytest.mark.parametrize("priority", ["sparse_first", "fifo"])
def test_no_bit_depends_on_the_messages_in_which_slices_travel(world, mode, priority):
    """In mode async the order in which pushes of several ranks arrive decides about bits."""
    found = set()
    for slices_each, in_calls in ((None, True), (1, True), (1, False), (3, True)):
        more = {} if slices_each is None else {"slice_floats": slices_each * SLICE_FLOATS, "priority": priority}
        with job("shards", world, mode=mode, **more) as at:

            def act(ranks):
                return trained(at, ranks, net=wide(in_calls=in_calls))[0].digest()  # noqa: B023

            found |= set(at.on_ranks(act)[0])
    assert len(found) == 1


def test_slices_travel_in_messages_of_the_size_that_is_set():
    sent = {}
    for priority in ("sparse_first", "fifo"):
        with job("shards", slice_floats=2 * SLICE_FLOATS, priority=priority) as at:
            trained(at, SingleRank(), range(1), net=wide())
            sent[priority] = messages(at.shards[0])
    with job("shards") as at:
        trained(at, SingleRank(), range(1), net=wide())
        sent["whole"] = messages(at.shards[0])
    assert sent["fifo"] == sent["sparse_first"] == sent["whole"] + 4, "of 4 and 3 slices, each with 2 at most"


class Waits:
    """Shards that note for how many slices somebody waits, which must say so."""

    def __init__(self, shards):
        self._shards, self.noted, self._awaited = shards, [], False

    @contextmanager
    def awaiting(self):
        self._awaited = True
        yield
        self._awaited = False

    def __getattr__(self, name):
        return getattr(self._shards, name)

    def await_slices(self, num_slices):
        assert self._awaited
        self.noted.append(num_slices)
        self._shards.await_slices(num_slices)


@pytest.mark.parametrize(("in_calls", "noted"), [(True, [5, 7]), (False, [7])])
def test_a_layer_waits_for_its_own_parameters_where_the_model_allows_it(in_calls, noted):
    with job("shards", slice_floats=SLICE_FLOATS) as at:
        at.shards = [Waits(at.shards[0])]
        at.awaiting = at.shards[0].awaiting
        trained(at, SingleRank(), range(1), net=wide(in_calls=in_calls))
        assert at.shards[0].noted == [*noted, 7], "in the step, and for all at the end of the pass"


def test_a_copy_of_a_model_whose_layers_wait_is_a_plain_model():
    with job("shards", slice_floats=SLICE_FLOATS) as at:
        at.shards = [Waits(at.shards[0])]
        at.awaiting = at.shards[0].awaiting
        net = wide()
        at.strategy(SingleRank(), net)
        found = copy.deepcopy(net)(torch.ones(2, 3))
        assert torch.equal(found, wide()(torch.ones(2, 3))) and at.shards[0].noted == []


def test_slices_begin_at_the_weights_of_another_strategy():
    with job("all_reduce") as at:
        saved = dict(trained(at, SingleRank())[0].consolidate())
    with job("shards") as at:
        strategy = at.strategy(SingleRank(), model(seed=4))
        strategy.load(saved)
        strategy.flush()
        assert all(torch.equal(value, saved[key]) for key, value in weights(strategy.tensors()).items())


def learnt_by_one(name, world):
    net = model()
    with job(name) as at:
        alone = at.strategy(SingleRank(), net)
        train(at, SingleRank(), alone, net, batches=joined(world))
    return weights(alone.tensors())


def assert_close(found, expected):
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=TOLERANCE), name


BY_NORMS = {
    "lamb": DenseLamb(kind="lamb", lr=0.1, weight_decay=0.1, no_decay=("bias",)),
    "lars": DenseLars(kind="lars", lr=2.0, weight_decay=0.1, trust=0.05, epsilon=1e-3, no_decay=("bias",)),
}


@pytest.mark.parametrize("kind", BY_NORMS)
@pytest.mark.parametrize(("world", "group"), [(1, None), (2, None), (3, None), (2, 1)])
def test_slices_learn_by_the_norms_of_whole_parameters(kind, world, group):
    """Layers of 1,280 rows cross the bounds of slices, which are multiples of 4,096."""

    def found(name, **more):
        with job(name, world, optimizer=BY_NORMS[kind], **more) as at:
            results, _ = at.on_ranks(lambda ranks: weights(trained(at, ranks, net=wide())[0].tensors()))
        return results[0]

    whole, sharded, again = found("all_reduce"), found("sharded", group=group), found("sharded", group=group)
    for name, value in whole.items():
        assert torch.allclose(sharded[name], value, rtol=0, atol=1e-6)
        assert torch.equal(sharded[name], again[name])
