"""Runs the traced dense part, and replaces its weights without another trace. Imports no torch.

A template, made by trainer.train.tracing, is an ONNX model. Its initializers have the names of the tensors of
dense.safetensors after "model.".

Shapes: B samples.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import numpy_helper

from headrace.errors import BadInput

F32 = NDArray[np.float32]

REPEATING = frozenset({"Loop", "Scan", "SequenceMap"})
MAX_NUMBERS = 1 << 26
"""Most numbers of a tensor, for each sample."""
PREFIX = "model."
"""Prefix of the name of each tensor in the graph, so that no tensor is taken for an input."""
# `DenseGraph` has weights as inputs: those of a new version need no new session. To make a session takes milliseconds
# in which no other thread of a Python process runs. Weights as inputs cost a request less than a microsecond.


def with_weights(template: bytes, tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """The model with the weights `tensors`, by names of the module's state. Raises BadInput for wrong shapes."""
    model = onnx.load_model_from_string(template)
    for initializer in model.graph.initializer:
        name = initializer.name.removeprefix(PREFIX)
        if name == initializer.name or name not in tensors:
            continue  # a constant of the graph
        old_type, tensor = onnx.helper.tensor_dtype_to_np_dtype(initializer.data_type), tensors[name]
        if tuple(initializer.dims) != tensor.shape or tensor.dtype != old_type:
            raise BadInput(
                f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)}; the traced model has it as "
                f"{old_type}{list(initializer.dims)}: it was traced from another model; restart the job"
            )
        initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(tensor), initializer.name))
    filled: bytes = model.SerializeToString(deterministic=True)
    return filled


class OnnxModel:
    """A dense part, ready to run on this thread alone."""

    def __init__(self, model: bytes) -> None:
        """Raises BadInput where onnxruntime does not accept the model, or its work has no bound."""
        check_bounded(model)
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # else it tells its makers of each model, from its import on
        import onnxruntime  # noqa: PLC0415  # it starts a thread when imported, and workers are forked after their imports

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001  # onnxruntime's errors have no narrower common class
            raise BadInput(f"onnxruntime does not accept the model: {first_line(error)}") from error
        self.inputs = tuple(each.name for each in self._session.get_inputs())
        self.outputs = tuple(each.name for each in self._session.get_outputs())

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, F32]:
        """(B,) predictions by task. `feeds` may hold more than the model reads. Raises BadInput."""
        try:
            found = self._session.run(self.outputs, {name: feeds[name] for name in self.inputs})
        except Exception as error:  # noqa: BLE001  # likewise
            raise BadInput(f"onnxruntime cannot run the model: {first_line(error)}") from error
        return dict(zip(self.outputs, found, strict=True))

    def bound(self, feeds: Mapping[str, NDArray[Any]]) -> "BoundRun":
        """The model with these arrays as inputs. Raises BadInput."""
        return BoundRun(self._session, {name: feeds[name] for name in self.inputs}, self.outputs)


class BoundRun:
    """A model whose inputs are bound to arrays once: for few samples, to make the inputs takes longer than to compute.

    Change the arrays in place, then run. Outputs equal those of `OnnxModel.run` bit by bit. One thread at a time.
    """

    def __init__(self, session: Any, arrays: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]) -> None:
        self._session, self._outputs = session, outputs
        self._arrays = dict(arrays)  # the binding reads their memory, and does not keep them
        try:
            self._binding = session.io_binding()
            for name, array in self._arrays.items():
                self._binding.bind_cpu_input(name, array)
            for name in outputs:
                self._binding.bind_output(name)
        except Exception as error:  # noqa: BLE001  # onnxruntime's errors have no narrower common class
            raise BadInput(f"onnxruntime cannot bind the model: {first_line(error)}") from error

    def run(self) -> dict[str, F32]:
        """(B,) predictions by task. Raises BadInput."""
        try:
            self._session.run_with_iobinding(self._binding)
            found = self._binding.copy_outputs_to_cpu()
        except Exception as error:  # noqa: BLE001  # likewise
            raise BadInput(f"onnxruntime cannot run the model: {first_line(error)}") from error
        return dict(zip(self._outputs, found, strict=True))


