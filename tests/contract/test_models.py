"""What every model promises, whoever wrote it: see trainer.models.contract."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.errors import SpecError
from headrace.trainer.config import ModelSection
from headrace.trainer.dense.shard_slices import in_order
from headrace.trainer.dense.strategy import dense_strategy
from headrace.trainer.dense_config import DenseSection, RecomputeSection
from headrace.trainer.models.contract import Declared, Inputs, SequenceInput, Shape, SlotShape
from headrace.trainer.models.layers import FirstOrder
from headrace.trainer.models.module_checks import check_outputs
from headrace.trainer.models.registry import MODELS, load_model
from headrace.trainer.models.settings import first_order, some_slot, some_values, two_tasks, vectors_of_one_length
from headrace.trainer.train.activations import saved_activations
from tests.fakes.model_settings import MODEL_NAMES, NEEDS_SEQUENCE, fitting
from tests.fakes.thread_ranks import on_ranks

B, L = 12, 5
USERS_MODEL = '''
import torch
from torch import nn

from headrace.config import Section


class Tower(nn.Module):
    """The smallest model of one's own."""

    class Settings(Section):
        width: int = 8

    def __init__(self, shape, settings):
        super().__init__()
        sparse = sum(slot.dim + slot.first_order for slot in shape.pooled + shape.sequences)
        self.tasks, self.shape = shape.tasks, shape
        self.first = nn.Linear(sparse + shape.dense_size, settings.width)
        self.last = nn.Linear(settings.width, len(shape.tasks))

    def forward(self, inputs):
        parts = [*inputs.vectors.values(), inputs.first_order_BF, inputs.dense_BC]
        for slot in self.shape.sequences:
            sequence = inputs.sequences[slot.name]
            parts.append((sequence.vectors_BLD * sequence.mask_BL.unsqueeze(2)).sum(1))
            if slot.first_order:
                parts.append((sequence.first_order_BL * sequence.mask_BL).sum(1, keepdim=True))
        logits_BT = self.last(torch.relu(self.first(torch.cat(parts, 1))))
        return {task: logits_BT[:, t] for t, task in enumerate(self.tasks)}
