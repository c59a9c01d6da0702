"""A softmax divided over ranks is the softmax over all classes: losses, gradients, what is learnt, and its commits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.collectives import divided_softmax
from headrace.trainer.collectives.divided_softmax import (
    ClassDraws,
    ClassRows,
    DividedSoftmax,
    Margins,
    draw,
    draw_reference,
    initial_rows,
    probabilities,
    slice_of,
)
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.strategy import dense_strategy
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseAdagrad, DenseAdam, DenseSgd
from headrace.trainer.models.contract import Inputs, Shape, Targets
from headrace.trainer.models.next_item import NextItem
from headrace.trainer.models.settings import NextItemSettings
from tests.fakes.recording_device import DEVICE, recorded
from tests.fakes.thread_ranks import on_ranks

TOLERANCE = 1e-5
CPU = torch.device("cpu")
DIM, SEED = 8, 5
ALL_MARGINS = [Margins(12.0), Margins(20.0, 1.0, 0.5, 0.0), Margins(20.0, 1.3, 0.2, 0.1), Margins(20.0, m3=0.35)]


def samples(sizes, classes, step=0, dim=DIM):
    """Vectors of length 1 and classes by rank."""
    made = torch.Generator().manual_seed(100 + step)
    users = [functional.normalize(torch.randn(size, dim, generator=made), dim=1) for size in sizes]
    return [(user, torch.randint(classes, (len(user),), generator=made)) for user in users]


def formula(user, rows, classes, margins):
    """The losses of samples over all classes, as the papers write them."""
    cosine = user @ (rows / rows.norm(dim=1, keepdim=True)).t()
    right = functional.one_hot(classes, len(rows)).bool()
    angle = torch.acos(cosine[right])
    score = margins.scale * cosine
    score[right] = margins.scale * (torch.cos(margins.m1 * angle + margins.m2) - margins.m3)
    return -torch.log_softmax(score, 1)[right]


def lost_by_formula(batches, num_classes, margins, dim=DIM):
    """Losses of all samples, and the gradients of users and classes, of weights 1, 2, 3, ..."""
    user, classes = (torch.cat(each) for each in zip(*batches, strict=True))
    user = user.double().requires_grad_()
    rows = initial_rows(SEED, dim, 0, num_classes).double().requires_grad_()
    lost = formula(user, rows, classes, margins)
    (lost * torch.arange(1, len(lost) + 1)).sum().backward()
    return lost.detach(), user.grad, rows.grad


def lost(ranks, batches, num_classes, margins, dim=DIM, draws=None):
    """The same on one rank: of its samples, and of its classes."""
    rows = ClassRows(num_classes, dim, ranks.rank, ranks.world, SEED, CPU)
    made = None if draws is None else draws(rows)
    softmax = DividedSoftmax(rows, margins, ranks, made, ranks_of_labels=True)
    user, classes = batches[ranks.rank]
    begin = sum(len(each) for each, _ in batches[: ranks.rank])
    if not len(user):
        softmax.follow()
        return torch.zeros(0), torch.zeros(0, dim), rows, torch.zeros(0)
    user = user.clone().requires_grad_()
    lost_B, better_B = softmax(user, classes)
    (lost_B * torch.arange(begin + 1, begin + 1 + len(user))).sum().backward()
    return lost_B.detach(), user.grad, rows, better_B


def close(found, expected, most=TOLERANCE):
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert torch.allclose(found.double(), expected.double(), rtol=0, atol=most * scale)


@pytest.mark.parametrize("margins", ALL_MARGINS, ids=str)
@pytest.mark.parametrize("sizes", [[6], [3, 4], [0, 5, 2], [2, 0, 0, 3]], ids=str)
def test_it_is_the_softmax_over_all_classes(sizes, margins, monkeypatch):
    monkeypatch.setattr(divided_softmax, "BLOCK", 24)
    batches = samples(sizes, 100)
    wanted, of_user, of_rows = lost_by_formula(batches, 100, margins)
    found, ranks = on_ranks(len(sizes), lambda ranks: lost(ranks, batches, 100, margins))
    close(torch.cat([each[0] for each in found]), wanted)
    close(torch.cat([each[1] for each in found]), of_user)
    close(torch.cat([each[2].gradient_KV for each in found]), of_rows)
    assert all(each.made == ranks[0].made for each in ranks), "a rank without a batch makes the same collectives"
    rows = functional.normalize(initial_rows(SEED, DIM, 0, 100), dim=1)
    user, classes = (torch.cat(each) for each in zip(*batches, strict=True))
    cosine = user @ rows.t()
    better = (cosine > cosine[torch.arange(len(user)), classes].unsqueeze(1) + 1e-6).sum(1)
    assert torch.cat([each[3] for each in found]).tolist() == better.tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_on_a_hundred_thousand_classes_it_agrees_within_the_fifth_place(world):
    margins, classes = Margins(30.0, 1.0, 0.3, 0.1), 100_000
    batches = samples([3] * world, classes, dim=16)
    wanted, of_user, of_rows = lost_by_formula(batches, classes, margins, 16)
    found, _ = on_ranks(world, lambda ranks: lost(ranks, batches, classes, margins, 16))
    close(torch.cat([each[0] for each in found]), wanted)
    close(torch.cat([each[1] for each in found]), of_user)
    close(torch.cat([each[2].gradient_KV for each in found]), of_rows)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**24), st.lists(st.floats(0, 1), max_size=40))
def test_the_kernel_of_draws_is_its_plain_twin(seed, begin, shares):
    drawn = np.zeros(len(shares), np.bool_)
    draw(np.uint64(seed), begin, np.array(shares), drawn)
    assert drawn.tolist() == draw_reference(seed, begin, np.array(shares))


@settings(max_examples=20)
@given(st.sampled_from(["uniform", "log_uniform"]), st.integers(1, 3000), st.integers(2, 2000), st.integers(1, 5))
def test_the_ranks_draw_what_one_rank_would(sampler, num_drawn, classes, world):
    def drawn(rank, world):
        begin, end = slice_of(classes, rank, world)
        made = ClassDraws(probabilities(sampler, num_drawn, classes, begin, end), begin, 3)
        place, _ = made.of_step(7, np.zeros(0, np.int64))
        return (place + begin).tolist()

    assert sum((drawn(rank, world) for rank in range(world)), []) == drawn(0, 1)
    whole = probabilities(sampler, num_drawn, classes, 0, classes)
    assert (whole > 0).all() and (whole <= 1).all() and whole.sum() <= num_drawn + 1e-6


@pytest.mark.parametrize("world", [1, 2])
def test_with_every_class_drawn_it_is_the_softmax_over_all(world):
    batches = samples([4] * world, 200)
    wanted, of_user, of_rows = lost_by_formula(batches, 200, ALL_MARGINS[2])
    draws = lambda rows: ClassDraws(probabilities("uniform", 200, 200, rows.begin, rows.end), rows.begin, SEED)  # noqa: E731
    found, _ = on_ranks(world, lambda ranks: lost(ranks, batches, 200, ALL_MARGINS[2], draws=draws))
    close(torch.cat([each[0] for each in found]), wanted)
    close(torch.cat([each[1] for each in found]), of_user)
    close(torch.cat([each[2].gradient_KV for each in found]), of_rows)


@pytest.mark.parametrize("sampler", ["uniform", "log_uniform"])
def test_on_average_over_many_draws_the_sum_over_classes_is_that_of_all(sampler):
    """The sum over drawn classes, each divided by its probability, has the right mean; the loss comes near it."""
    num, draws, classes = 300, 2000, 300
    user, label = samples([1], classes)[0]
    rows = ClassRows(classes, DIM, 0, 1, SEED, CPU)
    shares = probabilities(sampler, 60, classes, 0, classes)
    softmax = DividedSoftmax(rows, Margins(4.0), SingleRank(), ClassDraws(shares, 0, SEED), ranks_of_labels=False)
    wanted = formula(user, rows.weights_NV, label, Margins(4.0))
    sums = torch.tensor([softmax.lose(user, label)[0].exp() for _ in range(draws)]).double()
    error = sums.std() / math.sqrt(draws)
    assert abs(float(sums.mean() - wanted.exp())) < 4 * float(error) < 0.1 * float(wanted.exp())
    with_more = ClassDraws(probabilities(sampler, 250, num, 0, num), 0, SEED)
    few = (sums.log() - wanted).abs().mean()
    softmax = DividedSoftmax(rows, Margins(4.0), SingleRank(), with_more, ranks_of_labels=False)
    many = torch.tensor([float((softmax.lose(user, label)[0] - wanted).abs()) for _ in range(200)]).mean()
    assert many < few / 1.5


class Items(nn.Module):
    """A perceptron whose items are divided, as trainer.models.next_item has it."""

    def __init__(self, classes, ranks, draws=None):
        super().__init__()
        self.net = nn.Linear(3, DIM)
        made = torch.Generator().manual_seed(1)
        for each in self.net.parameters():
            each.data = torch.randn(each.shape, generator=made)
        self.class_rows = ClassRows(classes, DIM, ranks.rank, ranks.world, SEED, CPU)
        drawn = None if draws is None else draws(self.class_rows)
        self.softmax = DividedSoftmax(self.class_rows, Margins(10.0, m3=0.1), ranks, drawn, ranks_of_labels=False)


def lists(sizes, classes, step):
    """The samples of a step, divided over ranks."""
    made, total = torch.Generator().manual_seed(step), sum(sizes)
    x, wanted = torch.randn(total, 3, generator=made), torch.randint(classes, (total,), generator=made)
    return list(zip(x.split(sizes), wanted.split(sizes), strict=True))


def trained(ranks, section, sizes, steps=range(6), draws=None, restored=None):
    """A pass over the batches of this rank; the strategy after it."""
    model = Items(90, ranks, draws)
    strategy = dense_strategy(model, section, ranks)
    if restored is not None:
        strategy.load(restored)
    for step in steps:
        x, classes = lists(sizes, 90, step)[ranks.rank]
        total = sum(sizes)
        strategy.clear()
        if len(x):
            lost_B, _ = model.softmax(functional.normalize(model.net(x), dim=1), classes)
            (lost_B.sum() / total).backward()
        else:
            model.softmax.follow()
        assert strategy.finite()
        if len(x) or strategy.communicates(step):
            strategy.after_backward(step, 1.0)
            strategy.wait()
        strategy.step()
    strategy.flush()
    return {name: value.clone() for name, value in strategy.consolidate().items()}, strategy.digest()


def learnt_by_torch(section, sizes, steps=range(6)):
    model = Items(90, SingleRank())
    rows = nn.Parameter(initial_rows(SEED, DIM, 0, 90))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    optimizer = kinds[section.optimizer.kind]([*model.net.parameters(), rows], lr=section.optimizer.lr)
    for step in steps:
        x, classes = (torch.cat(each) for each in zip(*lists(sizes, 90, step), strict=True))
        optimizer.zero_grad()
        formula(functional.normalize(model.net(x), dim=1), rows, classes, Margins(10.0, m3=0.1)).mean().backward()
        optimizer.step()
    return {
        "model.classes": rows.data,
        **{f"model.net.{name}": each.data for name, each in model.net.named_parameters()},
    }


OPTIMIZERS = {
    "sgd": DenseSgd(kind="sgd", lr=0.5),
    "adam": DenseAdam(lr=0.01),
    "adagrad": DenseAdagrad(kind="adagrad", lr=0.05),
}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("sizes", [[5], [3, 2], [2, 0, 1, 2]], ids=str)
def test_it_learns_what_torch_learns(sizes, kind):
    section = DenseSection(optimizer=OPTIMIZERS[kind])
    wanted = learnt_by_torch(section, sizes)
    (found, digest), *others = on_ranks(len(sizes), lambda ranks: trained(ranks, section, sizes))[0]
    for name, value in wanted.items():
        close(found[name], value, 1e-4 if kind == "adam" else 1e-5)  # adam divides by small roots
    assert all(other == digest for _, other in others)


def merged(ranks, cuts, draws=None, scale=1024.0):
    """One step from micro-batches of sizes `cuts` on each rank, whose losses are scaled, as with float16. A rank with
    fewer of them takes part in the first ones of others."""
    model = Items(90, ranks, draws)
    strategy = dense_strategy(model, DenseSection(optimizer=OPTIMIZERS["sgd"], accumulate=3), ranks)
    total = sum(map(sum, cuts))
    x, classes = lists([sum(each) for each in cuts], 90, 1)[ranks.rank]
    strategy.clear()
    for _ in range(len(cuts[ranks.rank]), 3):
        model.softmax.follow()
    for each in zip(x.split(cuts[ranks.rank]), classes.split(cuts[ranks.rank]), strict=True):
        lost_B, _ = model.softmax(functional.normalize(model.net(each[0]), dim=1), each[1])
        (lost_B.sum() / total * scale).backward()
    strategy.after_backward(0, scale)
    strategy.wait()
    strategy.step()
    strategy.flush()
    return strategy.consolidate()


@pytest.mark.parametrize("draws", [None, 90], ids=["divided", "sampled"])
@pytest.mark.parametrize("cuts", [[[5]], [[2, 2, 1]], [[1, 2], [2]], [[2], [], [1, 1, 1]]], ids=str)
def test_a_step_of_several_micro_batches_learns_what_one_of_all_their_samples_learns(cuts, draws):
    made = draws and (lambda rows: ClassDraws(probabilities("uniform", 90, 90, rows.begin, rows.end), rows.begin, SEED))
    sizes = [sum(each) for each in cuts]
    wanted = learnt_by_torch(DenseSection(optimizer=OPTIMIZERS["sgd"]), sizes, [1])
    (found, *_), ranks = on_ranks(len(cuts), lambda ranks: merged(ranks, cuts, made))
    for name, value in wanted.items():
        close(found[name], value, 1e-6)
    assert all(each.made == ranks[0].made for each in ranks)


def test_micro_batches_that_draw_other_classes_learn_all_of_them():
    rows = ClassRows(90, DIM, 0, 1, SEED, CPU)
    rows.add(torch.tensor([1, 5]), torch.full((2, DIM), 1.0))
    rows.add(torch.tensor([0, 5, 7]), torch.full((3, DIM), 2.0))
    assert rows.place_K.tolist() == [0, 1, 5, 7] and rows.gradient_KV[:, 0].tolist() == [2, 1, 3, 2]


def next_item(mode):
    torch.manual_seed(SEED)
    given = NextItemSettings(classes=90, dim=DIM, hidden=(16,), mode=mode, recall_at=(), top=3)
    return NextItem(Shape((), (), (("x", 3),), ("next",)), given)


def step_of(model, ranks):
    """The loss, and the gradients of the perceptron and of the items, in types of 16 bits."""
    model.divide(ranks, CPU)
    x, classes = (
        lists([5, 6], 90, 1)[ranks.rank] if ranks.world > 1 else map(torch.cat, zip(*lists([5, 6], 90, 1), strict=True))
    )
    inputs = Inputs({}, torch.zeros(len(x), 0, 0), torch.zeros(len(x), 0), {}, x)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    lost_B = model.losses(outputs, inputs, Targets({}, {}, {}, {"next": classes}))["next"]
    (lost_B.sum() / 11).backward()
    of_user = torch.cat([each.grad.reshape(-1) for each in model.user.parameters()])
    of_items = model.classes.grad if model.class_rows is None else model.class_rows.gradient_KV
    return lost_B.detach(), of_user, of_items


def test_lower_types_are_for_the_perceptron_and_items_have_the_gradients_of_the_whole_softmax():
    wanted = step_of(next_item("full"), SingleRank())
    models = [next_item("divided") for _ in range(2)]
    found = on_ranks(2, lambda ranks: step_of(models[ranks.rank], ranks))[0]
    close(torch.cat([each[0] for each in found]), wanted[0], 1e-6)
    close(torch.cat([each[2] for each in found]), wanted[2], 1e-6)
    summed = sum(each[1] for each in found)
    assert (summed - wanted[1]).abs().max() < 2**-8 * wanted[1].abs().max()


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("draws", [None, 30], ids=["divided", "sampled"])
def test_a_commit_goes_on_with_any_number_of_ranks(kind, draws):
    section, sizes = DenseSection(optimizer=OPTIMIZERS[kind]), {1: [5], 2: [3, 2], 3: [2, 2, 1]}
    made = (
        None
        if draws is None
        else (lambda rows: ClassDraws(probabilities("uniform", draws, 90, rows.begin, rows.end), rows.begin, SEED))
    )
    saved, digest = on_ranks(2, lambda ranks: trained(ranks, section, sizes[2], range(3), made))[0][0]
    whole, _ = on_ranks(2, lambda ranks: trained(ranks, section, sizes[2], range(6), made))[0][0]
    for world, of_world in sizes.items():
        at_rest = on_ranks(world, lambda ranks: trained(ranks, section, of_world, (), made, saved))[0]  # noqa: B023
        assert [each[1] for each in at_rest] == [digest] * world, "a digest does not depend on the number of ranks"
        assert all(torch.equal(value, saved[name]) for name, value in at_rest[0][0].items())
        on = on_ranks(world, lambda ranks: trained(ranks, section, of_world, range(3, 6), made, saved))[0]  # noqa: B023
        for name, value in whole.items():
            close(on[0][0][name], value)


def test_classes_that_are_not_drawn_stay_as_they_are():
    section = DenseSection(optimizer=OPTIMIZERS["adagrad"])
    draws = lambda rows: ClassDraws(probabilities("uniform", 9, 90, rows.begin, rows.end), rows.begin, SEED)  # noqa: E731
    saved, _ = trained(SingleRank(), section, [5], range(1), draws)
    moved = (saved["model.classes"] != initial_rows(SEED, DIM, 0, 90)).any(1)
    assert 0 < int(moved.sum()) < 45 and torch.equal(moved, (saved["classes.sum"] != 0).any(1))


def test_the_count_of_steps_goes_on_after_a_restart_on_a_device():
    """Torch counts Adagrad's steps on the host."""
    section, place_K = DenseSection(optimizer=OPTIMIZERS["adagrad"]), torch.tensor([1, 5])
    saved, _ = trained(SingleRank(), section, [5], range(3))
    with recorded():
        model = Items(90, SingleRank())
        model.class_rows = rows = ClassRows(90, DIM, 0, 1, SEED, DEVICE)
        strategy = dense_strategy(model, section, SingleRank())
        strategy.load(saved)
        for _ in range(2):
            strategy.clear()
            rows.add(place_K.to(DEVICE), torch.ones(2, DIM).to(DEVICE))
            strategy.step()
        assert (saved["classes.step"], strategy.consolidate()["classes.step"]) == (3, 5)


@given(st.integers(1, 5000), st.integers(1, 9))
def test_slices_are_neighbours_and_have_all_classes(classes, world):
    ends = [slice_of(classes, rank, world) for rank in range(world)]
    assert ends[0][0] == 0 and ends[-1][1] == classes
    assert all(end == begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    rows = torch.cat([initial_rows(SEED, 2, *each) for each in ends])
    assert torch.equal(rows, initial_rows(SEED, 2, 0, classes))
