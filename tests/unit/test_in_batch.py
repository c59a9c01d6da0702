"""First-order weights that follow the events of a batch: the kernel equals its twin, and what it is for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import validate
from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.trainer.config import NEWEST_DEFAULTS
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.train.in_batch import follow_events, follow_events_reference

SAMPLES = st.lists(
    st.tuples(
        st.booleans(),  # begins an event
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1.0, 0.5, 0.0])), max_size=3),
        st.lists(
            st.tuples(st.integers(-3, 3), st.integers(0, 1), st.sampled_from([1.0, 2.0, 0.0])), min_size=2, max_size=2
        ),
    ),
    min_size=1,
    max_size=12,
)
STEPS = st.lists(st.sampled_from([(4.0, 4.0), (0.0, 1.0), (100.0, 25.0), (np.inf, 0.0)]), min_size=5, max_size=5)


@given(SAMPLES, STEPS, st.lists(st.booleans(), min_size=2, max_size=2), st.sampled_from([1.0, 0.5]))
def test_the_kernel_is_its_twin(samples, steps, is_bce, scale):
    occurrences = [found for _, found, _ in samples]
    tasks = [values for *_, values in samples]
    begins = [b for b, (begins, *_) in enumerate(samples) if begins or b == 0]
    events = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(samples)], strict=True)]
    logits, labels, factors = ([[float(each[i]) for each in values] for values in tasks] for i in range(3))
    wanted = follow_events_reference(logits, labels, factors, is_bce, [1.0, scale], events, occurrences, steps)
    added_B = np.zeros(len(samples))
    flat = [each for found in occurrences for each in found]
    follow_events(
        *(np.array(logits), np.array(labels), np.array(factors), np.array(is_bce), np.array([1.0, scale])),
        np.array([*begins, len(samples)]),
        np.cumsum([0, *(len(found) for found in occurrences)]),
        np.array([u for u, _ in flat], np.int32),
        np.array([by for _, by in flat], np.float32),
        *(np.array([step[number] for step in steps], np.float32) for number in (0, 1)),
        added_B,
    )
    np.testing.assert_allclose(added_B, wanted, rtol=1e-9, atol=1e-12)


def test_a_later_event_of_a_batch_knows_the_earlier_ones_and_samples_of_one_event_do_not():
    added_B = np.zeros(3)
    ones = np.ones((3, 1))
    of_samples = np.zeros((3, 1)), ones, ones, np.array([True]), np.ones(1)
    keys = np.array([0, 1, 3]), np.arange(4), np.zeros(3, np.int32), np.ones(3, np.float32)
    follow_events(*of_samples, *keys, np.ones(1, np.float32), np.ones(1, np.float32), added_B)
    first = 0.5 / 1.25**0.5
    assert added_B[:2].tolist() == [0, pytest.approx(first)]
    assert added_B[2] == added_B[1], "both are of the second event"


def table_of(number=NEWEST_DEFAULTS, **sections):
    raw = {
        "name": "j",
        "store": {"path": "s"},
        "pipe": {"command": ["cat"]},
        "tasks": [{"name": "ctr", "label": "click"}],
    }
    raw |= {"sources": {"s": {"kind": "files", "paths": ["x"]}}, "model": {"name": "deepfm"}}
    raw |= {"slots": [{"names": ["a", "b"]}, {"kind": "meta", "name": "click"}], **sections}
    return fill_defaults(raw, unset=number)["tables"]["default"]


def test_rows_follow_events_by_default_where_nothing_is_said_of_how_they_learn():
    assert table_of()["in_batch"]
    without = table_of(tables={"default": {"in_batch": False}})
    assert without["grad_scale"] == "sum" and without["optimizer"] == table_of()["optimizer"]
    assert table_of(tables={"default": {"in_batch": True}}) == table_of(), "to say it changes nothing"
    others = {
        "an older set": table_of(number=4),
        "by choice": without,
        "an optimizer of its own": table_of(tables={"default": {"optimizer": {"kind": "adagrad"}}}),
        "no first-order weights": table_of(tables={"default": {"first_order": False}}),
        "vectors that join later": table_of(tables={"default": {"extend_at": 3}}),
        "a pipeline": table_of(dense={"strategy": "pipeline"}),
        "copies of rows": table_of(train={"mode": "geo", "k_steps": 4}),
        "a softmax alone": table_of(tasks=[{"name": "next", "label": "item", "loss": "softmax"}]),
    }
    assert not [name for name, table in others.items() if table.get("in_batch")]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"grad_scale": "mean"}, 'needs grad_scale = "sum"'),
        ({"grad_scale": "mean", "first_order": False}, 'needs first_order = true and grad_scale = "sum"'),
        ({"optimizer": {"kind": "sgd"}}, 'needs optimizers of kind "adagrad"'),
        ({"first_order": False}, "needs first_order = true"),
        ({"slots": {"a": {"extend_at": 2}}}, "rows that start with their vectors"),
    ],
)
def test_what_it_needs_is_said(keys, words):
    with pytest.raises(SpecError, match=words):
        validate(TableSection, {"in_batch": True, "grad_scale": "sum", **keys})
