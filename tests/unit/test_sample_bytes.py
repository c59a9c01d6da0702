"""Samples as bytes, and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.sample_bytes import InvalidSampleBytes, decode_samples, encode_samples
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from tests.fakes.ragged import ragged

SCHEMA = Schema.of(
    (
        MetaSlot(name="text", kind="meta", type="string"),
        SparseSlot(name="plain"),
        DenseSlot(name="floats", kind="dense", size=2),
        SparseSlot(name="weighted", weighted=True),
        MetaSlot(name="label", kind="meta"),
        MetaSlot(name="whole", kind="meta", type="int64"),
        MetaSlot(name="key", kind="meta", type="uint64"),
    )
)
FLOATS = st.floats(width=32)
SAMPLES = st.lists(
    st.tuples(
        st.text(max_size=3),
        st.lists(st.integers(0, 2**64 - 1), max_size=3),
        st.tuples(FLOATS, FLOATS),
        st.lists(st.tuples(st.integers(0, 9), FLOATS), max_size=3),
        FLOATS,
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 2**64 - 1),
    ),
    max_size=5,
)


def samples_of(drawn):
    text, plain, floats, weighted, label, whole, key = zip(*drawn, strict=True) if drawn else ((),) * 7
    texts = np.empty(len(drawn), object)
    texts[:] = list(text)
    weights = [weight for row in weighted for _, weight in row]
    return Samples(
        {"plain": ragged(plain), "weighted": ragged([[sign for sign, _ in row] for row in weighted], weights)},
        {"floats": np.array(floats, np.float32).reshape(-1, 2)},
        {
            "text": texts,
            "label": np.array(label, np.float32),
            "whole": np.array(whole, np.int64),
            "key": np.array(key, np.uint64),
        },
        np.arange(len(drawn)),
        np.full(len(drawn), 0.5),
    )


def bits(samples):
    """Everything in samples, comparable where floats are no numbers."""
    columns = [*samples.dense.values(), *samples.meta.values()]
    for column in samples.sparse.values():
        columns += [column.values_N, column.offset_B1, column.weights_N]
    return [None if c is None else c.tolist() if c.dtype == object else (c.shape, c.tobytes()) for c in columns]


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_bytes_give_back_every_bit(drawn):
    samples = samples_of(drawn)
    offset_B1, data_N = encode_samples(samples, SCHEMA)
    again = decode_samples(offset_B1, data_N, SCHEMA, samples.event_B, samples.time_s_B)
    assert set(again.sparse) == set(samples.sparse) and set(again.meta) == set(samples.meta)
    assert bits(samples) == [
        *bits(
            Samples({}, again.dense, {name: again.meta[name] for name in samples.meta}, again.event_B, again.time_s_B)
        ),
        *bits(Samples({name: again.sparse[name] for name in samples.sparse}, {}, {}, again.event_B, again.time_s_B)),
    ]
    alone = [encode_samples(samples.slice(b, b + 1), SCHEMA)[1].tobytes() for b in range(len(samples))]
    assert b"".join(alone) == data_N.tobytes(), "a sample's bytes do not depend on its neighbours"


def test_other_bytes_are_refused():
    offset_B1, data_N = encode_samples(samples_of([("a", [1], (0, 0), [], 1, 2, 3)]), SCHEMA)
    for cut, said in ((-1, "middle of a slot"), (1, "longer than its slots")):
        changed_N = np.append(data_N, np.uint8(0))[: len(data_N) + cut]
        with pytest.raises(InvalidSampleBytes, match=said):
            decode_samples(offset_B1 + np.array([0, cut]), changed_N, SCHEMA, np.zeros(1, np.int64), np.zeros(1))
