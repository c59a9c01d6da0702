"""What each model can learn and deepfm or a plain perceptron cannot: tiny streams, each batch predicted, then learnt.

Shapes: B samples of a batch, L places of a sequence, D length of a vector, V signs of a slot.
"""

import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.trainer.config import ModelSection
from headrace.trainer.models.contract import Inputs, SequenceInput, Shape, SlotShape, Targets
from headrace.trainer.models.esmm import product_logit
from headrace.trainer.models.item_counts import LEAST, PART, log_shares
from headrace.trainer.models.registry import load_model
from headrace.trainer.models.two_tower import ItemFrequency, ItemPopularity
from tests.fakes.model_settings import fitting

PAGE = Path(__file__).parents[2] / "docs" / "model-zoo.md"
B, D, V, L = 256, 8, 100, 12


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The products here are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Batch:
    """One batch of a stream."""

    label: dict
    signs: dict = field(default_factory=dict)
    """By pooled slot: (B,) signs."""
    sequences: dict = field(default_factory=dict)
    """By sequence slot: (B, L) signs, (B, L) mask."""
    dense: torch.Tensor | None = None
    mask: dict = field(default_factory=dict)
    """By task: (B,) whether the label counts."""


class Learner:
    """A model with its rows, learnt by Adam. Slots of one table share their rows."""

    def __init__(self, name, shape, lr=0.01, tables=None, rows=V, **given):
        torch.manual_seed(7)
        given = fitting(name, shape) | given
        self.model = load_model(ModelSection(name=name, settings=given), shape, Path("."))
        slots, self._tables = shape.pooled + shape.sequences, tables or {}
        names = dict.fromkeys(self._table(slot.name) for slot in slots)
        self.rows = {name: nn.Parameter(0.3 * torch.randn(rows, D)) for name in names}
        self._optimizer = torch.optim.Adam([*self.model.parameters(), *self.rows.values()], lr=lr)

    def _table(self, slot):
        return self._tables.get(slot, slot)

    def inputs(self, batch):
        count = len(next(iter(batch.label.values())))
        vectors = {name: self.rows[self._table(name)][signs] for name, signs in batch.signs.items()}
        sequences = {}
        for name, (signs_BL, mask_BL) in batch.sequences.items():
            vectors_BLD = self.rows[self._table(name)][signs_BL] * mask_BL.unsqueeze(2)
            sequences[name] = SequenceInput(vectors_BLD, torch.zeros(mask_BL.shape), mask_BL)
        stacked = torch.stack(list(vectors.values()), 1) if vectors else torch.zeros(count, 0, 0)
        dense = torch.zeros(count, 0) if batch.dense is None else batch.dense
        return Inputs(vectors, stacked, torch.zeros(count, 0), sequences, dense)

    def learn(self, batch):
        """The predictions before the batch is learnt."""
        inputs = self.inputs(batch)
        outputs, loss = self.model(inputs), torch.zeros(())
        for task, label in batch.label.items():
            weight = batch.mask.get(task, torch.ones(len(label)))
            loss = loss + functional.binary_cross_entropy_with_logits(outputs[task], label, weight)
        if hasattr(self.model, "losses"):
            targets = Targets(batch.label, {}, batch.signs, {})
            loss = loss + sum(each.mean() for each in self.model.losses(outputs, inputs, targets).values())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return {task: outputs[task].detach() for task in batch.label}


def auc(logit, label):
    """By ranks; there are no ties."""
    order = np.argsort(np.asarray(logit), kind="stable")
    rank = np.empty(len(order))
    rank[order] = np.arange(1, len(order) + 1)
    positive = np.asarray(label) > 0
    count, others = positive.sum(), (~positive).sum()
    return (rank[positive].sum() - count * (count + 1) / 2) / (count * others)


