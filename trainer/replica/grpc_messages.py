"""Messages of the Open Inference Protocol over gRPC, as the requests that trainer.replica.inference_messages reads.

Source: the protocol's inference_grpc.md. Answers have raw outputs, which every client reads.
"""

from collections.abc import Mapping
from typing import Any

from headrace.trainer.proto import open_inference_pb2 as pb
from headrace.trainer.replica.inference_messages import InferenceResult
from headrace.trainer.replica.inference_tensors import (
    CLASSIFICATION,
    SHARED_MEMORY,
    TEXT,
    InvalidInference,
    kind_of,
    raw_of,
    texts,
)

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    TEXT: "bytes_contents",
}
"""Fields of InferTensorContents; values of other datatypes must be raw."""

MAX_TENSORS = 1 << 14
"""Most inputs, and outputs, of one request; more are refused before they are copied."""


def request_of(message: pb.ModelInferRequest) -> dict[str, Any]:
    """A request in the form of JSON, with bytes as the data of raw tensors. Raises InvalidInference."""
    raw, num_tensors = message.raw_input_contents, max(len(message.inputs), len(message.outputs))
    if num_tensors > MAX_TENSORS:
        raise InvalidInference(f"{num_tensors} inputs or outputs in one request; at most {MAX_TENSORS}")
    if raw and len(raw) != len(message.inputs):
        raise InvalidInference(f"{len(raw)} raw_input_contents for {len(message.inputs)} inputs; send all or none raw")
    inputs = []
    for place, tensor in enumerate(message.inputs):
        inputs.append(
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": _parameters(tensor.parameters),
                "data": raw[place] if raw else _contents(tensor),
            }
        )
    outputs = [{"name": each.name, "parameters": _parameters(each.parameters)} for each in message.outputs]
    return {"id": message.id, "inputs": inputs, "outputs": outputs}


def _contents(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        known = ", ".join(CONTENTS)
        raise InvalidInference(
            f"{tensor.name!r:.100}: contents cannot be of type {tensor.datatype!r:.100}; send it raw, or as {known}"
        )
    values = list(getattr(tensor.contents, field))
    return texts(tensor.name, values) if tensor.datatype == TEXT else values


def _parameters(found: Mapping[str, pb.InferParameter]) -> dict[str, bool]:
    """Those parameters that are refused; others mean nothing here."""
    return {name: True for name in (SHARED_MEMORY, CLASSIFICATION) if name in found}


def answer_of(message: pb.ModelInferRequest, result: InferenceResult) -> pb.ModelInferResponse:
    """The answer to a request."""
    answer = pb.ModelInferResponse(model_name=message.model_name, model_version=result.version, id=message.id)
    for name, value in result.outputs.items():
        answer.outputs.add(name=name, datatype=kind_of(value), shape=value.shape)
        answer.raw_output_contents.append(raw_of(value))
    return answer