class DenseGraph:
    """A dense part, ready to run. Any thread may run it."""

    def __init__(self, content: bytes) -> None:
        """`content`: an ONNX model, with or without its weights. Raises BadInput."""
        try:
            model = onnx.load_model_from_string(content)
        except DecodeError as error:
            raise BadInput(f"dense.onnx cannot be read: {error}") from error
        kept, self._types = [], {}
        given = {each.name for each in model.graph.input}
        for each in model.graph.initializer:
            if not each.name.startswith(PREFIX):
                kept.append(each)
                continue
            self._types[each.name] = (onnx.helper.tensor_dtype_to_np_dtype(each.data_type), tuple(each.dims))
            if each.name not in given:
                model.graph.input.append(onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims))
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        self.content: bytes = model.SerializeToString(deterministic=True)
        """The graph without weights: equal for all versions of one model."""
        self._session: OnnxModel | None = None

    def open(self) -> "DenseGraph":
        """Make the session if there is none; return itself. Raises BadInput."""
        self._session = self._session or OnnxModel(self.content)
        return self

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the inputs, without weights."""
        assert self._session is not None
        return frozenset(self._session.inputs) - frozenset(self._types)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        assert self._session is not None
        return self._session.outputs

    @property
    def num_weights(self) -> int:
        """Numbers in all weight tensors."""
        return sum(math.prod(shape) for _, shape in self._types.values())

    @property
    def widest(self) -> int:
        """The longest side of a weight tensor: a layer has about so many numbers for each sample. At least 1."""
        return max((side for _, shape in self._types.values() for side in shape), default=1) or 1

    def weights(self, dense: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The tensors of a version that the graph reads, by their names in the graph. Raises BadInput."""
        found = {}
        for name, (kind, shape) in self._types.items():
            tensor = dense.get(name.removeprefix(PREFIX))
            if tensor is None:
                raise BadInput(f"tensor {name.removeprefix(PREFIX)!r} is missing, and the model needs it")
            if tensor.dtype != kind or tensor.shape != shape:
                problem = f"{tensor.dtype}{list(tensor.shape)}; the traced model has it as {kind}{list(shape)}"
                raise BadInput(f"tensor {name.removeprefix(PREFIX)!r} is {problem}")
            if not np.isfinite(tensor).all():
                raise BadInput(f"tensor {name.removeprefix(PREFIX)!r} holds numbers that are not finite")
            found[name] = np.ascontiguousarray(tensor)
        return found

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """(B,) predictions by task; `feeds` are inputs and weights. Raises BadInput."""
        assert self._session is not None
        return dict(self._session.run(feeds))

    def bound(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        """The graph with these arrays as inputs and weights, which change in place. Raises BadInput."""
        assert self._session is not None
        return self._session.bound(feeds)


def check_bounded(content: bytes) -> None:
    """Raise BadInput for a graph that repeats work as often as it says, or makes tensors larger than MAX_NUMBERS.

    onnxruntime computes what is constant while it opens a model. No other thread runs meanwhile, so a replica would
    neither answer nor end.
    """
    try:
        model = onnx.load_model_from_string(content)
        shaped = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # noqa: BLE001  # of protobuf, and of onnx, whose errors have no common class
        raise BadInput(f"it is no ONNX model: {first_line(error)}") from error
    for node in _nodes((*model.graph.node, *(node for function in model.functions for node in function.node))):
        if node.op_type in REPEATING:
            raise BadInput(f"the graph has a node {node.op_type}, whose work has no bound")
        for each in node.attribute:
            if each.HasField("sparse_tensor") or each.sparse_tensors:
                raise BadInput(f"node {node.name or node.op_type!r} has a sparse tensor, whose size has no bound")
    for value in (*shaped.graph.value_info, *shaped.graph.output):
        sides = [max(1, side.dim_value) for side in value.type.tensor_type.shape.dim]
        if math.prod(sides) > MAX_NUMBERS:
            raise BadInput(
                f"tensor {value.name!r} of the graph has the shape {sides}: more than {MAX_NUMBERS:,} numbers"
            )


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for each in node.attribute:
            yield from _nodes((*each.g.node, *(inner for graph in each.graphs for inner in graph.node)))


def first_line(error: BaseException) -> str:
    """The first line of an error of other software, for a manifest."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
