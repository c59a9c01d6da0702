"""The signals of a pass: which inputs of row statistics came at all."""

import numpy as np

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.trainer.train.observer import SignalsCollector


def test_a_signal_is_told_once_it_came_and_forgotten_with_the_pass():
    schema = Schema.of([SparseSlot(name="a"), SparseSlot(name="b"), MetaSlot(kind="meta", name="click")])
    signals = SignalsCollector(schema, {"default": TableSection()}, "click")
    nothing, one = Ragged(np.empty(0, np.uint64), np.zeros(2, np.int64)), Ragged(np.ones(1, np.uint64), np.arange(2))

    def add(a, b, click):
        signals.add(Samples({"a": a, "b": b}, {}, {"click": np.array([click])}, np.zeros(1), np.zeros(1)))

    add(nothing, one, np.nan)
    add(nothing, nothing, 0.0)
    assert signals.take() == ["slot.b"]
    add(one, nothing, 0.0)
    add(nothing, nothing, 1.0)
    assert signals.take() == ["click.default", "slot.a"]
    assert signals.take() == []
