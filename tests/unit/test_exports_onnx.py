"""A dense part as ONNX: traced once, filled with any weights, it predicts what torch does; or says why it cannot."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from headrace.errors import BadInput
from headrace.trainer.config import ModelSection, TaskSection
from headrace.trainer.exports.onnx_model import DenseGraph, OnnxModel, with_weights
from headrace.trainer.models.contract import Shape, SlotShape
from headrace.trainer.models.registry import load_model
from headrace.trainer.train.tracing import (
    FrozenModel,
    ServedModel,
    TraceFailed,
    _examples,
    input_names,
    served,
    trace,
)
from tests.fakes.model_settings import MODEL_NAMES, NEEDS_SEQUENCE, fitting

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "deploy" / "examples" / "serving" / "serve.py"
CTR = TaskSection(name="ctr", label="click")
PRICE = TaskSection(name="price", label="price", loss="mse")
POOLED = (SlotShape("a", 4, True), SlotShape("b", 4, True))
SEQUENCE = (SlotShape("s", 4, True, 5),)
DENSE = (("d", 3), ("e", 1))
ROUNDING = 1e-4
"""Of float32 in large random models: 1e-5 was seen, which depends on the processor; a wrong graph is off by more."""
SHAPES = {
    "all": Shape(POOLED, SEQUENCE, DENSE, ("ctr", "price")),
    "pooled": Shape(POOLED, (), (), ("ctr",)),
    "sequences": Shape((), (*SEQUENCE, SlotShape("t", 4, True, 2)), (), ("ctr", "price")),
    "one": Shape((SlotShape("a", 4, True),), (), (), ("ctr",)),
    "weights alone": Shape((SlotShape("a", 0, True), SlotShape("b", 0, True)), (), (), ("ctr",)),
}
USUAL = [(model, "all") for model in MODEL_NAMES] + [
    (model, "pooled") for model in MODEL_NAMES if model not in (*NEEDS_SEQUENCE, "esmm")
]
SHAPED = USUAL + [("deepfm", "sequences"), ("dlrm", "one"), ("dlrm", "sequences"), ("lr", "weights alone")]


def tasks(shape):
    return [task for task in (CTR, PRICE) if task.name in shape.tasks]


def perturb(model, seed=7):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def state(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def difference(template, model, shape, num_samples=11):
    """Between onnxruntime and the same model in float64, relative for values above 1; torch in float32 is as near."""
    examples = _examples(shape, num_samples)
    whole = ServedModel(model.eval(), shape, tasks(shape))
    with torch.no_grad():
        exact = [value.numpy() for value in copy.deepcopy(whole).double()(*map(widened, examples.values()))]
        theirs = [value.numpy() for value in whole(*examples.values())]
    found = OnnxModel(with_weights(template, state(model))).run(
        {name: value.numpy() for name, value in examples.items()}
    )
    assert farthest(theirs, exact) < ROUNDING
    return farthest([found[name] for name in answered(model, shape)], exact)


def answered(model, shape):
    """Names of the outputs of `ServedModel`, in order."""
    return [*(task.name for task in tasks(shape)), *served(model)]


def widened(value):
    return value.double() if value.is_floating_point() else value


def farthest(values, others):
    pairs = zip(values, others, strict=True)
    return max((np.abs(one - other) / np.maximum(1, np.abs(other))).max() for one, other in pairs)


@pytest.mark.parametrize(("name", "shaped"), SHAPED)
def test_a_model_traced_once_predicts_as_torch_with_any_weights_and_number_of_samples(name, shaped):
    shape = SHAPES[shaped]
    model = load_model(ModelSection(name=name, settings=fitting(name, shape)), shape, Path("."))
    template = trace(model, shape, tasks(shape))
    for seed in (1, 2):
        perturb(model, seed)
        assert difference(template, model, shape, 1 + 10 * seed) < ROUNDING


def test_towers_low_rank_dropout_and_slots_of_different_lengths_are_traced():
    settings = {"hidden": [8], "towers": [4], "dropout": 0.5, "low_rank": 2, "structure": "stacked"}
    shape = Shape((SlotShape("a", 4, True), SlotShape("b", 2, False)), SEQUENCE, DENSE, ("ctr", "price"))
    model = load_model(ModelSection(name="dcn_v2", settings=settings), shape, Path("."))
    template = trace(model, shape, tasks(shape))
    perturb(model)
    assert difference(template, model, shape) < ROUNDING


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_replica_predicts_as_torch_with_weights_as_inputs(name):
    shape = SHAPES["all"]
    model = load_model(ModelSection(name=name, settings=fitting(name, shape)), shape, Path("."))
    graph = DenseGraph(trace(model, shape, tasks(shape))).open()
    perturb(model)
    examples = _examples(shape, 6)
    feeds = {key: value.numpy() for key, value in examples.items() if key in graph.inputs}
    found = graph.run(feeds | graph.weights(state(model)))
    with torch.no_grad():
        wanted = ServedModel(model.eval(), shape, tasks(shape))(*examples.values())
    for name, value in zip(answered(model, shape), wanted, strict=True):
        np.testing.assert_allclose(found[name], value.numpy(), rtol=ROUNDING, atol=ROUNDING)


SETTINGS = (
    ("din", {"softmax": True, "attention": []}),
    ("sasrec", {"newest": "first", "attention_heads": 2, "dropout": 0.5}),
    ("sasrec", {"block": "hstu", "attention_heads": 2}),
    ("finalmlp", {"bilinear_heads": 2, "first_context": ["a", "e"], "second_context": "s"}),
)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_other_settings_are_traced_too_and_an_empty_sequence_is_predicted_as_in_torch(name, settings):
    shape = SHAPES["all"]
    model = load_model(ModelSection(name=name, settings=fitting(name, shape) | settings), shape, Path("."))
    template = trace(model, shape, tasks(shape))
    perturb(model)
    examples = _examples(shape, 4)
    examples["s"][:2], examples["s.mask"][:2] = 0, False
    with torch.no_grad():
        wanted = ServedModel(model.eval(), shape, tasks(shape))(*examples.values())
    found = OnnxModel(with_weights(template, state(model))).run(
        {name: value.numpy() for name, value in examples.items()}
    )
    for task, value in zip(tasks(shape), wanted, strict=True):
        assert np.isfinite(found[task.name]).all()
        assert np.abs(found[task.name] - value.numpy()).max() < 1e-5


def test_every_input_is_there_by_name_and_every_task_is_an_output():
    shape = SHAPES["all"]
    dense = OnnxModel(trace(load_model(ModelSection(name="lr"), shape, Path(".")), shape, tasks(shape)))
    assert dense.inputs == ("a", "b", "s", "s.mask", "d", "e") == tuple(input_names(shape))
    assert dense.outputs == ("ctr", "price")


def test_tracing_changes_nothing_of_the_job():
    shape = SHAPES["all"]
    model = load_model(ModelSection(name="deepfm", settings={"dropout": 0.5}), shape, Path("."))
    before, drawn = {name: value.copy() for name, value in state(model).items()}, torch.get_rng_state()
    trace(model, shape, tasks(shape))
    assert model.training and all(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all((value == before[name]).all() for name, value in state(model).items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_is_traced_without_its_weights():
    """As stage 3 of the dense strategy "sharded" has it between steps."""
    shape = SHAPES["pooled"]
    model = load_model(ModelSection(name="deepfm"), shape, Path("."))
    for parameter in model.parameters():
        parameter.data = torch.tensor(float("nan")).expand(parameter.shape)
    assert trace(model, shape, tasks(shape))


def test_the_same_model_gives_the_same_bytes():
    shape = SHAPES["all"]
    model = load_model(ModelSection(name="dcn"), shape, Path("."))
    template = trace(model, shape, tasks(shape))
    assert template == trace(model, shape, tasks(shape))
    assert with_weights(template, state(model)) == with_weights(with_weights(template, state(model)), state(model))
    assert str(ROOT).encode() not in template


class Own(nn.Module):
    """A user's: normalised, with a buffer that is not kept, weights shared, and a tensor that is only measured."""

    def __init__(self, shape, settings):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.recurrent = nn.GRU(4, 3, batch_first=True)
        self.last = nn.Linear(11, 1)
        self.register_buffer("halved", torch.full((1,), 0.5), persistent=False)

    def forward(self, inputs):
        hidden = self.down(torch.relu(self.up(self.norm(inputs.vectors_BFD.flatten(1))))) * self.halved
        _, seen = self.recurrent(inputs.sequences["s"].vectors_BLD)
        return {"ctr": self.last(torch.cat([hidden, seen[0]], 1))[:, 0], "measured": hidden}


