"""Shuffled slots: the same values as before, of other samples, and the same ones at every run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.service.predict.prediction import format_losses, losses_of
from headrace.trainer.predict.fixed_batches import check_shuffled, shuffled

SLOTS = [SparseSlot(name="ids", weighted=True), DenseSlot(kind="dense", name="price"), MetaSlot(kind="meta", name="y")]


def column(lists):
    values = np.array([each for some in lists for each in some], np.uint64)
    offsets = np.cumsum([0, *(len(some) for some in lists)])
    return Ragged(values, offsets.astype(np.int64), values.astype(np.float32))


def listed(found):
    return [found.values_N[a:b].tolist() for a, b in zip(found.offset_B1, found.offset_B1[1:], strict=False)]


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=12), st.randoms(use_true_random=False))
def test_signs_and_their_weights_move_with_their_sample(lists, random):
    order = list(range(len(lists)))
    random.shuffle(order)
    moved = column(lists).take(np.array(order, np.int64))
    assert listed(moved) == [lists[number] for number in order]
    assert np.array_equal(moved.values_N.astype(np.float32), moved.weights_N)


def test_only_the_slots_named_are_shuffled_and_each_by_itself():
    many = 200
    price = np.arange(many, dtype=np.float32)[:, None]
    meta = {"y": np.arange(many)}
    ids = column([[number] for number in range(many)])
    samples = Samples({"ids": ids}, {"price": price}, meta, np.arange(many), np.zeros(many))
    both = shuffled(samples, ["ids", "price"], seed=3)
    first, second = both.sparse["ids"].values_N.tolist(), both.dense["price"][:, 0].tolist()
    assert sorted(first) == sorted(second) == list(range(many)) and first != second and first != sorted(first)
    assert both.meta is meta and shuffled(samples, [], seed=3) is samples
    assert shuffled(samples, ["ids"], seed=3).sparse["ids"].values_N.tolist() == first
    assert shuffled(samples, ["ids"], seed=4).sparse["ids"].values_N.tolist() != first


@pytest.mark.parametrize("name", ["y", "prise"])
def test_a_slot_that_the_model_does_not_get_is_refused(name):
    with pytest.raises(SpecError, match=f"'{name}' is no slot that the model gets.*price"):
        check_shuffled(Schema.of(SLOTS), [name])


def test_slots_are_listed_by_what_the_metrics_lose():
    def measured(auc):
        return {"ctr": {"auc": auc, "logloss": 1 - auc, "gauc": None}}

    worth = {"price": measured(0.79), "ids": measured(0.6)}
    lines = losses_of({"tasks": measured(0.8), "worth": worth})
    assert [line["slot"] for line in lines] == ["ids", "price"]
    assert lines[0]["auc"] == lines[0]["logloss"] == pytest.approx(0.2) and "gauc" not in lines[0]
    assert "+0.20000" in list(format_losses(lines))[1]