'''
NAMES = [*MODEL_NAMES, "users_tower:Tower"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "users_tower.py").write_text(USERS_MODEL)
    return tmp_path


@pytest.fixture(params=NAMES)
def build(request, folder):
    """Build the model of this name, with the same weights every time."""
    name = request.param

    def built(shape, **settings):
        torch.manual_seed(3)
        key = "class" if ":" in name else "name"
        given = fitting(name, shape) | settings
        return load_model(ModelSection.model_validate({key: name, "settings": given}), shape, folder)

    built.name = name
    return built


def slots(prefix, count, dim=4, first_order=True, max_len=1):
    return tuple(SlotShape(f"{prefix}{n}", dim, first_order, max_len) for n in range(count))


PLAIN = Shape(slots("s", 3), (), (("d", 2), ("e", 1)), ("ctr",))
SHAPES = {
    "plain": PLAIN,
    "several tasks": replace(PLAIN, tasks=("ctr", "cvr", "stay")),
    "no dense slot": replace(PLAIN, dense=()),
    "one slot": replace(PLAIN, pooled=slots("s", 1), dense=()),
    "with sequences": replace(PLAIN, sequences=slots("q", 2, max_len=L)),
    "a sequence and two tasks": replace(PLAIN, sequences=slots("q", 1, max_len=L), tasks=("ctr", "cvr")),
    "a sequence without weights": Shape(
        slots("s", 2, first_order=False), slots("q", 1, first_order=False, max_len=L), (), ("ctr",)
    ),
    "sequences alone": replace(PLAIN, pooled=(), dense=(), sequences=slots("q", 1, max_len=L)),
    "no first-order weights": replace(PLAIN, pooled=slots("s", 3, first_order=False)),
    "some first-order weights": replace(PLAIN, pooled=slots("s", 2) + slots("t", 1, first_order=False)),
    "vectors of two lengths": replace(PLAIN, pooled=slots("s", 2) + slots("t", 1, dim=6)),
    "a table of weights alone": replace(PLAIN, pooled=slots("s", 3, dim=0)),
    "dense values alone": replace(PLAIN, pooled=()),
    "one slot of weights among vectors": replace(PLAIN, pooled=slots("s", 2) + slots("t", 1, dim=0)),
}
REFUSED_BY = {
    some_slot: set(),
    some_values: set(),
    first_order: {"no first-order weights", "some first-order weights", "a sequence without weights"},
    vectors_of_one_length: {
        "vectors of two lengths",
        "a table of weights alone",
        "dense values alone",
    },
    two_tasks: set(SHAPES) - {"a sequence and two tasks"},
}
"""By requirement: the shapes it refuses."""
REFUSED_BESIDES = {
    "two_tower": {"one slot", "sequences alone", "a table of weights alone", "dense values alone"},
    **dict.fromkeys(
        NEEDS_SEQUENCE, set(SHAPES) - {"with sequences", "a sequence and two tasks", "a sequence without weights"}
    ),
}
"""By model: those that its own `check` refuses."""


def refused(name):
    """The shapes that a model refuses. A user's class has no requirements."""
    needs = MODELS.load(name).needs if name in MODEL_NAMES else ()
    return REFUSED_BESIDES.get(name, set()).union(*map(REFUSED_BY.__getitem__, needs))


def random_inputs(shape, num_samples=B, seed=0):
    """A batch as the embedding gives it (vectors are views behind first-order weights), and the leaves it came from."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*size):
        return torch.randn(size, generator=generator).requires_grad_()

    leaves = {slot.name: leaf(num_samples, slot.dim + slot.first_order) for slot in shape.pooled}
    vectors = {slot.name: leaves[slot.name][:, int(slot.first_order) :] for slot in shape.pooled}
    stacked = [vectors[slot.name] for slot in shape.pooled if slot.dim]
    same = len({slot.dim for slot in shape.pooled if slot.dim}) <= 1
    stack = torch.stack(stacked, 1) if stacked and same else torch.zeros(num_samples, 0, 0)
    first = [leaves[slot.name][:, 0] for slot in shape.pooled if slot.first_order]
    sequences = {}
    for slot in shape.sequences:
        mask_BL = torch.arange(L) < torch.randint(0, L + 1, (num_samples, 1), generator=generator)
        mask_BL[0], mask_BL[1] = True, False
        leaves[slot.name] = leaf(num_samples, L, slot.dim + 1)
        rows = leaves[slot.name] * mask_BL.unsqueeze(2)
        first_order_BL = rows[:, :, 0] if slot.first_order else torch.zeros(num_samples, L)
        sequences[slot.name] = SequenceInput(rows[:, :, 1:], first_order_BL, mask_BL)
    dense_BC = torch.randn((num_samples, shape.dense_size), generator=generator)
    first_order_BF = torch.stack(first, 1) if first else torch.zeros(num_samples, 0)
    return Inputs(vectors, stack if same else None, first_order_BF, sequences, dense_BC), leaves


def fields_of(name):
    """The settings of one of our models."""
    return MODELS.load(name).model_fields if name in MODEL_NAMES else {}


def cases(build):
    return {case: shape for case, shape in SHAPES.items() if case not in refused(build.name)}


def test_there_is_one_finite_logit_for_each_sample_and_task(build):
    for case, shape in cases(build).items():
        for num_samples in (B, 1 if not shape.sequences else 2):
            inputs, _ = random_inputs(shape, num_samples)
            outputs = check_outputs(build(shape)(inputs), shape.tasks, num_samples)
            assert all(torch.isfinite(outputs[task]).all() for task in shape.tasks), case


def test_a_shape_it_cannot_work_with_is_refused_when_it_is_built(build):
    for case in refused(build.name):
        with pytest.raises(SpecError, match="slot|dim|sparse|tasks"):
            build(SHAPES[case])


def test_gradients_reach_every_input_and_every_parameter(build):
    for case, shape in cases(build).items():
        model = build(shape)
        inputs, leaves = random_inputs(shape)
        outputs = model(inputs)
        # Unequal targets, so that no two samples cancel.
        target = torch.linspace(-1, 2, B)
        sum(((outputs[task] - target) ** 2).sum() for task in shape.tasks).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (case, name)
        for name, leaf in leaves.items():
            assert leaf.grad is not None, (case, name)
            if build.name != "lr" and leaf.shape[-1]:
                assert leaf.grad.abs().sum() > 0, (case, name)
        first_order = [name for name, leaf in leaves.items() if name in inputs.sequences and leaf.grad is not None]
        for name in first_order:
            assert (leaves[name].grad[~inputs.sequences[name].mask_BL] == 0).all(), (case, name)


def test_a_model_that_is_recomputed_has_the_same_gradients(build):
    section, cpu = DenseSection(recompute=RecomputeSection(segments=2)), torch.device("cpu")
    for case, shape in cases(build).items():
        found = []
        for how in (DenseSection(), section):
            model = build(shape, **({"dropout": 0.5} if "dropout" in fields_of(build.name) else {}))
            saved = saved_activations(model, how, cpu, nullcontext)
            inputs, leaves = random_inputs(shape)
            with saved.forward():
                outputs = model(inputs)
            sum(outputs[task].square().sum() for task in shape.tasks).backward()
            gradients = [each.grad for each in (*leaves.values(), *model.parameters())]
            found.append([outputs[task] for task in shape.tasks] + gradients)
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), case


def test_a_model_whose_weights_are_divided_over_trainers_learns_and_predicts_the_same(build):
    shapes = cases(build)
    shape = shapes.get("a sequence and two tasks") or next(iter(shapes.values()))
    model = build(shape)

    def learnt(stage):
        nets = [copy.deepcopy(model) for _ in range(2)]

        def act(ranks):
            net = nets[ranks.rank]
            blocks = {} if stage == 1 else {"stage": stage, "bucket_bytes": 64}
            strategy = dense_strategy(net, DenseSection(strategy="sharded", **blocks), ranks)
            for step in range(2):
                strategy.clear()
                outputs = net(random_inputs(shape, B, 2 * step + ranks.rank)[0])
                sum(outputs[task].square().mean() for task in shape.tasks).backward()
                assert strategy.finite()
                strategy.after_backward(step, 1.0)
                strategy.wait()
            with strategy.predicting(), torch.no_grad():
                predicted = net.eval()(random_inputs(shape, B, 9)[0])
            kept = {name: value.clone() for name, value in strategy.consolidate().items()}
            return kept | {task: predicted[task] for task in shape.tasks}

        return on_ranks(2, act)[0][0]

    whole, divided = learnt(1), learnt(3)
    assert all(torch.equal(value, divided[name]) for name, value in whole.items())


def test_first_order_weights_are_heard_where_a_table_has_them(build):
    for case, shape in cases(build).items():
        inputs, leaves = random_inputs(shape)
        build(shape)(inputs)[shape.tasks[0]].sum().backward()
        for slot in (*shape.pooled, *shape.sequences):
            if slot.first_order:
                assert leaves[slot.name].grad[..., 0].abs().sum() > 0, (case, slot.name)


def test_what_first_order_weights_gain_is_added_to_logits_or_the_model_says_that_it_is_not(build):
    """As `tables.<t>.in_batch` adds it: times the task's own factor."""
    for case, shape in cases(build).items():
        model = build(shape).eval()
        terms = [each for each in model.modules() if isinstance(each, FirstOrder) and each.present]
        inputs, _ = random_inputs(shape)
        if len(terms) != 1 or not Declared.of(model).sums_first_order or not inputs.first_order_BF.shape[1]:
            continue
        scale_T = torch.ones(len(shape.tasks))
        if terms[0].scale.scale_T is not None:
            with torch.no_grad():
                terms[0].scale.scale_T.copy_(torch.linspace(0.5, 2, len(shape.tasks)))
            scale_T = terms[0].scale.scale_T.detach()
        with torch.no_grad():
            before = model(inputs)
            after = model(replace(inputs, first_order_BF=inputs.first_order_BF + 0.25))
        gain = 0.25 * inputs.first_order_BF.shape[1]
        for t, task in enumerate(shape.tasks):
            torch.testing.assert_close(after[task] - before[task], torch.full((B,), gain * float(scale_T[t])), msg=case)


def arrive(parameter, value, _module, _inputs):
    parameter.data.copy_(value)


def test_a_model_that_says_so_uses_parameters_only_in_calls_of_the_modules_that_hold_them(build):
    for case, shape in cases(build).items():
        model, late = build(shape), build(shape)
        if not in_order(model):
            return
        for module in late.modules():
            for parameter in module.parameters(recurse=False):
                value = parameter.detach().clone()
                parameter.data.fill_(float("nan"))
                module.register_forward_pre_hook(partial(arrive, parameter, value))
        inputs, _ = random_inputs(shape)
        with torch.no_grad():
            wanted, found = model(inputs), late(inputs)
        assert all(torch.equal(found[task], wanted[task]) for task in shape.tasks), case


@pytest.mark.parametrize(
    "name",
    ["wide_deep", "deepfm", "dlrm", "deep_crossing", "dcn", "din", "sasrec", "mmoe", "esmm", "finalmlp", "two_tower"],
)
def test_these_models_say_so(name, tmp_path):
    shape = SHAPES["a sequence and two tasks"]
    assert in_order(load_model(ModelSection(name=name, settings=fitting(name, shape)), shape, tmp_path))


def test_a_tower_is_the_model_in_blocks(build):
    for case, shape in cases(build).items():
        model = build(shape)
        assert hasattr(model, "tower") == (build.name in MODEL_NAMES and MODELS.load(build.name).has_tower)
        if not hasattr(model, "tower"):
            return
        inputs, _ = random_inputs(shape)
        tower = model.tower()
        x_BW, beside_BT = tower.enter(inputs)
        assert x_BW.shape == (B, tower.width), case
        logits_BT = tower.leave(nn.Sequential(*tower.blocks)(x_BW)) + beside_BT
        outputs = model(inputs)
        wanted_BT = torch.stack([outputs[task] for task in shape.tasks], 1)
        torch.testing.assert_close(logits_BT, wanted_BT, rtol=0, atol=1e-6)
        owned = [id(each) for part in (*tower.blocks, tower.leave) for each in part.parameters()]
        assert len(owned) == len(set(owned)) and len(tower.blocks) > 1, case


def test_one_seed_gives_one_model_and_one_answer(build):
    shape = SHAPES["a sequence and two tasks"]
    inputs, _ = random_inputs(shape)
    one, two = build(shape), build(shape)
    assert torch.equal(one(inputs)["ctr"], two(inputs)["ctr"])
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in two.named_parameters()]


def test_a_sample_is_predicted_by_itself(build):
    shape = SHAPES["a sequence and two tasks"]
    model = build(shape)
    inputs, _ = random_inputs(shape)
    part = Inputs(
        {name: v[3:7] for name, v in inputs.vectors.items()},
        inputs.vectors_BFD[3:7],
        inputs.first_order_BF[3:7],
        {
            n: SequenceInput(s.vectors_BLD[3:7], s.first_order_BL[3:7], s.mask_BL[3:7])
            for n, s in inputs.sequences.items()
        },
        inputs.dense_BC[3:7],
    )
    torch.testing.assert_close(model(part)["ctr"], model(inputs)["ctr"][3:7])


def test_it_learns_a_small_problem(build):
    """Signs of one slot decide; rows learn with the model, as the embedding's do."""
    shape = replace(PLAIN, tasks=("ctr", "cvr"))
    sequences = {}
    if build.name in NEEDS_SEQUENCE:
        shape = replace(shape, sequences=slots("q", 1, max_len=L))
        sequences["q0"] = SequenceInput(torch.zeros(256, L, 4), torch.zeros(256, L), torch.zeros(256, L).bool())
    model = build(shape)
    torch.manual_seed(5)
    tables = nn.Parameter(0.1 * torch.randn(3, 7, 5))
    signs_BF = torch.randint(0, 7, (256, 3))
    dense_BC = torch.randn(256, 3)
    target = {"ctr": (signs_BF[:, 1] < 3).float(), "cvr": (signs_BF[:, 0] > 4).float()}
    if build.name == "esmm":
        target["cvr"] = target["ctr"] * target["cvr"]
    optimizer = torch.optim.Adam([*model.parameters(), tables], lr=0.03)
    first = last = 0.0
    for _ in range(60):
        cells_BFD = torch.stack([tables[f, signs_BF[:, f]] for f in range(3)], 1)
        vectors_BFD = cells_BFD[:, :, 1:]
        vectors = {f"s{f}": vectors_BFD[:, f] for f in range(3)}
        outputs = model(Inputs(vectors, vectors_BFD, cells_BFD[:, :, 0], sequences, dense_BC))
        loss = sum(nn.functional.binary_cross_entropy_with_logits(outputs[t], target[t]) for t in target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = first or loss.item(), loss.item()
    assert last < 0.4 * first


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name not in ("lr", "fm")])
def test_settings_change_the_model(name):
    shape = SHAPES["a sequence and two tasks"]

    def built(**settings):
        torch.manual_seed(1)
        return load_model(ModelSection(name=name, settings=fitting(name, shape) | settings), shape, Path("."))

    with_towers = [{"towers": [6]}] if "towers" in fields_of(name) else []
    models = [built(**settings) for settings in ({}, {"hidden": [7, 5, 3]}, *with_towers)]
    assert len({sum(p.numel() for p in model.parameters()) for model in models}) == len(models)
    linear = built(hidden=[])
    inputs, _ = random_inputs(shape)
    assert linear(inputs)["cvr"].shape == (B,)
    dropping = built(dropout=0.5)
    torch.manual_seed(1)
    one = dropping(inputs)["ctr"]
    torch.manual_seed(1)
    assert torch.equal(one, dropping(inputs)["ctr"])
    assert not torch.equal(one, dropping(inputs)["ctr"])
    dropping.eval()
    assert torch.equal(dropping(inputs)["ctr"], dropping(inputs)["ctr"])