def test_a_users_module_is_traced_too():
    shape = Shape(POOLED, SEQUENCE, (), ("ctr",))
    model = Own(shape, {})
    template = trace(model, shape, [CTR])
    model.norm(torch.rand(16, 8))  # its statistics move
    perturb(model)
    assert difference(template, model, shape) < ROUNDING


class ByValue(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.scale, self._act = nn.Parameter(torch.ones(())), act

    def forward(self, inputs):
        return {"ctr": self._act(inputs) * self.scale}


def _raises(inputs):
    raise RuntimeError("not here\nand more")


REFUSED = {
    "depends on values or on the number": lambda i: i.dense_BC.sum(1) / int(i.num_samples),
    "another number of samples": lambda i: i.dense_BC.sum(1) + torch.arange(int(i.num_samples)),
    "cannot be traced: RuntimeError: not here$": _raises,
    "no tensor for task 'ctr'": None,
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_module_that_cannot_be_traced_says_why(why):
    act = REFUSED[why]
    module = ByValue(act)
    if act is None:
        module.forward = lambda inputs: {}
    with pytest.raises(TraceFailed, match=why):
        trace(module, Shape((), (), (("d", 2),), ("ctr",)), [CTR])


def test_a_module_that_cannot_be_copied_says_so():
    module = ByValue(lambda inputs: inputs.dense_BC.sum(1))
    module.held = module.scale * 2  # not a leaf
    with pytest.raises(TraceFailed, match="cannot be copied"):
        trace(module, Shape((), (), (("d", 2),), ("ctr",)), [CTR])


def test_a_task_named_like_a_slot_is_refused():
    with pytest.raises(TraceFailed, match="would be named 'ctr'"):
        trace(ByValue(None), Shape((SlotShape("ctr", 2, True),), (), (), ("ctr",)), [CTR])


def test_weights_of_another_model_are_refused():
    shape = SHAPES["pooled"]
    model = load_model(ModelSection(name="lr"), shape, Path("."))
    with pytest.raises(BadInput, match=r"tensor 'wide.bias_T' is float32\[2\].*float32\[1\]"):
        with_weights(trace(model, shape, [CTR]), {"wide.bias_T": np.zeros(2, np.float32)})


def test_the_frozen_twin_takes_over_weights_and_drops_nothing():
    shape = SHAPES["pooled"]
    model = load_model(ModelSection(name="deepfm", settings={"dropout": 0.9}), shape, Path("."))
    frozen = FrozenModel(model, [CTR])
    perturb(model)
    frozen.load(model.state_dict())
    assert not frozen.model.training
    assert all(torch.equal(a, b) for a, b in zip(frozen.model.parameters(), model.parameters(), strict=True))


def test_who_fills_a_template_needs_no_torch():
    code = "import sys, trainer.exports.onnx_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "program",
    [
        "from headrace.trainer.exports.onnx_model import OnnxModel; OnnxModel(b'')",
        f"import runpy; runpy.run_path({str(SERVE)!r})",
    ],
)
def test_nobody_is_told_of_a_model_that_runs(program, tmp_path):
    """onnxruntime reports its use to its makers unless it is told not to; it begins with a file at home."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "BadInput" in done.stderr, done.stderr
    assert not list(tmp_path.rglob("*onnxruntime*"))


def graph_of(nodes, initializers=(), outputs=("y",)):
    """A graph that reads x, of as many numbers as there are samples."""
    numbers = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"])  # noqa: E731
    graph = onnx.helper.make_graph(nodes, "g", [numbers("x")], [numbers(name) for name in outputs], list(initializers))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def whole(name, value):
    return onnx.numpy_helper.from_array(np.array(value), name)


def filled(side):
    """x and the sum of a constant of so many zeros, which onnxruntime makes when it opens the graph."""
    node = onnx.helper.make_node
    nodes = [node("ConstantOfShape", ["side"], ["big"]), node("ReduceSum", ["big"], ["sum"], keepdims=0)]
    return graph_of([*nodes, node("Add", ["x", "sum"], ["y"])], [whole("side", [side])])


def looped(inside=False):
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    kinds = {"i": (onnx.TensorProto.INT64, []), "c": (onnx.TensorProto.BOOL, []), "v": (onnx.TensorProto.FLOAT, ["n"])}
    more = [node("Identity", ["c"], ["c2"]), node("Identity", ["v"], ["v2"])]
    ends = [info("c2", *kinds["c"]), info("v2", *kinds["v"])]
    body = onnx.helper.make_graph(more, "body", [info(name, *kind) for name, kind in kinds.items()], ends)
    loop = node("Loop", ["times", "true", "x"], ["y"], body=body)
    constants = [whole("times", 1 << 60), whole("true", True)]
    if not inside:
        return graph_of([loop], constants)
    branch = onnx.helper.make_graph([loop], "branch", [], [info("y", *kinds["v"])])
    same = onnx.helper.make_graph([node("Identity", ["x"], ["y"])], "same", [], [info("y", *kinds["v"])])
    return graph_of([node("If", ["true"], ["y"], then_branch=branch, else_branch=same)], constants)


def sparse():
    numbers = onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [1], [1.0])
    at = onnx.helper.make_tensor("", onnx.TensorProto.INT64, [1], [0])
    tensor = onnx.helper.make_sparse_tensor(numbers, at, [1 << 32])
    return graph_of([onnx.helper.make_node("Constant", [], ["y"], sparse_value=tensor)])


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (filled(1 << 32), r"'big' of the graph has the shape \[4294967296\]"),
        (looped(), "a node Loop, whose work has no bound"),
        (looped(inside=True), "a node Loop, whose work has no bound"),
        (sparse(), "has a sparse tensor"),
        (b"\xff" * 9, "no ONNX model"),
    ],
    ids=["constant", "loop", "loop in a branch", "sparse", "no model"],
)
def test_a_graph_without_bounds_is_refused_before_it_is_opened(graph, words):
    with pytest.raises(BadInput, match=words):
        OnnxModel(graph)


def test_a_graph_with_bounds_runs():
    found = OnnxModel(filled(1 << 10)).run({"x": np.array([1, 2], np.float32)})
    assert found["y"].tolist() == [1, 2]
