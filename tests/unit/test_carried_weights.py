"""A job goes on with other slots: the law of weights, for each of Headrace's models.

Weights and inputs are small integers, so every sum is exact and the law holds to the bit whatever the order of sums.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.trainer.config import ModelSection
from headrace.trainer.models.carried_weights import NotCarried, carried_weights
from headrace.trainer.models.contract import AxisPart, Inputs, SequenceInput, Shape, SlotShape
from headrace.trainer.models.registry import load_model

B, L, DIM = 6, 3, 2
POOLED, SEQUENCES, DENSE = ("a", "b", "c", "d"), ("q", "r"), (("x", 1), ("y", 3), ("z", 2))
SETTINGS = {
    "lr": {},
    "fm": {},
    "deepfm": {"hidden": (3,)},
    "wide_deep": {"hidden": (), "towers": (2,)},
    "deep_crossing": {"hidden": (3,)},
    "dcn": {"hidden": (), "cross_layers": 2},
    "dcn_v2": {"hidden": (3,), "cross_layers": 2},
    "dlrm": {"hidden": (3,), "bottom": (2,)},
    "din": {"hidden": (3,), "target": "a", "sequence": ("q",)},
    "sasrec": {"hidden": (3,), "target": "a", "sequence": "q", "blocks": 1},
    "two_tower": {"hidden": (3,), "item": ("a", "c"), "frequency_buckets": 16, "popularity": 10},
    "mmoe": {"hidden": (3,), "experts": 2},
    "esmm": {"hidden": ()},
    "finalmlp": {"hidden": (4,), "second_hidden": (2,), "first_context": ("b",)},
}
MODELS = [*SETTINGS.items(), ("dcn_v2", {"hidden": (3,), "low_rank": 2, "structure": "stacked"})]
NEEDED = {"din": ("a", "q"), "sasrec": ("a", "q"), "two_tower": ("a", "b"), "finalmlp": ("b",)}
"""Slots that are there before and after."""
ROUNDED = ("sasrec", "finalmlp")
"""Models whose hidden layers sum no small integers, so that the order of sums counts."""
SUMS_PAIRS = ("fm", "deepfm")
"""Their pairs count at once: a new slot contributes nothing only while its vectors are zeros."""


def lists_of(highest):
    """For each kind of slot: slots in some order, each with a number up to `highest`."""
    return st.tuples(
        *(
            st.permutations(pool).flatmap(lambda order: st.tuples(*(marked(each, highest) for each in order)))
            for pool in (POOLED, SEQUENCES, DENSE)
        )
    )


def marked(slot, highest):
    return st.integers(0, highest).map(lambda number: (slot, number))


def those(name, marks, least):
    """The slots with at least this number, and those that the model needs."""
    needed = NEEDED.get(name, ())
    return tuple(tuple(slot for slot, number in part if number >= least or slot in needed) for part in marks)


def shape_of(lists, tasks=("click", "buy")):
    pooled, sequences, dense = lists
    slots = tuple(SlotShape(name, DIM, True) for name in pooled)
    return Shape(slots, tuple(SlotShape(name, DIM, True, L) for name in sequences), tuple(dense), tasks)


def integers(generator, *size, low=-1, high=2):
    return torch.randint(low, high, size, generator=generator).float()


def built(name, its, lists, seed=1):
    generator = torch.Generator().manual_seed(seed)
    try:
        model = load_model(ModelSection(name=name, settings=its), shape_of(lists), Path())
    except SpecError:
        assume(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, *parameter.shape))
    return model


def values_of(zero=(), no_vector=()):
    """The inputs of all slots, by name; those of `zero` are zeros, those of `no_vector` have a vector of zeros."""
    found = {}
    for number, name in enumerate((*POOLED, *SEQUENCES, *(name for name, _ in DENSE))):
        generator = torch.Generator().manual_seed(100 + number)
        vectors, first = integers(generator, B, L, DIM), integers(generator, B, L)
        if name in no_vector or name in zero:
            vectors = vectors * 0
        found[name] = vectors, first * (name not in zero), integers(generator, B, 3) * (name not in zero)
    return found


def inputs_of(lists, values):
    pooled, sequences, dense = lists
    vectors = {name: values[name][0][:, 0] for name in pooled}
    mask_BL = torch.tensor([[True, True, False]] * B)  # two ids: their mean is exact
    first = [values[name][1][:, 0] for name in pooled]
    return Inputs(
        vectors=vectors,
        vectors_BFD=torch.stack(list(vectors.values()), 1) if vectors else torch.zeros(B, 0, 0),
        first_order_BF=torch.stack(first, 1) if first else torch.zeros(B, 0),
        sequences={
            name: SequenceInput(values[name][0] * 2 * mask_BL[:, :, None], values[name][1] * 2 * mask_BL, mask_BL)
            for name in sequences
        },
        dense_BC=torch.cat([torch.zeros(B, 0), *(values[name][2][:, :size] for name, size in dense)], 1),
    )


def sizes(model):
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def names(lists):
    return {*lists[0], *lists[1], *(name for name, _ in lists[2])}


def carry(old, new, before, after):
    """Give `after` the weights of `before`; the plan."""
    plan = carried_weights(
        (sizes(before), before.slot_axes), (sizes(after), after.slot_axes), names(new) - names(old),
        names(old) - names(new),
    )  # fmt: skip
    state = after.state_dict()
    for each in plan:
        if each.old is not None and each.new is not None:
            value = each.apply(before.state_dict()[each.name].numpy(), 0.0)
            state[each.name] = torch.from_numpy(value)
    after.load_state_dict(state)
    return plan


def logits(model, lists, values):
    with torch.no_grad():
        return model(inputs_of(lists, values))


def equal(name, ours, theirs):
    same = partial(torch.allclose, atol=1e-4) if name in ROUNDED else torch.equal
    return all(same(ours[task], theirs[task]) for task in ("click", "buy"))


each_model = pytest.mark.parametrize(("name", "its"), MODELS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(MODELS)])


@each_model
@settings(max_examples=15, deadline=None)
@given(marks=lists_of(2))
def test_slots_that_are_added_change_no_prediction_and_removed_again_leave_the_weights_as_they_were(name, its, marks):
    old, new = those(name, marks, 2), those(name, marks, 1)
    added = names(new) - names(old)
    before, after = built(name, its, old), built(name, its, new, seed=2)
    try:
        carry(old, new, before, after)
    except NotCarried as error:
        assert name == "dlrm" and "alone" in str(error)  # the vector itself was the input, and no pair was
        return
    zero = [each for each in added if each in (*POOLED, *SEQUENCES)]
    values = values_of(no_vector=zero if name in SUMS_PAIRS else ())
    values |= {each: (vectors, first * 0, floats) for each in zero for vectors, first, floats in [values[each]]}
    for part in sizes(after):
        if part not in sizes(before) and part.endswith("dense_TC"):
            after.get_parameter(part).data.zero_()  # its initial value
    assert equal(name, logits(after, new, values), logits(before, old, values))
    back = built(name, its, old, seed=3)
    carry(new, old, after, back)
    assert all(torch.equal(value, before.state_dict()[part]) for part, value in back.state_dict().items())


@each_model
@settings(max_examples=10, deadline=None)
@given(marks=lists_of(1), data=st.data())
def test_slots_in_another_order_are_a_permutation_of_the_weights(name, its, marks, data):
    old = those(name, marks, 1)
    new = tuple(tuple(data.draw(st.permutations(part))) for part in old)
    before, after = built(name, its, old), built(name, its, new, seed=2)
    plan = carry(old, new, before, after)
    assert all(each.old == each.new for each in plan)
    values = values_of()
    assert equal(name, logits(after, new, values), logits(before, old, values))


@pytest.mark.parametrize("name", ["deepfm", "dcn_v2", "wide_deep", "dlrm", "din", "mmoe", "esmm"])
@settings(max_examples=15, deadline=None)
@given(marks=lists_of(2))
def test_a_removed_slot_is_cut_as_if_its_inputs_were_zeros(name, marks):
    old, new = those(name, marks, 1), those(name, marks, 2)
    before, after = built(name, SETTINGS[name], old), built(name, SETTINGS[name], new, seed=2)
    assume(name != "dlrm" or bool(old[2]) == bool(new[2]))  # a vector of the dense part has biases
    try:
        carry(old, new, before, after)
    except NotCarried as error:
        assert name == "dlrm" and "alone" in str(error)
        return
    values = values_of(zero=names(old) - names(new))
    assert equal(name, logits(after, new, values), logits(before, old, values))


def test_a_model_that_does_not_say_where_its_slots_are_is_a_new_one():
    with pytest.raises(NotCarried, match=r"slots: .* new one: it does not say .*slot_axes.*headrace import"):
        carried_weights(({"w": (2, 3)}, None), ({"w": (2, 4)}, None), {"b"}, ())
    nothing = {"w": (2, 3)}, dict
    assert not carried_weights(nothing, nothing, (), ())[0].changes
    with pytest.raises(NotCarried, match="w, axis 1 had 3 places and has 4, and slot_axes does not name them"):
        carried_weights(nothing, ({"w": (2, 4)}, dict), {"b"}, ())
    one, other = [AxisPart("a", 3, frozenset("a"))], [AxisPart("a", 2, frozenset("a")), AxisPart("b", 2)]
    with pytest.raises(NotCarried, match="w, axis 1: a had 3 places and has 2"):
        carried_weights(
            ({"w": (2, 3)}, lambda: {"w": (None, one)}), ({"w": (2, 4)}, lambda: {"w": (None, other)}), {"b"}, ()
        )
    other[0] = replace(other[0], size=3)
    with pytest.raises(NotCarried, match=r"w has the shape \[2, 4\], and slot_axes says \[None, 5\]"):
        carried_weights(
            ({"w": (2, 3)}, lambda: {"w": (None, one)}), ({"w": (2, 4)}, lambda: {"w": (None, other)}), {"b"}, ()
        )
    with pytest.raises(NotCarried, match="b is new, and no slot of it was added"):
        carried_weights(
            ({"w": (2, 3)}, lambda: {"w": (None, one)}), ({"w": (2, 5)}, lambda: {"w": (None, other)}), {"b"}, ()
        )


def test_new_places_begin_at_the_given_value():
    axis = [AxisPart("a", 2, frozenset("a"))]
    wide = [AxisPart("b", 1, frozenset("b")), *axis]
    (each,) = carried_weights(
        ({"w": (2, 2)}, lambda: {"w": (None, axis)}), ({"w": (2, 3)}, lambda: {"w": (None, wide)}), {"b"}, ()
    )
    made = each.apply(np.arange(4, dtype=np.float32).reshape(2, 2), 0.5)
    assert made.tolist() == [[0.5, 0, 1], [0.5, 2, 3]]