def late_auc(learner, draw, steps, task="ctr"):
    """The AUC of the predictions of the last 20 batches."""
    generator, kept = torch.Generator().manual_seed(1), []
    for step in range(steps):
        batch = draw(generator)
        logit = learner.learn(batch)[task]
        if step >= steps - 20:
            kept.append((logit, batch.label[task]))
    return auc(torch.cat([one for one, _ in kept]), torch.cat([other for _, other in kept]))


def ints(generator, *size, high=V):
    return torch.randint(0, high, size, generator=generator)


def prefixes(generator, least=0):
    """(B, L) masks of sequences of any length from `least`."""
    return torch.arange(L) < ints(generator, B, 1, high=L + 1 - least) + least


# -- sequences

WITH_SEQUENCE = Shape((SlotShape("item", D, False),), (SlotShape("past", D, False, L),), (), ("ctr",))
ONE_TABLE = {"past": "item"}


def seen_before(generator):
    """Is the item among those of the sequence?"""
    mask_BL, signs_BL = prefixes(generator, 1), ints(generator, B, L)
    length_B1 = mask_BL.sum(1, keepdim=True)
    place_B1 = (torch.rand(B, 1, generator=generator) * length_B1).long()
    item_B = torch.where(
        torch.rand(B, generator=generator) < 0.5, signs_BL.gather(1, place_B1)[:, 0], ints(generator, B)
    )
    label_B = ((signs_BL == item_B.unsqueeze(1)) & mask_BL).any(1).float()
    return Batch({"ctr": label_B}, {"item": item_B}, {"past": (signs_BL, mask_BL)})


def follows_the_newest(generator, newest="last"):
    """Each item is followed by one other: is the item the one that follows the newest, or another of the sequence?"""
    mask_BL, signs_BL = prefixes(generator, 2), ints(generator, B, L, high=30)
    newest_B1 = mask_BL.sum(1, keepdim=True) - 1 if newest == "last" else torch.zeros(B, 1, dtype=torch.long)
    older_B1 = (torch.rand(B, 1, generator=generator) * (mask_BL.sum(1, keepdim=True) - 1)).long()
    older_B1 = older_B1 if newest == "last" else older_B1 + 1
    label_B = ints(generator, B, high=2)
    place_B1 = torch.where(label_B.unsqueeze(1) > 0, newest_B1, older_B1)
    item_B = (signs_BL.gather(1, place_B1)[:, 0] * 7 + 3) % 30
    return Batch({"ctr": label_B.float()}, {"item": item_B}, {"past": (signs_BL, mask_BL)})


def test_only_attention_to_the_target_finds_it_in_a_long_sequence():
    learners = [Learner(name, WITH_SEQUENCE, tables=ONE_TABLE) for name in ("din", "deepfm")]
    din, deepfm = (late_auc(learner, seen_before, 120) for learner in learners)
    assert din > 0.99 and deepfm < 0.88


@pytest.mark.parametrize(
    ("how", "newest"), [({}, "last"), ({"newest": "first"}, "first"), ({"block": "hstu"}, "last")], ids=str
)
def test_only_blocks_with_positions_know_the_newest_item(how, newest):
    sasrec = Learner("sasrec", WITH_SEQUENCE, tables=ONE_TABLE, blocks=1, **how)
    assert late_auc(sasrec, partial(follows_the_newest, newest=newest), 100) > 0.95


@pytest.mark.parametrize("name", ["deepfm", "din"])
def test_a_model_without_order_cannot_tell_the_newest_item(name):
    learner = Learner(name, WITH_SEQUENCE, tables=ONE_TABLE)
    assert late_auc(learner, follows_the_newest, 80) < 0.55


PADDED = {
    "din": {},
    "din, softmax": {"softmax": True},
    "sasrec": {"attention_heads": 2},
    "sasrec, newest first": {"newest": "first"},
    "sasrec, hstu": {"block": "hstu", "attention_heads": 2},
}


