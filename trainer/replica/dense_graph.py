"""Runs the dense part of a model with its weights as inputs: the weights of a new version need no new session.

To make a session takes milliseconds in which no other thread of a Python process runs. Weights as inputs cost a request
less than a microsecond. trainer.train.tracing makes the graph.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.trainer.exports.onnx_model import PREFIX, OnnxModel

Tensors = Mapping[str, NDArray[Any]]


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

    def weights(self, dense: Tensors) -> dict[str, NDArray[Any]]:
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

    def run(self, feeds: Tensors) -> dict[str, NDArray[Any]]:
        """(B,) predictions by task; `feeds` are inputs and weights. Raises BadInput."""
        assert self._session is not None
        return dict(self._session.run(feeds))
