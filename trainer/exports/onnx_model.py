"""Runs the traced dense part, and replaces its weights without another trace. Imports no torch.

A template, made by trainer.train.tracing, is an ONNX model. Its initializers have the names of the tensors of
dense.safetensors after "model.".

Shapes: B samples.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from headrace.errors import BadInput

F32 = NDArray[np.float32]

PREFIX = "model."
"""Prefix of the name of each tensor in the graph, so that no tensor is taken for an input."""


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
        """Raises BadInput where onnxruntime does not accept the model."""
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


def first_line(error: BaseException) -> str:
    """The first line of an error of other software, for a manifest."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