@pytest.fixture(scope="module", params=PADDED)
def padded_models(request):
    """One model, built for sequences of L and of L + 3 places."""
    name, found = request.param.partition(",")[0], []
    for max_len in (L, L + 3):
        shape = replace(WITH_SEQUENCE, sequences=(SlotShape("past", D, False, max_len),))
        found.append(Learner(name, shape, **PADDED[request.param]).model)
    short, long = found
    for (_, one), (_, other) in zip(short.named_parameters(), long.named_parameters(), strict=True):
        with torch.no_grad():
            (other[: len(one)] if one.shape != other.shape else other).copy_(one)
    return short, long


@given(st.lists(st.integers(0, L), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_prediction_does_not_depend_on_padding(padded_models, lengths, seed):
    generator, (short, long) = torch.Generator().manual_seed(seed), padded_models
    mask_BL = torch.arange(L) < torch.tensor(lengths).unsqueeze(1)
    vectors_BLD = torch.randn(*mask_BL.shape, D, generator=generator)
    item_BD = torch.randn(len(lengths), D, generator=generator)

    def predicted(model, vectors_BLD, mask_BL):
        sequence = SequenceInput(vectors_BLD, torch.zeros(mask_BL.shape), mask_BL)
        nothing = torch.zeros(len(lengths), 0)
        return model(Inputs({"item": item_BD}, item_BD.unsqueeze(1), nothing, {"past": sequence}, nothing))["ctr"]

    clean_BLD = vectors_BLD * mask_BL.unsqueeze(2)
    wanted_B = predicted(short, clean_BLD, mask_BL)
    assert torch.isfinite(wanted_B).all()
    assert torch.equal(predicted(short, torch.where(mask_BL.unsqueeze(2), clean_BLD, 1e6), mask_BL), wanted_B)
    wider = [functional.pad(clean_BLD, (0, 0, 0, 3)), functional.pad(mask_BL, (0, 3))]
    torch.testing.assert_close(predicted(long, *wider), wanted_B, rtol=1e-4, atol=1e-5)


# -- several tasks


CONTEXTS, WIDTH = 16, 16
OF_CONTEXT = torch.randn(2, CONTEXTS, WIDTH, generator=torch.Generator().manual_seed(3))
"""By task and context: the direction that decides."""
IN_CONTEXT = Shape((SlotShape("context", D, False),), (), (("x", WIDTH),), ("ctr", "cvr"))


def decided_in_context(generator):
    context_B, x_BC = ints(generator, B, high=CONTEXTS), torch.randn(B, WIDTH, generator=generator)
    ctr_B, cvr_B = (((rule[context_B] * x_BC).sum(1) > 0).float() for rule in OF_CONTEXT)
    return Batch({"ctr": ctr_B, "cvr": cvr_B}, {"context": context_B}, dense=x_BC)


def test_gates_choose_an_expert_where_a_shared_perceptron_of_the_same_width_learns_slowly():
    mmoe = Learner("mmoe", IN_CONTEXT, hidden=[8], experts=16)
    shared = [Learner(name, IN_CONTEXT, hidden=[128]) for name in ("wide_deep", "deepfm")]
    assert late_auc(mmoe, decided_in_context, 150) > 0.94
    assert all(late_auc(learner, decided_in_context, 150) < 0.91 for learner in shared)


HALF = 8
TO_CLICK, TO_BUY = torch.randn(2, HALF, generator=torch.Generator().manual_seed(4))
SHOWN = Shape((), (), (("x", HALF), ("y", HALF)), ("ctr", "ctcvr"))


def shown(generator):
    """Those who click are those who buy. A conversion is seen after a click alone; also returned: who would buy."""
    x_BC = torch.randn(B, 2 * HALF, generator=generator)
    click_B, buy_B = x_BC[:, :HALF] @ TO_CLICK, x_BC[:, HALF:] @ TO_BUY
    drawn = torch.rand(2, B, generator=generator)
    clicked_B = (drawn[0] < torch.sigmoid(1.5 * click_B - 2)).float()
    bought_B = (drawn[1] < torch.sigmoid(1.5 * buy_B + 0.75 * click_B)).float()
    return Batch({"ctr": clicked_B, "ctcvr": clicked_B * bought_B}, dense=x_BC), bought_B


def conversion_auc(learner, steps=100):
    """AUC of ctcvr / ctr over all samples that were shown, and how often ctcvr was above ctr."""
    generator, rates, truth, above = torch.Generator().manual_seed(1), [], [], 0
    for step in range(steps):
        batch, bought_B = shown(generator)
        logits = learner.learn(batch)
        click_B, both_B = (torch.sigmoid(logits[task]) for task in ("ctr", "ctcvr"))
        above += int((both_B > click_B + 1e-6).sum())
        if step >= steps - 20:
            rates.append(both_B / click_B)
            truth.append(bought_B)
    return auc(torch.cat(rates), torch.cat(truth)), above


def test_the_rate_of_conversions_is_learnt_over_all_that_was_shown():
    (esmm, never), (plain, often) = (conversion_auc(Learner(name, SHOWN, hidden=[])) for name in ("esmm", "wide_deep"))
    assert esmm > 0.95 and never == 0
    assert plain < 0.85 and often > 0
    assert conversion_auc(Learner("wide_deep", SHOWN, hidden=[32]))[1] > 0


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_the_logit_of_a_product_is_that_of_the_product(one, other):
    found = product_logit(torch.tensor([one]).double(), torch.tensor([other]).double())
    product = torch.sigmoid(torch.tensor(one).double()) * torch.sigmoid(torch.tensor(other).double())
    torch.testing.assert_close(torch.sigmoid(found)[0], product, rtol=1e-9, atol=0)


# -- products of inputs

PAIR = 32
MIXED = torch.randn(PAIR, PAIR, generator=torch.Generator().manual_seed(3)) / PAIR**0.5


def bilinear(generator):
    x_BC = torch.randn(B, 2 * PAIR, generator=generator)
    return Batch({"ctr": (((x_BC[:, :PAIR] @ MIXED) * x_BC[:, PAIR:]).sum(1) > 0).float()}, dense=x_BC)


def test_two_streams_learn_a_product_that_one_perceptron_learns_slowly():
    shape = Shape((), (), (("x", PAIR), ("y", PAIR)), ("ctr",))
    two = Learner("finalmlp", shape, hidden=[], second_hidden=[])
    assert late_auc(two, bilinear, 200) > 0.97
    assert late_auc(Learner("wide_deep", shape, hidden=[64, 32]), bilinear, 200) < 0.9


# -- two towers

USERS, ITEMS = 24, 30
POPULAR = 1 / torch.arange(1, ITEMS + 1)
LIKED = torch.where(torch.arange(USERS).unsqueeze(1) % 3 == torch.arange(ITEMS) % 3, 4.0, 1.0)
CLICKED = (POPULAR * LIKED) / (POPULAR * LIKED).sum(1, keepdim=True)
"""(USERS, ITEMS): the item of a user's next click."""
PAIRS = Shape((SlotShape("user", D, False), SlotShape("item", D, False)), (), (), ("ctr",))


def clicks(generator):
    user_B = ints(generator, B, high=USERS)
    return Batch(
        {"ctr": torch.ones(B)},
        {"user": user_B, "item": torch.multinomial(CLICKED[user_B], 1, generator=generator)[:, 0]},
    )


def share_of_best(learner, steps=60, count=3):
    """The share of clicks that the best items of each user get, by scores of all pairs."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        learner.learn(clicks(generator))
    user_N, item_N = torch.arange(USERS).repeat_interleave(ITEMS), torch.arange(ITEMS).repeat(USERS)
    batch = Batch({"ctr": torch.ones(USERS * ITEMS)}, {"user": user_N, "item": item_N})
    with torch.no_grad():
        best = learner.model(learner.inputs(batch))["ctr"].view(USERS, ITEMS).topk(count, 1).indices
    return CLICKED.gather(1, best).sum(1).mean().item()


def test_clicks_alone_teach_two_towers_what_to_retrieve_if_frequency_is_corrected():
    possible = CLICKED.topk(3, 1).values.sum(1).mean().item()
    towers = partial(Learner, "two_tower", PAIRS, item="item", hidden=[32])
    assert share_of_best(towers()) > 0.97 * possible
    assert share_of_best(towers(correct_frequency=False)) < 0.85 * possible
    assert share_of_best(towers(softmax=0)) < 0.75 * possible
    assert share_of_best(Learner("deepfm", PAIRS, hidden=[32])) < 0.75 * possible


def test_the_softmax_and_the_recall_are_as_their_plain_twins():
    learner = Learner("two_tower", PAIRS, item="item", recall_at=[1, 3], temperature=0.5)
    generator = torch.Generator().manual_seed(2)
    batch = Batch(
        {"ctr": (torch.rand(20, generator=generator) < 0.6).float()},
        {"user": ints(generator, 20, high=USERS), "item": ints(generator, 20, high=6)},
    )
    inputs, targets = learner.inputs(batch), Targets(batch.label, {}, batch.signs, {})
    with torch.no_grad():
        outputs = learner.model(inputs)
        lost_B = learner.model.losses(outputs, inputs, targets)["in_batch_softmax"]
        recall = learner.model.measures(outputs, inputs, targets)
        scores = (outputs["user_vector"] @ outputs["item_vector"].t() / 0.5).double().numpy()
    item, label = batch.signs["item"].tolist(), batch.label["ctr"].tolist()
    share = {each: item.count(each) / 20 for each in item}
    hits: dict = {1: [], 3: []}
    for b in range(20):
        others = [o for o in range(20) if item[o] != item[b]]
        corrected = [scores[b, o] - np.log(share[item[o]]) for o in (b, *others)]
        wanted = np.log(np.sum(np.exp(corrected))) - corrected[0] if label[b] else 0
        assert lost_B[b].item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        rank = len({item[o] for o in others if scores[b, item.index(item[o])] > scores[b, b]})
        for k, found in hits.items():
            found += [float(rank < k)] if label[b] else []
    assert {k: recall[f"recall_at_{k}"].tolist() for k in hits} == hits
    assert not learner.model.frequency.count_K.any(), "a prediction counts nothing"


def test_items_of_earlier_batches_are_candidates_of_the_softmax_as_in_its_plain_twin():
    learner = Learner("two_tower", PAIRS, item="item", temperature=0.5, cached=10, correct_frequency=False)
    generator, seen = torch.Generator().manual_seed(3), []
    for size in (4, 7, 12, 5):
        batch = Batch(
            {"ctr": (torch.rand(size, generator=generator) < 0.6).float()},
            {"user": ints(generator, size, high=USERS), "item": ints(generator, size, high=6)},
        )
        inputs, targets = learner.inputs(batch), Targets(batch.label, {}, batch.signs, {})
        with torch.no_grad():
            learner.model.losses(learner.model(inputs), inputs, targets)  # a prediction keeps nothing
        outputs = learner.model(inputs)
        lost_B = learner.model.losses(outputs, inputs, targets)["in_batch_softmax"].tolist()
        user, vectors = (outputs[name].detach().double().numpy() for name in ("user_vector", "item_vector"))
        item, label = batch.signs["item"].tolist(), batch.label["ctr"].tolist()
        for b in range(size):
            others = [vectors[o] for o in range(size) if item[o] != item[b]]
            others += [vector for sign, vector in seen[:10] if sign != item[b]]
            scores = [user[b] @ vector / 0.5 for vector in (vectors[b], *others)]
            wanted = np.log(np.sum(np.exp(scores))) - scores[0] if label[b] else 0
            assert lost_B[b] == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        seen = [*zip(item, vectors, strict=True), *seen]
    learner.model.forget({"user": [0], "item": [3, 5]})
    kept, kept_M = [sign for sign, _ in seen[:10] if sign not in {3, 5}], learner.model.cache.items()[1]
    assert kept_M.tolist() == kept and 0 < len(kept) < 10
    assert not learner.model.cache.vectors_MV[~learner.model.cache.used_M].any(), "nor is its vector in a commit"


def test_popularity_is_in_the_vectors_and_not_in_the_loss():
    settings = {"item": "item", "temperature": 0.5, "frequency_buckets": 1 << 12}
    plain, popular = (Learner("two_tower", PAIRS, **settings, **more) for more in (PLAIN, POPULAR))
    generator, counts = torch.Generator().manual_seed(3), dict.fromkeys(range(6), 0.0)
    for size in (4, 7, 12):
        batch = Batch(
            {"ctr": (torch.rand(size, generator=generator) < 0.6).float()},
            {"user": ints(generator, size, high=USERS), "item": ints(generator, size, high=6)},
        )
        inputs, targets = popular.inputs(batch), Targets(batch.label, {}, batch.signs, {})
        found = [each.model(each.inputs(batch)) for each in (plain, popular)]
        user_BV, item_BV = (found[1][name] for name in ("user_vector", "item_vector"))
        assert torch.equal(user_BV[:, :-1], found[0]["user_vector"]) and (user_BV[:, -1] * PART == 0.75).all()
        assert torch.equal(item_BV[:, :-1], found[0]["item_vector"]) and not item_BV[:, -1].any()
        losses = [each.model.losses(out, inputs, targets) for each, out in zip((plain, popular), found, strict=True)]
        assert torch.allclose(losses[0]["in_batch_softmax"], losses[1]["in_batch_softmax"], atol=1e-6)
        clicked = batch.signs["item"][batch.label["ctr"] > 0].tolist()
        counts = {item: count * 0.95 ** len(clicked) + clicked.count(item) for item, count in counts.items()}
    with torch.no_grad():
        popular.model.losses(popular.model(inputs), inputs, targets)  # a prediction counts nothing
    shares = log_shares(popular.model.popularity.count_DK.numpy(), np.array([*counts], np.uint64))
    assert np.allclose(shares, [np.log((each + LEAST) / (sum(counts.values()) + LEAST)) for each in counts.values()])


PLAIN, POPULAR = {"correct_frequency": False}, {"popularity": 20, "popularity_weight": 1.5}
SIGNS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=6)


@given(st.lists(SIGNS, min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_shares_are_those_of_counts_that_decay(batches):
    frequency, counts = ItemFrequency(64, 40), {}
    for signs in batches:
        buckets = frequency.buckets_of(torch.tensor(signs)).tolist()
        counts = {bucket: count * (1 - len(signs) / 40) for bucket, count in counts.items()}
        for bucket in buckets:
            counts[bucket] = counts.get(bucket, 0) + 1
        found = frequency.log_share(torch.tensor(signs), learn=True)
        assert np.allclose(found.numpy(), [np.log(counts[each] / sum(counts.values())) for each in buckets], atol=1e-4)


@pytest.mark.parametrize("step", [1, 1 << 20, 1 << 36, 1 << 50])
def test_items_are_spread_over_the_counters(step):
    count_K = torch.bincount(ItemFrequency(1 << 10, 1000).buckets_of(torch.arange(1 << 13) * step), minlength=1 << 10)
    assert count_K.max() < 30 and (count_K > 0).sum() > 1000


def test_few_items_have_the_count_of_another_one():
    popularity = ItemPopularity(1 << 12, 1000)
    popularity.add(torch.arange(64) * (1 << 36))
    shares = log_shares(popularity.count_DK.numpy(), np.arange(64, 1 << 14, dtype=np.uint64) << 36)
    assert (shares > np.log(0.5 / 64)).sum() < 20, "of 16,000 items, some 4 by chance; one row would let 250 through"


WORDS = Shape((SlotShape("word", D, False), SlotShape("near", D, False)), (), (), ("near",))


def test_the_losses_of_skip_gram_are_as_their_plain_twin():
    learner = Learner("skip_gram", WORDS, context="near", negatives=3, frequency_buckets=1 << 16)
    generator = torch.Generator().manual_seed(3)
    batch = Batch(
        {"near": (torch.rand(20, generator=generator) < 0.6).float()},
        {"word": ints(generator, 20, high=9), "near": ints(generator, 20, high=9)},
    )
    inputs, targets = learner.inputs(batch), Targets(batch.label, {}, batch.signs, {})
    outputs = learner.model(inputs)
    torch.manual_seed(11)
    lost_B = learner.model.losses(outputs, inputs, targets)["negatives"].tolist()
    better = iter(learner.model.measures(outputs, inputs, targets)["better_than_negatives"].tolist())
    word, near = (learner.rows[name].detach()[batch.signs[name]].double() for name in ("word", "near"))
    assert torch.allclose(outputs["near"].detach().double(), (word * near).sum(1))
    signs = batch.signs["near"].tolist()
    weight = torch.tensor([(signs.count(each) / 20) ** -0.25 for each in signs])
    torch.manual_seed(11)
    drawn = torch.multinomial(weight, 60, replacement=True).view(20, 3).tolist()
    for b, lost in enumerate(lost_B):
        others = [place for place in drawn[b] if signs[place] != signs[b] and batch.label["near"][b]]
        scores = [float(word[b] @ near[place]) for place in others]
        assert lost == pytest.approx(sum(np.log1p(np.exp(score)) for score in scores), rel=1e-5, abs=1e-6)
        assert [next(better) for _ in scores] == [float(float(word[b] @ near[b]) > score) for score in scores]
    assert next(better, None) is None


def test_negatives_are_drawn_by_the_share_of_their_words_to_the_power():
    learner = Learner("skip_gram", WORDS, context="near", negatives=200)
    share = np.array([0.64, 0.32, 0.04])
    near = torch.from_numpy(np.repeat([0, 1, 2], (share * 500).astype(int)))
    torch.manual_seed(1)
    weight_B = learner.model.frequency.log_share(near, learn=True).exp() ** (0.75 - 1)
    drawn = np.bincount(near[learner.model._drawn(weight_B)].flatten(), minlength=3) / 100_000
    np.testing.assert_allclose(drawn, share**0.75 / (share**0.75).sum(), atol=0.006)


def test_skip_gram_finds_words_of_one_topic():
    generator, learner = torch.Generator().manual_seed(4), Learner("skip_gram", WORDS, context="near", lr=0.02)
    for _ in range(150):
        topic, word, near = (ints(generator, B, high=high) for high in (5, 20, 20))
        batch = Batch({"near": torch.ones(B)}, {"word": 20 * topic + word, "near": 20 * topic + near})
        learner.learn(batch)
    rows = functional.normalize(learner.rows["word"].detach(), dim=1)
    nearest = (rows @ rows.t()).fill_diagonal_(-2).argmax(1)
    assert (nearest // 20 == torch.arange(V) // 20).float().mean() > 0.95


def test_the_own_model_of_the_page_returns_a_logit_for_each_task():
    block = re.search(r'```python title="my_model.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    exec(block[1], made := {})  # as a job imports it
    shape = Shape((SlotShape("a", 3, True, 1), SlotShape("b", 2, True, 1)), (), (("d", 4),), ("ctr", "buys"))
    vectors = {"a": torch.ones(5, 3), "b": torch.ones(5, 2)}
    logits = made["Mlp"](shape, {"hidden": 8})(Inputs(vectors, None, torch.zeros(5, 2), {}, torch.ones(5, 4)))
    assert {task: each.shape for task, each in logits.items()} == {"ctr": (5,), "buys": (5,)}
