"""Documents of the protocol about the server and its model: metadata, configuration, repository index.

Sources: inference_rest.md of the Open Inference Protocol; Triton's extension_model_configuration.md and
extension_model_repository.md.
"""

from typing import Any

import headrace
from headrace.trainer.replica.inference_messages import TEXT, WEIGHT
from headrace.trainer.replica.replica_state import KeptVersion, ReplicaState
from headrace.trainer.replica.serving_model import ServingModel

PLATFORM = "headrace_onnx"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics", "rollback", "follow")

Document = dict[str, Any]


def server_metadata() -> Document:
    """Name, version and extensions of the server."""
    return {"name": "headrace replica", "version": headrace.__version__, "extensions": list(EXTENSIONS)}


def model_metadata(state: ReplicaState, served: KeptVersion) -> Document:
    """Inputs, outputs and kept versions of the served version's model."""
    inputs, outputs = tensors_of(served.model)
    return {
        "name": served.version.job,
        "versions": [state.name_of(each) for each in state.versions()],
        "platform": PLATFORM,
        "inputs": inputs,
        "outputs": outputs,
    }


def tensors_of(model: ServingModel) -> tuple[list[Document], list[Document]]:
    """Inputs and outputs, as metadata has them."""
    inputs = []
    for slot in model.slots:
        if slot["kind"] == "dense":
            inputs.append({"name": slot["name"], "datatype": "FP32", "shape": [-1, slot["size"]]})
            continue
        kind = TEXT if slot["values"] == "string" else "UINT64"
        inputs.append({"name": slot["name"], "datatype": kind, "shape": [-1, -1]})
        if slot["weighted"]:
            inputs.append({"name": slot["name"] + WEIGHT, "datatype": "FP32", "shape": [-1, -1]})
    return inputs, [{"name": name, "datatype": "FP32", "shape": [-1]} for name in model.outputs]


def configuration(name: str, model: ServingModel, max_batch: int) -> Document:
    """The model's configuration; its shapes are those of one sample."""
    inputs, outputs = tensors_of(model)
    optional = set(model.memories) | {slot["name"] + WEIGHT for slot in model.slots}
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": "headrace",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": max_batch,
        "input": [_configured(each) | {"optional": each["name"] in optional} for each in inputs],
        "output": [_configured(each) for each in outputs],
    }


def _configured(tensor: Document) -> Document:
    kind = "STRING" if tensor["datatype"] == TEXT else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"][1:]}


def repository_index(state: ReplicaState, *, ready: bool) -> list[Document]:
    """All kept versions of the model, or with `ready` the one that is served."""
    served, found = state.served, []
    for each in state.versions():
        if each is not served and ready:
            continue
        label = ("READY", "") if each is served else ("UNAVAILABLE", "it is kept: roll back to it first")
        found.append({"name": each.version.job, "version": state.name_of(each), "state": label[0], "reason": label[1]})
    return found
